"""The sections of a recipe that single commands read: data preparation, sweeps, studies, plans."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from vit_ray.config.section import Fraction, NotNegative, Positive, PositiveFloat, Section, Share
from vit_ray.config.training_sections import ModelConfig, given_lengths
from vit_ray.config.validation import value_text


class ConvertConfig(Section):
    """From files of images to a sharded parquet data set."""

    source: str
    """Folder of class folders, tar shards, parquet, TFRecord, CSV or JSONL, a file, a glob, or
    braces such as `{000..127}`; local or `s3://`."""
    split: str | None = None
    """Which split of a source that has several, such as train; `all` takes them as one."""
    destination: str
    """Folder or `s3://` prefix of the new data set."""
    format: Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl", "tfrecord"] = (
        "auto"
    )
    """Format of the source; `tfrecord` is TensorFlow Datasets' (a folder of its `VERSION`)."""
    rows_per_row_group: Positive = 64
    """Images per row group: the smallest unit that is read."""
    shard_mib: PositiveFloat = 256.0
    """Target size of a parquet file in MiB, as it is written."""
    max_rejected_fraction: Fraction = 0.01
    """Refuse to commit when more of the source than this cannot be read as images; the command
    again with a higher limit commits what is finished."""
    damaged: Literal["auto", "reject", "keep"] = "auto"
    """JPEG files that libjpeg warns of but decodes: reject them, or keep them; auto = reject those
    that end early, such as half a file. What is kept is counted and listed in
    `damaged.parquet`."""
    classes: tuple[str, ...] | None = None
    """Class names in label order; unset = those that the source declares, or its sorted labels."""
    labels_are: Literal["auto", "names", "indices"] = "auto"
    """What labels are: class names, or indices into the classes; auto = as the source declares, and
    indices where it does not, all labels are integers, and no class name is. Where no class names
    are known, integers other than 0 to n - 1 need one of the two: `indices` keeps each label as it
    is, `names` numbers what there is from 0 on."""
    columns: tuple[str, ...] = ()
    """Fields of the source to pass through as text, such as captions and ids: columns of parquet
    and CSV, keys of JSON, suffixes of a tar's text files."""
    label_field: str | None = None
    """Field of the source that has the label: a column of parquet or CSV, a key of JSON, a suffix
    of a tar's text files, a feature of TFRecord; or, for TFRecord, a task of VTAB whose label is
    made of several: clevr-count, clevr-dist, dspr-loc, dspr-ori, kitti-dist, snorb-azim,
    snorb-elev. Unset = the only one that is called as labels are, such as `label`, or declared."""
    image_field: str | None = None
    """Field of the source that has the image: a column of parquet, a suffix of a tar's files, a
    feature of TFRecord, or the field of CSV or JSON that has its path; unset = the only one that is
    called as images are, such as `image` or `path`."""
    extend: bool = False
    """Add what is new in the source to the data set that the destination holds, in shards of its
    own: the images that it has keep their bytes and numbers, and the manifest before stays in
    `versions/FINGERPRINT`, which can be given as `data.train`. Without it a source that has changed
    is an error, and one that has not is not converted again."""
    keep_damaged_archives: bool = False
    """Take what stands before the damage of a tar that is cut or broken, instead of refusing it."""
    shrink_to: Positive | None = None
    """Re-encode images whose shorter side is longer than this; unset = keep every size."""
    shrink_quality: Annotated[int, Field(ge=1, le=100)] = 95
    """JPEG quality of re-encoded images."""
    index_jpeg: bool = True
    """Give JPEG files restart markers, losslessly, so that training decodes no more of an image
    than its crop: half of the bytes and of the decoding; false = keep every byte as it came."""
    cpus_per_task: PositiveFloat = 1.0
    """CPUs that one conversion task reserves."""


