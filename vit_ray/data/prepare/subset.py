"""Nested subsets of a data set, written as manifests only: no image is copied.

Rows were shuffled at conversion, so any row groups are a random sample. They are taken in an order
that the seed fixes, so that a smaller subset is part of every larger one (9M / 30M / 90M / 303M).
"""

import contextlib
import hashlib
import re
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest, RowGroupColumns, open_dataset, write_manifest
from vit_ray.data.format.row_groups import RowGroupReader
from vit_ray.data.format.schema import MANIFEST_FILE, STAGING_FOLDER
from vit_ray.data.order.keyed_random import key_of, keys_of
from vit_ray.data.prepare.progress import Shown, report_done
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.storage import locate

_SUBSET: Final = 7
_QUOTED: Final = re.compile(r"""'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/|"((?:[^"]|"")*)\"""", re.DOTALL)
"""Text, comments, and names in double quotes."""


def subset(
    source: str,
    destination: str,
    *,
    count: int | None = None,
    fraction: float | None = None,
    where: str | None = None,
    keys: str | None = None,
    seed: int = 0,
    num_cpus: float = 1.0,
) -> Manifest:
    """Write the manifest of a subset of a data set.

    Args:
        count, fraction: images to take at random; give one of the four.
        where: an SQLite expression on the columns that are passed through and `key`, `label`,
            `width` and `height`. Needs Ray, as `keys` does.
        keys: a file with the keys of the images to take.

    Raises:
        ValueError: not exactly one of them is given, the subset would be empty or larger than the
            set, a key is not in the data set, or the destination holds a data set already.
    """
    whole = open_dataset(source)
    given = {"count": count, "fraction": fraction, "where": where, "keys": keys}
    if len([name for name, value in given.items() if value is not None]) != 1:
        text = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"subset: {text}; give one of the four")
    if where is not None or keys is not None:
        return _matching(whole, destination, where, keys, num_cpus)
    wanted = count if count is not None else round(whole.num_images * (fraction or 0))
    if not 0 < wanted <= whole.num_images:
        raise ValueError(
            f"subset: {wanted} of {whole.num_images} images; use from 1 to {whole.num_images}"
        )
    order = np.argsort(keys_of(key_of(_SUBSET, seed), np.arange(whole.num_row_groups)))
    ends = np.cumsum(whole.rows[order], dtype=np.int64)
    last = int(np.searchsorted(ends, wanted))
    partial = int(order[last])
    kept = int(whole.rows[partial]) - (int(ends[last]) - wanted)
    left_out = {partial: whole.stored_rows(partial)[kept:].tolist()}
    origin = {"subset_of": whole.fingerprint, "seed": seed, "count": wanted}
    return derive(whole, left_out, destination, origin, groups=order[: last + 1])


def _matching(
    whole: Manifest, destination: str, where: str | None, keys: str | None, num_cpus: float
) -> Manifest:
    """The images for which an expression is true, or whose keys are listed."""
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    origin: dict[str, object] = {"subset_of": whole.fingerprint, "where": where}
    listed: set[str] = set()
    if keys is not None:
        content = locate(keys).read()
        listed = set(filter(None, content.decode("utf-8-sig").splitlines()))
        origin = {"subset_of": whole.fingerprint, "keys": hashlib.sha256(content).hexdigest()}
    elif where is not None:
        _rows_where(where, _facts_schema(whole), [])  # an error before any file is read
    files = [int(index) for index in np.unique(whole.file_index)]
    shown = Shown(f"reading {whole.path}", whole.num_images)
    results = run_tasks(_rejected_rows, files, num_cpus, whole, where, listed, shown=shown)
    left_out = {group: rows for found, _ in results for group, rows in found.items()}
    taken = {key for _, found in results for key in found}
    if missing := sorted(listed - taken):
        raise ValueError(
            f"subset.keys={keys!r}: {len(missing)} of {len(listed)} keys are not in "
            f"{whole.path!r}, such as {missing[:3]}; remove them from the list"
        )
    if sum(map(len, left_out.values())) == whole.num_images:
        raise ValueError(f"subset: no image of {whole.path!r} matches {where or keys!r}; change it")
    return derive(whole, left_out, destination, origin)


def _facts_schema(whole: Manifest) -> dict[str, str]:
    """SQLite type of each column that an expression may name."""
    fixed = {"key": "TEXT", "label": "TEXT", "width": "INTEGER", "height": "INTEGER"}
    return fixed | dict.fromkeys(whole.text_columns, "NUMERIC")


