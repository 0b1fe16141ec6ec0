"""The recipe: every knob of every job, with default, unit and check, in one frozen tree.

`load_recipe` reads YAML, applies `key.sub=value` overrides, and refuses what it does not know.
Other rooms take the section they need; nothing edits a recipe after it is loaded.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegativeFloat = Annotated[float, Field(ge=0.0)]
ImageSize = Positive | tuple[Positive, Positive]


class Section(BaseModel):
    """Base of every section: frozen, strict types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    """Which model, and the options that the paper varies."""

    name: str = "ViT-B/16"
    """Catalog name (`ViT-H/14`, `R50x1+ViT-B/32`, ...), or a family with its size in full: `ViT`,
    `Axial-ViT`, `R+ViT`, `ResNet`, `AxialResNet`."""
    image_size: ImageSize = 224
    """Input side in pixels, or (height, width)."""
    depth: Positive | None = None
    """Transformer blocks; of `ViT`, `Axial-ViT`, `R+ViT` only."""
    width: Positive | None = None
    """Token width D; of `ViT`, `Axial-ViT`, `R+ViT` only."""
    mlp_dim: Positive | None = None
    """Hidden width of the MLP; of `ViT`, `Axial-ViT`, `R+ViT` only."""
    num_heads: Positive | None = None
    """Attention heads; of `ViT`, `Axial-ViT`, `R+ViT` only."""
    patch_size: Positive | None = None
    """Patch side in pixels; of `ViT`, `Axial-ViT` only."""
    stages: tuple[Positive, ...] | None = None
    """Units of each stage; of `R+ViT`, `ResNet`, `AxialResNet` only."""
    width_factor: Positive | None = None
    """Factor on the widths of a ResNet (64 in its first stage); of the same three only."""
    positions: Literal["none", "learned_1d", "learned_2d", "relative"] | None = None
    """Position embedding of Table 8; unset = the model's own default."""
    positions_at: Literal["stem", "every_layer", "every_layer_shared"] | None = None
    """Where positions are added."""
    pool: Literal["cls", "gap"] | None = None
    """Classifier input: the class token, or the mean over patch tokens."""
    representation: bool | None = None
    """The tanh layer before the head, used in pre-training."""
    head_bias: float | None = None
    """Initial bias of the head: -10 for ImageNet-21k, -6.9 for ImageNet with sigmoid loss."""
    dropout: Fraction | None = None
    """Dropout after every dense layer but q, k, v, and after the positions."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `build_model`: only what the recipe sets."""
        given = self.model_dump(exclude={"name", "image_size"})
        return {key: value for key, value in given.items() if value is not None}


class AugmentConfig(Section):
    """How an encoded image becomes a square of pixels; random numbers are keyed by sample."""

    kind: Literal["inception_crop", "resize_crop", "resize", "center_crop"] = "inception_crop"
    """Inception crop, BiT's resize and random crop, plain resize, or resize and centre crop."""
    min_area: Fraction = 0.05
    """Smallest share of the image's area that an inception crop takes."""
    max_area: Fraction = 1.0
    """Largest share of the image's area that an inception crop takes."""
    resize: Positive | None = None
    """Side in pixels to resize to before a crop; unset = crop size x 8/7."""
    flip: bool = True
    """Mirror half of the images."""

    @model_validator(mode="after")
    def _areas_in_order(self) -> AugmentConfig:
        if self.min_area > self.max_area:
            raise ValueError(
                f"min_area={self.min_area} is larger than max_area={self.max_area}; "
                "give a range from small to large"
            )
        return self


