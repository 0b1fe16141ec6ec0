"""What `--help` prints for a command: what it does, and the keys that it reads, by section."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from vit_ray.commands.job_list import Command
from vit_ray.config import Recipe
from vit_ray.config.help import KeyHelp, SectionHelp, describe_sections

FIRST_DAY: Final = (
    "name", "output", "init_from", "model.name", "model.image_size", "data.train", "data.eval",
    "data.held_out_fraction", "optim.name", "optim.learning_rate", "optim.epochs", "optim.steps",
    "train.global_batch_size", "train.precision", "train.zero_stage", "checkpoint.every_steps",
    "workers.num_workers", "tracking.uri", "plan.device", "plan.num_gpus",
    "convert.source", "convert.split", "convert.destination", "convert.format",
    "convert.shrink_to", "convert.max_rejected_fraction",
    "sweep.learning_rates", "sweep.space", "sweep.dev_fraction", "sweep.seeds",
    "study.models", "study.data_fractions", "study.epochs", "study.seeds",
    "vtab.data", "vtab.sweep_each",
)  # fmt: skip
"""Keys in the short help, together with those that a command requires."""
ALL: Final = "all"
"""Asks for all keys."""


def print_usage(command: Command, program: str) -> None:
    """Usage and an example, in a few lines."""
    others = ", ".join(s.name for s in describe_sections() if s.name and "." not in s.name)
    plan = "plan" if command.plan else "keys that are set"
    options = Table.grid(padding=(0, 2, 0, 0))
    options.add_column(no_wrap=True)
    for option, meaning in (
        ("RECIPE", "a YAML file, or the name of a recipe that `vit-ray recipes` lists"),
        ("key=value", "changes, in any position, such as optim.learning_rate=3e-4"),
        ("--dry-run", f"print the {plan}; start nothing (--recipe adds the recipe)"),
        ("--recipe", "print the resolved recipe; start nothing"),
        (
            "--module NAME",
            "a Python module of your own that a checkpoint's parts may be imported from",
        ),
        ("--help", "the most used keys; with a recipe, its values"),
        (f"--help {ALL}", "every key that this command reads"),
        ("--help KEY", f"a section or a key of any command: {others}"),
    ):
        options.add_row(option, meaning)
    console = Console(highlight=False)
    console.print(escape(f"usage:   {program} RECIPE [key=value ...] [--dry-run]"), soft_wrap=True)
    console.print(escape(f"example: {program} {command.example}"), soft_wrap=True)
    console.print(f"\n{escape(command.what)}\n")
    console.print(Padding(options, (0, 0, 0, 2)))


def print_help(
    command: Command, program: str, prefixes: list[str], recipe: Recipe | None = None
) -> None:
    """The first keys that a command reads, all of them, or those below the prefixes.

    Args:
        prefixes: keys or sections; `all` for every key that the command reads.
        recipe: whose values are shown.
    """
    console = Console(highlight=False)
    if not prefixes:
        print_usage(command, program)
    whose = f"values of {recipe.name}" if recipe else "defaults"
    asked = [p for p in prefixes if p != ALL] or command.reads
    sections = sections_below(asked, describe_sections(recipe))
    num_keys = sum(len(section.keys) for section in sections)
    if not prefixes:
        needed = [n for n in command.needs if not any(_is_below(k, n) for k in FIRST_DAY)]
        sections = sections_below([*FIRST_DAY, *needed], sections)
    for section in sections:
        title = section.name or "recipe"
        console.print(f"\n[bold]{title}[/bold]: {escape(section.meaning)} [dim]({whose})[/dim]")
        console.print(Padding(_table(section.keys), (0, 0, 0, 2)))
    if others := num_keys - sum(len(section.keys) for section in sections):
        console.print(f"\n{others} more keys: --help {ALL}, or --help SECTION", highlight=False)


def keys_set(command: Command, recipe: Recipe) -> str:
    """What a command does, and the keys that it reads and that a recipe sets, with their values."""
    defaults = {k.name: k.value for section in describe_sections() for k in section.keys}
    sections = sections_below(command.reads, describe_sections(recipe))
    keys = [k for section in sections for k in section.keys]
    lines = [f"{k.name:<28} {k.value}" for k in keys if k.value != defaults[k.name]]
    return "\n".join([command.what, "", *lines])


def sections_below(prefixes: Sequence[str], sections: list[SectionHelp]) -> list[SectionHelp]:
    """Non-empty sections with only the keys that are, or are below, one of the prefixes."""
    found = []
    for section in sections:
        keys = tuple(k for k in section.keys if any(_is_below(k.name, p) for p in prefixes))
        if keys:
            found.append(replace(section, keys=keys))
    return found


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _table(keys: tuple[KeyHelp, ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=24, overflow="fold")
    table.add_column()
    for key in keys:
        notes = [] if key.allowed.startswith("text") else [f"({key.allowed})"]
        if key.on_resume:
            notes.append(f"[on resume: {key.on_resume}]")
        notes_text = escape("".join(f" {note}" for note in notes))
        table.add_row(key.name, escape(key.value), f"{escape(key.meaning)}[dim]{notes_text}[/dim]")
    return table
