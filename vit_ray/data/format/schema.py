"""The parquet layout of a data set: column names, types and file names.

A shard holds one row per image: the encoded bytes as they came, the labels, a key that names the
image in its source, its size in pixels, and a checksum, by which one damaged image is told from its
neighbours; that of its row group is in the manifest. Columns of text that a source has beside its
images (`convert.columns`) stand behind these; training does not decode them.
"""

import zlib
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

FORMAT_VERSION: Final = 2
"""Written to every manifest; a reader refuses a higher one. 2 has checksums of every byte."""

MANIFEST_FILE: Final = "manifest.parquet"
"""Its presence is the commit mark of a data set."""

STAGING_FOLDER: Final = "_staging"
"""Holds the plan and progress of a conversion until the manifest is written."""

REJECTED_FILE: Final = "rejected.parquet"
REPORT_FILE: Final = "report.json"
CHECKSUMS_FILE: Final = "SHA256SUMS"
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


def shard_schema(columns: Sequence[str]) -> pa.Schema:
    """That of shards with columns of text behind those that all have."""
    return pa.schema([*SHARD_SCHEMA, *((name, pa.string()) for name in columns)])


ROW_GROUP_SCHEMA: Final = pa.schema(
    [
        pa.field("file_index", pa.int32(), nullable=False),
        pa.field("row_group", pa.int32(), nullable=False),
        pa.field("rows", pa.int32(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("dropped", pa.list_(pa.int32())),
        pa.field("crc32", pa.uint32()),
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