class DataConfig(Section):
    """Which data sets, and how they are streamed."""

    train: str | None = None
    """Converted training set: a folder or `s3://` prefix."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Train on this share of `train`; smaller shares are subsets of larger ones."""
    eval: str | None = None
    """Converted set for accuracy; unset = none, or the held-out part of `train`."""
    held_out_fraction: Fraction = 0.0
    """Share of `train` set aside (keyed by `seed`) and evaluated on when `eval` is unset."""
    augment: AugmentConfig = AugmentConfig()
    """Training images."""
    eval_augment: AugmentConfig = AugmentConfig(kind="center_crop", flip=False)
    """Evaluation images."""
    max_bad_fraction: Fraction = 0.001
    """Undecodable images tolerated before the run stops, as a share of the data set."""
    cpus_per_task: PositiveFloat = 0.66
    """CPUs that one read-and-decode task reserves. Below 1, since each waits a part of its time
    for storage and for its turn: three tasks keep two cores busy."""
    max_tasks: Positive | None = None
    """Most read-and-decode tasks at a time; unset = as many as there are CPUs left for data."""
    decode: Literal["host", "device"] = "host"
    """Where training images become pixels: in reading tasks, or in the training workers, on the GPU
    by nvImageCodec, where the CPUs cannot keep up. The crops are the same; pixels differ a little
    (an antialiased resize of the region at full scale, where reading tasks decode it coarser)."""
    task_memory_mib: Positive = 256
    """Encoded images that one such task keeps at hand, in MiB; one row group at least."""
    object_store_mib: Positive | None = None
    """Most of the cluster's object store, in MiB, that a stream's images may take while they wait
    for training; at the limit reading waits. Unset = Ray Data's share, half of the store."""
    prefetch_batches: NotNegative = 2
    """Steps' worth of images that a worker fetches ahead."""


class OptimConfig(Section):
    """Optimizer, schedule and length of a run."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW (the paper's pre-training) or SGD with momentum (its fine-tuning, and BiT)."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's moments."""
    momentum: Fraction = 0.9
    """SGD's momentum."""
    weight_decay: NotNegativeFloat = 0.0
    """On matrices and kernels only, never on biases, norms, tokens or positions. AdamW decouples
    it from the moments and scales it by the rate; SGD adds it to the gradient, as BiT did."""
    clip_norm: NotNegativeFloat = 1.0
    """Largest global gradient norm; 0 = no clipping."""
    schedule: Literal["linear", "cosine", "constant", "steps"] = "cosine"
    """Decay after the warm-up; `steps` multiplies by 0.1 at 30, 60 and 90 % (BiT)."""
    end_learning_rate: NotNegativeFloat = 0.0
    """Where linear and cosine decay end; the paper's linear decay ends at 1e-5."""
    warmup_steps: NotNegative = 0
    """Linear warm-up from zero."""
    steps: Positive | None = None
    """Length in optimizer steps; give exactly one of steps, epochs, images."""
    epochs: PositiveFloat | None = None
    """Length in passes over the training set."""
    images: Positive | None = None
    """Length in training images seen."""

    @model_validator(mode="after")
    def _one_length(self) -> OptimConfig:
        given = [k for k in ("steps", "epochs", "images") if getattr(self, k) is not None]
        if len(given) > 1:
            raise ValueError(
                f"the length of the run is given {len(given)} times ({', '.join(given)}); "
                "keep one of steps, epochs, images and set the others to null"
            )
        return self

    def total_steps(self, num_images: int, global_batch_size: int) -> int:
        """Optimizer steps of the run.

        A length in epochs or images rounds to the nearest whole batch.

        Raises:
            ValueError: no length is given, or the warm-up does not fit in it.
        """
        if self.steps is not None:
            total = self.steps
        elif self.images is not None:
            total = max(1, round(self.images / global_batch_size))
        elif self.epochs is not None:
            total = max(1, round(num_images * self.epochs / global_batch_size))
        else:
            raise ValueError(
                "optim: the run has no length; set one of optim.steps, optim.epochs, optim.images"
            )
        if self.warmup_steps >= total:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} does not end before the run does "
                f"({total} steps); set it below {total}"
            )
        return total


