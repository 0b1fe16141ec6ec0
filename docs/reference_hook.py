"""Makes pages of the site: commands, schema, recipe headers, names of the API.

What a name of the API does is taken from its docstring by mkdocstrings, which reads the code
without importing it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from click import Context
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from vit_ray import MODULES
from vit_ray.commands.cli import vit_ray
from vit_ray.commands.job_list import COMMANDS
from vit_ray.config.loading import header_of, recipe_names, recipes_folder
from vit_ray.config.recipe import KEYS, sections

_ON_RESUME = (
    "*On resume* says whether a run may be resumed with another value of the key: at any time, "
    "only with `resume=changed`, or never; it is empty for keys that no training reads."
)


def on_files(files: Files, config: Any) -> Files:
    """mkdocs' hook: adds the generated pages."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}.md", content=make()))
    return files


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """mkdocs' hook: a page that shows its Markdown is an error.

    Raises:
        PluginError: a backslash before a bar, or a backtick, is left in the text.
    """
    text = re.sub(r"<pre.*?</pre>|<[^>]+>", "", html, flags=re.DOTALL)
    if found := re.search(r".{0,40}(?:\\\||`).{0,40}", text):
        raise PluginError(f"{page.file.src_uri} shows Markdown: {found[0]}")
    return html


def commands_page() -> str:
    """What each command does, an example, and the sections that it reads."""
    parts = [
        "# Commands\n\nInstalled as `vit-ray NAME`; those of `jobs/` also for `ray job submit`.\n"
    ]
    for name, command in vit_ray.commands.items():
        parts.append(f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        if job := COMMANDS.get(name):
            reads = ", ".join(f"[`{key}`](recipe.md)" for key in job.reads)
            parts.append(f"```\nvit-ray {name} {job.example}\n```\n\nReads {reads}.\n")
        else:
            usage = " ".join(command.collect_usage_pieces(Context(command)))
            parts.append(f"```\nvit-ray {name} {usage}\n```\n")
    return "\n".join(parts)


def recipe_page() -> str:
    """Every key with its default, allowed values, meaning, and whether it may change on resume."""
    return "\n".join(["# Recipe keys\n", f"{_ON_RESUME}\n", *map(_section, sections())])


def recipes_page() -> str:
    """The shipped recipes with expected result and cost, from their headers."""
    lines = ["# Recipes\n", "| name | what | expected | cost |", "|---|---|---|---|"]
    for name in recipe_names():
        header = header_of(recipes_folder() / f"{name}.yaml")
        facts = (header.get(key, "") for key in ("", "Expected", "Cost"))
        cells = (f"`{name}`", *facts)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """Every name of `vit_ray` with its signature and docstring."""
    parts = ["# Python names\n\nAll can be imported from `vit_ray`.\n"]
    for name, module in sorted(MODULES.items(), key=lambda item: item[0].lower()):
        # The keys of a recipe are a page of their own.
        options = "\n    options: {members: [run_folder, with_changes]}" if name == "Recipe" else ""
        parts.append(f"::: {module}.{name}{options}\n")
    return "\n".join(parts)


def _section(name: str) -> str:
    lines = [f"## {name or 'The recipe itself'}\n", f"{sections()[name]}\n"]
    lines += ["| key | default | allowed | meaning | on resume |", "|---|---|---|---|---|"]
    for key in KEYS:
        if key.section == name:
            names = (f"`{key.name}`", f"`{key.default}`", f"`{key.allowed}`")
            on_resume = key.on_resume.value if key.on_resume else ""
            cells = (*names, key.meaning, on_resume)
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """A bar outside code ends a cell; inside code Markdown shows a backslash before it."""
    return "".join(
        part if part.startswith("`") else part.replace("|", "\\|")
        for part in re.split(r"(`[^`]*`)", text)
    )


PAGES = {
    "commands": commands_page,
    "recipe": recipe_page,
    "recipes": recipes_page,
    "api": api_page,
}
