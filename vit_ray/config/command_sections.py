"""The recipe sections of single commands: data preparation, sweeps, studies, plans."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue

from vit_ray.config.schema import (
    NAME,
    PATH_PATTERN,
    REPOSITORY,
    Distinct,
    Fraction,
    NotNegative,
    Place,
    Positive,
    PositiveFloat,
    Section,
    Share,
    value_text,
)
from vit_ray.config.training_sections import ModelConfig


class ConvertConfig(Section):
    """Converting image files to a sharded parquet data set."""

    source: Place
    """Folder of class folders, of tar shards, parquet or TFRecord files; a CSV or JSONL file; a
    glob, or braces such as `{000..127}`; local or `s3://`."""
    split: str | None = None
    """Split of a source that has several, such as train; `all` = all of them as one set."""
    destination: Place
    """Folder or `s3://` prefix of the new data set."""
    format: Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl", "tfrecord"] = (
        "auto"
    )
    """Format of the source; `tfrecord` is TensorFlow Datasets' (a folder of its `VERSION`)."""
    rows_per_row_group: Positive = 32
    """Images per row group: the smallest unit that is read. With fewer, images of large batches
    meet others more often, and there are more requests."""
    shard_mib: PositiveFloat = 256.0
    """Target size of a parquet file in MiB."""
    max_rejected_fraction: Fraction = 0.01
    """Nothing is committed if a larger share of the source is rejected; the same command with a
    higher limit then commits what is finished."""
    damaged: Literal["auto", "reject", "keep"] = "auto"
    """JPEG files that libjpeg decodes with a warning: reject or keep them; auto = reject truncated
    ones. Kept ones are counted and listed in `damaged.parquet`."""
    max_pixels: Positive = 1 << 27
    """Reject images with more pixels than this; decoding takes 3 to 12 bytes of memory per pixel.
    Images above 178,956,970 pixels are always rejected."""
    classes: Annotated[tuple[str, ...], Distinct] | None = None
    """Class names in label order; unset = the source's names, or its sorted labels."""
    labels_are: Literal["auto", "names", "indices"] = "auto"
    """Whether labels are class names or class indices; auto = as the source declares, else indices
    if all labels are integers and no class name is. Without known class names, integers other than
    0 to n - 1 need one of the two: `indices` keeps each label, `names` renumbers them from 0."""
    columns: Annotated[tuple[str, ...], Distinct] = ()
    """Fields of the source to keep as text, such as captions and ids: columns of parquet and CSV,
    keys of JSON, suffixes of text files in a tar."""
    label_field: str | None = None
    """Field of the source with the label: a column of parquet or CSV, a key of JSON, a suffix of a
    tar's text files, a feature of TFRecord; or, for TFRecord, a task of VTAB whose label is
    computed from several features: clevr-count, clevr-dist, dspr-loc, dspr-ori, kitti-dist,
    snorb-azim, snorb-elev. Unset = the only field with a usual name for labels, such as `label`, or
    declared as one."""
    image_field: str | None = None
    """Field of the source with the image: a column of parquet, a suffix of a tar's files, a feature
    of TFRecord, or the field of CSV or JSON with its path; unset = the only field with a usual name
    for images, such as `image` or `path`."""
    image_pattern: str | None = Field(default=None, pattern=PATH_PATTERN)
    """Path of an image, with `{}` for what a list (CSV, JSONL) has in its field of images, such as
    `val/{}.JPEG` for the ids of Kaggle's lists; unset = the field has the path."""
    shrink_to: Positive | None = None
    """Re-encode images whose shorter side is longer than this many pixels, as JPEG of
    quality 95; unset = keep every size."""
    apply_orientation: bool = False
    """Rotate and mirror images as their EXIF says, and re-encode those as JPEG of quality 95;
    `false` keeps the stored pixels, as other training pipelines do."""
    license: str | None = None
    """Licence of the images, kept in the manifest of the set and of its subsets."""
    source_url: str | None = None
    """Where the images come from; kept in the same manifests."""
    evaluation_only: bool = False
    """Mark the set and its subsets as not to be trained on, such as ObjectNet."""
    index_jpeg: bool = True
    """Add restart markers to JPEG files, losslessly, so that training reads and decodes only the
    crop of an image: about half of the bytes and CPU time; false = keep the original bytes."""
    in_place: bool = False
    """Copy no images: for parquet files in the layout of the Hugging Face hub, local or `s3://`,
    write only a manifest, labels and checksums for the files in place. These files are never
    written and must not change."""

    def _check(self) -> None:
        if self.in_place and (self.shrink_to or self.apply_orientation):
            raise ValueError(
                "in_place=true with shrink_to or apply_orientation: images that are not copied "
                "cannot be changed; leave out one of them"
            )


