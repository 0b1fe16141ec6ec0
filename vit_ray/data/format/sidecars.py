"""The small files of a data set (what was rejected, the report), and their checksums.

These stand in a file of their own, as `sha256sum` writes and checks it (`sha256sum -c SHA256SUMS`).
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Final

from vit_ray.data.format.schema import CHECKSUMS_FILE
from vit_ray.storage import Location

_LINE: Final = re.compile(r"([0-9a-f]{64})  ([\w.]+)\n")


def write_checksums(folder: Location, contents: Mapping[str, bytes]) -> None:
    """Write the checksums of some files of a data set, by their names."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    folder.child(CHECKSUMS_FILE).write(lines.encode())


def problems_of_sidecars(folder: Location) -> dict[str, str]:
    """What is wrong, by file; nothing for a data set that was written without checksums."""
    checksums = folder.child(CHECKSUMS_FILE)
    if not checksums.exists():
        return {}
    lines = checksums.read().decode("ascii", "replace").splitlines(keepends=True)
    found = [_LINE.fullmatch(line) for line in lines]
    problems = {CHECKSUMS_FILE: "it is damaged"} if None in found or not found else {}
    for match in filter(None, found):
        file = folder.child(match[2])
        if not file.exists():
            problems[match[2]] = "the file is missing"
        elif hashlib.sha256(file.read()).hexdigest() != match[1]:
            problems[match[2]] = "the file differs from its checksum"
    return problems
