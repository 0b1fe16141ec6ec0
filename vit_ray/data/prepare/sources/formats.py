"""Which format a source has, and the units that it is cut into."""

import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from os.path import commonpath
from typing import Final, Literal

from pyarrow import fs

from vit_ray.data.prepare.sources import folders, hub, lists, tars, tfrecords
from vit_ray.data.prepare.sources.entries import IndexEntry, SourceUnit, is_hidden, relative
from vit_ray.data.prepare.sources.patterns import Match, is_pattern, matching
from vit_ray.data.prepare.sources.splits import choose_split, named_split, split_of
from vit_ray.storage import Location, locate

Format = Literal["auto", "folder", "webdataset", "huggingface", "csv", "jsonl", "tfrecord"]

_SUFFIX_OF: Final = {
    "webdataset": "tar", "huggingface": "parquet", "csv": "csv", "jsonl": "jsonl",
    "tfrecord": "tfrecord",
}  # fmt: skip
_FORMAT_OF: Final = {suffix: format for format, suffix in _SUFFIX_OF.items()}
_READERS: Final = 16
_PACKED: Final = frozenset({"zip", "gz", "tgz", "bz2", "xz", "zst", "7z", "rar"})

_INDEXERS: Final[dict[str, Callable[[SourceUnit, Location], Iterable[IndexEntry]]]] = {
    "folder": folders.index_folder,
    "loose": folders.index_loose_files,
    "webdataset": tars.index_tar,
    "huggingface": hub.index_parquet,
    "csv": lists.index_csv,
    "jsonl": lists.index_jsonl,
    "tfrecord": tfrecords.index_tfrecord,
}
_DECLARED: Final[dict[str, Callable[[SourceUnit], list[str] | None]]] = {
    "huggingface": hub.declared_classes,
    "tfrecord": tfrecords.declared_classes,
}
_STEMS: Final[dict[str, Callable[[str], str]]] = {
    "folder": str,
    "webdataset": lambda name: name.removesuffix(".tar"),
    "huggingface": lambda name: name.removesuffix(".parquet"),
    "tfrecord": lambda name: name.replace(".tfrecord", ""),
}
"""From the name of a unit to what stands before the slash in its keys; lists have any keys."""
_SHARD_NUMBER: Final = re.compile(r"-\d{5}-of-\d{5}$")
"""Behind the suffix of a file of TensorFlow Datasets."""


def index_unit(unit: SourceUnit, pack: Location) -> Iterator[IndexEntry]:
    """The images of one unit. `pack` is written only by formats that need packing.

    Raises:
        DamagedUnitError: after the last image before the damage.
        ValueError: the unit is not of its format.
    """
    yield from _INDEXERS[unit.format](unit, pack)


def key_prefix(unit: SourceUnit) -> str:
    """What the keys of all images of a unit begin with; empty where they may be anything."""
    stem = _STEMS.get(unit.format)
    return f"{stem(unit.name)}/" if stem else ""


def class_names_in_file(unit: SourceUnit) -> list[str] | None:
    """Class names that are declared in a file, or beside it; None where there are none."""
    declared = _DECLARED.get(unit.format)
    return declared(unit) if declared else None


def files_beside(unit: SourceUnit) -> list[Location]:
    """Files, there or not, that its index depends on and that are not its own."""
    return [tfrecords.names_beside(unit)] if unit.format == "tfrecord" else []


def list_units(source: str, format: Format = "auto", split: str | None = None) -> list[SourceUnit]:
    """The units of a source, in a fixed order.

    Args:
        source: a folder, a file, or a pattern with braces or globs.
        split: takes one of several; `all` takes all.

    Raises:
        ValueError: if the source is missing or holds nothing of its format, or a split must be
            chosen.
    """
    if is_pattern(source):
        return _units_of_matches(source, matching(source), format, split)
    location = locate(source)
    kind = location.info().type
    if kind == fs.FileType.NotFound:
        raise ValueError(f"convert.source={source!r}: no such folder or file; check the path.")
    if kind != fs.FileType.Directory:
        return _units_of_matches(source, [Match(location.uri, False)], format, split)
    chosen = detect_format(source) if format == "auto" else format
    if chosen == "folder":
        return _class_folders(source, location, split)
    files = _files_of(location, chosen)
    if not files:
        raise ValueError(
            f"convert.source={source!r} holds nothing of the format {chosen!r}; "
            f"expected {location.uri}/*.{_SUFFIX_OF[chosen]}."
        )
    units = _units_of_files(source, files, location.uri, chosen, split)
    _check_one_configuration(source, units)
    return units


