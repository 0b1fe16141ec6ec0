"""The command line: `vit-ray NAME RECIPE [key=value ...]`, also as `python jobs/NAME.py`.

Bodies of commands import what they need: torch, Ray and MLflow take seconds, which help, completion
and errors about typing mistakes must not wait for.
"""

import atexit
import gc
import io
import itertools
import json
import logging
import os
import pkgutil
import select
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from vit_ray.addresses import redact
from vit_ray.commands.job_list import COMMANDS, Command, check_inputs, check_outputs, check_values
from vit_ray.config import load_recipe
from vit_ray.config.loading import completed, header_of, recipe_names, recipes_folder, write_yaml
from vit_ray.config.recipe import keys_below, known_key, sections
from vit_ray.outcomes import RunStoppedError
from vit_ray.own_parts import trust_modules


def main() -> NoReturn:
    """`vit-ray` and `python -m vit_ray`."""
    _prepare()
    sys.exit(vit_ray.main(prog_name="vit-ray"))


def run_job(name: str) -> NoReturn:
    """The command behind `jobs/NAME.py`."""
    _prepare()
    sys.exit(vit_ray.commands[name].main(prog_name=f"python jobs/{name}.py"))


def _prepare() -> None:
    """Quiet the logs, and make text work in any locale.

    `gc.freeze` makes the process end at once: else Python searches the objects of all libraries
    for unreachable ones, several times, for 0.8 s (AMD EPYC, 2026-11-27).
    """
    if sys.getfilesystemencoding() != "utf-8":  # names of files are UTF-8, also in a Latin-1 locale
        words = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):  # names of classes in a locale without their letters
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    for category in (FutureWarning, DeprecationWarning):  # of libraries
        warnings.filterwarnings("ignore", category=category)
    logging.basicConfig(level=logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))


