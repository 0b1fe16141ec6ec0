"""What is refused of a conversion before Ray is imported: a wrong source, a destination in use."""

import os
import re
from typing import Final

from vit_ray.config import Recipe, require
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.files import is_pattern
from vit_ray.data.convert.rows import relative
from vit_ray.data.convert.sources import list_units
from vit_ray.data.dataset import (
    DAMAGED_FILE,
    MANIFEST_FILE,
    REJECTED_FILE,
    REPORT_FILE,
    SOURCE_FILE,
    STAGING_FOLDER,
)
from vit_ray.data.file_names import is_hidden
from vit_ray.lock import is_lock_file
from vit_ray.storage import HALF_WRITTEN, Location, locate

PLAN: Final = "plan.json"
_OURS: Final = (MANIFEST_FILE, REJECTED_FILE, DAMAGED_FILE, REPORT_FILE, SOURCE_FILE)
# Names that a conversion gives to files.
OUTPUT: Final = r"part-\d+-of-\d+\.parquet|" + "|".join(map(re.escape, _OURS))
# Names of the files in the staging folder.
_STAGED: Final = re.compile(
    r"(plan|index-[0-9a-f]{16}|list-\d{5,}|shard-\d{6,})\.(json|parquet|bin)" + f"({HALF_WRITTEN})?"
)


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
    source = config.source
    if is_pattern(source) or locate(source).info().kind != "directory":
        list_units(source, config.format, config.split)
    check_apart(config)
    check_free(locate(config.destination))


def check_apart(config: ConvertConfig) -> None:
    """Refuse a destination in the source, where the conversion would index its own files."""
    source, folder = (real_address(locate(path)) for path in (config.source, config.destination))
    if not config.in_place and f"{folder}/".startswith(f"{source.rstrip('/')}/"):
        raise ValueError(
            f"convert.destination={config.destination!r} is in convert.source={config.source!r}; "
            "choose a folder outside the source"
        )


def real_address(place: Location) -> str:
    """Its address without symbolic links."""
    return os.path.realpath(place.path) if place.is_local else place.uri


def check_free(folder: Location) -> None:
    """Refuse a folder that is neither empty nor of a conversion."""
    folder.refuse_file_in_its_place("convert.destination")
    names = {info.base_name for info in folder.list_files(recursive=False)}
    staging = folder.child(STAGING_FOLDER)
    if foreign := foreign_files(staging):
        raise ValueError(
            f"{staging.uri!r} holds {foreign[0]!r}, which no conversion has put there; choose "
            f"another convert.destination, or move it away"
        )
    if staging.child(PLAN).exists() or {MANIFEST_FILE, SOURCE_FILE} <= names:
        return
    if MANIFEST_FILE in names:
        raise ValueError(
            f"convert.destination={folder.uri!r} already holds a data set, without {SOURCE_FILE}, "
            "which says what it was made of; choose another folder or delete it first"
        )
    names |= {*folder.list_folders()} - {STAGING_FOLDER}
    if taken := sorted(name for name in names if not is_hidden(name)):
        raise ValueError(
            f"convert.destination={folder.uri!r} is not empty and holds no data set: it has "
            f"{taken[0]!r}; choose a new folder, or move it away"
        )


def staged_files(staging: Location) -> list[str]:
    """All files in a staging folder but locks."""
    names = [relative(info.path, staging.path) for info in staging.list_files()]
    return [name for name in names if not is_lock_file(name)]


def foreign_files(staging: Location) -> list[str]:
    """Files in a staging folder that no conversion writes."""
    return [name for name in staged_files(staging) if not _STAGED.fullmatch(name)]
