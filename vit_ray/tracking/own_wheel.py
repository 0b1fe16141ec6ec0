"""This package as a wheel next to a logged model: no package index has it."""

import base64
import csv
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from vit_ray.config.secrets import redact
from vit_ray.config.shipped_recipes import recipes_folder

_PACKAGE: Final = Path(__file__).parents[1]
_WHEEL: Final = "Wheel-Version: 1.0\nGenerator: vit_ray\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_SUFFIXES: Final = (".py", ".yaml", ".html", ".js", ".css", ".txt", ".typed")
"""Suffixes of the package's own files: other files next to them are not sent."""
_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Date of all files, so that equal code gives an equal wheel."""


def write_wheel(folder: Path) -> Path | None:
    """Write the running code as a wheel, with the dependencies that it was installed with.

    Returns:
        The file; None if the code is on the path without having been installed.
    """
    try:
        installed = distribution("vit-ray")
    except PackageNotFoundError:
        return None
    name = f"vit_ray-{installed.version}"
    files = {
        f"vit_ray/{prefix}{path.relative_to(root).as_posix()}": path.read_bytes()
        for prefix, root in (("", _PACKAGE), ("recipes/", recipes_folder()))
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.suffix in _SUFFIXES
    }
    for path, content in files.items():
        if path.endswith(".yaml"):  # which may be a user's own
            files[path] = redact(content.decode()).encode()
    info = f"{name}.dist-info"
    files[f"{info}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    files[f"{info}/entry_points.txt"] = (installed.read_text("entry_points.txt") or "").encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.writerow((path, f"sha256={digest}", len(content)))
    rows.writerow((f"{info}/RECORD", "", ""))
    files[f"{info}/RECORD"] = record.getvalue().encode()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in files.items():
            wheel.writestr(zipfile.ZipInfo(path, _DATE), content, zipfile.ZIP_DEFLATED)
    return file