class VerifyConfig(Section):
    """Checking a data set against its manifest."""

    path: str
    """Converted data set: a folder or `s3://` prefix."""
    decode_fraction: Fraction = 0.01
    """Share of the images to decode, and to compare with the source where their files were
    rewritten (`convert.index_jpeg`); checksums of all are checked always."""
    compare_source: bool = True
    """Compare with the source, where it is still there. That lists it, and reads the headers of a
    tar shard, or all of a parquet or TFRecord file, that has an image of the sample; `false` never
    looks at it."""


class SubsetConfig(Section):
    """A nested part of a data set, by manifest alone."""

    source: str
    """Converted data set to take from."""
    destination: str
    """Folder of the new manifest."""
    count: Positive | None = None
    """Images to take; give this or `fraction`."""
    fraction: Share | None = None
    """Share of the images to take; give this or `count`."""


class DeduplicateConfig(Section):
    """Removing what a pre-training set shares with evaluation sets, by manifest alone."""

    source: str
    """Converted pre-training set."""
    evaluation_sets: tuple[str, ...] = Field(min_length=1)
    """Converted sets whose images, exact or near, are left out."""
    destination: str
    """Folder of the new manifest and of the list of what was left out."""


class SweepConfig(Section):
    """A grid of fine-tuning learning rates (Table 4), chosen on a dev split, then retrained."""

    learning_rates: tuple[PositiveFloat, ...] = Field(
        default=(0.001, 0.003, 0.01, 0.03), min_length=1
    )
    """The grid where there is no `space`."""
    space: dict[str, JsonValue] | None = None
    """What is varied in its place: keys of the recipe with lists of values, such as
    `{optim.learning_rate: [0.003, 0.01], optim.steps: [500, 2000]}`; or, for `search=random`, with
    ranges `{log_uniform: [0.001, 0.1]}` and `{uniform: [0.0, 0.2]}`. Values of a section, such as
    `{model: [{name: ViT-S/16}, {name: ViT-B/16}]}`, change the keys that they name."""
    search: Literal["grid", "random"] = "grid"
    """Every combination, or `num_trials` drawn at random, the same for the same `seed`."""
    num_trials: Positive | None = None
    """Points that a random search draws."""
    seed: NotNegative = 0
    """Of the dev split and of what is drawn."""
    dev_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    """Share of the training set that chooses the rate: ImageNet 0.01, CIFAR 0.02, Pets 0.1; each
    class has its share."""
    seeds: Positive = 3
    """Runs on the full training set with the chosen rate; mean and deviation are reported."""
    scheduler: Literal["none", "asha"] = "none"
    """`asha` (Ray Tune's) measures trials on the dev split at rungs and stops at each all but the
    best share of those that were there so far; `none` trains every trial to its end."""
    grace_steps: Positive | None = None
    """Steps before ASHA's first rung; unset = those of the longest trial by `reduction_factor`
    squared."""
    reduction_factor: Annotated[float, Field(gt=1.0)] = 4.0
    """ASHA: a rung lies at so many times the steps of the one before, and one in so many goes
    on."""
    retries: NotNegative = 1
    """How often a trial that failed is started again from its checkpoint, and as often again behind
    each rung of ASHA. One whose loss or gradient was not finite has diverged, and is not."""
    max_concurrent: Positive | None = None
    """Trials at a time; unset = what the cluster holds."""

    def problems(self) -> dict[str, object]:
        """Keys that do not go together; values that span no space."""
        is_random = self.search == "random"
        told = {
            f"space: {key}={value_text(values)} {problem}": True
            for key, values in (self.space or {}).items()
            if (problem := _space_problem(values))
        }
        return {
            **told,
            f"search={self.search} and num_trials={self.num_trials}: a random search needs "
            "num_trials, and a grid has its own number": is_random == (self.num_trials is None),
            f"grace_steps={self.grace_steps} is of scheduler=asha, and scheduler=none stops "
            "nothing; set scheduler=asha, or leave it out": (
                self.scheduler == "none" and self.grace_steps is not None
            ),
            "space is empty; name what is varied, such as "
            "{optim.learning_rate: {log_uniform: [0.001, 0.1]}}": (
                self.space == {} or (is_random and self.space is None)
            ),
        }


