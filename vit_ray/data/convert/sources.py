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
    loose_images,
    loose_rows,
    matching,
    named_split,
    split_of,
)
from vit_ray.data.convert.labels import checked_names
from vit_ray.data.convert.rows import LISTS, DamagedUnitError, Row, Unit, relative
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
# Formats of files, and their suffixes.
_SUFFIXES: Final = {
    "csv": "csv",
    "jsonl": "jsonl",
    "huggingface": "parquet",
    "webdataset": "tar",
    "tfrecord": "tfrecord",
}
_FORMATS: Final = {suffix: format for format, suffix in _SUFFIXES.items()}
# Formats to which a key of `convert` applies.
_FORMATS_WITH: Final[dict[str, tuple[str, ...]]] = {
    "in_place": ("huggingface",),
    "columns": tuple(_SUFFIXES),
    "label_field": tuple(_SUFFIXES),
    "image_field": tuple(_SUFFIXES),
    "image_pattern": LISTS,
}
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
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise ValueError(
                    f"{unit.path!r} is compressed with {name}; decompress it first, since images "
                    "are read at their offsets in it"
                ) from error
        raise


def declared_classes(unit: Unit) -> list[str] | None:
    """Class names declared in a file or next to it; None if there are none."""
    if unit.format == "huggingface":
        with tables.opened(unit) as (_, columns):
            return columns.class_names
    if unit.format != "tfrecord":
        return None
    if task := archives.VTAB_LABELS.get(unit.config.label_field or ""):
        return list(map(str, range(task[0])))
    names = archives.names_beside(unit)
    return checked_names(names.read().decode().splitlines(), names.uri) if names.exists() else None


def units_of(config: ConvertConfig) -> list[Unit]:
    """The units that the source of a conversion has now, in a fixed order.

    Raises:
        ValueError: the source is missing or has no files of the format, a split must be chosen, or
            a key does not apply to the format.
    """
    source, matches = config.source, matching(config.source)
    folders = [locate(path) for path, is_folder in matches.items() if is_folder]
    files = [path for path, is_folder in matches.items() if not is_folder]
    if folders and files:
        raise ValueError(f"convert.source={source!r} matches files and folders; match one of them")
    is_root = len(folders) == 1 and (folders == [locate(source)] or not loose_images(folders[0]))
    root = folders[0] if is_root else _folder_of(list(matches))
    if is_root:
        files = _files_in(root, config)
        folders = [] if files else [root.child(name) for name in folders_in(root)]
    if files:
        is_list = not is_root and not GLOB.search(source)
        units = _units_of_files(config, files, root, is_list=is_list)
    else:
        units = _units_of_classes(config, folders, [root] if is_root else [], root)
    for key, formats in _FORMATS_WITH.items():
        if (value := getattr(config, key)) and units[0].format not in formats:
            raise ValueError(
                f"convert.{key}={value!r} is not for the format of {source!r}, which is "
                f"{units[0].format!r}, but for {', '.join(formats)}; leave it out"
            )
    return units


def _files_in(folder: Location, config: ConvertConfig) -> list[str]:
    """The files of a folder that have its format; none if it is a folder of class folders.

    Raises:
        ValueError: the folder has no files of the chosen format, or a list next to class folders.
    """
    kinds: set[str] = {config.format}
    if config.format == "auto":
        kinds = _kinds_in(folder) & _SUFFIXES.keys() or {_format_below(folder)}
        with_images = (n for n in folders_in(folder) if loose_images(folder.child(n)))
        classes = list(islice(with_images, 2)) if kinds.intersection(LISTS) else []
        if len(classes) > 1:
            raise ValueError(
                f"convert.source={config.source!r} has a list ({', '.join(kinds)}) next to folders "
                f"of images ({', '.join(classes)}); set convert.format to that of the list, or "
                "convert.format=folder"
            )
    if not kinds & _SUFFIXES.keys():
        return []
    infos = folder.list_files(recursive=not kinds.intersection(LISTS))
    names = [relative(info.path, folder.path) for info in infos]
    files = [folder.child(n).uri for n in names if _kind_of(n) in kinds and not is_hidden(n)]
    if not files:
        raise ValueError(
            f"convert.source={config.source!r} has no files of the format {config.format!r}; "
            f"expected {folder.uri}/*.{_SUFFIXES[config.format]}"
        )
    return files


