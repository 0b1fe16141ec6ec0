"""The sections of a recipe that decide what one training does."""

import json
import os
import re
from importlib.metadata import entry_points
from posixpath import normpath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from vit_ray.config.schema import (
    MODEL_NAME,
    Below1,
    Distinct,
    Fraction,
    ImageSize,
    LabelSelector,
    NotNegative,
    NotNegativeFloat,
    OnResume,
    OwnPart,
    Place,
    Positive,
    PositiveFloat,
    Section,
    Share,
    value_text,
)
from vit_ray.paper import resolved_model

# Addresses of tracking stores that MLflow opens.
_STORE: Final = re.compile(
    r"(databricks|databricks-uc|uc)(:.*)?|sqlite(\+\w+)?:///+[^/].*(?<!/)"
    r"|(postgresql|mysql|mssql|https?)(\+\w+)?:///*[^/].*"
)
# Names that MLflow accepts (`mlflow.utils.validation`, 3.17).
_TAG_NAME: Final = re.compile(r"[\w\- :][/\w.\- :]{0,249}")
# A model with more blocks is a typing error, and would take hours to build.
_MAX_BLOCKS: Final = 1000
# Metrics of every evaluation.
_EVAL_METRICS: Final = ("top1", "top5", "loss", "images", "mean_class_top1")


class ModelConfig(Section):
    """Which model, and the options that the paper varies."""

    name: str = "ViT-B/16"
    """Catalog name (`ViT-H/14`, `R50x1+ViT-B/32`, ...), or timm's or Hugging Face's for the same
    (`vit_base_patch16_224`), or a family with its size in full: `ViT`, `Axial-ViT`, `R+ViT`,
    `ResNet`, `AxialResNet`; or a model of your own (`mymodels.ConvStem`)."""
    image_size: ImageSize = 224
    """Input side in pixels, or (height, width)."""
    depth: Annotated[int, Field(gt=0, le=_MAX_BLOCKS)] | None = None
    """Transformer blocks (`ViT`, `Axial-ViT`, `R+ViT`)."""
    width: Positive | None = None
    """Token width D (`ViT`, `Axial-ViT`, `R+ViT`)."""
    mlp_dim: Positive | None = None
    """Hidden width of the MLP (`ViT`, `Axial-ViT`, `R+ViT`)."""
    num_heads: Positive | None = None
    """Attention heads (`ViT`, `Axial-ViT`, `R+ViT`)."""
    patch_size: Positive | None = None
    """Patch side in pixels (`ViT`, `Axial-ViT`)."""
    stages: tuple[Annotated[int, Field(gt=0, le=_MAX_BLOCKS)], ...] | None = None
    """Units of each stage (`R+ViT`, `ResNet`, `AxialResNet`)."""
    width_factor: Positive | None = None
    """Factor on the widths of a ResNet, 64 in its first stage (same three families)."""
    positions: Literal["none", "learned_1d", "learned_2d", "relative", "sincos_2d"] | None = None
    """Position embedding of the paper's Table 8, or fixed sines and cosines; unset = the model's
    default."""
    positions_at: Literal["stem", "every_layer", "every_layer_shared"] | None = None
    """Where positions are added."""
    pool: Literal["cls", "gap"] | None = None
    """Classifier input: the class token, or the mean over patch tokens."""
    activation: Literal["gelu_tanh", "gelu"] | None = None
    """Activation of the MLPs: GELU approximated by tanh (the paper's code), or exact (DeiT)."""
    norm_eps: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Epsilon of the layer norms; 1e-6 if unset."""
    representation: bool | None = None
    """The tanh layer before the head, used in pre-training."""
    head_bias: float | None = None
    """Constant that is added in fp32 to the head's bias, which starts at 0: -10 for ImageNet-21k,
    -6.9 for ImageNet with sigmoid loss. Published weights with such a bias keep their logits."""
    dropout: Fraction | None = None
    """Dropout after the positions and after every dense layer except q, k and v."""
    stochastic_depth: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Share of images that skip the attention and MLP of the last block in training; it rises
    linearly from 0 at the first block. Not for axial ViTs."""

    def _check(self) -> None:
        explicit_size = self.image_size if "image_size" in self.model_fields_set else None
        name, image_size = resolved_model(self.name, explicit_size)
        # The section is frozen, but its validation is not finished yet.
        self.__dict__.update(name=name, image_size=image_size or self.image_size)
        if image_size:
            self.__pydantic_fields_set__.add("image_size")
        patch = self.patch or 1
        multiples = [max(1, round(side / patch)) * patch for side in self.sides]
        if multiples != list(self.sides):
            raise ValueError(
                f"image_size={value_text(self.image_size)} is not a multiple of the patches of "
                f"{self.name}, {patch} pixels; the nearest is "
                f"{multiples[0] if isinstance(self.image_size, int) else multiples}"
            )

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the input in pixels."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @property
    def patch(self) -> int | None:
        """Side of a patch in image pixels; None for a hybrid, which cuts a feature map."""
        match = re.fullmatch(r"(?!R)[^/]*/(\d+)", self.name)
        return self.patch_size or (int(match[1]) if match else None)

    def options(self) -> dict[str, Any]:
        """Keyword arguments for `build_model`: only those that the recipe sets."""
        return self.model_dump(exclude={"name", "image_size"}, exclude_none=True)


