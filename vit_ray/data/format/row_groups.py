"""Row groups of a data set as encoded images, checked against the manifest."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.schema import SHARD_SCHEMA, checksum
from vit_ray.retry import is_denied, is_transient, with_retries
from vit_ray.storage import Location

_COLUMNS: Final = ["image", "labels", "key", "crc32"]
_OPEN_FILES: Final = 16


class ChangedImageError(ValueError):
    """The bytes of an image are not those that were converted."""


@dataclass(frozen=True)
class EncodedRows:
    """The rows of one stored row group."""

    images: pa.Array
    labels: pa.Array
    keys: pa.Array
    crc32: NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        """Memory that the rows take."""
        return int(self.images.nbytes + self.labels.nbytes + self.keys.nbytes + self.crc32.nbytes)

    def image(self, row: int) -> bytes:
        """Encoded bytes of one row, checked against its checksum.

        Raises:
            ChangedImageError: if they are not the bytes that were converted.
        """
        image: bytes = self.images[row].as_py()
        if checksum(image) != self.crc32[row]:
            raise ChangedImageError("the bytes changed since conversion (checksum differs)")
        return image

    def labels_of(self, row: int) -> list[int]:
        """Labels of one row."""
        labels: list[int] = self.labels[row].as_py()
        return labels

    def key(self, row: int) -> str:
        """Key of one row."""
        return str(self.keys[row].as_py())


class RowGroupReader:
    """Reads row groups by their index in the manifest, keeping some files open."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()

    def read(self, group: int) -> EncodedRows:
        """The rows of a row group as they are stored.

        Raises:
            ValueError: if the shard is missing, truncated, or not what the manifest says.
        """
        columns = self._columns(group, _COLUMNS)
        crc32 = columns["crc32"].to_numpy()
        return EncodedRows(columns["image"], columns["labels"], columns["key"], crc32)

    def first_labels(self, group: int) -> NDArray[np.int32]:
        """The first label of each image of a row group that counts, -1 where it has none.

        Reads no other column.

        Raises:
            ValueError: as `read`.
        """
        labels = self._columns(group, ["labels"])["labels"]
        offsets = labels.offsets.to_numpy()
        first = np.full(len(labels), -1, np.int32)
        has_any = np.diff(offsets) > 0
        first[has_any] = labels.values.to_numpy()[offsets[:-1][has_any]]
        return np.delete(first, self._manifest.dropped.get(group, []))

    def _columns(self, group: int, names: list[str]) -> dict[str, pa.Array]:
        """Columns of a row group as it is stored."""
        location = self._manifest.shard_location(group)
        with _explained(location):
            table = with_retries(
                lambda: self._read_once(group, location, names), f"reading {location.path}"
            )
        expected = int(self._manifest.rows[group]) + len(self._manifest.dropped.get(group, ()))
        if table.num_rows != expected:
            raise ValueError(
                f"shard {location.path!r} has {table.num_rows} rows in row group "
                f"{int(self._manifest.row_group[group])} and the manifest says {expected}: it was "
                f"changed after conversion; run jobs/verify.py."
            )
        return {name: _one_chunk(table[name]) for name in names}

    def _read_once(self, group: int, location: Location, names: list[str]) -> pa.Table:
        index = int(self._manifest.file_index[group])
        try:
            return self._file(index, location).read_row_group(
                int(self._manifest.row_group[group]), columns=names, use_threads=False
            )
        except OSError:
            self._open.pop(index, None)
            raise

    def _file(self, index: int, location: Location) -> pq.ParquetFile:
        if index not in self._open:
            self._open[index] = self._open_checked(index, location)
            if len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(index)
        return self._open[index]

    def _open_checked(self, index: int, location: Location) -> pq.ParquetFile:
        source = location.filesystem.open_input_file(location.path)
        expected = self._manifest.files[index].bytes
        if source.size() != expected:
            raise ValueError(
                f"shard {location.path!r} has {source.size()} bytes and the manifest says "
                f"{expected}: it was changed or cut short after conversion; run jobs/verify.py."
            )
        file = pq.ParquetFile(source, pre_buffer=not location.is_local)
        if not file.schema_arrow.equals(SHARD_SCHEMA):
            raise ValueError(
                f"shard {location.path!r} has a foreign schema ({file.schema_arrow.names}); "
                f"expected the columns {SHARD_SCHEMA.names} as jobs/convert.py writes them."
            )
        return file


@contextlib.contextmanager
def _explained(location: Location) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"shard {location.path!r} is missing though the manifest lists it; "
            f"restore the file or convert again."
        ) from error
    except OSError as error:
        if is_transient(error):
            raise OSError(
                f"shard {location.path!r} cannot be read: its storage does not answer ({error}); "
                f"the data need no repair, try again when it does."
            ) from error
        raise ValueError(_unreadable(location, error)) from error
    except pa.ArrowException as error:
        raise ValueError(_unreadable(location, error)) from error


def _unreadable(location: Location, error: Exception) -> str:
    advice = "run jobs/verify.py on the data set"
    if is_denied(error):
        advice = "check the credentials in the environment, and the rights that they give"
    return f"shard {location.path!r} cannot be read ({error}); {advice}."


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
