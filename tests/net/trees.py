"""Another revision beside this tree: its files, an environment, and this net in it."""

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "net"
BASE = "before-light"


@dataclass(frozen=True)
class Tree:
    """A folder with `vit_ray/` and this net, and the Python that runs it."""

    folder: Path
    python: str = sys.executable

    def environment(self) -> dict[str, str]:
        """For processes that use this tree, themselves and in theirs, and no Ray that runs."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return {**kept, "PYTHONPATH": str(self.folder)}

    def run(self, *words: str) -> int:
        """Run a command of the net in this tree; returns its exit code."""
        command = [self.python, "-m", "tests.net", *words]
        return subprocess.run(command, cwd=self.folder, env=self.environment()).returncode


HERE = Tree(ROOT)


def checkout(revision: str) -> Tree:
    """A worktree of the revision in `build/net`, with this net in place of its own.

    It has an environment of its own, from its `constraints.txt`, which is kept while that file is
    the same. If versions and dependencies are those of this tree, the Python of this process runs
    it, with `PYTHONPATH` at the worktree.
    """
    commit = _commit(revision)
    folder = PLACE / commit[:12]
    if not folder.exists():
        _git("worktree", "prune")
        _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    net = folder / "tests" / "net"
    shutil.rmtree(net, ignore_errors=True)
    shutil.copytree(Path(__file__).parent, net, ignore=shutil.ignore_patterns("__pycache__"))
    same = _versions(folder) == _versions(ROOT)
    return Tree(folder, sys.executable if same else _python_of(folder))


def _commit(revision: str) -> str:
    """The full hash; that of the base revision also where a clone has no tags."""
    name = Path(__file__).with_name("BASE").read_text().strip() if revision == BASE else revision
    return _git("rev-parse", "--verify", f"{name}^{{commit}}")


def _versions(folder: Path) -> tuple[str, list[str]]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return (folder / "constraints.txt").read_text(), sorted(project["dependencies"])


def _python_of(folder: Path) -> str:
    environment, stamp = folder / ".venv", folder / ".venv" / "constraints.txt"
    constraints = (folder / "constraints.txt").read_text()
    if not stamp.is_file() or stamp.read_text() != constraints:
        print(f"installing versions of {folder}, which takes minutes", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(environment)], check=True)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "-qq"]
        wanted = ["--constraint", "constraints.txt", "--editable", ".[dev]"]
        subprocess.run([*pip, *wanted], cwd=folder, check=True)
        stamp.write_text(constraints)
    return str(environment / "bin" / "python")


def _git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()
