"""Fields of a source that are passed through: captions, ids. All are stored as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vit_ray.data.shards import RESERVED_NAMES


def extra_of(fields: Mapping[str, Any], columns: Sequence[str]) -> tuple[str | None, ...]:
    """Values of some fields: text unchanged, anything else as JSON, None if missing."""
    return tuple(stored_text(fields.get(name)) for name in columns)


def check_columns(columns: Sequence[str]) -> None:
    """Check the requested names.

    Raises:
        ValueError: a name is given twice, or is a column of every data set.
    """
    for place, name in enumerate(columns):
        if name in RESERVED_NAMES or name in columns[:place]:
            raise ValueError(
                f"convert.columns={list(columns)}: {name!r} is given twice, or is one of "
                f"{list(RESERVED_NAMES)}, which data sets have; name other fields"
            )


def stored_text(value: Any) -> str | None:
    """The value as it is stored.

    Raises:
        ValueError: it contains bytes, which are not text.
    """
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_text_of)


def _text_of(value: Any) -> str:
    """Dates and similar values."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("a field of convert.columns contains bytes, which are not text")
    return str(value)
