"""What `--help` prints of a command: what it does, and the keys that it reads, by section."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from vit_ray.commands.job_list import Command
from vit_ray.config import Recipe
from vit_ray.config.help import KeyHelp, SectionHelp, describe_sections


def print_usage(command: Command, program: str) -> None:
    """Usage and an example, in a few lines."""
    _print_usage(command, program, Console(highlight=False))


def print_help(
    command: Command, program: str, prefixes: list[str], recipe: Recipe | None = None
) -> None:
    """The keys that a command reads, or those below the prefixes, with values of the recipe's."""
    console = Console(highlight=False)
    if not prefixes:
        _print_usage(command, program, console)
    whose = f"values of {recipe.name}" if recipe else "defaults"
    for section in sections_below(list(prefixes or command.reads), recipe):
        title = section.name or "recipe"
        console.print(f"\n[bold]{title}[/bold]: {escape(section.meaning)} [dim]({whose})[/dim]")
        console.print(Padding(_table(section.keys), (0, 0, 0, 2)))


def sections_below(prefixes: list[str], recipe: Recipe | None = None) -> list[SectionHelp]:
    """Sections with those of their keys that are one of the prefixes or below one; none empty."""
    found = []
    for section in describe_sections(recipe):
        keys = tuple(k for k in section.keys if any(_is_below(k.name, p) for p in prefixes))
        if keys:
            found.append(SectionHelp(section.name, section.meaning, keys))
    return found


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _print_usage(command: Command, program: str, console: Console) -> None:
    others = ", ".join(s.name for s in describe_sections() if s.name and "." not in s.name)
    plan = "plan (--recipe adds the recipe)" if command.plan else "resolved recipe"
    options = Table.grid(padding=(0, 2, 0, 0))
    options.add_column(no_wrap=True)
    for option, meaning in (
        ("RECIPE", "a YAML file, or the name of one that `vit-ray recipes` lists"),
        ("key=value", "changes, in any place, such as optim.learning_rate=3e-4"),
        ("--dry-run", f"print the {plan}; start nothing"),
        ("--recipe", "print the resolved recipe; start nothing"),
        ("--module NAME", "a Python module that parts of a checkpoint may be imported from"),
        ("--help", "the keys that this command reads; with a recipe, its own values"),
        ("--help KEY", f"a section or a key, of any command: {others}"),
    ):
        options.add_row(option, meaning)
    console.print(escape(f"usage:   {program} RECIPE [key=value ...] [--dry-run]"), soft_wrap=True)
    console.print(escape(f"example: {program} {command.example}"), soft_wrap=True)
    console.print(f"\n{escape(command.what)}\n")
    console.print(Padding(options, (0, 0, 0, 2)))


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