def _space_problem(values: Any) -> str | None:
    """What is wrong with the values of a key, a list or a range by its name, or None."""
    ranges = "{log_uniform: [low, high]} or {uniform: [low, high]}"
    if isinstance(values, list) and values:
        is_twice = any(value in values[:index] for index, value in enumerate(values))
        return "has a value twice; list each once" if is_twice else None
    if not isinstance(values, dict):
        return f"is no list of values, nor {ranges}"
    kind = next(iter(values), "")
    bounds: Any = values.get(kind)
    is_pair = isinstance(bounds, list) and [type(b) in (int, float) for b in bounds] == [True, True]
    if len(values) != 1 or kind not in ("log_uniform", "uniform") or not is_pair:
        return f"is no {ranges}"
    low, high = bounds
    if low < high and (low > 0 or kind == "uniform"):
        return None
    return "must go from a smaller to a larger number, above zero where it is logarithmic"


class VtabTask(Section):
    """One task of VTAB-1k, with its exceptions from the common augmentation."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Of its folder, and in tables."""
    group: Literal["natural", "specialized", "structured"]
    """Group whose mean it belongs to."""
    flip: bool = True
    """Mirror half of the training images; not where the answer depends on it."""
    crop: bool = True
    """Random crops of training images; not where the answer lies outside of them."""


class VtabConfig(Section):
    """The tasks of VTAB-1k, each fine-tuned with the one recipe, under one parent run."""

    data: str
    """Folder or `s3://` prefix with the converted sets `TASK/train` (1,000 images) and
    `TASK/test`; tasks without them are listed as absent."""
    tasks: tuple[VtabTask, ...] = Field(min_length=1)
    """The tasks."""
    sweep_each: bool = False
    """Choose among the points of `sweep` for each task, on a dev split of its 1,000 images (200 by
    `sweep.dev_fraction=0.2`), and train on all of them with `sweep.seeds` seeds, of which mean and
    deviation are the result; false = one run with the recipe's own rate."""


class _Axes(Section):
    """Data sizes and lengths that a row of a study is trained with."""

    data_fractions: tuple[Share, ...] | None = Field(default=None, min_length=1)
    """Nested parts of the training set; unset = all of it."""
    epochs: tuple[PositiveFloat, ...] | None = Field(default=None, min_length=1)
    """Lengths in passes over the part that is trained on; give one of epochs, steps, images. All
    three unset = 7 epochs, the paper's."""
    steps: tuple[Positive, ...] | None = Field(default=None, min_length=1)
    """Lengths in optimizer steps: the same compute for every data size."""
    images: tuple[Positive, ...] | None = Field(default=None, min_length=1)
    """Lengths in training images seen."""

    @property
    def lengths(self) -> list[tuple[str, float]]:
        """Key of `optim` and value of each length that is given."""
        return [(key, value) for key, values in given_lengths(self).items() for value in values]

    def problems(self) -> dict[str, object]:
        """Lengths of several kinds."""
        kinds = list(given_lengths(self))
        told = f"lengths are given in {' and in '.join(kinds)}; keep one of epochs, steps, images "
        return {f"{told}and set the others to null": len(kinds) > 1}


class StudyModel(_Axes):
    """One row of a scaling study; data sizes and lengths of its own take the place of the study's.

    Any other key of the recipe may differ between rows: optimizer, positions, pooling, shape.
    """

    label: str = Field(min_length=1)
    """Name of the row in tables and figures."""
    model: ModelConfig | None = None
    """The model of the row, whole: what it leaves out, `image_size` too, is the default and not the
    recipe's; unset = the recipe's, of which `changes` may change keys."""
    learning_rate: PositiveFloat | None = None
    """Peak rate of the row; unset = the recipe's."""
    changes: dict[str, JsonValue] = {}
    """Other keys of the recipe that the row has values of its own for, such as
    `{optim.name: sgd, model: {pool: gap}}`."""


