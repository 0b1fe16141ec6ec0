"""Mutations: changes of one place in `vit_ray/`, each of which a test file must notice.

`mutations.toml` gives the text, not the file, so that the list stays true where code moves.
"""

import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.net.trees import ROOT, Tree

LIST = Path(__file__).with_name("mutations.toml")
LIMIT_S = 600
"""For one test file on a busy machine; a quiet one takes less than a minute."""
_NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", "build", "runs", "quickstart")


@dataclass(frozen=True)
class Mutation:
    """`old` stands once in `vit_ray/`; with `new` in its place, `test` must fail."""

    name: str
    old: str
    new: str
    test: str

    def places(self, root: Path = ROOT) -> list[Path]:
        """The file that has the old text, once for each time that it stands there."""
        files = sorted((root / "vit_ray").rglob("*.py"))
        return [file for file in files for _ in range(file.read_text().count(self.old))]


def read_list() -> list[Mutation]:
    return [Mutation(name, **keys) for name, keys in tomllib.loads(LIST.read_text()).items()]


def run(names: list[str]) -> int:
    """Try the mutations of these names, or all, on a copy of the tree; 1 if any survives."""
    known = {mutation.name: mutation for mutation in read_list()}
    if unknown := set(names) - set(known):
        sys.exit(f"no mutation is named {', '.join(unknown)}; names are in {LIST}")
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        for name in names or known:
            start_s = time.monotonic()
            verdict = _try(known[name], copy)
            survived += [name] if verdict != "noticed" else []
            print(f"{name}: {verdict} ({time.monotonic() - start_s:.0f} s)", flush=True)
    print(f"{len(survived)} of {len(names or known)} not noticed: {', '.join(survived) or 'none'}")
    return 1 if survived else 0


def _try(mutation: Mutation, copy: Path) -> str:
    (file,) = mutation.places(copy)
    before = file.read_text()
    file.write_text(before.replace(mutation.old, mutation.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutation.test]
    try:
        code = subprocess.run(
            command, cwd=copy, env=Tree(copy).environment(), capture_output=True, timeout=LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return f"no end in {LIMIT_S} s"
    finally:
        file.write_text(before)
    # Any other code means that the tests did not run.
    return {0: "survived", 1: "noticed"}.get(code, f"pytest could not run (exit code {code})")
