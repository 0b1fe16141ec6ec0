"""The commands that read a recipe: what each does, its code, and the keys that it reads.

Wrong recipes are refused here too, before torch, Ray or MLflow is imported: values by
`check_values`, what is read by `check_inputs`, what is written by `check_outputs`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from vit_ray.addresses import (
    UPLOADED,
    check_address,
    local_folder,
    require_store,
    sqlite_file,
    with_home,
)
from vit_ray.config import Recipe
from vit_ray.config.recipe import keys_below
from vit_ray.measure.devices import require_device
from vit_ray.models.catalog import find_spec
from vit_ray.own_parts import is_own
from vit_ray.training.steps import micro_batch_size

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
        main: `module:function` that takes the recipe and returns an exit code or None; None = the
            command only prints its plan.
        reads: sections and keys of the recipe that the command uses.
        example: recipe and overrides of an example.
        plan: `module:function` that returns the text of `--dry-run`.
        needs: keys that the recipe must set.
        opens: keys of the data sets, weights and sources that must exist.
    """

    name: str
    what: str
    main: str | None
    reads: tuple[str, ...]
    example: str
    plan: str | None = None
    needs: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()


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
        "vit_ray.commands.trainings:pretrain",
        (*_TRAINING, *_WEIGHTS, *_COUNTS),
        "digits optim.learning_rate=3e-4 --dry-run",
        "vit_ray.commands.plan:describe_training",
        needs=("data.train",),
        opens=("init_from", *_SETS),
    ),
    Command(
        "finetune",
        "Fine-tune the weights in init_from: new zero head, resized positions.",
        "vit_ray.commands.trainings:finetune",
        (*_TRAINING, *_WEIGHTS, *_COUNTS),
        "finetune/pets init_from=hf://google/vit-base-patch16-224-in21k data.train=data/pets/train",
        "vit_ray.commands.plan:describe_training",
        needs=("init_from", "data.train"),
        opens=("init_from", *_SETS),
    ),
    Command(
        "evaluate",
        "Accuracy of the weights in init_from on data.eval, also per class, and few-shot accuracy; "
        "ReaL, ObjectNet and others with `benchmark`.",
        "vit_ray.commands.trainings:evaluate",
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
        "vit_ray.commands.trainings:sweep",
        ("sweep", *_TRAINING, *_WEIGHTS, *_COUNTS),
        "digits_sweep sweep.learning_rates=[0.003,0.01,0.03]",
        "vit_ray.commands.plan:describe_sweep",
        needs=("sweep.learning_rates", "data.train", "data.eval"),
        opens=("init_from", *_SETS),
    ),
    Command(
        "vtab",
        "Fine-tune on the tasks of VTAB-1k that have data: group means, next to the paper's Table "
        "9.",
        "vit_ray.commands.trainings:vtab",
        ("vtab", "sweep", *_TRAINING, *_WEIGHTS, *_COUNTS),
        "vtab_1k init_from=runs/vit vtab.data=data/vtab",
        "vit_ray.commands.plan:describe_vtab",
        needs=("vtab.tasks", "init_from"),
        opens=("init_from", "vtab.data"),
    ),
    Command(
        "scaling_study",
        "Pre-train and few-shot evaluate a grid of models, data sizes, lengths and seeds in "
        "parallel; finished cells are not repeated.",
        "vit_ray.commands.trainings:study",
        ("study", *_TRAINING, *_WEIGHTS, *_COUNTS),
        "study_digits --dry-run",
        "vit_ray.commands.plan:describe_study",
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
        None,
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
        "vit_ray.commands.trainings:run_quickstart",
        (*_TRAINING, *_WEIGHTS, *_COUNTS),
        "digits",
        "vit_ray.commands.plan:describe_training",
        needs=("data.train", "data.eval"),
        opens=("init_from", *_FEW_SHOT),
    ),
)  # fmt: skip
COMMANDS = {command.name: command for command in _ALL}


# Commands that continue a run of the same name.
_RESUMED = frozenset({"pretrain", "finetune", "sweep", "vtab", "scaling_study", "quickstart"})
_PATTERN_CHARACTERS = frozenset("*?[{")
# Keys of the paths that commands write to, besides `tracking.uri`.
_WRITTEN = (
    "output", "convert.destination", "subset.destination", "deduplicate.destination",
    "export.path", "inspect.path",
)  # fmt: skip


def _are_weights(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.suffix in (".npz", ".safetensors"))