class _CropConfig(Section):
    """Keys that crops of training and evaluation have in common."""

    resize: Positive | None = None
    """Side in pixels to resize to before a crop; unset = crop size x 8/7."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How crops are resized, with antialiasing."""


class AugmentConfig(_CropConfig):
    """How an encoded image becomes a training crop; random numbers are keyed by sample."""

    kind: Literal["inception_crop", "resize_crop", "resize", "center_crop"] = "inception_crop"
    """Inception crop, BiT's resize and random crop, plain resize, or resize and centre crop."""
    min_area: Share = 0.05
    """Smallest share of the image's area that an inception crop takes."""
    max_area: Share = 1.0
    """Largest share of the image's area that an inception crop takes."""
    flip: bool = True
    """Mirror half of the images."""
    randaugment: Literal["tensorflow"] | None = None
    """Random operations on the finished crop, those of the paper's code and AugReg; unset =
    none."""
    randaugment_layers: Positive = 2
    """Operations per image."""
    randaugment_magnitude: Annotated[float, Field(ge=0.0, le=30.0)] = 10.0
    """Strength of the operations; 10 is full strength."""
    own: OwnPart | None = None
    """A function of your own that changes the finished crop, such as `myparts.grey`."""

    def _check(self) -> None:
        if self.min_area > self.max_area:
            raise ValueError(
                f"min_area={self.min_area} is larger than max_area={self.max_area}; give a range "
                "from small to large"
            )


class EvalAugmentConfig(_CropConfig):
    """How an encoded image becomes an evaluation crop, without randomness."""

    kind: Literal["resize", "center_crop"] = "center_crop"
    """Plain resize, or resize and centre crop."""
    border: NotNegative = 0
    """Pixels cut off all four sides before anything else: 2 for ObjectNet's red frame."""


class DataConfig(Section):
    """Which data sets, and how they are streamed."""

    train: Annotated[Place | None, OnResume.FREE] = None
    """Converted training set: a folder or `s3://` prefix. A run resumes only with the same data,
    which may have moved."""
    fraction: Annotated[Share, OnResume.FIXED] = 1.0
    """Train on this share of `train`; smaller shares are subsets of larger ones."""
    eval: Annotated[Place | None, OnResume.EVALUATED] = None
    """Converted set on which accuracy is measured; unset = the held-out part of `train`, if any."""
    held_out_fraction: Annotated[Fraction, OnResume.FIXED] = 0.0
    """Share of `train` that is held out (keyed by `seed`), and evaluated on if `eval` is unset."""
    shuffle_window: Annotated[NotNegative | Literal["auto"], OnResume.FIXED] = "auto"
    """Images in the shuffle buffer, a multiple of the global batch: their row groups are dealt out
    over its batches, differently in each epoch. A reading task holds one window in memory. 0 = row
    groups one after another. `auto` = up to 2,048 that fit in 256 MiB and half of
    object_store_mib, and 0 for batches above 1,024; a resumed run keeps the window it began
    with."""
    augment: AugmentConfig = AugmentConfig()
    """Training images."""
    eval_augment: EvalAugmentConfig = EvalAugmentConfig()
    """Evaluation images."""
    max_bad_fraction: Annotated[Fraction, OnResume.FREE] = 0.001
    """Share of undecodable images in the data set above which the run stops."""
    cpus_per_task: Annotated[PositiveFloat, OnResume.FREE] = 0.66
    """CPUs that one read-and-decode task reserves. Below 1 because tasks wait for storage: three
    keep two cores busy."""
    label_selector: Annotated[LabelSelector, OnResume.FREE] = {}
    """Labels of the nodes on which images are read and decoded, as `workers.label_selector`; unset
    = all nodes, training nodes first."""
    object_store_mib: Annotated[Positive | None, OnResume.FREE] = None
    """Maximum MiB of the object store for images that wait for training; at the limit reading
    pauses. Unset = Ray Data's default, half of the store."""
    cache_dir: Annotated[Place | None, OnResume.FREE] = None
    """Folder on each node's local disk that caches row groups for later epochs; each use verifies
    their checksum. Unset = no cache."""
    cache_free_gib: Annotated[NotNegativeFloat, OnResume.FREE] = 10.0
    """GiB that stay free on the cache's disk; cached files are never deleted."""

    def _check(self) -> None:
        if "://" in (self.cache_dir or ""):
            raise ValueError(
                f"cache_dir={self.cache_dir!r} is not a local folder; give a path on each node's "
                "disk, such as /local_ssd/vit_ray"
            )