class TrainConfig(Section):
    """Loss, batch and the engine that trains."""

    loss: Literal["softmax", "sigmoid", "masked_patch"] = "softmax"
    """Softmax or sigmoid cross-entropy, or masked patch prediction (no labels)."""
    label_smoothing: Fraction = 0.0
    """Softmax only."""
    masked_target: Literal["mean_color", "downsized", "full_patch"] = "mean_color"
    """What masked patch prediction predicts."""
    global_batch_size: Positive = 4096
    """Images per optimizer step, on any number of workers."""
    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Images per worker and pass; `auto` = the largest that fits. The rest is accumulation."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights."""
    offload: bool = False
    """Keep optimizer state in host memory (ZeRO 1-3)."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16 keeps fp32 master weights and an fp32 loss."""
    activation_checkpointing: NotNegative = 0
    """0 = keep all activations, n = recompute every n-th block."""
    compile: bool = False
    """torch.compile the model (ZeRO 0-2)."""
    averaging: Fraction = 0.0
    """Polyak averaging factor per step (the paper's is 0.9999); 0 = off."""
    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """A loss or gradient that is not finite is never applied; then: stop, skip on, or roll back."""
    max_nonfinite_steps: Positive = 3
    """With skip or rollback: stop at this many in a row."""
    log_every_steps: Positive = 50
    """Cadence of log lines and metrics."""
    profile_steps: tuple[Positive, Positive] | None = None
    """First and last step of a profiler's trace, kept with the MLflow run; unset = none."""
    early_stopping: Positive | None = None
    """Stop after this many evaluations without a better validation loss."""
    step_timeout_s: PositiveFloat = 600.0
    """A step that takes longer counts as hung: the attempt is ended and restarted."""

    @model_validator(mode="after")
    def _known_combinations(self) -> TrainConfig:
        if self.label_smoothing and self.loss != "softmax":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} needs loss=softmax, not {self.loss}; "
                "set label_smoothing to 0 or the loss to softmax"
            )
        if self.compile and self.zero_stage == 3:
            raise ValueError(
                "compile=true does not work with zero_stage=3; use zero_stage 0, 1 or 2, "
                "or set compile to false"
            )
        if self.offload and self.zero_stage == 0:
            raise ValueError(
                "offload=true needs zero_stage 1, 2 or 3; zero_stage=0 keeps all state"
            )
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)} ends before it begins; "
                "give the first and the last step, such as [20, 22]"
            )
        if self.averaging == 1.0:
            raise ValueError("averaging=1.0 would never move; use a factor below 1 such as 0.9999")
        return self


class CheckpointConfig(Section):
    """When state is written, and how much of it is kept."""

    every_steps: Positive | None = None
    """Cadence in steps; unset = only by minutes, and at the end."""
    every_minutes: PositiveFloat | None = 15.0
    """Cadence by the clock."""
    keep_last: Positive = 2
    """Newest checkpoints kept."""
    keep_best: bool = False
    """Also keep the one with the best validation loss."""


class EvalConfig(Section):
    """Evaluation while training, and at its end."""

    every_steps: Positive | None = None
    """Cadence; unset = only at the end."""
    batch_size: Positive = 256
    """Images per worker and pass."""
    few_shot_train: str | None = None
    """Converted set that few-shot examples are drawn from; unset = no few-shot accuracy."""
    few_shot_test: str | None = None
    """Converted set that few-shot accuracy is measured on."""
    shots: tuple[Positive, ...] = (1, 5, 10, 25)
    """Examples per class."""
    few_shot_seeds: Positive = 3
    """Random draws of examples; the mean is reported."""

    @model_validator(mode="after")
    def _few_shot_in_pairs(self) -> EvalConfig:
        if (self.few_shot_train is None) != (self.few_shot_test is None):
            raise ValueError(
                "few_shot_train and few_shot_test go together; "
                f"given {self.few_shot_train!r} and {self.few_shot_test!r}"
            )
        return self


