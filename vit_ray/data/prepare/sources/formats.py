"""The format of a source, and the units that it is cut into."""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from os.path import commonpath
from typing import Final, Literal

from vit_ray.data.prepare.sources import folders, hub, lists, tars, tfrecords
from vit_ray.data.prepare.sources.entries import (
    DamagedUnitError,
    IndexEntry,
    SourceUnit,
    is_hidden,
    relative,
)
from vit_ray.data.prepare.sources.patterns import Match, is_pattern, matching
from vit_ray.data.prepare.sources.splits import choose_split, named_split, split_of
from vit_ray.storage import Location, locate

Format = Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl", "tfrecord"]


@dataclass(frozen=True)
class _Rules:
    """The functions for the units of a format.

    Attributes:
        suffix: of its files.
        stem: from the name of a unit to the part before the slash in its keys; None if keys may be
            anything.
        declared: reads the class names that a file declares.
        fields: reads which fields have images and labels; none if records differ in that.
    """

    index: Callable[[SourceUnit, Location], Iterable[IndexEntry]]
    suffix: str = ""
    stem: Callable[[str], str] | None = None
    declared: Callable[[SourceUnit], list[str] | None] = lambda _: None
    fields: Callable[[SourceUnit], dict[str, str]] = lambda _: {}


_RULES: Final = {
    "folder": _Rules(folders.index_folder, stem=str),
    "loose": _Rules(folders.index_loose_files),
    "webdataset": _Rules(tars.index_tar, "tar", lambda name: name.removesuffix(".tar")),
    "huggingface": _Rules(
        hub.index_parquet,
        "parquet",
        lambda name: name.removesuffix(".parquet"),
        hub.declared_classes,
        hub.fields_of,
    ),
    "csv": _Rules(lists.index_csv, "csv", fields=lists.fields_of_csv),
    "jsonl": _Rules(lists.index_jsonl, "jsonl"),
    "tfrecord": _Rules(
        tfrecords.index_tfrecord,
        "tfrecord",
        lambda name: name.replace(".tfrecord", ""),
        tfrecords.declared_classes,
    ),
}
_FORMAT_OF: Final = {rules.suffix: format for format, rules in _RULES.items() if rules.suffix}
_READERS: Final = 16
_PACKED: Final = frozenset({"zip", "gz", "tgz", "bz2", "xz", "zst", "7z", "rar"})
_COMPRESSED: Final = {
    "gzip": b"\x1f\x8b\x08",
    "bzip2": b"BZh",
    "xz": b"\xfd7zXZ\0",
    "zstd": b"\x28\xb5\x2f\xfd",
}
"""The first bytes of a file."""
_SHARD_NUMBER: Final = re.compile(r"-\d{5}-of-\d{5}$")
"""Follows the suffix of a file of TensorFlow Datasets."""