class OptimConfig(Section):
    """Optimizer, schedule and length of a run."""

    name: Annotated[Literal["adamw", "sgd"] | OwnPart, OnResume.FIXED] = "adamw"
    """AdamW (the paper's pre-training), SGD with momentum (its fine-tuning, and BiT), or an
    optimizer of your own (`myparts.lion`)."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """AdamW's betas."""
    momentum: Fraction = 0.9
    """SGD's momentum."""
    weight_decay: NotNegativeFloat = 0.0
    """On matrices and kernels, not on biases, norms, tokens or positions. Decoupled and scaled by
    the rate; added to the gradient in SGD, as in BiT."""
    frozen: Annotated[tuple[str, ...], Distinct, OnResume.FIXED] = ()
    """Parts of the model that are not trained and have no gradient or optimizer state:
    `embedding`, `class_token`, `positions`, `blocks` or `blocks.0-5`, `norm`, `representation`,
    `head`; of a ResNet `root`, `units` or `units.0-5`, `norm`, `head`."""
    clip_norm: NotNegativeFloat = 1.0
    """Gradients are clipped to this global norm; 0 = no clipping."""
    schedule: Literal["linear", "cosine", "constant", "steps", "cooldown"] = "cosine"
    """Learning rate after the warm-up: `steps` multiplies it by 0.1 at each of `decay_at`;
    `cooldown` is constant, with a cool-down at the end."""
    decay_at: tuple[Fraction, ...] = (0.3, 0.6, 0.9)
    """Shares of the run at which `schedule=steps` decays; the default is BiT's for fine-tuning."""
    cooldown_fraction: Share = 0.2
    """Last share of the run, in which `schedule=cooldown` falls linearly."""
    end_learning_rate: NotNegativeFloat = 0.0
    """Final rate of linear and cosine decay and of the cool-down; the paper's linear decay ends at
    1e-5."""
    warmup_steps: NotNegative = 0
    """Steps of linear warm-up from zero."""
    steps: Annotated[Positive | None, OnResume.LENGTH] = None
    """Length in optimizer steps; give steps or epochs."""
    epochs: Annotated[PositiveFloat | None, OnResume.LENGTH] = None
    """Length in passes over the training set."""

    def _check(self) -> None:
        if list(self.decay_at) != sorted(set(self.decay_at)):
            raise ValueError(
                f"decay_at={list(self.decay_at)} is not in ascending order; give shares of the run "
                "such as [0.3, 0.6, 0.9]"
            )
        if self.steps and self.epochs:
            raise ValueError(
                "the length of the run is given twice (steps, epochs); set one of them to null"
            )

    def total_steps(self, num_images: int, global_batch_size: int) -> int:
        """Optimizer steps of the run; a length in epochs is rounded to whole batches.

        Raises:
            ValueError: no length is given, or it is not longer than the warm-up.
        """
        if not (self.steps or self.epochs):
            raise ValueError("optim gives no length of the run; set optim.steps or optim.epochs")
        total = self.steps or max(1, round(num_images * (self.epochs or 0) / global_batch_size))
        if self.warmup_steps >= total:
            raise ValueError(
                f"optim.warmup_steps={self.warmup_steps} is not shorter than the run ({total} "
                f"steps); set optim.warmup_steps={max(min(1, total - 1), total // 10)}"
            )
        return total