def _units_of_files(
    config: ConvertConfig, files: list[str], root: Location, *, is_list: bool
) -> list[Unit]:
    """Units for files of one format, in the chosen split.

    Args:
        root: a folder that contains the files.
        is_list: the user names the files one by one, so that some may be missing.

    Raises:
        ValueError: the files are of several formats or splits or data sets, or some are missing.
    """
    kinds = {config.format} if config.format != "auto" else set(map(_kind_of, files))
    if len(kinds) > 1 or not kinds <= _SUFFIXES.keys():
        raise ValueError(
            f"convert.source={config.source!r} has files of the formats "
            f"{', '.join(sorted(kinds))}; choose one of {', '.join(_SUFFIXES)} with "
            "convert.format, or by a glob such as *.tar; unpack other archives first, and give "
            "images as a folder of class folders"
        )
    # By the path below `root`: the folders above it tell nothing about single files.
    splits = {path: split_of(relative(path, root.uri)) for path in sorted(files)}
    (format,) = kinds
    chosen = choose_split(splits, config.split, config.source)
    units = [Unit(format, path, root.uri, config) for path in chosen]
    # A hub repository may have several data sets, each in its own folder.
    parts_of = (unit.name.split("/")[:-1] for unit in units)
    sets = {"/".join(p for p in parts if p != "data" and not named_split(p)) for parts in parts_of}
    if len(sets) > 1 and root == locate(config.source):
        raise ValueError(
            f"convert.source={config.source!r} has several folders of data: "
            f"{', '.join(sorted(name or '.' for name in sets))}; give one of them as "
            "convert.source, or a glob of the files"
        )
    if not is_list:
        check_complete(chosen, config.source)
    return units


def _format_below(folder: Location, depth: int = _MAX_DEPTH) -> str:
    """The format of the first folder below with images, tar, TFRecord or parquet files, if any."""
    for child in map(folder.child, folders_in(folder) if depth else ()):
        kinds = _kinds_in(child)
        formats = ["folder"] if "image" in kinds else sorted(kinds & _SUFFIXES.keys() - {*LISTS})
        if format := next(iter(formats), "") or _format_below(child, depth - 1):
            return format
    return ""


def _kinds_in(folder: Location) -> set[str]:
    return {_kind_of(info.base_name) for info in folder.list_files(recursive=False)}


def _kind_of(path: str) -> str:
    """The format of a file by its name; `image` for an image, and `unknown` for other files."""
    name = _SHARD_NUMBER.sub("", path.rpartition("/")[2])
    format = "unknown" if is_hidden(name) else _FORMATS.get(name.rpartition(".")[2].lower())
    return format or ("image" if is_image_name(name) else "unknown")


def folders_in(folder: Location) -> list[str]:
    """Names of the folders in a folder, without hidden ones."""
    return [name for name in folder.list_folders() if not is_hidden(name)]


def _folder_of(paths: list[str]) -> Location:
    """The deepest folder that contains all paths."""
    locations = list(map(locate, paths))
    folder = commonpath([location.path.rpartition("/")[0] or "/" for location in locations])
    return Location(locations[0].protocol, folder)


def _units_of_classes(
    config: ConvertConfig, folders: list[Location], roots: list[Location], common: Location
) -> list[Unit]:
    """Class folders, those in folders that are splits, and the images next to them.

    Folders with names of splits are splits if no other folder has images, as a class may be named
    `train`, too, and if they contain folders, or are of several splits. Names such as `train2017`
    are, if no other folder has folders either. `folder_rows` refuses class folders whose images are
    deeper.

    Args:
        roots: folders of the class folders, which may have images next to them.
        common: keys are relative to it, or to the only split.

    Raises:
        ValueError: a split must be chosen, or there are none, or no class folders.
    """
    names = {folder: folder.path.rpartition("/")[2] for folder in folders}
    exact = {f: split for f, name in names.items() if (split := named_split(name))}
    splits = exact or {f: split for f, name in names.items() if (split := split_of(name))}
    are_several = config.format == "auto" and len({*splits.values()}) > 1
    others = (folder for folder in folders if folder not in splits)
    are_classes = (loose_images(f) or (not exact and folders_in(f)) for f in others)
    if (are_several or any(map(folders_in, splits))) and not any(are_classes):
        roots = choose_split(splits, config.split, config.source)
        common = roots[0] if len(roots) == 1 else common
        folders = [root.child(name) for root in roots for name in folders_in(root)]
    elif config.split is not None:
        raise ValueError(
            f"convert.split={config.split!r}: {config.source!r} has no folders such as train and "
            "val with class folders in them; leave convert.split out"
        )
    if not folders:
        raise ValueError(
            f"convert.source={config.source!r} has no files of the format 'folder'; expected "
            f"{common.uri}/CLASS/IMAGE; unpack archives first, or set convert.format=folder if "
            f"{common.path.rpartition('/')[2]!r} is a class"
        )
    units = [Unit("folder", folder.uri, common.uri, config) for folder in folders]
    loose = [root.uri for root in roots if loose_images(root)]
    return units + [Unit("loose", path, common.uri, config) for path in loose]