class RedactingFormatter(logging.Formatter):
    """Log lines, tracebacks too, without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def run_recipe(command: Command, words: tuple[str, ...], is_dry: bool) -> int | None:
    """Load the recipe that the arguments name, check it, and run the command.

    A dry run prints the plan, or, for a command without one, the recipe.
    """
    path, overrides = split_words(words)
    recipe = load_recipe(path, overrides)
    refuse_unread(command, overrides)
    if not is_dry:
        check_values(command, recipe)
        check_outputs(command, recipe)
        check_inputs(command, recipe)
    if is_dry or command.main is None:
        plan = pkgutil.resolve_name(command.plan) if command.plan else None
        print(plan(recipe) if plan else write_yaml(recipe.written(*command.reads)))
        return 0
    if "workers" in command.reads:
        address = os.environ.get("RAY_ADDRESS")
        ray = f"joining the Ray at {address}" if address else "starting Ray here"
        # The next line takes seconds.
        print(f"{recipe.name}: {command.name}: opening data and {ray}", file=sys.stderr, flush=True)
    return pkgutil.resolve_name(command.main)(recipe)


def refuse_unread(command: Command, overrides: list[str]) -> None:
    """
    Raises:
        ValueError: an override is of a key that the command does not read.
    """
    unread = [
        key
        for key, _, _ in (word.partition("=") for word in overrides)
        if not any(
            f"{key}.".startswith(f"{read}.") or f"{read}.".startswith(f"{key}.")
            for read in command.reads
        )
    ]
    if unread:
        raise ValueError(
            f"{command.name} does not read {', '.join(unread)}; leave it out "
            f"(`vit-ray keys --of {command.name}` lists what it reads)"
        )


def split_words(words: tuple[str, ...]) -> tuple[str, list[str]]:
    """The recipe and the overrides, given in any order.

    Raises:
        ValueError: there is no recipe among them.
    """
    recipes = [word for word in words if "=" not in word or os.path.isfile(word)]
    if not recipes:
        raise ValueError(
            "no recipe is given; name a YAML file, or a recipe that `vit-ray recipes` lists"
        )
    return recipes[0], [word for word in words if word != recipes[0]]


def _ended(run: Callable[[], Any]) -> int:
    """The exit code of a command.

    Errors of the user and of the storage end in one line, or with VIT_RAY_LOGS=1 in a traceback.
    """
    try:
        code = run() or 0
        sys.stdout.flush()
        return int(code)
    except KeyboardInterrupt:  # not during a training, which ends itself with a checkpoint
        print(
            "stopped; run the same command again to continue from what is finished", file=sys.stderr
        )
        return 130
    except RunStoppedError as stopped:
        sys.stdout.flush()  # the reason comes last
        print(stopped, file=sys.stderr)
        return 3
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if poll.poll(0):  # the other end of the pipe is closed, as of `| head`
                raise  # click ends quietly
        sys.stdout.flush()  # the error comes last
        is_verbose = os.environ.get("VIT_RAY_LOGS") == "1"
        print(redact(traceback.format_exc() if is_verbose else f"error: {error}"), file=sys.stderr)
        if isinstance(error, ValueError | PermissionError):
            return 2
        atexit.unregister(shutil.rmtree)  # of a Ray's folder: a failure's message names its logs
        return 1


class _Command(click.Command):
    # The callback returns an exit code. `--optim.steps=5` is refused with the right spelling.

    def invoke(self, ctx: click.Context) -> NoReturn:
        trust_modules(*ctx.params.pop("modules", ()))
        sys.exit(_ended(lambda: super(_Command, self).invoke(ctx)))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = tuple(args)  # click takes them from the list
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            key = known_key(name.lstrip("-").replace("-", "_"))
            is_misspelt_option = error.possibilities and not keys_below(key)
            if is_misspelt_option or not name.startswith("--"):
                raise
            value = next((b for a, b in itertools.pairwise(words) if a == name), "VALUE")
            raise click.UsageError(
                f"no such option: {name}; write keys of the recipe without dashes: {key}={value}",
                ctx,
            ) from None


class _Commands(click.Group):
    # Listed in the order of a user's work; dashes in a name count as underscores.

    command_class = _Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name.replace("-", "_"))


_modules = click.option(
    "--module",
    "modules",
    multiple=True,
    help="Module of your own parts that a checkpoint names, to import.",
)
_out = click.option("--out", help="File or folder to write; named after the source by default.")


@click.group(
    "vit-ray", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
@click.version_option(package_name="vit-ray", prog_name="vit_ray")
def vit_ray() -> None:
    """Train Vision Transformers at scale, on Ray.

    Most commands are `vit-ray NAME RECIPE [key=value ...]`, such as `vit-ray pretrain digits
    optim.learning_rate=3e-4 --dry-run`. RECIPE is a YAML file, or the name of one that `vit-ray
    recipes` lists.
    """


def _add(command: Command) -> None:
    dry_run_help = f"Print the {'plan' if command.plan else 'recipe'}; start nothing."

    @click.argument("words", nargs=-1, required=True, metavar="RECIPE [KEY=VALUE ...]")
    @click.option("--dry-run", "is_dry", is_flag=True, help=dry_run_help)
    @_modules
    def run(words: tuple[str, ...], is_dry: bool, gpus: int | None = None) -> int | None:
        return run_recipe(command, (*words, f"plan.num_gpus={gpus}") if gpus else words, is_dry)

    if command.name == "plan":
        click.option("--gpus", type=click.IntRange(1), help="Short for plan.num_gpus.")(run)
    epilog = (
        f"\b\nExample: vit-ray {command.name} {command.example}\n"
        f"Keys (`vit-ray keys --of {command.name}`): {' '.join(command.reads)}"
    )
    vit_ray.command(command.name, help=command.what, epilog=epilog)(run)


for _recipe_command in COMMANDS.values():
    _add(_recipe_command)


@vit_ray.command()
def recipes() -> None:
    """List the shipped recipes with their results and cost."""
    for name in recipe_names():
        header = header_of(recipes_folder() / f"{name}.yaml")
        print(f"{name}  {header['']}")
        for what in ("Expected", "Cost"):
            if what in header:
                print(f"    {what.lower()}: {header[what]}")
    print(f"\nFiles are in {recipes_folder()}; `base: NAME` in your recipe starts from one.")


@vit_ray.command()
@click.argument("prefixes", nargs=-1, metavar="[PREFIX ...]")
@click.option("--of", type=click.Choice([*COMMANDS]), help="Only keys that this command reads.")
def keys(prefixes: tuple[str, ...], of: str | None) -> None:
    """The keys of recipes below PREFIX, such as `optim`: default, values, meaning, on resume."""
    for prefix in prefixes:
        if not keys_below(prefix):
            similar = known_key(prefix)
            hint = "" if similar == prefix else f"; did you mean {similar}?"
            raise ValueError(f"{prefix!r} is no key or section of a recipe{hint}")
    read = keys_below(*(COMMANDS[of].reads if of else ()))
    chosen = [key for key in keys_below(*prefixes) if key in read]
    if not chosen:
        raise ValueError(f"{of} reads no key of {', '.join(prefixes)}; leave out one of the two")
    printed_sections = set[str]()
    for key in chosen:
        if key.section not in printed_sections:
            print(f"\n{key.section or 'recipe'}: {sections()[key.section]}")
            printed_sections.add(key.section)
        resume = f" [on resume: {key.on_resume.value}]" if key.on_resume else ""
        print(f"  {key.name}={key.default}  ({key.allowed}){resume}\n      {key.meaning}")


@vit_ray.command()
@click.argument("store", required=False)
@click.option("--port", type=int, default=5000, show_default=True)
def ui(store: str | None, port: int) -> None:
    """Start MLflow's pages of STORE on this machine, and print the link to the newest runs.

    STORE is an address such as sqlite:///mlflow.db, or a recipe for its tracking.uri.
    """
    pkgutil.resolve_name("vit_ray.commands.tracking_store:open_pages")(store, port)


@vit_ray.command()
@click.argument("log", type=click.Path(path_type=Path))
@click.argument("uri")
def replay(log: Path, uri: str) -> int:
    """Send to MLflow what a run recorded in LOG (its metrics.jsonl) while MLflow was away.

    URI is the tracking server, or sqlite:///mlflow.db. Points that MLflow already has are not sent
    again.
    """
    return pkgutil.resolve_name("vit_ray.commands.tracking_store:run_replay")(log, uri)


@vit_ray.command()
@click.argument("source")
@click.argument("paths", nargs=-1, required=True, metavar="PATH ... [KEY=VALUE ...]")
@click.option(
    "--out",
    "outputs",
    multiple=True,
    help="File to write: .parquet of all images, .png of the first 48. Can be given twice.",
)
@click.option(
    "--recipe",
    help="Recipe for weight files that do not record their model; or give keys such as "
    "model.name=ViT-B/16 after SOURCE.",
)
@_modules
def predict(
    source: str, paths: tuple[str, ...], outputs: tuple[str, ...], recipe: str | None
) -> int:
    """Class and probability of the images at each PATH by the weights in SOURCE.

    PATH is an image, folder or converted data set; SOURCE is a run, a checkpoint, or a weight file,
    as in `init_from` of recipes.
    """
    return pkgutil.resolve_name("vit_ray.commands.predict:print_predictions")(
        source, paths, recipe, outputs
    )


@vit_ray.command()
@click.argument("source")
@click.argument("words", nargs=-1, required=True, metavar="step=K [KEY=VALUE ...]")
@_out
@_modules
def batch(source: str, words: tuple[str, ...], out: str | None) -> None:
    """The crops of a step, before mixing and masking, as a picture and a table.

    `vit-ray batch SOURCE step=100`: steps are counted from 0. SOURCE is a recipe, the folder of a
    run's checkpoints, or its id in MLflow. Further `key=value` arguments change the recipe.
    """
    pkgutil.resolve_name("vit_ray.commands.recorded_run:show_batch")(source, words, out)


@vit_ray.command()
@click.argument("source")
@click.argument("words", nargs=-1, required=True, metavar="step=K name=NEW [KEY=VALUE ...]")
@click.option(
    "--dry-run", "is_dry", is_flag=True, help="Print what would be done, and write nothing."
)
@_modules
def fork(source: str, words: tuple[str, ...], is_dry: bool) -> None:
    """A new run from a checkpoint of another, with changes of its recipe.

    `vit-ray fork SOURCE step=1000 name=NEW optim.learning_rate=3e-4`: SOURCE is the folder of the
    parent's checkpoints or its id in MLflow; the checkpoint is copied. Writes NEW.yaml, which
    `vit-ray pretrain` trains from there.
    """
    pkgutil.resolve_name("vit_ray.commands.recorded_run:fork_run")(source, words, is_dry)


@vit_ray.command()
@click.argument("images")
@_out
@click.option(
    "--weights", help="ViT-B/16 to fine-tune: a file, a folder, s3://, hf://OWNER/NAME; or none."
)
def init(images: str, out: str | None, weights: str | None) -> None:
    """Look at IMAGES and write a recipe with a suitable model, batch and epochs.

    IMAGES is a folder, bucket or archive with classes, as `convert.source`.
    """
    pkgutil.resolve_name("vit_ray.commands.init:write_recipe")(images, out, weights)


@vit_ray.command()
@click.argument("images")
def start(images: str) -> int:
    """Write a recipe for IMAGES as `init`, convert them, and train for a first look."""
    from vit_ray.commands.init import first_look, recipe_for

    file = recipe_for(images)
    recipe = load_recipe(file)
    run_recipe(COMMANDS["convert"], (str(file),), False)
    if test := recipe.data.eval:
        changes = (
            f"convert.split={Path(test).name}",
            f"convert.destination={json.dumps(test, ensure_ascii=False)}",
        )
        run_recipe(COMMANDS["convert"], (str(file), *changes), False)
    shorter = first_look(recipe.name, recipe.optim.epochs or 1)
    training = COMMANDS["finetune" if recipe.init_from else "pretrain"]
    return run_recipe(training, (str(file), *shorter), False) or 0


@vit_ray.command()
@click.argument("words", nargs=-1, metavar="[RECIPE] [KEY=VALUE ...]")
def doctor(words: tuple[str, ...]) -> int:
    """Check what training needs here: packages, GPUs, limits, Ray, MLflow, access to output.

    Starts nothing. With a recipe also its data sets.
    """
    from vit_ray.commands.doctor import run_doctor

    if any("=" not in word for word in words):
        return run_doctor(load_recipe(*split_words(words)))
    return run_doctor(completed({"name": "doctor"}, words, "doctor"))