def detect_format(source: str) -> str:
    """Name of the format of a source, by what lies there.

    Raises:
        ValueError: if nothing is there, or files of several formats.
    """
    location = locate(source)
    info = location.info()
    if info.type == fs.FileType.NotFound:
        raise ValueError(f"convert.source={source!r}: no such folder or file; check the path.")
    if info.type == fs.FileType.File:
        return _format_of_file(location.path)
    return _format_of_folder(location, source) or _format_below(location) or "folder"


def _format_of_file(path: str) -> str:
    suffix = _SHARD_NUMBER.sub("", path).rsplit(".", 1)[-1].lower()
    if suffix in _PACKED:
        raise ValueError(f"convert.source={path!r} is a packed archive; unpack it first.")
    if suffix not in _FORMAT_OF:
        raise ValueError(
            f"convert.source={path!r} is a file of no known format; give a folder of class "
            f"folders, or files that end in {', '.join(sorted(_FORMAT_OF))}."
        )
    return _FORMAT_OF[suffix]


def _format_of_folder(folder: Location, source: str) -> str | None:
    names = [info.base_name for info in folder.list_files(recursive=False)]
    found = sorted({_FORMAT_OF[s] for s in map(_suffix, names) if s in _FORMAT_OF})
    if len(found) > 1:
        raise ValueError(
            f"convert.source={source!r} has files of the formats {', '.join(found)}; "
            f"say which by convert.format, or give a glob such as {source}/*.tar."
        )
    return found[0] if found else None


_DEPTH: Final = 3
"""Of folders that are looked into: a hub repository may have CONFIGURATION/SPLIT/FILE."""


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


def _files_of(folder: Location, format: str) -> list[str]:
    """Addresses of its files; those of tar and parquet may lie in folders."""
    is_deep = format in ("webdataset", "huggingface", "tfrecord")
    names = [relative(i.path, folder.path) for i in folder.list_files(recursive=is_deep)]
    wanted = _SUFFIX_OF[format]
    return [
        folder.child(name).uri
        for name in names
        if _suffix(name.rpartition("/")[2]) == wanted and not is_hidden(name)
    ]


def _units_of_matches(
    source: str, matches: list[Match], format: Format, split: str | None
) -> list[SourceUnit]:
    """Units of the files that a pattern stands for, or of its folders as class folders."""
    chosen = [match.path for match in matches if match.is_folder]
    if chosen and len(chosen) == len(matches):
        return _units_of_folders(source, chosen, format, split)
    if chosen:
        raise ValueError(
            f"convert.source={source!r} stands for files and folders; match one or the other."
        )
    files = [match.path for match in matches]
    found = sorted({_format_of_file(path) for path in files}) if format == "auto" else [format]
    if len(found) > 1 or found == ["folder"]:
        raise ValueError(
            f"convert.source={source!r} stands for files of the formats {', '.join(found)}; "
            f"match one of {', '.join(_SUFFIX_OF)}, or class folders."
        )
    return _units_of_files(source, files, _folder_of(files), found[0], split)


def _units_of_folders(
    source: str, paths: list[str], format: Format, split: str | None
) -> list[SourceUnit]:
    """Class folders, or the one folder that is the source, or splits with class folders in them.

    Raises:
        ValueError: nobody can tell which, or they hold files of another format.
    """
    locations = [locate(path) for path in paths]
    given = None if format in ("auto", "folder") else format
    with ThreadPoolExecutor(_READERS) as pool:
        images = [bool(found) for found in pool.map(folders.loose_images, locations)]
        below = [bool(found) for found in pool.map(_folders_in, locations)]
    found = given or (None if any(images) else _format_of_folder(locations[0], source))
    if found is None and _are_classes(source, locations, images, below):
        _check_no_split(source, split)
        return [SourceUnit("folder", path, _folder_of(paths)) for path in paths]
    if len(paths) == 1:
        return list_units(paths[0], format, split)
    if found is not None:
        raise ValueError(
            f"convert.source={source!r} stands for folders of the format {found!r}; give their "
            f"files, such as {source}/*.{_SUFFIX_OF[found]}."
        )
    return _units_of_roots(source, locations, split)


def _are_classes(
    source: str, matches: list[Location], images: list[bool], below: list[bool]
) -> bool:
    """Whether folders are classes, by which of them hold images and which hold folders.

    Raises:
        ValueError: some are as classes are, and some as folders that hold classes.
    """
    if not any(images):
        return not any(below)
    is_split = [named_split(_name_of(at)) is not None for at in matches]
    facts = list(zip(is_split, images, below, strict=True))
    holders = [
        has_folders and (named or not has_images) for named, has_images, has_folders in facts
    ]
    if any(holders) and not all(is_split):
        names = [_name_of(at) for at, is_holder in zip(matches, holders, strict=True) if is_holder]
        raise ValueError(
            f"convert.source={source!r} stands for folders of images and for others that seem to "
            f"hold class folders ({', '.join(names[:5])}); match one or the other, or give the "
            f"folder that holds them."
        )
    return not any(holders)


