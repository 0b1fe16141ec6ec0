"""What is refused of a conversion before Ray is imported: a wrong source, a destination in use."""

import os
import re
from typing import Final

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.files import is_pattern
from vit_ray.data.convert.sources import units_of
from vit_ray.data.dataset import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    REJECTED_FILE,
    REPORT_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
)
from vit_ray.data.images import is_hidden
from vit_ray.lock import is_lock_file
from vit_ray.storage import Location, locate

PLAN: Final = "plan.json"
# How names begin in the staging folder, but for locks.
_STAGED: Final = (PLAN, "index-", "list-", "shard-")
_OURS: Final = (MANIFEST_FILE, REJECTED_FILE, DAMAGED_FILE, REPORT_FILE, SOURCE_FILE)
# Names that a conversion gives to files.
OUTPUT: Final = r"part-\d+-of-\d+\.parquet|" + "|".join(map(re.escape, _OURS))


def convert_of(recipe: Recipe) -> ConvertConfig:
    """The recipe's conversion; raises ValueError if it has none."""
    hint = (
        "convert.source and convert.destination, such as "
        "convert='{source: images/, destination: data/}'"
    )
    return require(recipe.convert, "convert", hint)


def check_conversion(recipe: Recipe) -> None:
    """Refuse what can be seen without opening images.

    Raises:
        ValueError: there is no conversion, nothing at the source, it is a file of no known format,
            or the destination is taken or in the source. What is in a folder is seen by the
            conversion.
    """
    config = convert_of(recipe)
    if is_pattern(config.source) or locate(config.source).info().kind != "directory":
        units_of(config)
    check_destination(config)


def check_destination(config: ConvertConfig) -> None:
    """Refuse a folder in the source, or one that is neither empty nor of a conversion."""
    folder = locate(config.destination)
    source = units_of(config)[0].folder if config.in_place else config.source
    if _real(folder).startswith(_real(locate(source))):
        raise ValueError(
            f"convert.destination={config.destination!r} is in convert.source={config.source!r} or "
            f"next to its files; choose a folder outside {source!r}"
        )
    folder.refuse_file_in_its_place("convert.destination")
    names = {info.base_name for info in folder.list_files(recursive=False)}
    staged = {info.base_name for info in folder.child(STAGING_FOLDER).list_files()}
    # Without its plan nobody knows of which conversion the shards of a folder are.
    if PLAN in staged or {MANIFEST_FILE, SOURCE_FILE} <= names:
        return
    is_ours = all(name.startswith(_STAGED) or is_lock_file(name) for name in staged)
    names |= {*folder.list_folders()} - ({STAGING_FOLDER} if is_ours else set())
    if taken := sorted(name for name in names if not is_hidden(name)):
        raise ValueError(
            f"convert.destination={folder.uri!r} is not empty and holds no data set with its "
            f"{SOURCE_FILE}: it has {taken[0]!r}; choose a new folder, or move it away"
        )


def _real(place: Location) -> str:
    """Its address without symbolic links, and with a slash at its end."""
    path = os.path.realpath(place.path) if place.is_local else place.uri
    return f"{path.rstrip('/')}/"
