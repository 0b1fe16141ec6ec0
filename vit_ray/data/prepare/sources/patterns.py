"""Several files in one address: brace ranges and globs, locally and on `s3://`."""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Final

from fsspec.utils import glob_translate

from vit_ray.data.prepare.sources.entries import is_hidden, relative
from vit_ray.storage import Location, locate

_BRACES: Final = re.compile(r"\{([^{}]*)\}")
_RANGE: Final = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_MAGIC: Final = re.compile(r"[*?\[]")
_AT_ONCE: Final = 16
MOST_PATHS: Final = 100_000
"""Most paths that the braces of one address may give."""


def expand_braces(pattern: str) -> list[str]:
    """`a{000..127}` and `{a,b}` as all their paths; other braces stay.

    Raises:
        ValueError: they give more than `MOST_PATHS`.
    """
    paths = list(islice(_expanded(pattern), MOST_PATHS + 1))
    if len(paths) > MOST_PATHS:
        raise ValueError(
            f"convert.source={pattern!r} gives more than {MOST_PATHS:,} files; use a glob such as "
            "*.tar instead"
        )
    return list(dict.fromkeys(paths))


def _expanded(path: str) -> Iterator[str]:
    for braces in _BRACES.finditer(path):
        choices: Iterable[str] = braces[1].split(",") if "," in braces[1] else []
        if span := _RANGE.fullmatch(braces[1]):
            first, last = int(span[1]), int(span[2])
            width = len(span[1]) if span[1].startswith("0") else 0
            step = 1 if first <= last else -1
            choices = (f"{number:0{width}d}" for number in range(first, last + step, step))
        if choices:
            for choice in choices:
                yield from _expanded(path[: braces.start()] + choice + path[braces.end() :])
            return
    yield path


@dataclass(frozen=True)
class Match:
    """A file or folder that a pattern matches."""

    path: str
    is_folder: bool


def is_pattern(source: str) -> bool:
    """Whether an address is a pattern; an address that exists literally is not."""
    has_magic = bool(_MAGIC.search(source)) or len(expand_braces(source)) > 1
    return has_magic and not locate(source).exists()


def matching(source: str) -> list[Match]:
    """The files and folders that a pattern matches, sorted by path, each once.

    Raises:
        ValueError: a glob matches nothing, or a path of a brace range does not exist.
    """
    paths = expand_braces(source)
    globs = [path for path in paths if _MAGIC.search(path)]
    found = [match for glob in globs for match in _matches_of(glob, source)]
    found += _existing([path for path in paths if not _MAGIC.search(path)], source)
    return sorted(set(found), key=lambda match: match.path)


def _existing(paths: list[str], source: str) -> list[Match]:
    if not paths:
        return []
    locations = [locate(path) for path in paths]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        infos = list(threads.map(Location.info, locations))
    missing = [p for p, i in zip(paths, infos, strict=True) if i.kind == "nothing"]
    if missing:
        raise ValueError(
            f"convert.source={source!r}: {len(missing)} of the {len(paths)} files that it names do "
            f"not exist, the first {missing[0]!r}; add them, or change the range"
        )
    are_folders = [info.kind == "directory" for info in infos]
    return [Match(at.uri, folder) for at, folder in zip(locations, are_folders, strict=True)]


def _matches_of(glob: str, source: str) -> list[Match]:
    """The matches below the last folder whose name has no glob characters."""
    magic = _MAGIC.search(glob)
    assert magic is not None
    begin = glob[: magic.start()].rfind("/") + 1
    folder, rest = locate(glob[:begin] or "."), glob[begin:].rstrip("/")
    is_deep = "/" in rest or "**" in rest
    matches = re.compile(glob_translate(rest)).fullmatch
    names = [relative(info.path, folder.path) for info in folder.list_files(recursive=is_deep)]
    found = [Match(folder.child(name).uri, False) for name in names if matches(name)]
    if not is_deep:
        names = [name for name in folder.list_folders() if matches(name)]
        found += [Match(folder.child(name).uri, True) for name in names]
    found = [match for match in found if not is_hidden(relative(match.path, folder.uri))]
    if not found:
        raise ValueError(f"convert.source={source!r}: nothing matches {glob!r}; check the pattern")
    return found
