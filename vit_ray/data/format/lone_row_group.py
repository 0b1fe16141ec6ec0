"""A row group read without the footer of its file, by that of another file of the same columns.

What a footer says of a row group's columns (where they begin, how long they are, how many values
they have) stands in the page headers too. So a footer for this row group alone is made: the schema
as in the other footer, the columns as the headers have them. Both are Thrift structs in its compact
protocol (parquet.thrift of Apache Parquet).
"""

from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

MAGIC: Final = b"PAR1"
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = *range(1, 10), 12
Struct = dict[int, tuple[int, Any]]
"""Type and value of each field, by its number; a list's value is (type, values)."""


class OtherLayoutError(ValueError):
    """The row group does not have the columns of the given footer."""


class FooterTemplate:
    """To read row groups by the footer of another file.

    Args:
        footer: to the end of that file.
    """

    def __init__(self, footer: bytes) -> None:
        self._footer: Struct = _Reader(footer).struct()
        groups = self._footer[4][1][1]
        columns = [column[3][1] for column in groups[0][1][1][1]] if groups else []
        # Type, encodings, path and codec.
        self._columns: list[Struct] = [{n: column[n] for n in (1, 2, 3, 4)} for column in columns]
        metadata = pq.read_metadata(pa.BufferReader(MAGIC + footer))
        paths = [metadata.schema.column(i) for i in range(len(columns))]
        self._is_nested = [path.max_repetition_level > 0 for path in paths]

    def metadata_of(self, content: pa.Buffer, rows: int) -> pq.FileMetaData:
        """What a file would say that consists of the bytes of one row group.

        Args:
            content: the row group, with the file's magic in front where it is the first.

        Raises:
            OtherLayoutError: it is of other columns, or has not so many rows.
        """
        at = first = len(MAGIC) * (content[: len(MAGIC)].to_pybytes() == MAGIC)
        columns = []
        try:
            for static, is_nested in zip(self._columns, self._is_nested, strict=True):
                start, values = at, 0
                # A list has a value for each row at least; more pages of it are left over then.
                while values < rows:
                    reader = _Reader(content, at)
                    header = reader.struct()
                    at = reader.at + header[3][1]
                    values += header[5][1][1][1]
                if not is_nested and values != rows:
                    raise OtherLayoutError("a column has another number of rows")
                size = (_I64, at - start)
                column = {**static, 5: (_I64, values), 6: size, 7: size, 9: (_I64, start)}
                columns.append({2: (_I64, 0), 3: (_STRUCT, column)})
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise OtherLayoutError(f"its page headers are others ({error})") from error
        if at != content.size:
            raise OtherLayoutError("it has more columns, or more pages of a list")
        group = {
            1: (_LIST, (_STRUCT, columns)), 2: (_I64, at - first), 3: (_I64, rows),
        }  # fmt: skip
        footer = self._footer | {3: (_I64, rows), 4: (_LIST, (_STRUCT, [group]))}
        written = _written(_STRUCT, footer)
        ends = len(written).to_bytes(4, "little") + MAGIC
        return pq.read_metadata(pa.BufferReader(MAGIC + written + ends))


class _Reader:
    """Reads values one after the other, from a place on."""

    def __init__(self, content: Any, at: int = 0) -> None:
        self._content, self.at = memoryview(content).cast("B"), at

    def struct(self) -> Struct:
        found: Struct = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            found[number] = (kind, kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind))
        return found

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) > 127:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)

    def _value(self, kind: int) -> Any:
        if kind in (_I16, _I32, _I64):
            return self._signed()
        if kind == _STRUCT:
            return self.struct()
        if kind == _LIST:
            head = self._byte()
            count = self._unsigned() if head >> 4 == 15 else head >> 4
            return head & 15, [self._value(head & 15) for _ in range(count)]
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind not in (_BINARY, _DOUBLE):
            raise OtherLayoutError(f"a field is of type {kind}")
        count = self._unsigned() if kind == _BINARY else 8
        self.at += count
        return bytes(self._content[self.at - count : self.at])


def _written(kind: int, value: Any) -> bytes:
    if kind in (_I16, _I32, _I64):
        return _varint(value << 1 if value >= 0 else ~value << 1 | 1)
    if kind in (_TRUE, _FALSE, _BYTE):
        return bytes([value])
    if kind == _DOUBLE:
        return bytes(value)
    if kind == _BINARY:
        return _varint(len(value)) + value
    if kind == _LIST:
        of, values = value
        count = len(values)
        head = bytes([count << 4 | of]) if count < 15 else bytes([15 << 4 | of]) + _varint(count)
        return head + b"".join(_written(of, one) for one in values)
    parts, before = [], 0
    for number, (field, one) in sorted(value.items()):
        if field in (_TRUE, _FALSE):
            parts.append(bytes([(number - before) << 4 | (_TRUE if one else _FALSE)]))
        else:
            parts.append(bytes([(number - before) << 4 | field]) + _written(field, one))
        before = number
    return b"".join(parts) + b"\0"


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
