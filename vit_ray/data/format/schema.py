"""The parquet layout of a data set: column names, types and file names.

A shard holds one row per image: its encoded bytes, the labels, a key that names the
image in its source, its size in pixels, and a checksum, so that one damaged image costs no other;
the checksum of its row group is in the manifest. Where JPEG files were given restart markers
(`convert.index_jpeg`), two columns follow: the checksum of the file as it came, and where the parts
lie that a crop is made of (`data.jpeg_index`), null for what was left as it came. Columns of
text that a source has with its images (`convert.columns`) follow; training does not
decode them.
"""

import zlib
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

FORMAT_VERSION: Final = 3
"""A reader refuses a manifest with any other."""

MANIFEST_FILE: Final = "manifest.parquet"
"""Its presence is the commit mark of a data set."""

STAGING_FOLDER: Final = "_staging"
"""Holds the plan and progress of a conversion until the manifest is written."""

REJECTED_FILE: Final = "rejected.parquet"
DAMAGED_FILE: Final = "damaged.parquet"
"""Images of the set in whose files libjpeg sees damage; columns as in `REJECTED_FILE`."""
REPORT_FILE: Final = "report.json"
SOURCE_FILE: Final = "source.json"
"""Settings of the conversion, and the versions of the parts of its source."""

NO_LABEL: Final = -1
"""Pads the `labels` of a batch to the width of the data set's longest label list."""

SHARD_SCHEMA: Final = pa.schema(
    [
        pa.field("image", pa.binary(), nullable=False),
        pa.field("labels", pa.list_(pa.int32()), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("crc32", pa.uint32(), nullable=False),
    ]
)


INDEX_SCHEMA: Final = pa.schema(
    [
        pa.field("original_crc32", pa.uint32(), nullable=False),
        pa.field(
            "restart_index",
            pa.struct(
                [
                    pa.field("front", pa.uint32(), nullable=False),
                    pa.field("tables_at", pa.uint32(), nullable=False),
                    pa.field("size_at", pa.uint32(), nullable=False),
                    pa.field("unit_height", pa.uint32(), nullable=False),
                    pa.field("unit_width", pa.uint32(), nullable=False),
                    pa.field("columns", pa.uint32(), nullable=False),
                    pa.field("offsets", pa.list_(pa.uint32()), nullable=False),
                ]
            ),
        ),
    ]
)


RESERVED_NAMES: Final = (*SHARD_SCHEMA.names, *INDEX_SCHEMA.names)
"""What no column of text may be called."""


def shard_schema(text_columns: Sequence[str], *, is_indexed: bool = False) -> pa.Schema:
    """The schema of shards with text columns after the common ones."""
    index = INDEX_SCHEMA if is_indexed else ()
    return pa.schema([*SHARD_SCHEMA, *index, *((name, pa.string()) for name in text_columns)])


def is_shard_schema(schema: pa.Schema) -> bool:
    """Whether it is a valid schema of a shard, with any text columns."""
    names, fixed = schema.names, len(SHARD_SCHEMA)
    is_indexed = has_index(schema)
    text_columns = names[fixed + is_indexed * len(INDEX_SCHEMA) :]
    return bool(schema.equals(shard_schema(text_columns, is_indexed=is_indexed)))


def has_index(schema: pa.Schema) -> bool:
    """Whether its images may have a restart index."""
    fixed = len(SHARD_SCHEMA)
    names = schema.names[fixed : fixed + len(INDEX_SCHEMA)]
    return bool(names == INDEX_SCHEMA.names)


ROW_GROUP_SCHEMA: Final = pa.schema(
    [
        pa.field("file_index", pa.int32(), nullable=False),
        pa.field("row_group", pa.int32(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("dropped", pa.list_(pa.int32())),
        pa.field("crc32", pa.uint32(), nullable=False),
    ]
)

REJECTED_SCHEMA: Final = pa.schema(
    [pa.field("key", pa.string(), nullable=False), pa.field("reason", pa.string(), nullable=False)]
)


def shard_name(index: int, num_shards: int) -> str:
    """File name of shard `index`, sortable and telling how many there are."""
    return f"part-{index:05d}-of-{num_shards:05d}.parquet"


def checksum(content: bytes | pa.Buffer, before: int = 0) -> int:
    """CRC-32 of some bytes, or of all of them where `before` is that of those before."""
    return zlib.crc32(content, before)
