"""Files in which a conversion keeps what its tasks found, each compared with checksums when read.

Tables are parquet with checksums of pages. Facts are one line of JSON, and a line with its checksum
(none where a version before wrote it). What differs is read once more: it may be as it was written,
and have been changed on its way.
"""

import contextlib
import functools
import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.format.schema import checksum
from vit_ray.retry import second_look, with_retries
from vit_ray.storage import Location, closed_after

_READERS: Final = 16


def write_facts(file: Location, facts: dict[str, Any]) -> None:
    """Write JSON and its checksum."""
    content = json.dumps(facts).encode()
    file.write(b"%s\n%08x" % (content, checksum(content)))


def read_facts(file: Location) -> dict[str, Any]:
    """What `write_facts` wrote.

    Raises:
        ValueError: the file is not what was written.
    """
    return second_look(lambda: _read_facts(file), ValueError)


def _read_facts(file: Location) -> dict[str, Any]:
    content, _, written = file.read().partition(b"\n")
    try:
        if written and written != b"%08x" % checksum(content):
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
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()


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

    def read_one(number: int) -> tuple[pa.Table, int]:
        with location.filesystem.open_input_file(location.path) as source:
            file = pq.ParquetFile(source, page_checksum_verification=True)
            count = file.metadata.num_row_groups
            if number >= count:
                return file.schema_arrow.empty_table(), count
            return file.read_row_group(number, columns=columns), count

    def read(number: int) -> tuple[pa.Table, int]:
        return second_look(functools.partial(read_one, number), OSError, pa.ArrowException)

    number, count = only or 0, 1 if only is None else only + 1
    while number < count:
        table, total = with_retries(functools.partial(read, number), f"reading {location.path}")
        count = total if only is None else count
        yield table
        number += 1
