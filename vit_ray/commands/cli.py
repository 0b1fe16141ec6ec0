"""The command line: `vit-ray NAME RECIPE [key=value ...]`, also as `python jobs/NAME.py`."""

import atexit
import difflib
import gc
import logging
import os
import pkgutil
import re
import select
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
import yaml
from click.shell_completion import CompletionItem

from vit_ray.commands.early_checks import (
    check_packages,
    check_places,
    note_start,
    note_unread,
)
from vit_ray.commands.job_list import COMMANDS, Command
from vit_ray.config import load_recipe
from vit_ray.config.help import key_names, known_key, require_keys
from vit_ray.config.secrets import RedactingFormatter, redact
from vit_ray.config.shipped_recipes import recipe_names
from vit_ray.own_parts import trust_modules

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def main() -> NoReturn:
    """`vit-ray` and `python -m vit_ray`."""
    _prepare()
    sys.exit(vit_ray.main(prog_name="vit-ray"))


def run_job(name: str) -> NoReturn:
    """The command behind `jobs/NAME.py`."""
    _prepare()
    sys.exit(vit_ray.commands[name].main(prog_name=f"python jobs/{name}.py"))


def run_recipe(
    command: Command,
    words: tuple[str, ...],
    is_dry: bool,
    shows_recipe: bool = False,
) -> int:
    """Load the recipe that the arguments name and run the command; returns its exit code.

    A dry run prints the plan, or, for a command without one, the keys that it reads and that are
    set.
    """

    def run() -> int | None:
        path, overrides = split_words(words)
        recipe = load_recipe(path, overrides)
        note_unread(command, overrides)
        runs = not (is_dry or shows_recipe)
        if runs:
            example = command.example.removesuffix(" --dry-run")
            require_keys(recipe, command.needs, f"vit-ray {command.name} {example}")
            check_packages(command, recipe)
            check_places(command, recipe)
            note_start(command, recipe)
        if runs:
            return command.run(recipe, overrides)
        if is_dry and command.plan:
            print(command.describe(recipe))
        elif is_dry:
            print(pkgutil.resolve_name("vit_ray.commands.help_pages:keys_set")(command, recipe))
        if shows_recipe:
            print(yaml.safe_dump(recipe.recorded(), sort_keys=False))
        return 0

    return _ended(run)


def _ended(run: Callable[[], int | None]) -> int:
    """The exit code of a command.

    Errors of the user and of the storage end in one line, or with VIT_RAY_LOGS=1 in a traceback.
    """
    try:
        code = run() or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:  # not during a training, which ends itself with a checkpoint
        print(
            "stopped; run the same command again to continue from what is finished", file=sys.stderr
        )
        return 130
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if poll.poll(0):  # the other end of the pipe is closed, as of `| head`
                raise  # click ends quietly
        sys.stdout.flush()  # the error comes last
        wants_all = os.environ.get("VIT_RAY_LOGS") == "1"
        text = traceback.format_exc() if wants_all else f"error: {error}"
        print(redact(text), file=sys.stderr)
        if isinstance(error, ValueError | PermissionError):
            return 2
        atexit.unregister(shutil.rmtree)  # of a Ray's folder: a failure's message names its logs
        return 1


def split_words(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """The recipe and the overrides, given in any order.

    Raises:
        ValueError: there is no recipe among them.
    """
    others = [word for word in words if not _OVERRIDE.match(word)]
    if not others:
        raise ValueError(
            "no recipe is given; name a YAML file, or a recipe that `vit-ray recipes` lists"
        )
    recipe, *misspelt = others
    return recipe, [word for word in words if _OVERRIDE.match(word)] + misspelt


def _prepare() -> None:
    """Quiet logs, and a process that ends at once: Python would search all objects of all libraries
    for unreachable ones, several times, in 0.8 s (AMD EPYC, 2026-11-27).
    """
    atexit.register(gc.freeze)
    for category in (FutureWarning, DeprecationWarning):  # of libraries
        warnings.filterwarnings("ignore", category=category)
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))


class _Job(click.Command):
    """A command on a recipe; explains what to type instead of `--optim.steps=5`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.possibilities or not error.option_name.startswith("--"):
                raise
            key = known_key(error.option_name.lstrip("-").replace("-", "_"))
            raise click.UsageError(
                f"no such option: {error.option_name}; write keys of the recipe without dashes: "
                f"{key}=VALUE",
                ctx,
            ) from None


def _command(command: Command) -> click.Command:
    """The command with its options; without arguments it prints the short help."""

    def run(
        words: tuple[str, ...],
        is_dry: bool,
        shows_recipe: bool,
        modules: tuple[str, ...],
        help_of: str | None,
    ) -> None:
        trust_modules(*modules)
        program = click.get_current_context().command_path
        if help_of is not None:
            sys.exit(_help(command, program, (help_of, *words)))
        if not words:
            pkgutil.resolve_name("vit_ray.commands.help_pages:print_usage")(command, program)
            sys.exit(2)
        sys.exit(run_recipe(command, words, is_dry, shows_recipe))

    return _Job(
        command.name,
        callback=run,
        short_help=command.what,
        add_help_option=False,
        params=[
            click.Argument(["words"], nargs=-1, type=click.UNPROCESSED, shell_complete=_complete),
            click.Option(["--dry-run", "is_dry"], is_flag=True),
            click.Option(["--recipe", "shows_recipe"], is_flag=True),
            click.Option(["--module", "modules"], multiple=True),
            click.Option(["--help", "-h", "help_of"], is_flag=False, flag_value=""),
        ],
    )


def _help(command: Command, program: str, words: tuple[str, ...]) -> int:
    """Help on the first keys, on those of a prefix, or on all; with a recipe, its own values."""
    parts = [name.split(".") for name in key_names()]
    known = {".".join(name[:depth]) for name in parts for depth in range(1, len(name) + 1)} | {
        "all"
    }
    prefixes = [word for word in words if word in known]
    others = tuple(word for word in words if word and word not in prefixes)
    try:
        recipe = load_recipe(*split_words(others)) if others else None
    except ValueError as error:
        near = [] if words[0] in known else difflib.get_close_matches(words[0], sorted(known), 3)
        meant = f"; keys similar to {words[0]!r}: {', '.join(near)}" if near else ""
        print(redact(f"error: {error}{meant}"), file=sys.stderr)
        return 2
    show = pkgutil.resolve_name("vit_ray.commands.help_pages:print_help")
    show(command, program, prefixes, recipe)
    return 0


def _complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    words = context.params.get("words") or ()
    has_recipe = any(not _OVERRIDE.match(word) for word in words)
    found = key_names() if has_recipe else recipe_names()
    items = [CompletionItem(name) for name in found if name.startswith(incomplete)]
    return items if has_recipe else [*items, CompletionItem(incomplete, type="file")]


class _Names(click.Group):
    """Commands by name; dashes and underscores are interchangeable."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name.replace("-", "_"))