def _name_of(folder: Location) -> str:
    return folder.path.rstrip("/").rsplit("/", 1)[-1]


def _check_no_split(source: str, split: str | None) -> None:
    if split is not None:
        raise ValueError(
            f"convert.split={split!r}: {source!r} has no folders such as train and val with class "
            f"folders in them; leave convert.split out."
        )


def _units_of_roots(source: str, roots: list[Location], split: str | None) -> list[SourceUnit]:
    """Class folders in folders that are named as splits are."""
    splits: dict[str | None, list[Location]] = {}
    for root in roots:
        splits.setdefault(named_split(root.path.rsplit("/", 1)[-1]), []).append(root)
    if None in splits:
        raise ValueError(
            f"convert.source={source!r} stands for folders with nothing but folders in them; if "
            f"they are classes, give the folder that holds them; if they hold the classes, give "
            f"{source}/*."
        )
    common = locate(_folder_of([root.uri for root in roots]))
    chosen = choose_split(splits, split, source)
    return [unit for root in chosen for unit in _units_of_root(source, root, common)]


def _folders_in(folder: Location) -> list[str]:
    return [name for name in folder.list_folders() if not is_hidden(name)]


def _folder_of(paths: list[str]) -> str:
    """The folder that holds all of them, at whatever depth."""
    parents = [path.rpartition("/")[0] for path in paths]
    if parents[0].startswith("s3://"):
        return "s3://" + commonpath([parent.removeprefix("s3://") for parent in parents])
    return commonpath([parent or "/" for parent in parents])


def _units_of_files(
    source: str, files: list[str], folder: str, format: str, split: str | None
) -> list[SourceUnit]:
    splits: dict[str | None, list[SourceUnit]] = {}
    for path in files:
        # What the user named in full, such as the folder, tells nothing of one file from another.
        splits.setdefault(split_of(relative(path, folder)), []).append(
            SourceUnit(format, path, folder)
        )
    units = sorted(choose_split(splits, split, source), key=lambda unit: unit.path)
    if format not in ("csv", "jsonl"):
        return units
    return [part for unit in units for part in lists.cut_list(unit)]


def _check_one_configuration(source: str, units: list[SourceUnit]) -> None:
    """A hub repository may hold several data sets, a folder each."""
    found = sorted({_configuration(unit.name) for unit in units})
    if len(found) > 1:
        raise ValueError(
            f"convert.source={source!r} has several folders of data: {', '.join(found)}; "
            f"give one of them as convert.source, or a glob of the files."
        )


def _configuration(path: str) -> str:
    parts = path.split("/")[:-1]
    return "/".join(p for p in parts if p != "data" and named_split(p) is None) or "."


def _class_folders(source: str, root: Location, split: str | None) -> list[SourceUnit]:
    """A unit per class folder, of the root or of its splits, and one for images beside them."""
    splits: dict[str | None, list[Location]] = {}
    for folder in _split_folders(root):
        splits.setdefault(named_split(folder.path.rsplit("/", 1)[-1]), []).append(folder)
    if not splits:
        _check_no_split(source, split)
    roots = choose_split(splits, split, source) if splits else [root]
    folder = roots[0] if len(roots) == 1 else root
    return [unit for root in roots for unit in _units_of_root(source, root, folder)]


def _units_of_root(source: str, root: Location, folder: Location) -> list[SourceUnit]:
    names = _folders_in(root)
    if not names:
        raise ValueError(
            f"convert.source={source!r} holds nothing of the format 'folder'; "
            f"expected {root.uri}/CLASS/IMAGE."
        )
    units = [SourceUnit("folder", root.child(name).uri, folder.uri) for name in names]
    has_loose = bool(folders.loose_images(root))
    return units + [SourceUnit("loose", root.uri, folder.uri)] * has_loose


def _split_folders(root: Location) -> list[Location]:
    """Folders that are named as splits are, where these are splits.

    One of them has class folders in it and no images. A class may be called `train`, too; so where
    only one folder is named so, none beside it may hold images.
    """
    names = _folders_in(root)
    named = [root.child(name) for name in names if named_split(name)]
    others = [root.child(name) for name in names if not named_split(name)]
    if not any(at.list_folders() and not folders.loose_images(at) for at in named):
        return []
    is_class = len(named) == 1 and any(folders.loose_images(at) for at in others)
    return [] if is_class else named