class VerifyConfig(Section):
    """Checking a data set against its manifest, or a run's checkpoints against their checksums and
    the order of its samples.
    """

    path: Place
    """Converted data set, or the folder of a run's checkpoints; also as `s3://` prefix."""
    decode_fraction: Fraction = 0.01
    """Share of the images to decode. Checksums of all images are always checked."""


class SubsetConfig(Section):
    """A nested subset of a data set, written as a manifest only."""

    source: Place
    """Converted data set to take from."""
    destination: Place
    """Folder of the new manifest."""
    count: Positive | None = None
    """Number of images to take, a random sample; give one of `count`, `fraction` and `keys`."""
    fraction: Share | None = None
    """Share of the images to take, a random sample."""
    keys: Place | None = None
    """Take the images of a list: a text file, local or `s3://`, with one key per line."""


class DeduplicateConfig(Section):
    """Removing images of evaluation sets from a pre-training set, by writing a manifest only."""

    source: Place
    """Converted pre-training set."""
    evaluation_sets: Annotated[tuple[Place, ...], Distinct] = Field(min_length=1)
    """Converted sets; their images, and near duplicates of them, are left out."""
    destination: Place
    """Folder of the new manifest and of `duplicates.parquet`, the list of images left out."""


# Keys that a sweep sets itself, for each trial and retraining.
_FIXED: Final = (
    "name", "output", "resume", "seed", "sweep", "tracking", "storage",
    "data.eval", "data.held_out_fraction", "data.train",
)  # fmt: skip


class SweepConfig(Section):
    """A grid of fine-tuning learning rates (Table 4), selected on a dev split, then retrained."""

    learning_rates: Annotated[tuple[PositiveFloat, ...], Distinct] = Field(
        default=(0.001, 0.003, 0.01, 0.03), min_length=1
    )
    """Learning rates to try, if there is no `space`."""
    space: Annotated[dict[str, JsonValue], Field(min_length=1)] | None = None
    """Search space instead of `learning_rates`: keys of the recipe with lists of values, such as
    `{optim.learning_rate: [0.003, 0.01], optim.steps: [500, 2000]}`; random search and Optuna also
    take the ranges `{log_uniform: [0.001, 0.1]}` and `{uniform: [0.0, 0.2]}`. A value of a section,
    such as `{model: [{name: ViT-S/16}, {name: ViT-B/16}]}`, changes only the keys that it names."""
    search: Literal["grid", "random", "optuna"] = "grid"
    """Every combination; `num_trials` random points that depend only on `seed`; or `num_trials`
    points that Optuna proposes from the accuracies so far (`pip install 'vit_ray[search]'`)."""
    num_trials: Positive | None = None
    """Number of points of a random or Optuna search."""
    seed: NotNegative = 0
    """Seed of the dev split and of the random points."""
    dev_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    """Share of each class of the training set used as dev split: ImageNet 0.01, CIFAR 0.02, Pets
    0.1; for a task of VTAB, share of all of its images, regardless of classes."""
    seeds: Positive = 3
    """Runs on the full training set with the selected point; mean and deviation are reported."""
    scheduler: Literal["none", "asha"] = "none"
    """`asha` (Ray Tune's) evaluates trials on the dev split at rungs, each at four times the steps
    of the one before, and stops all but the best quarter at each; `none` trains every trial to its
    end."""
    grace_steps: Positive | None = None
    """Steps before ASHA's first rung; unset = a sixteenth of the longest trial."""
    max_concurrent: Positive | None = None
    """Trials in parallel; unset = as many as fit on the nodes that are up."""

    def _check(self) -> None:
        for key, values in (self.space or {}).items():
            for fixed in _FIXED:
                if f"{fixed}.".startswith(f"{key}.") or key.startswith(f"{fixed}."):
                    raise ValueError(f"space: {key} cannot be varied in one sweep")
            if not _can_vary(values):
                raise ValueError(
                    f"space: {key}={value_text(values)} is not a list of different values, nor a "
                    "range {log_uniform: [low, high]} or {uniform: [low, high]} from a smaller to "
                    "a larger number, for log_uniform above zero"
                )
            if self.search == "grid" and isinstance(values, dict):
                raise ValueError(
                    f"space: {key} is a range, but a grid needs lists of values; set "
                    "sweep.search=random and sweep.num_trials, or list values"
                )
        if (self.search == "grid") != (self.num_trials is None):
            raise ValueError(
                f"search={self.search} and num_trials={self.num_trials}: random and optuna need "
                "num_trials, and a grid must not have it; set num_trials for random and optuna, "
                "unset it for a grid"
            )
        if self.search != "grid" and self.space is None:
            raise ValueError(
                f"search={self.search} needs a space; name the keys to vary, such as "
                "{optim.learning_rate: {log_uniform: [0.001, 0.1]}}"
            )
        if self.scheduler == "none" and self.grace_steps is not None:
            raise ValueError(
                f"grace_steps={self.grace_steps} with scheduler=none: only scheduler=asha stops "
                "trials; set scheduler=asha, or leave grace_steps out"
            )


