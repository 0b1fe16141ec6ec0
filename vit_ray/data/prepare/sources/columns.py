"""Fields of a source that are passed through: captions, ids. All are stored as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vit_ray.data.format.schema import RESERVED_NAMES


def extra_of(fields: Mapping[str, Any], columns: Sequence[str]) -> tuple[str | None, ...]:
    """Values of some fields: text as it stands, anything else as JSON, None where there is none."""
    return tuple(stored_text(fields.get(name)) for name in columns)


def check_columns(columns: Sequence[str]) -> None:
    """Check the names that are asked for.

    Raises:
        ValueError: one is named twice, or is a column of every data set.
    """
    for place, name in enumerate(columns):
        if name in RESERVED_NAMES or name in columns[:place]:
            raise ValueError(
                f"convert.columns={list(columns)}: {name!r} stands there twice, or is one of "
                f"{list(RESERVED_NAMES)}, which data sets have; name other fields"
            )


def stored_text(value: Any) -> str | None:
    """The value as it is stored.

    Raises:
        ValueError: there are bytes in it, which are no text.
    """
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_text_of)


def _text_of(value: Any) -> str:
    """Dates and the like."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise ValueError("a field of convert.columns has bytes in it, which are no text")
    return str(value)