class WorkersConfig(Section):
    """Ray Train workers: how many, on what, and how failures are met."""

    num_workers: Positive | tuple[Positive, Positive] = 1
    """Workers, or (min, max) for an elastic run, which takes those counts that divide the batch."""
    use_gpu: bool | Literal["auto"] = "auto"
    """One GPU per worker; `auto` = if the cluster has any."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPUs that a worker reserves; the rest of the cluster feeds it."""
    max_failures: int = Field(default=5, ge=-1)
    """Failures in a row, with no new checkpoint between them, that the run survives; -1 = any
    number. Passes that do not fit into memory and nodes that are preempted are not counted."""
    collective_timeout_s: Positive = 600
    """A collective operation that takes longer fails the attempt."""

    @property
    def sizes(self) -> range:
        """Every worker count that the run may have."""
        if isinstance(self.num_workers, int):
            return range(self.num_workers, self.num_workers + 1)
        return range(self.num_workers[0], self.num_workers[1] + 1)

    @model_validator(mode="after")
    def _sizes_in_order(self) -> WorkersConfig:
        if len(self.sizes) == 0:
            raise ValueError(f"num_workers={self.num_workers} has its minimum above its maximum")
        return self


class TrackingConfig(Section):
    """MLflow."""

    uri: str = "sqlite:///mlflow.db"
    """Tracking server or SQLite file; relative files lie in the folder of the command."""
    experiment: str = "vit_ray"
    """MLflow experiment."""
    parent_run_id: str | None = None
    """Record under this run (sweeps and studies set it)."""
    system_metrics: bool = True
    """CPU, memory, GPU and network of every node."""


class ConvertConfig(Section):
    """From images as they lie to a sharded parquet data set."""

    source: str
    """Folder of class folders, tar shards, parquet, CSV or JSONL; local or `s3://`."""
    destination: str
    """Folder or `s3://` prefix of the new data set."""
    format: Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl"] = "auto"
    """Layout of the source."""
    rows_per_row_group: Positive = 64
    """Images per row group: the smallest unit that is read."""
    shard_mib: Positive = 256
    """Target size of a parquet file in MiB."""
    max_rejected_fraction: Fraction = 0.1
    """Refuse to commit when more of the source than this cannot be read as images."""
    classes: tuple[str, ...] | None = None
    """Class names in label order; unset = those that the source declares, or its sorted labels."""
    shrink_to: Positive | None = None
    """Re-encode images whose shorter side is longer than this; unset = keep every byte."""
    shrink_quality: Annotated[int, Field(ge=1, le=100)] = 95
    """JPEG quality of re-encoded images."""
    cpus_per_task: PositiveFloat = 1.0
    """CPUs that one conversion task reserves."""


class VerifyConfig(Section):
    """Checking a data set against its manifest."""

    path: str
    """Converted data set: a folder or `s3://` prefix."""
    decode_fraction: Fraction = 0.01
    """Share of the images to decode; checksums of all are checked always."""


class SubsetConfig(Section):
    """A nested part of a data set, by manifest alone."""

    source: str
    """Converted data set to take from."""
    destination: str
    """Folder of the new manifest."""
    count: Positive | None = None
    """Images to take; give this or `fraction`."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Share of the images to take; give this or `count`."""


class DeduplicateConfig(Section):
    """Removing what a pre-training set shares with evaluation sets, by manifest alone."""

    source: str
    """Converted pre-training set."""
    evaluation_sets: tuple[str, ...] = Field(min_length=1)
    """Converted sets whose images, exact or near, are left out."""
    destination: str
    """Folder of the new manifest and of the list of what was left out."""
    max_distance: Annotated[int, Field(ge=0, le=128)] = 60
    """Bits of 256 by which two perceptual hashes may differ."""


