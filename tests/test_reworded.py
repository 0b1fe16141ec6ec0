"""Messages are for people: with every one of ours in other words, runs and trials end as before."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT_AT = {
    "Failure": 0, "_failed": 0, "_tell": 1, "event.remote": 1, "note": 1, "record.event": 1,
    "note_hang": 0, "tell": 0, "TaskResult": 4, "Trained": 2,
    **dict.fromkeys(("debug", "info", "warning", "error", "exception"), 0),
}  # fmt: skip
"""Of what we call with a text, and of logs: which argument it is."""
REWORD = '''
def reworded(text):
    """Every letter is the next one, but for the places that a log fills."""
    if not isinstance(text, str):
        return text
    parts = re.split(r"(%(?:[-.0-9]*[a-z]|%))", text)
    parts[::2] = (re.sub(r"[a-yA-Y]", lambda at: chr(ord(at[0]) + 1), one) for one in parts[::2])
    return "".join(parts)
'''
OUTCOMES = (
    "tests/launch/test_outcomes.py",
    "tests/experiments/test_study_run.py::test_a_stop_ends_a_trial_between_its_trainings",
    "tests/test_storage.py::test_a_network_disk_that_is_away_is_waited_for_longer_each_time",
    "tests/training/test_micro_batch.py::test_memory_that_ran_out_is_known_by_every_librarys_word",
    "tests/training/test_micro_batch.py::test_the_estimate_is_tried_and_halved_until_it_fits",
)
"""Tests whose assertions are on outcomes alone."""


class Reworder(ast.NodeTransformer):
    """Rewords what is raised, noted and logged, whatever it is made of, as the process runs."""

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.exc, ast.Call):
            node.exc.args = [_reworded(argument) for argument in node.exc.args]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        at = next((at for end, at in TEXT_AT.items() if f".{name}".endswith(f".{end}")), None)
        if at is not None and at < len(node.args):
            node.args[at] = _reworded(node.args[at])
        return node


def _reworded(argument: ast.expr) -> ast.expr:
    if isinstance(argument, ast.Starred):
        return argument
    return ast.Call(ast.Name("reworded", ast.Load()), [argument], [])


def write_reworded(folder: Path) -> None:
    """A copy of the package and its tests, with every message of the package in other words."""
    for name in ("tests", "jobs", "vit_ray"):
        ignored = shutil.ignore_patterns("__pycache__", "newcomer", "browser")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path in (folder / "vit_ray").rglob("*.py"):
        tree = Reworder().visit(ast.parse(path.read_text()))
        first = "from vit_ray.reworded import reworded"
        at = next((i for i, n in enumerate(tree.body) if not _comes_first(n)), 0)
        tree.body.insert(at, ast.parse(first).body[0])
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (folder / "vit_ray" / "reworded.py").write_text(f"import re\n{REWORD}")


def _comes_first(node: ast.stmt) -> bool:
    """A docstring, or what is imported from the future."""
    return isinstance(node, ast.Expr) or getattr(node, "module", "") == "__future__"


@pytest.mark.slow
def test_reworded_messages_change_no_outcome(tmp_path):
    write_reworded(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OUTCOMES],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout
