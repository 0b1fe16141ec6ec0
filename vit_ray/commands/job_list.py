"""The commands that read a recipe: what each does, its code, and the keys that it reads."""

from dataclasses import dataclass

_TRAINING = (
    "name", "seed", "output", "resume", "model", "data", "optim", "train",
    "checkpoint", "evaluate", "workers", "tracking", "storage", "paper",
)  # fmt: skip
_WEIGHTS = ("init_from",)
_COUNTS = ("plan",)
_FEW_SHOT = ("evaluate.few_shot_train", "evaluate.few_shot_test")
_SETS = ("data.train", "data.eval", *_FEW_SHOT)


@dataclass(frozen=True)
class Command:
    """One command that reads a recipe.

    Attributes:
        what: a sentence for the help.
        main: `module:function` that takes the recipe and returns an exit code or None.
        reads: sections and keys of the recipe that the command uses.
        example: recipe and overrides of an example.
        plan: `module:function` that returns the text of `--dry-run`.
        needs: keys that the recipe must set, checked before anything is imported.
        opens: keys of the data sets, weights and sources that must exist before it starts.
    """

    name: str
    what: str
    main: str
    reads: tuple[str, ...]
    example: str
    plan: str | None = None
    needs: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()

    @property
    def starts_workers(self) -> bool:
        return "workers" in self.reads and self.name != "plan"


