"""Files in which a conversion keeps what its tasks found, each compared with checksums when read.

Tables are parquet with checksums of pages. Facts are one line of JSON, and a line with its
checksum. What differs is read once more: it may be as it was written, and have been changed on its
way.
"""

import contextlib
import functools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.format.schema import checksum
from vit_ray.retry import read_again, with_retries
from vit_ray.storage import Location, closed_after

_READERS: Final = 16

_Result = TypeVar("_Result")


def write_facts(file: Location, facts: dict[str, Any]) -> None:
    """Write JSON and its checksum."""
    content = json.dumps(facts).encode()
    file.write(b"%s\n%08x" % (content, checksum(content)))


def read_facts(file: Location) -> dict[str, Any]:
    """What `write_facts` wrote.

    Raises:
        ValueError: the file is not what was written.
    """
    return read_again(lambda: _read_facts(file), ValueError)


def _read_facts(file: Location) -> dict[str, Any]:
    content, _, written = file.read().partition(b"\n")
    try:
        if written != b"%08x" % checksum(content):
            raise ValueError("its checksum differs")
        return dict(json.loads(content))
    except ValueError as error:
        raise ValueError(
            f"{file.uri!r} is not what was written ({error}); delete it, and run the same command "
            "again: it makes anew what is missing."
        ) from error


def read_many_facts(files: Iterable[Location]) -> Iterator[dict[str, Any]]:
    """The contents of small files, in order, a few read ahead: object stores answer slowly."""
    with ThreadPoolExecutor(_READERS) as pool:
        waiting: deque[Future[dict[str, Any]]] = deque()
        for file in files:
            waiting.append(pool.submit(read_facts, file))
            if len(waiting) > 2 * _READERS:
                yield waiting.popleft().result()  # no limit: retry.py limits each file
        for future in waiting:
            yield future.result()  # no limit: as above


@contextlib.contextmanager
def parquet_output(
    destination: Location, schema: pa.Schema, compression: str = "zstd"
) -> Iterator[pq.ParquetWriter]:
    """A writer of a file that becomes `destination` when the block ends without an error."""
    with (
        destination.atomic_output() as target,
        closed_after(target.filesystem.open_output_stream(target.path)) as stream,
        closed_after(
            pq.ParquetWriter(stream, schema, compression=compression, write_page_checksum=True)
        ) as writer,
    ):
        yield writer


def read_row_groups(
    location: Location, only: int | None = None, columns: list[str] | None = None
) -> Iterator[pa.Table]:
    """The row groups of a parquet file, or one of them, each read with retries."""

    def read(number: int, file: pq.ParquetFile) -> tuple[pa.Table, int]:
        count = file.metadata.num_row_groups
        if number >= count:
            return file.schema_arrow.empty_table(), count
        return _row_group(file, number, columns), count

    number, count = only or 0, 1 if only is None else only + 1
    while number < count:
        table, total = _read_parquet(location, functools.partial(read, number))
        count = total if only is None else count
        yield table
        number += 1


def read_row(location: Location, row: int) -> pa.Table:
    """One row of a parquet file; reads the row group that it lies in."""

    def read(file: pq.ParquetFile) -> pa.Table:
        rows = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        ends = np.cumsum(rows)
        group = int(np.searchsorted(ends, row, side="right"))
        return _row_group(file, group).slice(row - int(ends[group]) + rows[group], 1)

    return _read_parquet(location, read)


def _row_group(file: pq.ParquetFile, number: int, columns: list[str] | None = None) -> pa.Table:
    table = file.read_row_group(number, columns=columns)
    if table.num_rows != file.metadata.row_group(number).num_rows:  # the header of a page lies
        raise pa.ArrowInvalid(f"row group {number} has {table.num_rows} rows; its footer says more")
    return table


def _read_parquet(location: Location, read: Callable[[pq.ParquetFile], _Result]) -> _Result:
    def read_once() -> _Result:
        with location.filesystem.open_input_file(location.path) as source:
            return read(pq.ParquetFile(source, page_checksum_verification=True))

    def read_twice() -> _Result:
        return read_again(read_once, OSError, pa.ArrowException)

    return with_retries(read_twice, f"reading {location.path}")
