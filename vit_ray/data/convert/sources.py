"""The format of a source, and the units that it is read in."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from os.path import commonpath
from typing import Final, Literal

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert import folders, hub, lists, tars, tfrecords
from vit_ray.data.convert.files import (
    Match,
    check_complete,
    choose_split,
    is_glob,
    is_pattern,
    matching,
    named_split,
    split_of,
)
from vit_ray.data.convert.rows import DamagedUnitError, Row, Unit, relative
from vit_ray.data.file_names import is_hidden, is_image_name
from vit_ray.storage import Location, locate

Format = Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl", "tfrecord"]


@dataclass(frozen=True)
class _Rules:
    """The functions for the units of a format.

    Attributes:
        suffix: of its files.
        declared: reads the class names that a file declares.
        fields: reads which fields have images and labels; none if records differ in that.
    """

    rows: Callable[[Unit], Iterable[Row]]
    suffix: str = ""
    declared: Callable[[Unit], list[str] | None] = lambda _: None
    fields: Callable[[Unit], dict[str, str]] = lambda _: {}


_RULES: Final = {
    "folder": _Rules(folders.folder_rows),
    "loose": _Rules(folders.loose_rows),
    "webdataset": _Rules(tars.tar_rows, "tar"),
    "huggingface": _Rules(
        hub.parquet_rows,
        "parquet",
        hub.declared_classes,
        hub.fields_of_file,
    ),
    "csv": _Rules(lists.csv_rows, "csv", fields=lists.fields_of_csv),
    "jsonl": _Rules(lists.jsonl_rows, "jsonl"),
    "tfrecord": _Rules(tfrecords.tfrecord_rows, "tfrecord", tfrecords.declared_classes),
}
_FORMAT_OF: Final = {rules.suffix: format for format, rules in _RULES.items() if rules.suffix}
_IN_FOLDERS: Final = ("webdataset", "huggingface", "tfrecord")
_PACKED: Final = frozenset({"zip", "gz", "tgz", "bz2", "xz", "zst", "7z", "rar"})
# The first bytes of a file.
_COMPRESSED: Final = {
    "gzip": b"\x1f\x8b\x08",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\0",
    "zstd": b"\x28\xb5\x2f\xfd",
}
# Follows the suffix of a file of TensorFlow Datasets.
_SHARD_NUMBER: Final = re.compile(r"-\d{5}-of-\d{5}$")
# Depth of folders that are searched: a hub repository may have CONFIGURATION/SPLIT/FILE, and
# images may lie in ILSVRC/Data/CLS-LOC/train/CLASS.
_DEPTH: Final = 5


def rows_of(unit: Unit) -> Iterator[Row]:
    """The images of one unit.

    Raises:
        DamagedUnitError: the number of its images is unknown.
        ValueError: the unit is not of its format, or is compressed as a whole.
    """
    try:
        yield from _RULES[unit.format].rows(unit)
    except DamagedUnitError as error:
        head = b"" if error.offset else locate(unit.path).read_range(0, 6)
        for name, magic in _COMPRESSED.items():
            if head.startswith(magic):
                raise ValueError(
                    f"{unit.path!r} is compressed with {name}; decompress it first, since images "
                    "are read at their offsets in it"
                ) from error
        raise


def class_names_in_file(unit: Unit) -> list[str] | None:
    """Class names declared in a file, or next to it; None if there are none."""
    return _RULES[unit.format].declared(unit)


def fields_in_file(unit: Unit) -> dict[str, str]:
    """The fields of images and labels, if they are the same for all records of a file."""
    return _RULES[unit.format].fields(unit)


def units_of(config: ConvertConfig) -> list[Unit]:
    """The units of the source of a conversion, in its present state, with its settings."""
    found = list_units(config.source, config.format, config.split)
    for key in ("columns", "label_field", "image_field", "image_pattern"):
        value, format = getattr(config, key), found[0].format
        if value and format in ("folder", "loose"):
            raise ValueError(
                f"convert.{key}={value!r}: class folders have no fields; leave it out, or give a "
                "list (CSV, JSONL) of the images"
            )
        if value and key == "image_pattern" and format not in ("csv", "jsonl"):
            raise ValueError(
                f"convert.image_pattern={value!r} is for lists (CSV, JSONL), and "
                f"{config.source!r} is of the format {format!r}; leave it out"
            )
    return [
        replace(
            unit,
            columns=config.columns,
            label_field=config.label_field,
            image_field=config.image_field,
            image_pattern=config.image_pattern or "{}",
        )
        for unit in found
    ]


def list_units(source: str, format: Format = "auto", split: str | None = None) -> list[Unit]:
    """The units of a source, in a fixed order.

    Args:
        source: a folder, a file, or a pattern with braces or globs.
        split: takes one of several; `all` takes all.

    Raises:
        ValueError: the source is missing or has nothing of its format, or a split must be chosen.
    """
    if is_pattern(source):
        return _units_of_matches(source, matching(source), format, split)
    location = locate(source)
    kind = location.info().kind
    if kind == "nothing":
        raise ValueError(f"convert.source={source!r}: no such folder or file; check the path")
    if kind != "directory":
        return _units_of_matches(source, [Match(location.uri, False)], format, split)
    chosen = detect_format(source) if format == "auto" else format
    if chosen == "folder":
        places = [location.child(name) for name in folders_in(location)]
        units = _splits_of(source, places, location, format, split)
        return units or _classes_in(source, location, location, format)
    suffix = _RULES[chosen].suffix
    found = location.list_files(recursive=chosen in _IN_FOLDERS)
    names = [relative(info.path, location.path) for info in found]
    files = [
        location.child(name).uri
        for name in names
        if _suffix(name.rpartition("/")[2]) == suffix and not is_hidden(name)
    ]
    if not files:
        raise ValueError(
            f"convert.source={source!r} has no files of the format {chosen!r}; expected "
            f"{location.uri}/*.{suffix}"
        )
    units = _units_of_files(source, files, location.uri, chosen, split)
    # A hub repository may hold several data sets, a folder each.
    configurations = set()
    for unit in units:
        parts = unit.name.split("/")[:-1]
        own = "/".join(p for p in parts if p != "data" and named_split(p) is None)
        configurations.add(own or ".")
    if len(configurations) > 1:
        raise ValueError(
            f"convert.source={source!r} has several folders of data: "
            f"{', '.join(sorted(configurations))}; give one of them as convert.source, or a glob "
            "of the files"
        )
    return units


def detect_format(source: str) -> str:
    """Name of the format of a source, by its files.

    Raises:
        ValueError: nothing is there, or files of several formats.
    """
    location = locate(source)
    if location.info().kind == "file":
        return _format_of_file(location.path)
    return _format_of_folder(location, source) or _format_below(location) or "folder"


def _format_of_file(path: str) -> str:
    suffix = _suffix(path.rpartition("/")[2])
    if suffix in _PACKED:
        raise ValueError(f"convert.source={path!r} is a packed archive; unpack it first")
    if suffix not in _FORMAT_OF:
        raise ValueError(
            f"convert.source={path!r} is a file of no known format; give a folder of class "
            f"folders, or files that end in {', '.join(sorted(_FORMAT_OF))}"
        )
    return _FORMAT_OF[suffix]


def _format_of_folder(folder: Location, source: str) -> str | None:
    names = [info.base_name for info in folder.list_files(recursive=False)]
    found = sorted({_FORMAT_OF[s] for s in map(_suffix, names) if s in _FORMAT_OF})
    if len(found) > 1:
        raise ValueError(
            f"convert.source={source!r} has files of the formats {', '.join(found)}; choose one "
            f"with convert.format, or give a glob such as {source}/*.tar"
        )
    if found in (["csv"], ["jsonl"]):
        holders = (n for n in folders_in(folder) if folders.loose_images(folder.child(n)))
        if len(classes := list(islice(holders, 2))) > 1:
            listed = [name for name in names if _suffix(name) in _FORMAT_OF]
            raise ValueError(
                f"convert.source={source!r} has a list ({listed[0]}) next to folders of images "
                f"({', '.join(classes)}); set convert.format={found[0]} or convert.format=folder"
            )
    packed = [name for name in names if _suffix(name) in _PACKED]
    if not found and packed and not folders_in(folder):
        raise ValueError(
            f"convert.source={source!r} holds packed archives, such as {packed[0]}; unpack them "
            "first"
        )
    return found[0] if found else None


def _format_below(folder: Location, depth: int = _DEPTH) -> str | None:
    """By the first folder below, in order of names, that has an image, a tar or a parquet file."""
    for child in (folder.child(name) for name in folders_in(folder)) if depth else ():
        files = [info.base_name for info in child.list_files(recursive=False)]
        if any(map(is_image_name, files)):
            return "folder"
        if found := [f for f in map(_FORMAT_OF.get, map(_suffix, files)) if f in _IN_FOLDERS]:
            return min(filter(None, found))
        if below := _format_below(child, depth - 1):
            return below
    return None


def _suffix(name: str) -> str:
    name = _SHARD_NUMBER.sub("", name)
    return "" if is_hidden(name) else name.rpartition(".")[2].lower()


def _units_of_matches(
    source: str, matches: list[Match], format: Format, split: str | None
) -> list[Unit]:
    """Units of the files that a pattern matches, or of its folders as class folders."""
    chosen = [match.path for match in matches if match.is_folder]
    if chosen and len(chosen) == len(matches):
        if len(chosen) == 1 and not folders.loose_images(locate(chosen[0])):
            return list_units(chosen[0], format, split)
        common = locate(_folder_of(chosen))
        units = _splits_of(source, list(map(locate, chosen)), common, format, split)
        return units or [_class_folder(path, common, format) for path in chosen]
    if chosen:
        raise ValueError(
            f"convert.source={source!r} matches files and folders; match one or the other"
        )
    files = [match.path for match in matches]
    found = sorted({_format_of_file(path) for path in files}) if format == "auto" else [format]
    if len(found) > 1 or found == ["folder"]:
        raise ValueError(
            f"convert.source={source!r} matches files of the formats {', '.join(found)}; match one "
            f"of {', '.join(_FORMAT_OF.values())}, or class folders"
        )
    return _units_of_files(source, files, _folder_of(files), found[0], split)


def folders_in(folder: Location) -> list[str]:
    """Names of the folders directly in a folder that are not hidden."""
    return [name for name in folder.list_folders() if not is_hidden(name)]


def _folder_of(paths: list[str]) -> str:
    """The folder that holds all of them, at any depth."""
    parents = [path.rpartition("/")[0] for path in paths]
    protocol, mark, _ = parents[0].rpartition("://")
    if mark:
        return protocol + mark + commonpath([p.removeprefix(protocol + mark) for p in parents])
    return commonpath([parent or "/" for parent in parents])


def _units_of_files(
    source: str, files: list[str], folder: str, format: str, split: str | None
) -> list[Unit]:
    splits: dict[str | None, list[Unit]] = {}
    for path in files:
        # Folders that the user named in full are the same for all files.
        splits.setdefault(split_of(relative(path, folder)), []).append(Unit(format, path, folder))
    units = sorted(choose_split(splits, split, source), key=lambda unit: unit.path)
    if is_glob(source) or not (is_pattern(source) or files == [locate(source).uri]):
        check_complete([unit.path for unit in units], source)
    return units


def _splits_of(
    source: str, places: list[Location], common: Location, format: Format, split: str | None
) -> list[Unit]:
    """The class folders in those of some folders that are splits; none if these are the classes.

    Folders with the names of splits are splits where no other folder holds images, as a class may
    be named `train`, too. `folder_rows` refuses class folders whose images lie deeper.

    Raises:
        ValueError: a split must be chosen, or folders with the names of splits are no classes.
    """
    named = [at for at in places if split_of(_name(at))]
    are_splits = not any(folders.loose_images(at) for at in places if named and at not in named)
    splits: dict[str | None, list[Location]] = {}
    for place in named:
        if exact := named_split(_name(place)):
            splits.setdefault(exact, []).append(place)
    if are_splits and any(folders_in(at) for roots in splits.values() for at in roots):
        roots = choose_split(splits, split, source)
        common = roots[0] if len(roots) == 1 else common
        return [unit for root in roots for unit in _classes_in(source, root, common, format)]
    if split is not None:
        raise ValueError(
            f"convert.split={split!r}: {source!r} has no folders such as train and val with class "
            "folders in them; leave convert.split out"
        )
    if are_splits and format == "auto" and len({split_of(_name(at)) for at in named}) > 1:
        raise ValueError(
            f"convert.source={source!r} has the folders {', '.join(map(_name, named[:5]))}, which "
            "are splits by their names and not classes; give one of them as convert.source if it "
            "holds class folders, or set convert.format=folder if they are classes"
        )
    return []


def _classes_in(source: str, root: Location, common: Location, format: Format) -> list[Unit]:
    """A unit for each folder in a root or a split, and one for the images next to them."""
    names = folders_in(root)
    if not names:
        raise ValueError(
            f"convert.source={source!r} has no files of the format 'folder'; expected "
            f"{root.uri}/CLASS/IMAGE"
        )
    units = [_class_folder(root.child(name).uri, common, format) for name in names]
    return units + [Unit("loose", root.uri, common.uri)] * bool(folders.loose_images(root))


def _class_folder(path: str, common: Location, format: Format) -> Unit:
    return Unit("folder", path, common.uri, may_be_deep=format == "folder")


def _name(place: Location) -> str:
    return place.path.rpartition("/")[2]