class TrainConfig(Section):
    """Loss, batch and training engine."""

    loss: Annotated[Literal["softmax", "sigmoid", "masked_patch"] | OwnPart, OnResume.FIXED] = (
        "softmax"
    )
    """Softmax or sigmoid cross-entropy, or masked patch prediction (no labels); or a loss of your
    own (`myparts.focal_loss`)."""
    label_smoothing: Fraction = 0.0
    """For `loss=softmax`."""
    mixup: NotNegativeFloat = 0.0
    """Alpha of MixUp's Beta(alpha, alpha); 0 = off. Neighbours in the global batch are mixed, so
    the micro-batch must be even."""
    cutmix: NotNegativeFloat = 0.0
    """Alpha of CutMix; 0 = off. With MixUp, each applies to half of the pairs."""
    masked_target: Annotated[Literal["mean_color", "downsized", "full_patch"], OnResume.FIXED] = (
        "mean_color"
    )
    """Target of masked patch prediction."""
    global_batch_size: Annotated[Positive, OnResume.FIXED] = 4096
    """Images per optimizer step, over all workers."""
    micro_batch_size: Annotated[Positive | Literal["auto"], OnResume.FREE] = "auto"
    """Images per worker and pass; `auto` = the largest that fits. Gradients are accumulated over
    the passes of a step."""
    zero_stage: Annotated[Literal[0, 1, 2, 3], OnResume.FREE] = 1
    """DeepSpeed ZeRO stage: 1 shards optimizer state, 2 also gradients, 3 also weights."""
    offload: Annotated[bool, OnResume.FREE] = False
    """Keep optimizer state in host memory (ZeRO 1-3)."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """bf16 keeps fp32 master weights and an fp32 loss."""
    activation_checkpointing: Annotated[NotNegative, OnResume.FREE] = 0
    """0 = keep all activations, n = recompute every n-th block."""
    compile: Annotated[bool | Literal["auto"], OnResume.FREE] = "auto"
    """torch.compile the model's blocks, which share one compiled code (ZeRO 0-2); `auto` = on GPUs,
    and eager if compiling fails, for example without a C compiler."""
    averaging: Below1 = 0.0
    """Decay per step of the averaged weights (EMA, Polyak averaging); the paper's is 0.9999; 0 =
    off."""
    averaging_warmup: bool = True
    """Limit the decay to (1 + t) / (10 + t) in step t, so that the average of a short run does not
    stay near the initial weights; `false` = a constant decay, as in the paper."""
    nonfinite: Annotated[Literal["stop", "skip"], OnResume.FREE] = "stop"
    """What to do after a loss or gradient that is not finite, which is never applied: stop, or skip
    the step. Three such steps in a row stop the run."""
    skip_above: Annotated[float, Field(gt=1.0)] | None = None
    """Skip a step whose gradient norm is above this many times the median of the last 128 steps (32
    must be known); such steps are counted, and named at the next log or checkpoint. Unset = off."""
    log_every_steps: Annotated[Positive, OnResume.FREE] = 50
    """Steps between log lines and metrics. The first step is logged too, and steps 4, 8, 16 and 32
    before the first of these."""
    profile_steps: Annotated[tuple[Positive, Positive] | None, OnResume.FREE] = None
    """First and last step of a profiler trace, kept with the MLflow run; unset = none."""
    early_stopping: Positive | None = None
    """Stop after this many evaluations without a better validation loss: of the averaged weights if
    there are any (`averaging`), on held-out images if there are any (`data.held_out_fraction`). The
    best evaluation is the result, as with `checkpoint.keep_best`."""
    callbacks: Annotated[tuple[OwnPart, ...], Distinct, OnResume.FREE] = ()
    """Functions of your own that are called on rank 0 with each logged step and its metrics."""
    step_timeout_s: Annotated[PositiveFloat, OnResume.FREE] = 600.0
    """Seconds after which a step, or a collective operation in it, counts as hung, and the workers
    are restarted; for a collective operation at least 120."""

    def compiles(self, has_gpu: bool) -> bool:
        if self.compile == "auto":
            return has_gpu and self.zero_stage < 3
        return self.compile

    @property
    def mixes(self) -> bool:
        return self.mixup > 0.0 or self.cutmix > 0.0

    @property
    def pass_multiple(self) -> int:
        """Images of a pass must be a multiple of this number."""
        return 2 if self.mixes else 1

    def _check(self) -> None:
        if self.mixes and self.loss == "masked_patch":
            raise ValueError(
                "mixup and cutmix mix labels, and loss=masked_patch has none; set both to 0"
            )
        if self.label_smoothing and self.loss != "softmax":
            raise ValueError(
                f"label_smoothing={self.label_smoothing} with loss={self.loss}: it needs "
                "loss=softmax; set label_smoothing to 0 or the loss to softmax"
            )
        if self.compile is True and self.zero_stage == 3:
            raise ValueError(
                "compile=true does not work with zero_stage=3; use zero_stage 0, 1 or 2, or set "
                "compile to false"
            )
        if self.offload and self.zero_stage == 0:
            raise ValueError(
                "offload=true with zero_stage=0, which does not shard optimizer state; use "
                "zero_stage 1, 2 or 3, or set offload to false"
            )
        if self.profile_steps and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"profile_steps={list(self.profile_steps)} ends before it begins; give the first "
                "and the last step, such as [20, 22]"
            )


class CheckpointConfig(Section):
    """When checkpoints are written, and which ones are kept."""

    every_steps: Positive | None = None
    """Steps between checkpoints; unset = only by minutes, and at the end."""
    every_minutes: PositiveFloat | None = 15.0
    """Minutes between checkpoints; null = only by steps."""
    keep_last: Positive = 2
    """Newest checkpoints to keep."""
    keep_every_steps: Positive | None = None
    """Steps between permanent checkpoints, which are never removed; unset = none."""
    keep_steps: tuple[Positive, ...] = ()
    """Steps after which permanent checkpoints are written."""
    keep_best: Annotated[bool, OnResume.CONFIRM] = False
    """The evaluation with the best validation loss is the result: its accuracy is reported, and its
    checkpoint is kept and used by later steps."""


class EvalConfig(Section):
    """Evaluation during training and at its end."""

    every_steps: Positive | None = None
    """Steps between evaluations; unset = only at the end."""
    batch_size: Annotated[Positive, OnResume.FREE] = 256
    """Images per worker and pass; fewer where a worker has fewer."""
    few_shot_train: Annotated[Place | None, OnResume.EVALUATED] = None
    """Converted set for the few-shot examples; unset = no few-shot accuracy."""
    few_shot_test: Annotated[Place | None, OnResume.EVALUATED] = None
    """Converted set on which few-shot accuracy is measured."""
    shots: Annotated[tuple[Positive, ...], Field(min_length=1), Distinct] = (1, 5, 10, 25)
    """Examples per class."""
    few_shot_seeds: Positive = 3
    """Random draws of the examples; the mean accuracy is reported."""
    metrics: Annotated[tuple[OwnPart, ...], Distinct, OnResume.FREE] = ()
    """Functions of your own that give each image a number, such as `myparts.top3`; means are
    reported as `eval/top3`."""

    def _check(self) -> None:
        if (self.few_shot_train is None) != (self.few_shot_test is None):
            raise ValueError(
                "few_shot_train and few_shot_test go together; given "
                f"{self.few_shot_train!r} and {self.few_shot_test!r}"
            )
        names = [metric.rpartition(".")[2] for metric in self.metrics]
        if taken := [name for name in names if name in _EVAL_METRICS or names.count(name) > 1]:
            raise ValueError(f"metrics: the name eval/{taken[0]} is taken; rename the function")


class WorkersConfig(Section):
    """Ray Train workers: how many, with which resources, and how many failures they may have."""

    num_workers: Positive | tuple[Positive, Positive] = 1
    """Workers, or [min, max] for an elastic run, which uses only counts that divide the batch."""
    use_gpu: bool | Literal["auto"] = "auto"
    """One GPU per worker; `auto` = if the cluster has GPUs."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPUs that a worker reserves for its threads; the other CPUs of the cluster read data."""
    label_selector: LabelSelector = {}
    """Labels of the nodes that train, by Ray's rules: `{ray.io/accelerator-type: H100}`, `{pool:
    "in(a, b)"}`, `{ray.io/market-type: "!spot"}`. Nodes that are up have Ray's own labels and
    those of `ray start --labels`; an autoscaler starts nodes whose node type or KubeRay group has
    them in its `labels`."""
    max_failures: int = Field(default=5, ge=-1)
    """Failures in a row, without a new checkpoint between them, that the run survives; -1 = any
    number. Preempted nodes and micro-batches that do not fit into memory do not count."""
    place_timeout_minutes: PositiveFloat = 60.0
    """Minutes to wait for free resources on the cluster before the run ends."""

    @property
    def sizes(self) -> range:
        """Every worker count that the run may use."""
        count = self.num_workers
        smallest, largest = (count, count) if isinstance(count, int) else count
        return range(smallest, largest + 1)

    def _check(self) -> None:
        if not self.sizes:
            raise ValueError(f"num_workers={self.num_workers} has its minimum above its maximum")