# How the path of a key is checked, and what it must be; all other keys are of converted data sets,
# which are opened by the command itself.
_KINDS: dict[str, tuple[Callable[[Path], bool], str]] = {
    "init_from": (_are_weights, "a run folder, a step-* folder, or a .npz or .safetensors file"),
    "convert.source": (Path.exists, "a folder or file with images"),
    "benchmark.label_file": (Path.exists, "the published file or folder of labels"),
    "benchmark.model_classes": (Path.exists, "a converted set, or a .txt or .json with classes"),
    "inspect.images": (Path.is_dir, "a folder of images"),
    "vtab.data": (Path.is_dir, "a folder with TASK/train and TASK/test"),
    "subset.keys": (Path.is_file, "a text file with a key per line"),
}
_CONVERTED = (Path.exists, "a converted data set (`vit-ray convert` makes one)")


def check_values(command: Command, recipe: Recipe) -> None:
    """
    Raises:
        ValueError: a key that the command needs is not set; the model or the plan's device is not
            known; an evaluation would measure nothing; or the batch does not divide among the
            workers.
    """
    for name in command.needs:
        if _value(recipe, name) is None:
            (key,) = [key for key in keys_below(name) if key.name == name]
            raise ValueError(
                f"{name} is not set; give {key.meaning[:1].lower()}{key.meaning[1:]} "
                f"For example: `vit-ray {command.name} {command.example}`"
            )
    if "model" in command.reads and not is_own(recipe.model.name):
        find_spec(recipe.model.name, recipe.model.options())
    match command.name:
        case "evaluate":
            recipe.check_measures()
        case "plan":
            require_device(recipe.plan.device, "plan.device")
        case "report":
            require_store(recipe.tracking.uri)
        case "pretrain" | "finetune" | "quickstart":
            for world_size in recipe.group_sizes:
                micro_batch_size(recipe, world_size)


def check_inputs(command: Command, recipe: Recipe) -> None:
    """Check the files that a command reads on this machine; S3 and the hub are checked later.

    Raises:
        ValueError: a file or folder does not exist, or is of another kind.
    """
    for key in command.opens:
        paths = _value(recipe, key) or ()
        for path in (paths,) if isinstance(paths, str) else paths:
            if "://" not in path:
                _check_local(command, recipe, key, path)
            elif key != "init_from":
                check_address(path)
    if command.name == "convert":  # imports pyarrow, but not Ray
        importlib.import_module("vit_ray.data.convert.checks").check_conversion(recipe)


def _check_local(command: Command, recipe: Recipe, key: str, text: str) -> None:
    path = with_home(text)
    is_there, kind = _KINDS.get(key, _CONVERTED)
    if key == "convert.source" and (path / "manifest.parquet").is_file():
        raise ValueError(
            f"{key}={text!r} is a converted data set already; use it as data.train or data.eval, "
            "or give the images that it was made from"
        )
    if is_there(path) or (key == "convert.source" and _PATTERN_CHARACTERS & set(text)):
        return
    if key == "init_from" and command.name in _RESUMED:
        locate = importlib.import_module("vit_ray.storage").locate  # with pyarrow
        if locate(recipe.run_folder).exists():
            return  # a continued run does not read the weights
    is_file = key == "init_from" and path.is_file()
    remedy = "convert it to .npz or .safetensors" if is_file else "check the path"
    if UPLOADED in path.absolute().parts:
        remedy += (
            "; this job runs in a copy of the submitted folder, without ignored files: give a full "
            "path that all nodes share, or s3://"
        )
    raise ValueError(
        f"{key}={text!r}: {path.absolute()} does not exist, or is not {kind}; {remedy}"
    )


def check_outputs(command: Command, recipe: Recipe) -> None:
    """
    Raises:
        ValueError: `tracking.uri` is a folder, or results would be in a submitted job's copy of its
            folder: each node has a copy, and Ray deletes it.
    """
    uri = recipe.tracking.uri
    store = sqlite_file(uri)
    if "tracking" in command.reads and store is not None and store.is_dir():
        raise ValueError(
            f"tracking.uri={uri} is a folder; give a file, such as sqlite:///{store}/mlflow.db"
        )
    if UPLOADED not in Path.cwd().parts or command.name == "plan":
        return
    folders = {key: local_folder(text) for key in _WRITTEN if (text := _value(recipe, key))}
    for key, path in {**folders, "tracking.uri": store}.items():
        is_written = path is not None and key.split(".")[0] in command.reads
        if is_written and UPLOADED in with_home(str(path)).absolute().parts:
            raise ValueError(
                f"{key}={_value(recipe, key)} would be in this job's copy of the submitted folder, "
                "which Ray deletes; give a full path that all nodes share, s3://BUCKET/FOLDER, or "
                "as tracking.uri a server"
            )


def _value(recipe: Recipe, key: str) -> Any:
    # None also if the section of the key is not set.
    section, _, name = key.rpartition(".")
    config = attrgetter(section)(recipe) if section else recipe
    return None if config is None else getattr(config, name)