class StudyTask(Section):
    """A data set to which every cell's weights are transferred, and how."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """In names of runs and in tables."""
    recipe: str
    """Recipe of the fine-tuning: a YAML file, or a shipped one such as `finetune/pets`. With a
    section `sweep` the rate is chosen on a dev split; else it is `optim.learning_rate`. Model,
    weights, seed and workers are the cell's."""
    changes: dict[str, JsonValue] = {}
    """Keys of that recipe with other values, such as
    `{data.train: data/pets/train, sweep: null}`."""


class StudyConfig(_Axes):
    """Rows by data sizes by lengths by seeds; each cell is pre-trained and few-shot evaluated."""

    models: tuple[StudyModel, ...] = Field(min_length=1)
    """The rows."""
    seeds: tuple[NotNegative, ...] | None = Field(default=None, min_length=1)
    """Every cell is trained with each; unset = the recipe's `seed` alone."""
    branch: bool = False
    """Train the longest of a row's lengths, and of the others only what differs, from the longest
    one's checkpoint: the cool-down of `optim.schedule=cooldown` or `rsqrt`. Cells are labelled
    so."""
    transfer: tuple[StudyTask, ...] = ()
    """What each cell is fine-tuned on after its pre-training, one after another."""
    retries: NotNegative = 1
    """How often a cell that failed is started again from its newest checkpoint. One whose loss or
    gradient was not finite has diverged, and is not."""
    max_concurrent: Positive | None = None
    """Cells at a time, largest first; unset = what the cluster holds when each starts."""
    max_gpus: Positive | None = None
    """GPUs that the cells take together; unset = all of the cluster's."""
    budget_gpu_hours: PositiveFloat | None = None
    """Refuse to start a study whose cells, by the plan of `--dry-run`, need more hours of
    `plan.device` in all; unset = no limit."""

    def problems(self) -> dict[str, object]:
        """A task with the name of the mean of all."""
        told = "transfer: 'mean' names the mean over all tasks; give the task another name"
        return super().problems() | {told: "mean" in [task.name for task in self.transfer]}


class ExportConfig(Section):
    """Weights for other programs, from a run, a checkpoint or a published file."""

    path: str
    """File to write, local or `s3://`: `.npz` for jax, `.safetensors` for the others; for
    huggingface also a folder that `from_pretrained` reads."""
    layout: Literal["jax", "timm", "huggingface", "vit_ray"] = "jax"
    """Whose names and shapes the tensors get."""
    averaged: bool | None = None
    """Averaged weights of a checkpoint; unset = if it has any."""


class ExtractConfig(Section):
    """Features of a data set in parquet files."""

    data: str
    """Converted data set."""
    path: str
    """Folder or `s3://` prefix that the files are written to."""
    logits: bool = True
    """Write logits, too."""


class BenchmarkConfig(Section):
    """A published test set whose right answers are not simply the labels of `data.eval`."""

    kind: Literal["own_labels", "imagenet_real", "imagenet_v2", "objectnet", "class_names"] = (
        "own_labels"
    )
    """`own_labels`: those of `data.eval`. `imagenet_real`: those of `label_file`, of which an image
    may have several or none. `imagenet_v2`: class folders are numbers of ImageNet's classes.
    `objectnet`: class folders by the mappings in `label_file`; others are skipped. `class_names`
    (ImageNet-A, -R, -Sketch): by name in `model_classes`, and only those of the set compete."""
    label_file: str | None = None
    """Published file: `real.json` for `imagenet_real`, the folder `mappings` of ObjectNet."""
    model_classes: str | None = None
    """The model's outputs in order: a converted set, a `.txt` with a class a line (or a WordNet id
    and text), or a `.json` list or `imagenet_class_index.json`. Unset = the classes of `data.train`
    or `data.eval`, in the order in which `config.json` beside the weights has them, if it does."""


