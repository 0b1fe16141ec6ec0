"""Parquet files as on the Hugging Face hub: `image` = {bytes, path}, `label` or `labels`.

The type that a file declares for its labels decides their meaning: a `ClassLabel` is an index into
its names, text is a name, a plain integer is an index into names that must be given.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.data.convert.labels import (
    Labels,
    check_columns,
    checked_names,
    chosen_field,
    labelled,
    labels_of_value,
)
from vit_ray.data.convert.rows import DamagedUnitError, Row, Unit
from vit_ray.data.shard_writer import MOST_ROW_GROUP_BYTES
from vit_ray.storage import is_of_the_store, locate

_IMAGE_COLUMNS: Final = ("image", "img", "jpg", "picture")
_LABEL_COLUMNS: Final = ("label", "labels", "fine_label", "cls")
# With their images, and labels alone.
_ROWS_AT_A_TIME: Final = {True: 64, False: 4096}
# Most rows of a row group; a footer that says more is damaged.
MOST_ROWS: Final = 10_000_000


class Columns(NamedTuple):
    """Which columns hold images and labels, and the kind of the labels.

    Attributes:
        image_path: the column of encoded bytes, without the file names next to them.
        class_names: of a `ClassLabel`.
    """

    image: str
    image_path: str
    label: str
    class_names: list[str] | None


def parquet_rows(unit: Unit, *, with_images: bool = True) -> Iterator[Row]:
    """Every row that the footer of a file declares.

    Args:
        with_images: False leaves them out; their lengths are the mean of their row group.

    Raises:
        DamagedUnitError: the file cannot be opened.
        ValueError: it has no columns of images and labels, or a row group cannot be read in place.
    """
    stem, first = unit.name.removesuffix(".parquet"), 0
    with opened(unit) as (source, columns):
        # With the names of files that are not embedded.
        image_columns = [columns.image] if with_images else []
        wanted = [*image_columns, columns.label, *unit.config.columns]
        for group in range(source.num_row_groups):
            metadata = source.metadata.row_group(group)
            chunks = map(metadata.column, range(metadata.num_columns))
            image_chunks = (c for c in chunks if c.path_in_schema == columns.image_path)
            size = sum(chunk.total_uncompressed_size for chunk in image_chunks)
            if unit.config.in_place:
                check_in_place(unit.path, group, metadata.num_rows, size)
            number, end, problem = first, first + metadata.num_rows, "it ends early"
            try:
                for batch in source.iter_batches(_ROWS_AT_A_TIME[with_images], [group], wanted):
                    images = _images_of(batch, columns) if with_images else None
                    for i in range(min(len(batch), end - number)):
                        image = None if images is None else images[i].as_py() or b""
                        length = size // metadata.num_rows if image is None else len(image)
                        row = Row(f"{stem}/{number:08d}", length=length, image=image)
                        read = functools.partial(_described, row, batch, i, columns, unit)
                        yield labelled(row, unit, read)
                        number += 1
            except (pa.ArrowException, OSError) as error:
                if is_of_the_store(error):
                    raise
                problem = str(error)
            for lost in range(number, end):
                yield Row(f"{stem}/{lost:08d}", problem=f"row group {group} is damaged: {problem}")
            first = end


def _images_of(batch: pa.RecordBatch, columns: Columns) -> pa.Array:
    images = batch.column(columns.image)
    if pa.types.is_struct(images.type):
        images = pa.compute.struct_field(images, "bytes")
    return images.cast(pa.large_binary())


def _described(
    row: Row, batch: pa.RecordBatch, at: int, columns: Columns, unit: Unit
) -> tuple[Labels, Mapping[str, Any]]:
    """The labels of a row of a batch, and its fields for `convert.columns`."""
    if row.image == b"":
        value = batch.column(columns.image)[at].as_py()
        if isinstance(value, dict) and value.get("path"):
            raise ValueError(
                f"its image has no bytes, only the path {value['path']!r}: it is not embedded; "
                "save the set with datasets' push_to_hub or save_to_disk after "
                "embed_table_storage, or convert the image files"
            )
        raise ValueError("its image has no bytes")
    labels = _labels_of(batch.column(columns.label)[at].as_py(), columns)
    return labels, {name: batch.column(name)[at].as_py() for name in unit.config.columns}


def check_in_place(path: str, group: int, rows: int, image_bytes: int) -> None:
    """Raises ValueError for a row group that has no rows, or too many bytes to be read at once."""
    if rows and image_bytes <= MOST_ROW_GROUP_BYTES:
        return
    found = f"{image_bytes >> 20:,} MiB of images" if rows else "no rows"
    raise ValueError(
        f"{path!r}: row group {group} has {found}; in place it needs rows, of at most "
        f"{MOST_ROW_GROUP_BYTES >> 20:,} MiB; convert to another folder with convert.in_place=false"
    )


def declared_classes(unit: Unit) -> list[str] | None:
    """The names of its `ClassLabel`; None if its labels are something else."""
    with opened(unit) as (_, columns):
        return columns.class_names


@contextlib.contextmanager
def opened(unit: Unit) -> Iterator[tuple[pq.ParquetFile, Columns]]:
    """A file, and the columns that it is read by; errors as `parquet_rows`."""
    with locate(unit.path).open() as file:
        try:
            source = pq.ParquetFile(file)
            groups = map(source.metadata.row_group, range(source.metadata.num_row_groups))
            if any(not 0 <= group.num_rows <= MOST_ROWS for group in groups):
                raise ValueError(f"a row group has more than {MOST_ROWS:,} rows")
        except (pa.ArrowException, OSError, ValueError) as error:
            if is_of_the_store(error):
                raise
            what = f"its footer cannot be read ({error})"
            raise DamagedUnitError(unit.path, file.size(), what) from error
        yield source, _columns_of(source.schema_arrow, unit)


def _columns_of(schema: pa.Schema, unit: Unit) -> Columns:
    """The columns that a file is read by.

    Raises:
        ValueError: they are missing, duplicated, ambiguous, or of types that cannot be read.
    """
    whose, config = repr(unit.path), unit.config
    declared = _declared(schema, whose)
    image = chosen_field("image", config.image_field, _IMAGE_COLUMNS, schema.names, whose)
    label = chosen_field(
        "label", config.label_field, (*_LABEL_COLUMNS, *declared), schema.names, whose
    )
    check_columns((image, label, *config.columns), schema.names, whose)
    element = schema.field(label).type
    if not pa.types.is_dictionary(element):
        element = getattr(element, "value_type", element)  # of a list
    if pa.types.is_dictionary(element):
        element = element.value_type
    is_text = str(element) in ("string", "large_string", "string_view")
    if not (is_text or pa.types.is_integer(element)):
        raise ValueError(
            f"{whose}: its label column {label!r} is {schema.field(label).type}; expected "
            "integers, text, or lists of one of them"
        )
    kind, image_path = schema.field(image).type, image
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind, image_path = kind.field("bytes").type, f"{image}.bytes"
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    # Null where no image is embedded.
    if not str(kind).startswith(("binary", "large_binary", "fixed_size_binary", "null")):
        raise ValueError(
            f"{whose}: its column {image!r} is {schema.field(image).type}; expected encoded "
            "images, as binary or as a struct with `bytes`"
        )
    names = declared.get(label)
    return Columns(image, image_path, label, names and checked_names(names, whose))


def _declared(schema: pa.Schema, whose: str) -> dict[str, list[str]]:
    """The class names that a file declares, by column."""
    try:
        metadata = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = metadata.get("info", {}).get("features") or {}
        found = {name: _names(features.get(name)) for name in schema.names}
        return {name: names for name, names in found.items() if names}
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{whose}: its huggingface metadata is damaged") from error


def _names(feature: Any) -> Any:
    """The names of a `ClassLabel`, or of a list of them, unchanged."""
    if isinstance(feature, list) and len(feature) == 1:
        return _names(feature[0])
    if not isinstance(feature, dict):
        return None
    return feature.get("names") or _names(feature.get("feature"))


def _labels_of(value: Any, columns: Columns) -> Labels:
    """Labels of a value of the label column; indices of a `ClassLabel` as its names.

    Raises:
        ValueError: as `labels_of_value`, or an index is not one of the names.
    """
    labels, kind = labels_of_value(value)
    names = columns.class_names
    if names is None or kind != "index":
        return labels, kind
    indices = [int(text) for text in labels]
    if unknown := [index for index in indices if not 0 <= index < len(names)]:
        none = " (by convention: not labelled)" if unknown == [-1] else ""
        raise ValueError(f"its label is {unknown[0]}{none}, of {len(names)} classes")
    return tuple(names[index] for index in indices), "name"