class SweepConfig(Section):
    """A grid of fine-tuning learning rates (Table 4), chosen on a dev split, then retrained."""

    learning_rates: tuple[PositiveFloat, ...] = (0.001, 0.003, 0.01, 0.03)
    """The grid."""
    dev_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    """Share of the training set that chooses the rate: ImageNet 0.01, CIFAR 0.02, Pets 0.1."""
    seeds: Positive = 3
    """Runs on the full training set with the chosen rate; mean and deviation are reported."""
    max_concurrent: Positive | None = None
    """Trials at a time; unset = what the cluster holds."""

    @model_validator(mode="after")
    def _a_grid(self) -> SweepConfig:
        if not self.learning_rates or len(set(self.learning_rates)) < len(self.learning_rates):
            raise ValueError(
                f"learning_rates={list(self.learning_rates)} must hold one or more different rates"
            )
        return self


class StudyModel(Section):
    """One row of a scaling study."""

    label: str
    """Name of the row in tables and figures."""
    model: ModelConfig
    """The model of the row."""
    learning_rate: PositiveFloat | None = None
    """Peak rate of the row; unset = the recipe's."""


class StudyConfig(Section):
    """A grid of models by data sizes; each cell is pre-trained and few-shot evaluated."""

    models: tuple[StudyModel, ...] = Field(min_length=1)
    """The rows."""
    data_fractions: tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...] = (1.0,)
    """Nested parts of the training set."""
    epochs: tuple[PositiveFloat, ...] = (7.0,)
    """Lengths; every model and data size is trained for each."""


class ExportConfig(Section):
    """Weights for other programs, from a run, a checkpoint or a published file."""

    path: str
    """File to write, local or `s3://`: `.npz` for jax, `.safetensors` for the others; for
    huggingface also a folder that `from_pretrained` reads."""
    layout: Literal["jax", "timm", "huggingface", "vit_ray"] = "jax"
    """Whose names and shapes the tensors get."""
    averaged: bool | None = None
    """Averaged weights of a checkpoint; unset = if it has any."""


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


class PlanConfig(Section):
    """The cluster, and the data set, that `jobs/plan.py` and `--dry-run` reckon with."""

    device: str = "H200"
    """GPU: part of the name that its driver reports, such as H200, H100, A100."""
    num_gpus: Positive | None = None
    """GPUs, one per worker; unset = the most of `workers.num_workers`."""
    mfu: Annotated[float, Field(gt=0.0, le=1.0)] = 0.4
    """Share of the GPU's dense peak that training is assumed to reach, communication aside."""
    link_gb_per_s: PositiveFloat | None = None
    """GB/s (1000^3) that a GPU sends; unset = the data sheet's link for up to 8 GPUs (one server),
    and 50 for more (a port of 400 Gbit/s for each GPU)."""
    num_images: Positive | None = None
    """Training images, told instead of read from `data.train`."""
    num_classes: Positive | None = None
    """Classes, told instead of read from `data.train`."""

    @model_validator(mode="after")
    def _told_in_pairs(self) -> PlanConfig:
        if (self.num_images is None) != (self.num_classes is None):
            raise ValueError(
                "num_images and num_classes go together; "
                f"given {self.num_images} and {self.num_classes}"
            )
        return self