def _can_vary(values: Any) -> bool:
    """Whether these are values for a key of a space: a list of different values, or a range."""
    match values:
        case [_, *_]:
            return all(value not in values[:index] for index, value in enumerate(values))
        case {"log_uniform": [low, high]} | {"uniform": [low, high]} if len(values) == 1:
            is_range = {type(low), type(high)} <= {int, float} and low < high
            return is_range and (low > 0 or "uniform" in values)
    return False


class VtabTask(Section):
    """One task of VTAB-1k and how its augmentation differs from the common one."""

    name: str = Field(min_length=1, pattern=NAME)
    """Name of its folder and in tables."""
    group: Literal["natural", "specialized", "structured"]
    """Group of tasks for the group means."""
    flip: bool = True
    """Mirror half of the training images; `false` if labels depend on orientation."""
    crop: bool = True
    """Random crops of training images; `false` if a crop may miss the answer."""


class VtabConfig(Section):
    """The tasks of VTAB-1k, each fine-tuned with the same recipe, under one parent run."""

    data: Place
    """Folder or `s3://` prefix with the converted sets `TASK/train` (1,000 images) and
    `TASK/test`; tasks without them are listed as absent."""
    tasks: Annotated[tuple[VtabTask, ...], Distinct] = Field(min_length=1)
    """The tasks to run."""
    sweep_each: bool = False
    """Run the `sweep` for each task, on a dev split of its 1,000 images (200 with
    `sweep.dev_fraction=0.2`), then train on all images with `sweep.seeds` seeds; the result is
    their mean and deviation. `false` = one run with the recipe's learning rate."""


class _Axes(Section):
    """Data sizes, lengths and seeds of a study, or of one of its rows."""

    data_fractions: Annotated[tuple[Share, ...], Field(min_length=1), Distinct] | None = None
    """Nested shares of the training set; unset = all of it."""
    epochs: Annotated[tuple[PositiveFloat, ...], Field(min_length=1), Distinct] | None = None
    """Lengths in passes over the training share; give one of epochs, steps, images. All three unset
    = 7 epochs, as in the paper."""
    steps: Annotated[tuple[Positive, ...], Field(min_length=1), Distinct] | None = None
    """Lengths in optimizer steps: the same compute for every data size."""
    images: Annotated[tuple[Positive, ...], Field(min_length=1), Distinct] | None = None
    """Lengths in training images seen."""
    seeds: Annotated[tuple[NotNegative, ...], Field(min_length=1), Distinct] | None = None
    """Seeds of every cell; unset = the recipe's `seed`."""

    @property
    def lengths(self) -> list[tuple[str, float]]:
        """Unit and value of each given length."""
        lengths = {"epochs": self.epochs, "steps": self.steps, "images": self.images}
        return [(unit, value) for unit, values in lengths.items() for value in values or ()]

    def _check(self) -> None:
        if len(units := dict(self.lengths)) > 1:
            raise ValueError(
                f"lengths are given in {' and in '.join(units)}; keep one of epochs, steps, images "
                "and set the others to null"
            )


class StudyModel(_Axes):
    """One row of a scaling study; its data sizes, lengths and seeds replace those of the study."""

    label: str = Field(min_length=1)
    """Name of the row in tables and figures; rows that differ in data sizes, lengths or seeds may
    share it."""
    model: ModelConfig | None = None
    """The complete model of the row: keys that it leaves out have the schema's defaults, not the
    recipe's values. Unset = the recipe's model, which `changes` may change."""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate of the row; unset = the recipe's."""
    changes: dict[str, JsonValue] = {}
    """Other keys of the recipe that differ in this row, such as
    `{optim.name: sgd, model: {pool: gap}}`."""


class StudyTask(Section):
    """A fine-tuning of each cell's weights on another data set."""

    name: str = Field(min_length=1, pattern=NAME)
    """Name in runs and tables."""
    recipe: Place
    """Recipe of the fine-tuning: a YAML file, relative to the study's, or a shipped recipe such as
    `finetune/pets`. With a section `sweep` the rate is selected on a dev split; else it is
    `optim.learning_rate`. Model, weights, seed and workers come from the cell."""
    changes: dict[str, JsonValue] = {}
    """Changes to that recipe, such as
    `{data.train: data/pets/train, sweep: null}`."""

    def _check(self) -> None:
        if self.name == "mean":
            raise ValueError("name=mean is that of the mean over all tasks; give another name")


