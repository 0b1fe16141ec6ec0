"""The format of a source, and its units: the class folders, archives or lists that tasks read."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from os.path import commonpath
from typing import Final

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert import archives, tables
from vit_ray.data.convert.files import (
    GLOB,
    check_complete,
    choose_split,
    folder_rows,
    is_pattern,
    loose_images,
    loose_rows,
    matching,
    named,
    named_split,
    split_of,
)
from vit_ray.data.convert.rows import FOLDERS, LISTS, DamagedUnitError, Row, Unit, relative
from vit_ray.data.images import is_hidden, is_image_name
from vit_ray.storage import Location, locate

_ROWS: Final[dict[str, Callable[..., Iterable[Row]]]] = {
    "folder": folder_rows,
    "loose": loose_rows,
    "webdataset": archives.tar_rows,
    "huggingface": tables.parquet_rows,
    "csv": tables.csv_rows,
    "jsonl": tables.jsonl_rows,
    "tfrecord": archives.tfrecord_rows,
}
# Formats of files, by suffix.
_FORMATS: Final = {
    "csv": "csv",
    "jsonl": "jsonl",
    "parquet": "huggingface",
    "tar": "webdataset",
    "tfrecord": "tfrecord",
}
_SUFFIXES: Final = {format: suffix for suffix, format in _FORMATS.items()}
# Kinds of compressed files, by their first bytes.
_COMPRESSED: Final = {
    b"\x1f\x8b\x08": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}
# The shard number that files of TensorFlow Datasets have after the suffix.
_SHARD_NUMBER: Final = re.compile(r"-\d{5}-of-\d{5}$")
# Depth of the search for files: a hub repository may have CONFIGURATION/SPLIT/FILE, and images may
# be in ILSVRC/Data/CLS-LOC/train/CLASS.
_MAX_DEPTH: Final = 5


def rows_of(unit: Unit, *, with_images: bool = True) -> Iterator[Row]:
    """The images of one unit.

    Args:
        with_images: False leaves out the images of parquet files, so that they are not read.

    Raises:
        DamagedUnitError: the unit is damaged, so that the number of its images is unknown.
        ValueError: the unit does not have its format, or is compressed as a whole.
    """
    options = {"with_images": with_images} if unit.format == "huggingface" else {}
    try:
        yield from _ROWS[unit.format](unit, **options)
    except DamagedUnitError as error:
        head = b"" if error.offset else locate(unit.path).read_range(0, 6)
        if names := [name for magic, name in _COMPRESSED.items() if head.startswith(magic)]:
            raise ValueError(
                f"{unit.path!r} is compressed with {names[0]}; decompress it first, since images "
                "are read at their offsets in it"
            ) from error
        raise


def declared_classes(unit: Unit) -> list[str] | None:
    """Class names declared in a file or next to it; None if there are none."""
    if unit.format == "huggingface":
        return tables.declared_classes(unit)
    return archives.declared_classes(unit) if unit.format == "tfrecord" else None


def units_of(config: ConvertConfig) -> list[Unit]:
    """The units that the source of a conversion has now, in a fixed order.

    Raises:
        ValueError: the source is missing or has no files of the format, a split must be chosen, or
            a key does not apply to the format.
    """
    units = _units(config)
    format = units[0].format
    if config.in_place and format != "huggingface":
        raise ValueError(
            f"convert.in_place=true: {config.source!r} is of the format {format!r}; only parquet "
            "files in the layout of the Hugging Face hub can be read in place"
        )
    for key in ("columns", "label_field", "image_field", "image_pattern"):
        is_wrong = format in FOLDERS or (key == "image_pattern" and format not in LISTS)
        if (value := getattr(config, key)) and is_wrong:
            raise ValueError(
                f"convert.{key}={value!r} is not for the format of {config.source!r}, which is "
                f"{format!r}; leave it out, or give a list (CSV, JSONL) of the images"
            )
    return units


def _units(config: ConvertConfig) -> list[Unit]:
    source, is_named = config.source, not is_pattern(config.source)
    matches = named(source) if is_named else matching(source)
    if not matches:
        raise ValueError(f"convert.source={source!r}: no such folder or file; check the path")
    if not any(matches.values()):
        return _units_of_files(config, list(matches))
    if not all(matches.values()):
        raise ValueError(
            f"convert.source={source!r} matches files and folders; match one or the other"
        )
    folders = list(map(locate, matches))
    if is_named or (len(folders) == 1 and not loose_images(folders[0])):
        return _units_of_folder(config, folders[0])
    common = locate(_folder_of(list(matches)))
    return _units_of_splits(config, folders, common) or [
        Unit("folder", path, common.uri, config) for path in matches
    ]


def _units_of_folder(config: ConvertConfig, location: Location) -> list[Unit]:
    format = _format_of(location, config) if config.format == "auto" else config.format
    if format == "folder":
        folders = [location.child(name) for name in folders_in(location)]
        units = _units_of_splits(config, folders, location)
        return units or _classes_in(config, location, location)
    infos, suffix = location.list_files(recursive=format not in LISTS), _SUFFIXES[format]
    names = [relative(info.path, location.path) for info in infos]
    names = [name for name in names if _suffix(name) == suffix and not is_hidden(name)]
    if not names:
        raise ValueError(
            f"convert.source={config.source!r} has no files of the format {format!r}; expected "
            f"{location.uri}/*.{suffix}"
        )
    units = _units_of_files(config, [location.child(name).uri for name in names], location.uri)
    # A hub repository may have several data sets, each in its own folder.
    parts_of = (unit.name.split("/")[:-1] for unit in units)
    sets = {"/".join(p for p in parts if p != "data" and not named_split(p)) for parts in parts_of}
    if len(sets) > 1:
        raise ValueError(
            f"convert.source={config.source!r} has several folders of data: "
            f"{', '.join(sorted(name or '.' for name in sets))}; give one of them as "
            "convert.source, or a glob of the files"
        )
    return units


def _units_of_files(config: ConvertConfig, files: list[str], folder: str = "") -> list[Unit]:
    """Units for files of one format, in the chosen split."""
    source, folder = config.source, folder or _folder_of(files)
    formats: list[str] = [config.format]
    if config.format == "auto":
        if unknown := [path for path in files if _suffix(path) not in _FORMATS]:
            raise ValueError(
                f"convert.source={unknown[0]!r} is a file of no known format; unpack it first, or "
                f"give a folder of class folders, or files that end in {', '.join(_FORMATS)}"
            )
        formats = sorted({_FORMATS[_suffix(path)] for path in files})
    if len(formats) > 1 or formats == ["folder"]:
        raise ValueError(
            f"convert.source={source!r} matches files of the formats {', '.join(formats)}; match "
            f"one of {', '.join(_FORMATS.values())}, or class folders"
        )
    splits: dict[str | None, list[Unit]] = {}
    for path in files:
        # By the path below `folder`: the folders above it tell nothing about single files.
        unit = Unit(formats[0], path, folder, config)
        splits.setdefault(split_of(unit.name), []).append(unit)
    units = sorted(choose_split(splits, config.split, source), key=lambda unit: unit.path)
    if GLOB.search(source) or not (is_pattern(source) or files == [locate(source).uri]):
        check_complete([unit.path for unit in units], source)
    return units


def _format_of(folder: Location, config: ConvertConfig) -> str:
    """The format of a folder by its files, else by those in folders below it.

    Raises:
        ValueError: the folder has files of several formats, or a list next to class folders.
    """
    formats, _ = _formats_in(folder)
    if len(formats) > 1:
        raise ValueError(
            f"convert.source={config.source!r} has files of the formats {', '.join(formats)}; "
            f"choose one with convert.format, or give a glob such as {config.source}/*.tar"
        )
    if formats and formats[0] in LISTS:
        with_images = (n for n in folders_in(folder) if loose_images(folder.child(n)))
        if len(classes := list(islice(with_images, 2))) > 1:
            raise ValueError(
                f"convert.source={config.source!r} has a list ({formats[0]}) next to folders of "
                f"images ({', '.join(classes)}); set convert.format={formats[0]} or "
                "convert.format=folder"
            )
    return formats[0] if formats else _format_below(folder) or "folder"


def _format_below(folder: Location, depth: int = _MAX_DEPTH) -> str | None:
    """The format of the first folder below with images, tar, TFRecord or parquet files."""
    for child in (folder.child(name) for name in folders_in(folder)) if depth else ():
        formats, has_images = _formats_in(child)
        if has_images:
            return "folder"
        archives = [format for format in formats if format not in LISTS]
        if format := next(iter(archives), None) or _format_below(child, depth - 1):
            return format
    return None


def _formats_in(folder: Location) -> tuple[list[str], bool]:
    """The formats of the files directly in a folder, sorted, and whether some are images."""
    names = [info.base_name for info in folder.list_files(recursive=False)]
    formats = {_FORMATS[suffix] for suffix in map(_suffix, names) if suffix in _FORMATS}
    return sorted(formats), any(map(is_image_name, names))


def _suffix(path: str) -> str:
    """The suffix of a file's name in lower case; empty for hidden files."""
    name = _SHARD_NUMBER.sub("", path.rpartition("/")[2])
    return "" if is_hidden(name) else name.rpartition(".")[2].lower()