_ALL = (
    Command(
        "convert",
        "Convert a source of images to a sharded parquet data set.",
        "vit_ray.commands.datasets:run_convert",
        ("convert", "seed", "storage"),
        "cifar10 convert.source=IMAGES/train",
        "vit_ray.commands.datasets:describe_conversion",
        needs=("convert.source", "convert.destination"),
        opens=("convert.source",),
    ),
    Command(
        "verify",
        "Check a converted data set: files, checksums, and whether images decode; or a run: the "
        "checksums of its checkpoints, and whether its samples came in the planned order.",
        "vit_ray.commands.datasets:run_verify",
        ("verify", "storage"),
        "cifar10 verify.path=data/cifar10/train",
        needs=("verify.path",),
        opens=("verify.path",),
    ),
    Command(
        "subset",
        "Take a subset of a converted data set, as a manifest only.",
        "vit_ray.commands.datasets:run_subset",
        ("subset", "seed", "storage"),
        "cifar10 subset.source=data/cifar10/train subset.destination=data/tenth "
        "subset.fraction=0.1",
        needs=("subset.source", "subset.destination"),
        opens=("subset.source", "subset.keys"),
    ),
    Command(
        "deduplicate",
        "Remove from a pre-training set the images that evaluation sets also have.",
        "vit_ray.commands.datasets:run_deduplicate",
        ("deduplicate", "storage"),
        "cifar10 deduplicate.source=data/cifar10/train "
        "deduplicate.evaluation_sets=[data/cifar10/test] deduplicate.destination=data/clean",
        needs=("deduplicate.source", "deduplicate.evaluation_sets", "deduplicate.destination"),
        opens=("deduplicate.source", "deduplicate.evaluation_sets"),
    ),
    Command(
        "pretrain",
        "Pre-train a model on a converted data set, or continue a run of the same name.",
        "vit_ray.commands.train:pretrain",
        (*_TRAINING, *_WEIGHTS, *_COUNTS),
        "digits optim.learning_rate=3e-4 --dry-run",
        "vit_ray.commands.dry_run:describe_training",
        needs=("data.train",),
        opens=("init_from", *_SETS),
    ),
    Command(
        "finetune",
        "Fine-tune the weights in init_from: new zero head, resized positions.",
        "vit_ray.commands.train:finetune",
        (*_TRAINING, *_WEIGHTS, *_COUNTS),
        "finetune/pets init_from=hf://google/vit-base-patch16-224-in21k data.train=data/pets/train",
        "vit_ray.commands.dry_run:describe_training",
        needs=("init_from", "data.train"),
        opens=("init_from", *_SETS),
    ),
    Command(
        "evaluate",
        "Accuracy of the weights in init_from on data.eval, also per class, and few-shot accuracy; "
        "ReaL, ObjectNet and others with `benchmark`.",
        "vit_ray.commands.train:evaluate",
        (
            "name", "seed", "output", *_WEIGHTS, "benchmark", "paper", "model", "data", "train",
            "evaluate", "workers", "tracking", "storage",
        ),
        "cifar10 init_from=runs/cifar10-vit",
        needs=("init_from",),
        opens=(
            "init_from", "data.eval", *_FEW_SHOT, "benchmark.label_file", "benchmark.model_classes",
        ),
    ),
    Command(
        "sweep",
        "Fine-tune over a grid of learning rates, select on a dev split, retrain on all data.",
        "vit_ray.commands.experiments:sweep",
        ("sweep", *_TRAINING, *_WEIGHTS, *_COUNTS),
        "digits_sweep sweep.learning_rates=[0.003,0.01,0.03]",
        "vit_ray.commands.dry_run:describe_sweep",
        needs=("sweep.learning_rates", "data.train", "data.eval"),
        opens=("init_from", *_SETS),
    ),
    Command(
        "vtab",
        "Fine-tune on the tasks of VTAB-1k that have data: group means, next to the paper's Table "
        "9.",
        "vit_ray.commands.experiments:vtab",
        ("vtab", "sweep", *_TRAINING, *_WEIGHTS, *_COUNTS),
        "vtab_1k init_from=runs/vit vtab.data=data/vtab",
        needs=("vtab.tasks", "init_from"),
        opens=("init_from", "vtab.data"),
    ),
    Command(
        "scaling_study",
        "Pre-train and few-shot evaluate a grid of models, data sizes, lengths and seeds in "
        "parallel; finished cells are not repeated.",
        "vit_ray.commands.experiments:study",
        ("study", *_TRAINING, *_WEIGHTS, *_COUNTS),
        "study_digits --dry-run",
        "vit_ray.commands.dry_run:describe_study",
        needs=("study.models",),
        opens=("init_from", *_SETS),
    ),
    Command(
        "report",
        "One HTML page of tables and figures of the recipe's run or experiment, from MLflow.",
        "vit_ray.commands.tracking_store:report_page",
        ("name", "output", "tracking", "storage"),
        "digits",
    ),
    Command(
        "plan",
        "Memory per GPU for each ZeRO stage, step and run time on plan.num_gpus "
        "of plan.device; starts nothing.",
        "vit_ray.commands.plan:print_plan",
        (*_COUNTS, *_TRAINING, *_WEIGHTS, "convert", "sweep"),
        "paper/vit_h14_jft plan.device=H100 plan.num_gpus=64",
        "vit_ray.commands.plan:describe_plan",
    ),
    Command(
        "export",
        "Write the weights in init_from (a run, a checkpoint or a published file) to export.path "
        "in export.layout: jax, timm, huggingface or vit_ray.",
        "vit_ray.commands.trained_model:export",
        ("export", "name", *_WEIGHTS, "model", "data.train", "data.eval_augment", "storage"),
        "cifar10 init_from=runs/cifar10-vit export.path=vit.npz",
        needs=("export.path", "init_from"),
        opens=("init_from",),
    ),
    Command(
        "inspect_model",
        "Draw the patch filters, position similarity, attention distance and attention rollout of "
        "the weights in init_from for the images in inspect.images.",
        "vit_ray.commands.trained_model:inspect",
        ("inspect", "name", *_WEIGHTS, "model", "data.eval_augment", "tracking", "storage"),
        "cifar10 init_from=runs/cifar10-vit inspect.images=IMAGES/test",
        needs=("inspect.images", "init_from"),
        opens=("inspect.images",),
    ),
    Command(
        "quickstart",
        "Convert, pre-train, sweep and report on handwritten digits.",
        "vit_ray.commands.experiments:run_quickstart",
        (*_TRAINING, *_WEIGHTS, *_COUNTS),
        "digits",
        "vit_ray.commands.dry_run:describe_training",
        needs=("data.train", "data.eval"),
        opens=("init_from", *_FEW_SHOT),
    ),
)  # fmt: skip
COMMANDS = {command.name: command for command in _ALL}