# Values of FSSPEC_S3 that recipes of this process have set, and the user's value before each.
_USER_VALUES: Final[dict[str, str]] = {}


class StorageConfig(Section):
    """Access to `s3://`; credentials, region and endpoint are those of the AWS command line."""

    anonymous: bool = False
    """Read public buckets without credentials."""
    requester_pays: bool = False
    """Pay for what is read from buckets whose owner does not."""

    def variables(self) -> dict[str, str]:
        """fsspec's environment variable, if this recipe sets it or an earlier recipe has set it."""
        current = os.environ.get("FSSPEC_S3", "{}")
        user_value = _USER_VALUES.get(current, current)
        options = {"anon": self.anonymous, "requester_pays": self.requester_pays}
        enabled = {key: True for key, is_enabled in options.items() if is_enabled}
        value = json.dumps({**json.loads(user_value), **enabled}) if enabled else user_value
        _USER_VALUES[value] = user_value
        return {"FSSPEC_S3": value} if enabled or value != current else {}

    def use(self) -> None:
        """Apply these settings to this process and to those that it starts."""
        os.environ.update(self.variables())


def _are_tags(tags: dict[str, str]) -> dict[str, str]:
    for name in tags:
        is_reserved = name.startswith(("mlflow.", "vit_ray."))
        if is_reserved or not _TAG_NAME.fullmatch(name) or normpath(name) != name:
            raise ValueError(
                f"{name[:40]!r} is reserved (mlflow.*, vit_ray.*), or MLflow does not accept it; "
                "give a name of at most 250 letters, digits, _ - . : / and blanks, which is not a "
                "path like a/../b"
            )
    return tags


