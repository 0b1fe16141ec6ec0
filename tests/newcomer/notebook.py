"""Runs the cells of a notebook of ours without Jupyter.

`python -m tests.newcomer.notebook FILE` keeps their outputs in the file. The notebook's paths are
relative to the current folder.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_notebook(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The notebook with the outputs of its cells, and its names.

    A cell shows what it prints on stdout, and the value of its last expression.
    """
    notebook = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(c for c in notebook["cells"] if c["cell_type"] == "code"):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            exec(compile(tree, f"cell {number}", "exec"), names)  # noqa: S102
            if isinstance(last, ast.Expr):
                expression = ast.Expression(last.value)
                value = eval(compile(expression, f"cell {number}", "eval"), names)  # noqa: S307
        cell["execution_count"] = number + 1
        cell["outputs"] = []
        if text := printed.getvalue():
            cell["outputs"].append(
                {"name": "stdout", "output_type": "stream", "text": _lines(text)}
            )
        if value is not None:
            shown = {"text/plain": _lines(repr(value))}
            if hasattr(value, "_repr_html_"):
                shown["text/html"] = _lines(value._repr_html_())
            cell["outputs"].append(
                {
                    "data": shown,
                    "execution_count": number + 1,
                    "metadata": {},
                    "output_type": "execute_result",
                }
            )
    return notebook, names


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    found, _ = run_notebook(file)
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