class PaperConfig(Section):
    """What a result is of in the terms of the paper's Tables 2 and 5, beside which it is shown."""

    task: Literal["cifar10", "cifar100", "imagenet", "imagenet_real", "flowers", "pets"] | None = (
        None
    )
    """The paper's test set that `data.eval` is, whole; unset = none: the result is a proxy."""
    pretraining: Literal["imagenet", "imagenet21k", "jft300m"] | None = None
    """What the weights in `init_from` were pre-trained on; unset = other data, or unknown."""


class BenchmarkedModel(Section):
    """One model whose speed is measured."""

    label: str = Field(min_length=1)
    """Name of the row in tables and figures."""
    model: ModelConfig
    """The model; its `image_size` is that of `benchmark_models.image_sizes`."""


class BenchmarkModelsConfig(Section):
    """Images per second and the largest batch of models on one device (the paper's D.5)."""

    models: tuple[BenchmarkedModel, ...] = Field(min_length=1)
    """Measured one after the other, each in a process of its own."""
    image_sizes: tuple[Positive, ...] = Field(default=(64, 128, 224, 384, 512), min_length=1)
    """Sides in pixels; for each model the nearest that its patches fill."""
    modes: tuple[Literal["inference", "training"], ...] = Field(
        default=("inference", "training"), min_length=1
    )
    """`inference`: a forward pass. `training`: forward and backward pass; in memory it has the
    state of `train.zero_stage` and `optim.name` beside it, as for `train.micro_batch_size=auto`."""
    max_batch_size: Positive = 4096
    """Images; no larger batch is tried."""
    memory_gib: PositiveFloat | None = None
    """Memory that may be taken; unset = all of a GPU's, and 2 GiB of a CPU's, where a batch is
    tried only if it needs no more by the estimate of `--dry-run`."""
    timed_s: PositiveFloat = 1.0
    """Passes of a batch are repeated for so long, three times at least; their median counts."""


class InspectConfig(Section):
    """Figures of what a trained model looks at."""

    images: str
    """Folder of images, local or `s3://`, searched with its subfolders."""
    path: str = "inspection"
    """Local folder that the figures are written to."""
    num_images: Positive = 128
    """Images that attention distance is averaged over (the paper's number), over the folder."""
    averaged: bool | None = None
    """Averaged weights of a checkpoint; unset = if it has any."""


class ReportConfig(Section):
    """The page of tables and figures."""

    watch_s: Annotated[float, Field(ge=1.0)] | None = None
    """Write the page anew every so many seconds, and let an open one reload itself, while any of
    its runs goes on; unset = write it once."""


class PlanConfig(Section):
    """The cluster, and the data set, that `jobs/plan.py` and `--dry-run` estimate for."""

    device: str = "H200"
    """GPU: part of the name that its driver reports, such as H200, H100, A100."""
    num_gpus: Positive | None = None
    """GPUs, one per worker; unset = the most of `workers.num_workers`."""
    mfu: Share = 0.4
    """Share of the GPU's dense peak that training is assumed to reach, communication aside."""
    link_gb_per_s: PositiveFloat | None = None
    """GB/s (1000^3) that a GPU sends; unset = the data sheet's link for up to 8 GPUs (one server),
    and 50 for more (a port of 400 Gbit/s for each GPU)."""
    num_images: Positive | None = None
    """Training images, told instead of read from `data.train`."""
    num_classes: Positive | None = None
    """Classes, told instead of read from `data.train`."""
    price_per_gpu_hour: PositiveFloat | None = None
    """What an hour of one GPU costs, in any currency; unset = no costs are shown."""

    def problems(self) -> dict[str, object]:
        """One of the two counts without the other."""
        images, classes = self.num_images, self.num_classes
        told = f"num_images and num_classes go together; given {images} and {classes}"
        return {told: (images is None) != (classes is None)}