class StudyConfig(_Axes):
    """A grid over rows, data sizes, lengths and seeds; each cell is pre-trained and evaluated."""

    models: tuple[StudyModel, ...] = Field(min_length=1)
    """The rows."""
    branch: bool = False
    """Train the longest length of a row, and branch the shorter ones off its checkpoints: only
    their cool-down is trained (`optim.schedule=cooldown`). Such cells are labelled."""
    transfer: Annotated[tuple[StudyTask, ...], Distinct] = ()
    """Fine-tunings of each cell after its pre-training."""
    max_concurrent: Positive | None = None
    """Cells in parallel; unset = as many as fit on the nodes that are up."""


class ExportConfig(Section):
    """Exporting weights of a run, a checkpoint or a published file to other programs."""

    path: Place
    """File to write, local or `s3://`: `.npz` for jax, `.safetensors` for the others; or, without a
    suffix, a folder with class names, image processor and model card next to the weights, which
    `from_pretrained` reads for huggingface."""
    layout: Literal["jax", "timm", "huggingface", "vit_ray"] = "jax"
    """Library whose tensor names and shapes are used."""
    averaged: bool | None = None
    """Use the averaged weights of a checkpoint; unset = if it has them."""
    push: Annotated[str, Field(pattern=REPOSITORY)] | None = None
    """Repository on the Hugging Face hub to upload the folder to: `hf://OWNER/NAME`."""
    license: str | None = None
    """Licence of the weights, as the hub abbreviates it, such as `apache-2.0`; shown in the
    card."""


class BenchmarkConfig(Section):
    """A published test set whose correct answers are more than the labels of `data.eval`."""

    kind: Literal["own_labels", "imagenet_real", "imagenet_v2", "objectnet", "class_names"] = (
        "own_labels"
    )
    """`own_labels`: labels of `data.eval`. `imagenet_real`: labels of `label_file`, several or none
    per image. `imagenet_v2`: class folders are ImageNet class numbers. `objectnet`: class folders
    are mapped by `label_file`; others are skipped. `class_names` (ImageNet-A, -R, -Sketch): classes
    are matched by name with `model_classes`, and only these are predicted."""
    label_file: Place | None = None
    """Published file: `real.json` for `imagenet_real`, the folder `mappings` of ObjectNet."""
    model_classes: Place | None = None
    """Class names of the model's outputs in order: a converted set, a `.txt` with one class (or one
    WordNet id and text) a line, a `.json` list, or `imagenet_class_index.json`. Unset = the classes
    of `data.train` or `data.eval`, in the order of the `config.json` next to the weights, if
    any."""

    def _check(self) -> None:
        published = {"imagenet_real": "real.json", "objectnet": "the folder `mappings`"}
        if self.kind in published and self.label_file is None:
            raise ValueError(
                f"kind={self.kind}: label_file is not set; give {published[self.kind]}"
            )


class PaperConfig(Section):
    """The row of the paper's Tables 2 and 5 to compare a result with."""

    task: Literal["cifar10", "cifar100", "imagenet", "imagenet_real", "flowers", "pets"] | None = (
        None
    )
    """The paper's test set, if `data.eval` is the whole of it; unset = none: the result is a
    proxy."""
    pretraining: Literal["imagenet", "imagenet21k", "jft300m"] | None = None
    """Pre-training data of the weights in `init_from`; unset = other or unknown."""


class InspectConfig(Section):
    """Filters, positions and attention of a trained model as images."""

    images: Place
    """Folder of images, local or `s3://`, searched with its subfolders."""
    path: Place = "inspection"
    """Local folder to write the figures to."""
    num_images: Positive = 128
    """Images over which attention distance is averaged; the default is the paper's."""


class PlanConfig(Section):
    """The cluster and the data set that `plan` and `--dry-run` assume."""

    device: str = "H200"
    """GPU: part of the name that its driver reports, such as H200, H100, A100."""
    num_gpus: Positive | None = None
    """GPUs, one per worker; unset = the maximum of `workers.num_workers`."""
    mfu: Share = 0.4
    """Assumed share of the GPU's dense peak over whole steps, communication included."""
    num_images: Positive | None = None
    """Training images: for `plan`, this number replaces that of `data.train`; for a dry run, only
    while `data.train` does not exist."""
    num_classes: Positive | None = None
    """Classes; give it with `num_images`, or neither."""
