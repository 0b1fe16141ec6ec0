"""Files in which a conversion keeps what its tasks found, each compared with checksums when read.

Tables are parquet with checksums of pages. Facts are one line of JSON, and a line with its
checksum. What differs is read once more: it may be as it was written, and have been changed on its
way.
"""

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.dataset import checksum
from vit_ray.data.shard_writer import closed_after
from vit_ray.storage import Location, naming, read_again, with_retries

_READERS: Final = 16
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def write_facts(file: Location, facts: dict[str, Any]) -> None:
    """Write JSON, with lists for sets, and its checksum."""
    content = json.dumps(facts, default=sorted).encode()
    file.write(b"%s\n%08x" % (content, checksum(content)))


def read_facts(file: Location) -> dict[str, Any]:
    """What `write_facts` wrote; raises ValueError if the file is not what was written."""

    def read() -> dict[str, Any]:
        content, _, written = file.read().partition(b"\n")
        try:
            if written != b"%08x" % checksum(content):
                raise ValueError("its checksum differs")
            return dict(json.loads(content))
        except ValueError as error:
            raise ValueError(
                f"{file.uri!r} is not what was written ({error}); delete it, and run the same "
                "command again, which writes what is missing"
            ) from error

    return read_again(read, ValueError)


def read_many_facts(files: Iterable[Location]) -> Iterator[dict[str, Any]]:
    """The contents of small files, in order, a few read ahead: object stores answer slowly."""
    return ahead(read_facts, files, _READERS)


def ahead(
    work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int
) -> Iterator[_Result]:
    """The results of `work` on each item, in order, computed by threads a few items ahead."""
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_Result]] = deque()
        for item in items:
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()  # no limit: the storage limits each file
            waiting.append(pool.submit(work, item))
        for future in waiting:
            yield future.result()  # no limit: as above


@contextlib.contextmanager
def parquet_output(
    destination: Location, schema: pa.Schema, compression: str = "zstd"
) -> Iterator[pq.ParquetWriter]:
    """A writer of a file that becomes `destination` when the block ends without an error."""
    with (
        destination.output() as stream,
        closed_after(
            pq.ParquetWriter(stream, schema, compression=compression, write_page_checksum=True)
        ) as writer,
    ):
        yield writer


def read_row_groups(location: Location) -> Iterator[pa.Table]:
    """The row groups of a parquet file, each read with retries."""
    count = _read_parquet(location, lambda file: int(file.metadata.num_row_groups))
    return (read_row_group(location, number) for number in range(count))


def read_row_group(location: Location, number: int) -> pa.Table:
    """One row group of a parquet file."""

    def read(file: pq.ParquetFile) -> pa.Table:
        table = file.read_row_group(number)
        expected = file.metadata.row_group(number).num_rows
        if table.num_rows != expected:  # the header of a page lies
            raise pa.ArrowInvalid(
                f"row group {number} has {table.num_rows} rows; its footer says {expected}"
            )
        return table

    return _read_parquet(location, read)


def _read_parquet(location: Location, read: Callable[[pq.ParquetFile], _Result]) -> _Result:
    def read_once() -> _Result:
        with naming(location.uri), location.open() as source:
            return read(pq.ParquetFile(source, page_checksum_verification=True))

    return with_retries(
        lambda: read_again(read_once, OSError, pa.ArrowException), f"reading {location.path}"
    )
