"""The files of a source: patterns, splits, missing shards, and class folders."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice, product
from typing import Final, TypeVar

from vit_ray.data.convert.labels import checked_label
from vit_ray.data.convert.rows import Row, Unit, relative
from vit_ray.data.dataset import MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.images import is_hidden, is_image_name
from vit_ray.storage import Location, local_info, locate, naming

# The value of `convert.split` that makes one data set of all splits.
_ALL_SPLITS: Final = "all"
# Maximum number of paths that braces may expand to.
MOST_PATHS: Final = 100_000
_BRACES: Final = re.compile(r"(\{[^{}]*\})")
_RANGE: Final = re.compile(r"\{([0-9]{1,18})\.\.([0-9]{1,18})\}")
GLOB: Final = re.compile(r"[*?\[]")
_THREADS: Final = 16
_SPLIT_OF_WORD: Final = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_NUMBERED: Final = re.compile(r"(.+)-\d{5,}-of-\d{5,}(?:-\w+)?")
_SHARD: Final = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(.*)")
# Every folder that a conversion has begun to write contains one of these.
_OF_CONVERSIONS: Final = {MANIFEST_FILE, STAGING_FOLDER}
Item = TypeVar("Item")


class SeveralSplitsError(ValueError):
    """A source has several splits, and none is chosen."""

    def __init__(self, message: str, splits: tuple[str | None, ...] = ()) -> None:
        super().__init__(message)
        self.splits = splits


def named_split(name: str) -> str | None:
    """The split with exactly this name, such as `validation` for `val`; None for other names."""
    return _SPLIT_OF_WORD.get(name.lower())


def split_of(path: str) -> str | None:
    """The split of a file by its relative path; None if the path has no split name.

    As on the Hugging Face hub: `data/NAME-00000-of-00002.parquet` is in the split NAME; for other
    names the first word that names a split decides, in the file's name, else in its folders'.
    """
    *folders, file = path.split("/")
    stem = file.partition(".")[0]
    if numbered := _NUMBERED.fullmatch(stem):
        return named_split(numbered[1]) or numbered[1]
    words = chain(*(re.findall("[a-z]+", part.lower()) for part in (stem, *reversed(folders))))
    return next(filter(None, map(named_split, words)), None)


def choose_split(
    split_of_item: Mapping[Item, str | None], wanted: str | None, source: str
) -> list[Item]:
    """The items of the wanted split; if `wanted` is None, of the only split.

    Raises:
        SeveralSplitsError: there are several splits, and `wanted` is None.
        ValueError: the wanted split does not exist.
    """
    splits = sorted({*split_of_item.values()}, key=str)
    listed = ", ".join(split or "(files without a split)" for split in splits)
    if wanted is None and len(splits) > 1:
        raise SeveralSplitsError(
            f"convert.source={source!r} has several splits: {listed}; give one as convert.split, "
            f"or convert.split={_ALL_SPLITS} to make one data set from all of them",
            tuple(splits),
        )
    if wanted is None or wanted == _ALL_SPLITS:
        return list(split_of_item)
    named = named_split(wanted) or wanted
    if named not in splits:
        raise ValueError(f"convert.split={wanted!r} is not in {source!r}; it has {listed}")
    return [item for item, split in split_of_item.items() if split == named]


def check_complete(paths: Sequence[str], source: str) -> None:
    """Raises ValueError if files named `NAME-00000-of-00003` are not all of one set of shards."""
    sets: dict[str, set[tuple[int, int]]] = {}
    for shard in filter(None, map(_SHARD.fullmatch, paths)):
        sets.setdefault(shard[1], set()).add((int(shard[2]), int(shard[3])))
    for name, shards in sets.items():
        count = max(count for _, count in shards)
        if odd := sorted({(number, count) for number in range(count)} ^ shards):
            raise ValueError(
                f"convert.source={source!r}: {len(odd)} of the {count} shards of {name!r} are "
                f"missing, or there are shards of another number, the first {odd[0][0]:05d}-of-"
                f"{odd[0][1]:05d}; add or remove them, or name the files that are to be taken in "
                "braces, such as {00000..00001}"
            )


def expand_braces(pattern: str) -> list[str]:
    """All paths of `a{000..127}` or `{a,b}`; other braces are not expanded.

    Raises:
        ValueError: there are more than `MOST_PATHS`.
    """
    choices = map(_choices, _BRACES.split(pattern))
    paths = [*map("".join, islice(product(*choices), MOST_PATHS + 1))]
    if len(paths) > MOST_PATHS:
        raise ValueError(
            f"convert.source={pattern!r} gives more than {MOST_PATHS:,} files; use a glob such as "
            "*.tar instead"
        )
    return list(dict.fromkeys(paths))


def _choices(part: str) -> list[str]:
    """What a part of a pattern stands for: the texts of braces, else the part itself."""
    if span := _RANGE.fullmatch(part):
        first, last = int(span[1]), int(span[2])
        width = len(span[1]) if span[1].startswith("0") else 0
        numbers = range(first, last + 1) or range(first, last - 1, -1)
        return [f"{number:0{width}d}" for number in numbers[: MOST_PATHS + 1]]
    has_choices = _BRACES.fullmatch(part) and "," in part
    return part[1:-1].split(",") if has_choices else [part]


def matching(source: str) -> dict[str, bool]:
    """What a path or pattern matches, sorted, and whether each is a folder.

    What exists under exactly this name is not taken for a pattern.

    Raises:
        ValueError: a path does not exist, or a glob matches nothing.
    """
    paths = [source] if locate(source).exists() else expand_braces(source)
    with ThreadPoolExecutor(_THREADS) as threads:
        matches = list(threads.map(_matches_of, paths))
    if missing := [path for path, found in zip(paths, matches, strict=True) if not found]:
        raise ValueError(
            f"convert.source={source!r}: no such folder or file as {missing[0]!r}; nothing matches "
            f"{len(missing)} of the {len(paths)} paths and globs in it; check them"
        )
    return dict(sorted(chain(*(found.items() for found in matches))))


def _matches_of(path: str) -> dict[str, bool]:
    location = locate(path)
    kind = location.info().kind
    if kind != "nothing" or not GLOB.search(path):
        return {} if kind == "nothing" else {location.uri: kind == "directory"}
    folder = GLOB.split(location.path)[0].rpartition("/")[0]
    with naming(location.uri):
        matches = location.filesystem.glob(location.path, detail=True)
    return {
        replace(location, path=path).uri: info["type"] == "directory"
        for path, info in matches.items()
        if not is_hidden(path.removeprefix(folder))
    }


def folder_rows(unit: Unit) -> Iterator[Row]:
    """Files below a class folder, sorted by path; hidden ones are skipped.

    Raises:
        ValueError: a folder cannot be read, was written by a conversion, or contains class folders
            and so is probably no class.
    """
    location = locate(unit.path)
    label = checked_label(unit.path.rpartition("/")[2])
    if location.is_local:
        rows = sorted(_walk(location.path), key=lambda row: row.path)
    else:
        rows = [
            Row("", path=replace(location, path=i.path).uri, length=i.size, version=i.version)
            for i in location.list_files()
        ]
    if unit.config.format != "folder":
        _check_depth(unit, rows)
    for row in rows:
        if _OF_CONVERSIONS.intersection(relative(row.path, unit.path).split("/")):
            raise ValueError(
                f"convert.source: {unit.path!r} holds {row.path!r}, of a conversion; move that "
                "folder out of the source"
            )
        key = relative(row.path, unit.folder)
        if not is_hidden(key):
            yield replace(row, key=key, labels=(label,), kind="name")


def _check_depth(unit: Unit, rows: list[Row]) -> None:
    """Raises ValueError for a folder that contains class folders, and so is probably no class."""
    paths = (relative(row.path, unit.path) for row in rows)
    names = [path for path in paths if is_image_name(path) and not is_hidden(path)]
    deeper = [name for name in names if "/" in name]
    # A cover image, or a sample of each class, may be next to the class folders.
    if deeper and (2 * len(deeper) >= len(names) or named_split(unit.name)):
        above = f"{unit.path}/{deeper[0].rpartition('/')[0]}"
        raise ValueError(
            f"convert.source: {unit.path!r} holds at most half of its images itself, or is a split "
            f"by its name; they lie deeper, such as in '{above}'. If that is a class, give a glob "
            f"of the class folders, such as {above.rpartition('/')[0]}/*; if "
            f"{unit.path.rpartition('/')[2]!r} is one, set convert.format=folder"
        )


def loose_rows(unit: Unit) -> Iterator[Row]:
    """Images next to the class folders, which have no class, and so are rejected."""
    for path in loose_images(locate(unit.path)):
        yield Row(relative(path, unit.folder), problem="it is not in a class folder")


def loose_images(folder: Location) -> list[str]:
    """Addresses of the images directly in a folder."""
    files = [folder.child(info.base_name).uri for info in folder.list_files(recursive=False)]
    return [path for path in files if is_image_name(path)]


def _walk(folder: str) -> Iterator[Row]:
    """Everything below a local folder that is not a folder.

    Raises:
        ValueError: a folder cannot be read, or is a link, which may lead to a folder above it.
    """
    for path, names, files in os.walk(folder, onerror=_refuse):
        if links := [name for name in names if os.path.islink(f"{path}/{name}")]:
            raise ValueError(
                f"convert.source: '{path}/{links[0]}' is a link to a folder; only class folders "
                "and files may be links, so move the folder there"
            )
        for name in files:
            info = local_info(f"{path}/{name}")
            problem = None if info.kind == "file" else "it is a broken link or not a regular file"
            yield Row("", path=info.path, length=info.size, version=info.version, problem=problem)


def _refuse(error: OSError) -> None:
    # Not a problem of one row, as the number of images in the folder is unknown.
    raise ValueError(
        f"convert.source: the folder {error.filename!r} cannot be read ({error.strerror}); grant "
        "read access, or move it away"
    ) from error