class Recipe(Section):
    """Everything that decides what a job does."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Run name: folder of its checkpoints, and how it is resumed."""
    seed: NotNegative = 0
    """Initial weights, order, augmentation and dropout."""
    output: str = "runs"
    """Folder or `s3://` prefix under which runs keep their checkpoints."""
    resume: bool | Literal["auto"] = "auto"
    """A run of this name exists: `auto` continues it, `true` demands it, `false` refuses it."""
    init_from: str | None = None
    """Weights to start from: a run folder, a checkpoint, a `.npz` or `.safetensors` file, or a
    folder of Hugging Face; local or `s3://`."""
    init_resize: Literal["bilinear", "bicubic"] = "bilinear"
    """How positions of `init_from` reach another resolution: as the paper's code, or as timm and
    transformers."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvalConfig = EvalConfig()
    workers: WorkersConfig = WorkersConfig()
    tracking: TrackingConfig = TrackingConfig()
    convert: ConvertConfig | None = None
    verify: VerifyConfig | None = None
    subset: SubsetConfig | None = None
    deduplicate: DeduplicateConfig | None = None
    sweep: SweepConfig | None = None
    study: StudyConfig | None = None
    plan: PlanConfig = PlanConfig()
    export: ExportConfig | None = None
    inspect: InspectConfig | None = None

    @property
    def group_sizes(self) -> list[int]:
        """Worker counts that training may have: those that divide its batch; all if none does."""
        sizes = list(self.workers.sizes)
        return [n for n in sizes if self.train.global_batch_size % n == 0] or sizes

    @property
    def run_folder(self) -> str:
        """Where the run of this name keeps its checkpoints."""
        return f"{self.output.rstrip('/')}/{self.name}"

    def flat(self) -> dict[str, str]:
        """Dotted keys to values as text, as MLflow's parameters take them."""
        return {key: _as_text(value) for key, value in _leaves(self.model_dump(), "")}

    def with_absolute_paths(self) -> Recipe:
        """The same with local paths made absolute: workers run in folders of their own."""
        few_shot = {key: getattr(self.evaluate, key) for key in ("few_shot_train", "few_shot_test")}
        return self.with_changes(
            output=_absolute(self.output),
            init_from=_absolute(self.init_from),
            data={"train": _absolute(self.data.train), "eval": _absolute(self.data.eval)},
            evaluate={key: _absolute(path) for key, path in few_shot.items()},
            tracking={"uri": _absolute_sqlite(self.tracking.uri)},
        )

    def with_changes(self, **sections: Any) -> Recipe:
        """A checked copy; a dict changes the named keys of a section, anything else replaces it.

        Raises:
            ValueError: as `load_recipe`.
        """
        tree = self.model_dump(mode="json")
        for key, value in sections.items():
            old = tree.get(key)
            tree[key] = (
                {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
            )
        return recipe_from_dict(tree, where=f"recipe {self.name!r}")


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _absolute_sqlite(uri: str) -> str:
    scheme = "sqlite:///"
    if not uri.startswith(scheme) or uri.startswith(f"{scheme}/"):
        return uri
    return scheme + str(Path(uri.removeprefix(scheme)).absolute())


def accumulation_steps(global_batch_size: int, micro_batch_size: int, num_workers: int) -> int:
    """Passes per optimizer step: global batch / (micro-batch x workers).

    Raises:
        ValueError: it does not divide; the message gives the nearest batch that does.
    """
    per_pass = micro_batch_size * num_workers
    if global_batch_size % per_pass == 0:
        return global_batch_size // per_pass
    nearest = max(1, round(global_batch_size / per_pass)) * per_pass
    raise ValueError(
        f"train.global_batch_size={global_batch_size} is not divisible by train.micro_batch_size "
        f"x workers.num_workers ({micro_batch_size} x {num_workers} = {per_pass}: "
        f"{global_batch_size} = {global_batch_size // per_pass} x {per_pass} + "
        f"{global_batch_size % per_pass}); the nearest valid train.global_batch_size is {nearest}"
    )


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a YAML recipe and apply overrides such as `optim.learning_rate=3e-4`.

    Args:
        path: YAML file; a key `base` names another recipe, relative to it, that it changes.
        overrides: `dotted.key=value`, the value in YAML.

    Raises:
        ValueError: no such file, bad YAML, an unknown key (with the nearest valid one), an
            ill-typed or impossible value (with its dotted key).
    """
    tree = _read_tree(Path(path), seen=())
    for override in overrides or []:
        _apply_override(tree, override)
    return recipe_from_dict(tree, where=str(path))


def recipe_from_dict(tree: dict[str, Any], where: str) -> Recipe:
    """A checked recipe from plain data.

    Raises:
        ValueError: as `load_recipe`; every problem is listed.
    """
    try:
        # JSON mode is strict about types but lets a list stand for a tuple, as YAML needs.
        return Recipe.model_validate_json(json.dumps(tree))
    except pydantic.ValidationError as error:
        found = error.errors()
        # A tuple whose items failed counts as too short as well; only the items' own faults help.
        causes = [p for p in found if p["type"] != "too_short"] or found
        problems = [_describe(problem) for problem in causes]
        raise ValueError(f"{where}: " + "; ".join(dict.fromkeys(problems))) from None


def describe_keys() -> str:
    """All dotted keys with type, default and meaning, one a line, for `--help`."""
    return "\n".join(_describe_section(Recipe, ""))


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 3e-4 is a number (YAML 1.1 would read a string)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: not valid YAML: {error}") from None


def _read_tree(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], 3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise ValueError(f"recipe {str(path)!r}: no such file{hint}")
    if path.resolve() in seen:
        raise ValueError(f"recipe {str(path)!r}: base names the recipe itself")
    tree = _parse(path.read_text(), str(path))
    if not isinstance(tree, dict):
        raise ValueError(f"recipe {str(path)!r}: expected a mapping of sections, got {tree!r}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    return _merge(_read_tree(path.parent / str(base), (*seen, path.resolve())), tree)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"override {override!r}: expected key=value, such as train.zero_stage=2")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ValueError(f"override {override!r}: {parent} is a value, not a section")
        node = child
    node[last] = _parse(text, f"override {override!r}")


def _describe(problem: Any) -> str:
    where = [part for part in problem["loc"] if not _is_union_branch(part)]
    key = ".".join(str(part) for part in where)
    if problem["type"] == "extra_forbidden":
        return _describe_unknown(where)
    given = problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key} is required but not given"
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}={given!r}: {message}"


def _is_union_branch(part: Any) -> bool:
    """Pydantic names the branch of a union it tried; users did not write that."""
    return (
        isinstance(part, str)
        and re.search(r"[\[(,]|^(constrained-)?(int|float|bool|str)$", part) is not None
    )


def _describe_unknown(where: list[Any]) -> str:
    section, unknown = where[:-1], str(where[-1])
    valid = _keys_of(section)
    everything = list(_dotted_keys(Recipe, ""))
    near = difflib.get_close_matches(unknown, valid, 1, 0.6)
    prefix = "".join(f"{part}." for part in section)
    if near:
        hint = f"did you mean {prefix}{near[0]}?"
    elif elsewhere := [key for key in everything if key.split(".")[-1] == unknown]:
        hint = f"did you mean {elsewhere[0]}?"
    else:
        full = difflib.get_close_matches(f"{prefix}{unknown}", everything, 1, 0.0)
        hint = f"the nearest is {full[0]}" if full else ""
    return f"unknown key {prefix}{unknown}; {hint} (valid in this section: {', '.join(valid)})"


def _keys_of(section: list[Any]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in section:
        if isinstance(part, int):
            continue
        model = _section_type(model.model_fields[str(part)].annotation) or model
    return list(model.model_fields)


def _section_type(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_type(argument) for argument in get_args(annotation))
    return next((section for section in found if section), None)


def _dotted_keys(model: type[BaseModel], prefix: str) -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        section = _section_type(field.annotation)
        if section is not None:
            keys += _dotted_keys(section, f"{prefix}{name}.")
    return keys


def _describe_section(model: type[BaseModel], prefix: str) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        section = _section_type(field.annotation)
        if section is not None:
            lines += ["", f"{prefix}{name}: {(section.__doc__ or '').splitlines()[0]}"]
            lines += _describe_section(section, f"{prefix}{name}.")
        else:
            default = "required" if field.is_required() else _as_text(field.get_default())
            lines.append(f"  {prefix}{name} [{default}]  {field.description or ''}")
    return lines


def _leaves(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _as_text(value: Any) -> str:
    return json.dumps(value, default=str) if isinstance(value, (tuple, list, dict)) else str(value)