def _plain(what: str, reference: str, *params: click.Parameter) -> click.Command:
    """A command without a recipe; `module:function` is imported when it runs.

    Errors and `--module` are handled as for a command on a recipe.
    """

    def run(modules: tuple[str, ...] = (), **given: Any) -> None:
        trust_modules(*modules)
        sys.exit(_ended(lambda: pkgutil.resolve_name(reference)(**given)))

    name = reference.partition(":")[0].rpartition(".")[2]
    return click.Command(name, callback=run, help=what, params=list(params))


_MODULES = click.Option(
    ["--module", "modules"], multiple=True, help="Module of your own parts to import."
)

vit_ray = _Names(
    "vit-ray",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train Vision Transformers at scale, on Ray.\n\n"
    "Every command is `vit-ray NAME RECIPE [key=value ...]`, such as "
    "`vit-ray pretrain digits optim.learning_rate=3e-4 --dry-run`. RECIPE is a YAML file, or the "
    "name of one that `vit-ray recipes` lists.",
    commands=[
        *map(_command, COMMANDS.values()),
        _plain(
            "Start MLflow's pages of STORE on this machine, and print the link to the newest runs. "
            "STORE is an address such as sqlite:///mlflow.db, or a recipe for its tracking.uri.",
            "vit_ray.commands.ui:open_pages",
            click.Argument(["store"], required=False),
            click.Option(["--port"], type=int, default=5000, show_default=True),
        ),
        _plain(
            "Send to MLflow what a run recorded in LOG (its metrics.jsonl) while MLflow was away. "
            "URI is the tracking server, or sqlite:///mlflow.db. Points that MLflow already has "
            "are not sent again.",
            "vit_ray.commands.replay:run_replay",
            click.Argument(["log"], type=click.Path(path_type=Path)),
            click.Argument(["uri"]),
        ),
        _plain(
            "Class and probability of the images at PATHS (images, folders, parquet files, "
            "converted data sets) by the weights in SOURCE: a run, a checkpoint, or a weight file, "
            "as in `init_from` of recipes.",
            "vit_ray.commands.trained.predict:print_predictions",
            click.Argument(["source"]),
            click.Argument(["paths"], nargs=-1, required=True),
            click.Option(
                ["--out", "outputs"],
                multiple=True,
                help="File to write: .parquet or .csv of all images, .png of the first 48. Can be "
                "given several times.",
            ),
            click.Option(
                ["--recipe"],
                help="Recipe for weight files that do not record their model; or give keys such as "
                "model.name=ViT-B/16 after SOURCE.",
            ),
            _MODULES,
        ),
        _plain(
            "The images of a step as the model sees them, as a picture and a table: `vit-ray batch "
            "SOURCE step=100` (counted from 0). SOURCE is a recipe, the folder of a run's "
            "checkpoints, or its id in MLflow. Further `key=value` arguments change the recipe.",
            "vit_ray.commands.trained.batch:show_batch",
            click.Argument(["source"]),
            click.Argument(["words"], nargs=-1, required=True),
            click.Option(["--out"], help="Folder to write; by default NAME-step-K."),
            _MODULES,
        ),
        _plain(
            "A new run from a checkpoint of another, with changes of its recipe: "
            "`vit-ray fork SOURCE step=1000 name=NEW optim.learning_rate=3e-4`. SOURCE is the "
            "folder of the parent's checkpoints or its id in MLflow; the checkpoint is copied. "
            "Writes NEW.yaml, which `vit-ray pretrain` trains from there.",
            "vit_ray.commands.trained.fork:fork_run",
            click.Argument(["source"]),
            click.Argument(["words"], nargs=-1, required=True),
            click.Option(
                ["--dry-run", "is_dry"],
                is_flag=True,
                help="Print what would be done, and write nothing.",
            ),
            _MODULES,
        ),
        _plain(
            "Look at IMAGES (a folder, bucket or archive with classes, as `convert.source`) and "
            "write a recipe with a suitable model, batch and epochs, with the reasons as comments.",
            "vit_ray.commands.init:write_recipe",
            click.Argument(["images"]),
            click.Option(
                ["--out"],
                help="File to write; by default FOLDER.yaml. An existing file is not overwritten.",
            ),
        ),
        _plain(
            "List the shipped recipes with their results and cost.",
            "vit_ray.commands.recipes:print_recipes",
        ),
    ],
)
click.version_option(package_name="vit-ray", prog_name="vit_ray")(vit_ray)