def index_unit(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """The images of one unit. `pack` is written only by formats that need packing.

    Raises:
        DamagedUnitError: after the last image before the damage.
        ValueError: the unit is not of its format, or is compressed as a whole.
    """
    try:
        yield from _RULES[unit.format].index(unit, pack)
    except DamagedUnitError as error:
        head = b"" if error.offset else locate(unit.path).read_range(0, 6)
        for name, magic in _COMPRESSED.items():
            if head.startswith(magic):
                raise ValueError(
                    f"{unit.path!r} is compressed with {name}; decompress it first, since images "
                    "are read at their offsets in it"
                ) from error
        raise


def class_names_in_file(unit: SourceUnit) -> list[str] | None:
    """Class names declared in a file, or next to it; None if there are none."""
    return _RULES[unit.format].declared(unit)


def fields_in_file(unit: SourceUnit) -> dict[str, str]:
    """The fields of images and labels, if they are the same for all records of a file."""
    return _RULES[unit.format].fields(unit)


def files_beside(unit: SourceUnit) -> list[Location]:
    """Other files, existing or not, on which its index depends."""
    return [tfrecords.names_beside(unit)] if unit.format == "tfrecord" else []


def list_units(source: str, format: Format = "auto", split: str | None = None) -> list[SourceUnit]:
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
        return _class_folders(source, location, split)
    suffix = _RULES[chosen].suffix
    is_deep = chosen in ("webdataset", "huggingface", "tfrecord")  # may be in folders
    names = [relative(i.path, location.path) for i in location.list_files(recursive=is_deep)]
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
    info = location.info()
    if info.kind == "nothing":
        raise ValueError(f"convert.source={source!r}: no such folder or file; check the path")
    if info.kind == "file":
        return _format_of_file(location.path)
    return _format_of_folder(location, source) or _format_below(location) or "folder"


def _format_of_file(path: str) -> str:
    suffix = _SHARD_NUMBER.sub("", path).rsplit(".", 1)[-1].lower()
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
        holders = (n for n in _folders_in(folder) if folders.loose_images(folder.child(n)))
        if len(classes := list(islice(holders, 2))) > 1:
            listed = [name for name in names if _suffix(name) in _FORMAT_OF]
            raise ValueError(
                f"convert.source={source!r} has a list ({listed[0]}) next to folders of images "
                f"({', '.join(classes)}); set convert.format={found[0]} or convert.format=folder"
            )
    packed = [name for name in names if _suffix(name) in _PACKED]
    if not found and packed and not _folders_in(folder):
        raise ValueError(
            f"convert.source={source!r} holds packed archives, such as {packed[0]}; unpack them "
            "first"
        )
    return found[0] if found else None


_DEPTH: Final = 3
"""Depth of folders that are searched: a hub repository may have CONFIGURATION/SPLIT/FILE."""


def _format_below(folder: Location, depth: int = _DEPTH) -> str | None:
    """By the first folder below, in order of names, that has an image, a tar or a parquet file."""
    names = folder.list_folders() if depth else []
    for child in (folder.child(name) for name in names if not is_hidden(name)):
        files = [info.base_name for info in child.list_files(recursive=False)]
        if any(map(folders.is_image_name, files)):
            return "folder"
        if found := {_suffix(name) for name in files} & {"parquet", "tar", "tfrecord"}:
            return _FORMAT_OF[min(found)]
        if below := _format_below(child, depth - 1):
            return below
    return None


def _suffix(name: str) -> str:
    name = _SHARD_NUMBER.sub("", name)
    return "" if is_hidden(name) else name.rsplit(".", 1)[-1].lower()


def _units_of_matches(
    source: str, matches: list[Match], format: Format, split: str | None
) -> list[SourceUnit]:
    """Units of the files that a pattern matches, or of its folders as class folders."""
    chosen = [match.path for match in matches if match.is_folder]
    if chosen and len(chosen) == len(matches):
        return _units_of_folders(source, chosen, format, split)
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


def _units_of_folders(
    source: str, paths: list[str], format: Format, split: str | None
) -> list[SourceUnit]:
    """Class folders, or the one folder that is the source, or splits with class folders in them.

    Raises:
        ValueError: which of these is not clear, or they hold files of another format.
    """
    places = [locate(path) for path in paths]
    with ThreadPoolExecutor(_READERS) as pool:
        images = [bool(found) for found in pool.map(folders.loose_images, places)]
        below = [bool(found) for found in pool.map(_folders_in, places)]
    found = None if format in ("auto", "folder") else format
    if found is None and not any(images):
        found = _format_of_folder(places[0], source)  # type: ignore[assignment]
    names = [_name_of(place) for place in places]
    are_classes = not any(below)
    if any(images) and found is None:
        # Folders that hold classes contain folders, and no images unless they are named like a
        # split.
        holders = [
            name
            for name, has_images, has_folders in zip(names, images, below, strict=True)
            if has_folders and (named_split(name) or not has_images)
        ]
        if holders and not all(map(named_split, names)):
            raise ValueError(
                f"convert.source={source!r} matches folders of images and others that seem to hold "
                f"class folders ({', '.join(holders[:5])}); match one or the other, or give the "
                "folder that holds them"
            )
        are_classes = not holders
    if found is None and are_classes:
        _check_no_split(source, split)
        return [SourceUnit("folder", path, _folder_of(paths)) for path in paths]
    if len(paths) == 1:
        return list_units(paths[0], format, split)
    if found is not None:
        raise ValueError(
            f"convert.source={source!r} matches folders of the format {found!r}; give their files, "
            f"such as {source}/*.{_RULES[found].suffix}"
        )
    splits = _by_split(places)
    if None in splits:
        raise ValueError(
            f"convert.source={source!r} matches folders that only contain folders; if they are "
            f"classes, give the folder that holds them; if they hold the classes, give {source}/*"
        )
    common = locate(_folder_of([place.uri for place in places]))
    chosen = choose_split(splits, split, source)
    return [unit for root in chosen for unit in _units_of_root(source, root, common)]


def _name_of(folder: Location) -> str:
    return folder.path.rstrip("/").rsplit("/", 1)[-1]


def _by_split(roots: list[Location]) -> dict[str | None, list[Location]]:
    splits: dict[str | None, list[Location]] = {}
    for root in roots:
        splits.setdefault(named_split(_name_of(root)), []).append(root)
    return splits


def _check_no_split(source: str, split: str | None) -> None:
    if split is not None:
        raise ValueError(
            f"convert.split={split!r}: {source!r} has no folders such as train and val with class "
            "folders in them; leave convert.split out"
        )


def _folders_in(folder: Location) -> list[str]:
    return [name for name in folder.list_folders() if not is_hidden(name)]


def _folder_of(paths: list[str]) -> str:
    """The folder that holds all of them, at any depth."""
    parents = [path.rpartition("/")[0] for path in paths]
    if parents[0].startswith("s3://"):
        return "s3://" + commonpath([parent.removeprefix("s3://") for parent in parents])
    return commonpath([parent or "/" for parent in parents])


def _units_of_files(
    source: str, files: list[str], folder: str, format: str, split: str | None
) -> list[SourceUnit]:
    splits: dict[str | None, list[SourceUnit]] = {}
    for path in files:
        # Folders that the user named in full are the same for all files.
        splits.setdefault(split_of(relative(path, folder)), []).append(
            SourceUnit(format, path, folder)
        )
    units = sorted(choose_split(splits, split, source), key=lambda unit: unit.path)
    if format not in ("csv", "jsonl"):
        return units
    return [part for unit in units for part in lists.cut_list(unit)]


def _class_folders(source: str, root: Location, split: str | None) -> list[SourceUnit]:
    """A unit per class folder, of the root or of its splits, and one for images next to them."""
    # Folders that are named like splits are splits if one of them has class folders in it and no
    # images. A class may be named `train`, too; so if only one folder has such a name, none next to
    # it may hold images.
    children = [root.child(name) for name in _folders_in(root)]
    named = [at for at in children if named_split(_name_of(at))]
    others = [at for at in children if at not in named]
    roots = [root]
    has_splits = any(at.list_folders() and not folders.loose_images(at) for at in named)
    if has_splits and not (len(named) == 1 and any(map(folders.loose_images, others))):
        roots = choose_split(_by_split(named), split, source)
    else:
        _check_no_split(source, split)
    folder = roots[0] if len(roots) == 1 else root
    return [unit for root in roots for unit in _units_of_root(source, root, folder)]


def _units_of_root(source: str, root: Location, folder: Location) -> list[SourceUnit]:
    names = _folders_in(root)
    if not names:
        raise ValueError(
            f"convert.source={source!r} has no files of the format 'folder'; expected "
            f"{root.uri}/CLASS/IMAGE"
        )
    units = [SourceUnit("folder", root.child(name).uri, folder.uri) for name in names]
    has_loose = bool(folders.loose_images(root))
    return units + [SourceUnit("loose", root.uri, folder.uri)] * has_loose