def _rejected_rows(
    file_index: int, whole: Manifest, where: str | None, listed: set[str]
) -> tuple[dict[int, list[int]], list[str]]:
    """The stored rows of each row group that do not match, and which of the keys were found."""
    reader, schema = RowGroupReader(whole), _facts_schema(whole)
    left_out, taken, num_images = {}, [], 0
    for group in np.flatnonzero(whole.file_index == file_index).tolist():
        stored = whole.stored_rows(group).tolist()
        if where is None:
            keys = reader.texts(group, "key")
            chosen = {row for row, key in enumerate(keys) if key in listed}
            taken += [keys[row] for row in chosen]
        else:
            labels = [whole.classes[i] if i >= 0 else None for i in reader.first_labels(group)]
            others = [reader.column(group, n).to_pylist() for n in schema if n != "label"]
            kept = [[column[row] for row in stored] for column in others]
            chosen = _rows_where(where, schema, list(zip(kept[0], labels, *kept[1:], strict=True)))
        left_out[group] = [at for row, at in enumerate(stored) if row not in chosen]
        num_images += len(stored)
        report_done(num_images)
    return left_out, taken


def _rows_where(where: str, schema: Mapping[str, str], rows: list[tuple[Any, ...]]) -> set[int]:
    """Indices of the rows for which an expression is true.

    Raises:
        ValueError: it is not valid, names a missing column, or has a query in it, which would only
            see these rows.
    """
    known = {name.lower() for name in schema}
    for match in _QUOTED.finditer(where):
        # SQLite takes an unknown column name for text, which is true for all rows or for none.
        if match[1] is not None and match[1].replace('""', '"').lower() not in known:
            raise ValueError(
                f"subset.where={where!r}: no such column: {match[1]}; the data set has the columns "
                f"{', '.join(schema)}, and text needs single quotes"
            )
    queries = 0

    def allowed(action: int, *_: str | None) -> int:
        nonlocal queries
        queries += action == sqlite3.SQLITE_SELECT
        return sqlite3.SQLITE_OK if queries <= 1 else sqlite3.SQLITE_DENY

    columns = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}" {t}' for name, t in schema.items())
    try:
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.execute(f"CREATE TABLE images ({columns})")
            places = ", ".join("?" * len(schema))
            database.executemany(f"INSERT INTO images VALUES ({places})", rows)  # noqa: S608
            database.set_authorizer(allowed)
            query = f"SELECT rowid FROM images WHERE ({where}\n)"  # noqa: S608  # the user's own
            return {row - 1 for (row,) in database.execute(query)}
    except sqlite3.Error as error:
        reason = "it contains a query" if queries > 1 else error
        raise ValueError(
            f"subset.where={where!r}: {reason}; the data set has the columns {', '.join(schema)}"
        ) from error


def derive(
    whole: Manifest,
    left_out: Mapping[int, Iterable[int]],
    destination: str,
    origin: dict[str, object],
    groups: NDArray[np.int64] | None = None,
) -> Manifest:
    """Write a manifest over the shards of another data set, and open it.

    Args:
        left_out: for a row group, the stored rows that the new set lacks, in addition to those that
            the other set lacks.
        groups: row groups to take, in any order; None = all. Groups without rows are left out.

    Raises:
        ValueError: the destination holds a data set already.
    """
    refuse_existing(destination, MANIFEST_FILE, STAGING_FOLDER)
    chosen = np.arange(whole.num_row_groups) if groups is None else np.sort(groups)
    gone = {g: sorted({*left_out.get(g, ()), *whole.dropped.get(g, ())})
            for g in {*left_out, *whole.dropped}}  # fmt: skip
    rows = whole.rows.copy()
    for group, stored in gone.items():
        rows[group] -= len(stored) - len(whole.dropped.get(group, ()))
    chosen = chosen[rows[chosen] > 0]
    dropped = {
        place: np.array(gone[group], np.int32)
        for place, group in enumerate(chosen.tolist())
        if gone.get(group)
    }
    write_manifest(
        locate(destination),
        RowGroupColumns.chosen(whole, chosen, rows[chosen], dropped),
        files=whole.files,
        classes=whole.classes,
        max_labels=whole.max_labels,
        text_columns=whole.text_columns,
        root=locate(whole.root).uri,
        origin=whole.about | origin,
        largest_pixels=whole.largest_pixels,
    )
    return open_dataset(destination)


def refuse_existing(destination: str, *names: str) -> None:
    """Raise a ValueError if the destination holds a file of one of the names."""
    locate(destination).refuse_file_in_its_place("destination")
    for name in names:
        if locate(destination).child(name).exists():
            raise ValueError(
                f"destination={destination!r} already holds a data set, or a part of one "
                f"({name}); choose another folder, or move the file away"
            )