def _is_a_store(uri: str) -> str:
    # MLflow 3 opens no folder of files, and reports what it cannot open only after several
    # time-outs. The error does not show the address, which may contain a password.
    scheme = uri.partition(":")[0].partition("+")[0]
    plugins = {plugin.name for plugin in entry_points(group="mlflow.tracking_store")} - {"file", ""}
    if _STORE.fullmatch(uri) or scheme in plugins:
        return uri
    raise ValueError(
        f"{scheme + '://' if '://' in uri else 'a path'} is not the address of a store of "
        "MLflow's; give sqlite:///FILE, such as sqlite:///mlflow.db, http://HOST:PORT of a "
        "server, or postgresql://, mysql://, mssql://HOST/DATABASE (here, or in "
        "MLFLOW_TRACKING_URI). MLflow 3 does not open a folder of files, such as mlruns"
    )


class TrackingConfig(Section):
    """MLflow."""

    uri: Annotated[str, AfterValidator(_is_a_store)] = "sqlite:///mlflow.db"
    """Tracking server or SQLite file. Unset = MLFLOW_TRACKING_URI of the environment, if it is
    set."""
    experiment: str = "vit_ray"
    """MLflow experiment; unset = MLFLOW_EXPERIMENT_NAME, if it is set."""
    system_metrics: bool = False
    """Record CPU, memory, GPU and network of every node; MLflow's pages show these first."""
    log_model: bool = True
    """Log the trained model for `mlflow.pyfunc.load_model`, as the address of its checkpoint,
    without a copy."""
    register_as: Annotated[str, Field(pattern=MODEL_NAME)] | None = None
    """Registered model that gets a new version; trials of a sweep are not registered."""
    description: str | None = None
    """Markdown at the top of the run's description in MLflow."""
    tags: Annotated[dict[str, str], AfterValidator(_are_tags)] = {}
    """Tags of the run in MLflow, such as {team: vision}."""


def is_due(step: int, every_steps: int | None, at_steps: tuple[int, ...] = ()) -> bool:
    """Whether something that happens every `every_steps`, and at `at_steps`, is due after `step`
    steps; None = not by steps.
    """
    return (every_steps is not None and step % every_steps == 0) or step in at_steps