def folders_in(folder: Location) -> list[str]:
    """Names of the folders in a folder, without hidden ones."""
    return [name for name in folder.list_folders() if not is_hidden(name)]


def _folder_of(paths: list[str]) -> str:
    """The deepest folder that contains all paths."""
    locations = list(map(locate, paths))
    folder = commonpath([location.path.rpartition("/")[0] or "/" for location in locations])
    return Location(locations[0].protocol, folder).uri


def _units_of_splits(
    config: ConvertConfig, folders: list[Location], common: Location
) -> list[Unit]:
    """The class folders in folders that are splits; none if the folders are classes themselves.

    Folders with names of splits are splits if no other folder has images, as a class may be named
    `train`, too. `folder_rows` refuses class folders whose images are deeper.

    Raises:
        ValueError: a split must be chosen, or folders with names of splits contain no classes.
    """
    source, names = config.source, {f: f.path.rpartition("/")[2] for f in folders}
    candidates = [f for f in folders if split_of(names[f])]
    are_splits = not any(loose_images(f) for f in folders if candidates and f not in candidates)
    splits: dict[str | None, list[Location]] = {}
    for folder in candidates:
        if split := named_split(names[folder]):
            splits.setdefault(split, []).append(folder)
    if are_splits and any(folders_in(f) for roots in splits.values() for f in roots):
        roots = choose_split(splits, config.split, source)
        common = roots[0] if len(roots) == 1 else common
        return [unit for root in roots for unit in _classes_in(config, root, common)]
    if config.split is not None:
        raise ValueError(
            f"convert.split={config.split!r}: {source!r} has no folders such as train and val with "
            "class folders in them; leave convert.split out"
        )
    if are_splits and config.format == "auto" and len({split_of(names[f]) for f in candidates}) > 1:
        raise ValueError(
            f"convert.source={source!r} has the folders "
            f"{', '.join(names[f] for f in candidates[:5])}, which are splits by their names and "
            "not classes; give one of them as convert.source if it holds class folders, or set "
            "convert.format=folder if they are classes"
        )
    return []


def _classes_in(config: ConvertConfig, root: Location, common: Location) -> list[Unit]:
    """A unit for each class folder in a root, and a unit for the images next to them."""
    names = folders_in(root)
    if not names:
        raise ValueError(
            f"convert.source={config.source!r} has no files of the format 'folder'; expected "
            f"{root.uri}/CLASS/IMAGE; unpack archives first"
        )
    units = [Unit("folder", root.child(name).uri, common.uri, config) for name in names]
    if loose_images(root):
        units.append(Unit("loose", root.uri, common.uri, config))
    return units
