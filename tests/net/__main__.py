"""A net under refactoring: what users have, recorded at another revision and here, and compared.

    python -m tests.net against REV [PART ...]      records REV and this tree; prints what differs
    python -m tests.net record FOLDER [PART ...]    one JSON file for each part, of this tree
    python -m tests.net compare A B [PART ...]      prints what differs between two recordings
    python -m tests.net keep [PART ...]             renews kept/ from the base revision
    python -m tests.net mutations [NAME ...]        each mutation must fail its test
    python -m tests.net speed REV [MEASURE ...]     how fast it is there and here

A difference that is intended has an entry in `intended.toml`, and is not printed. The exit code is
1 if anything else differs. Parts are the modules of `tests/net/parts`; by default all of them are
taken. `against before-light` compares with the base revision (file `BASE`).

Two recordings of one commit on one machine are equal. Those of the parts in `kept/` are also equal
on other processors; `test_net.py` compares with them.
"""

import importlib
import json
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.net import mutations, speed
from tests.net.compare import differences, read_intended, unintended
from tests.net.trees import BASE, HERE, PLACE, checkout

NET = Path(__file__).parent
KEPT = NET / "kept"
PARTS = sorted(file.stem for file in (NET / "parts").glob("[a-z]*.py"))
KEPT_PARTS = sorted(file.stem for file in KEPT.glob("*.json"))


def record(folder: Path, parts: list[str]) -> None:
    """Write `PART.json` for each part, one leaf a line, so that `diff` reads it too."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        start_s = time.monotonic()
        module = importlib.import_module(f"tests.net.parts.{part}")
        with tempfile.TemporaryDirectory(prefix=f"net-{part}-") as scratch:
            found = json.dumps(module.record(Path(scratch)), indent=1, sort_keys=True)
        (folder / f"{part}.json").write_text(found + "\n")
        print(f"{part}: recorded in {time.monotonic() - start_s:.0f} s", flush=True)


def compare(first: Path, second: Path, parts: list[str]) -> int:
    """Print the differences that are not intended; 1 if there are any."""
    found, notes = list[str](), list[str]()
    for part in parts:
        files = [folder / f"{part}.json" for folder in (first, second)]
        if absent := [str(file) for file in files if not file.is_file()]:
            found.append(f"{part}: not recorded: {', '.join(absent)}")
            continue
        before, after = (json.loads(file.read_text()) for file in files)
        lines, patterns = [*differences(before, after, part)], read_intended().get(part, {})
        found += unintended(part, lines, patterns)
        notes += [p for p in patterns if not any(re.search(p, line) for line in lines)]
    print("\n".join(found) or f"equal: {', '.join(parts)}")
    for pattern in notes:
        print(f"note: no difference matches intended {pattern}")
    return 1 if found else 0


def against(revision: str, parts: list[str]) -> int:
    """Record there and here, part by part, and compare."""
    tree = checkout(revision)
    folders = [PLACE / "recorded" / name for name in (tree.folder.name, "here")]
    for part in parts:
        for place, folder in zip((tree, HERE), folders, strict=True):
            (folder / f"{part}.json").unlink(missing_ok=True)
            place.run("record", str(folder), part)
    return compare(*folders, parts)


def main(*words: str) -> int:
    match words:
        case ["record", folder, *parts] if set(parts) <= set(PARTS):
            record(Path(folder), parts or PARTS)
        case ["compare", first, second, *parts] if set(parts) <= set(PARTS):
            return compare(Path(first), Path(second), parts or PARTS)
        case ["against", revision, *parts] if set(parts) <= set(PARTS):
            return against(revision, parts or PARTS)
        case ["keep", *parts] if set(parts) <= set(PARTS):
            return checkout(BASE).run("record", str(KEPT), *(parts or KEPT_PARTS))
        case ["mutations", *names]:
            return mutations.run(names)
        case ["speed", *names]:
            return speed.run(names)
        case _:
            print(__doc__, f"\nPARTS: {', '.join(PARTS)}")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
