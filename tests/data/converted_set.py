"""A set of 12 small pictures in three classes, converted once a process without Ray."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from PIL import Image

from tests.data.converting import convert, in_this_process
from tests.data.pictures import picture


@functools.cache
def converted_set() -> Path:
    """Its folder, which ends with the process; one shard of the split `part`."""
    folder = Path(tempfile.mkdtemp(prefix="converted-set-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for number in range(12):
        file = folder / "images" / f"class_{number % 3}" / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, 10, 12)).save(file)
    with in_this_process():
        convert(folder / "images", folder / "set", rows_per_row_group=4, seed=3)
    return folder / "set"
