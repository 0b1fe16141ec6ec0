"""Labels of one image as the source gives them, with what the source says they are.

Several labels are a list: a JSON list, a list column of parquet, or a CSV column `labels`. Text is
one label as it stands, whatever commas it holds.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from vit_ray.data.prepare.sources.entries import LabelKind

MOST_LABEL_CHARACTERS: Final = 1000
MOST_TEXT_BYTES: Final = 1 << 16
"""Of a `.cls` file of a tar shard."""
MOST_JSON_BYTES: Final = 1 << 20
"""Of a `.json` file of a tar shard, and of a line of a list."""

LABEL_FIELDS: Final = ("labels", "label", "cls", "class")

Labels = tuple[tuple[str, ...], LabelKind]


def labels_of_record(fields: Mapping[str, Any]) -> Labels:
    """Labels of a JSON object or of a CSV row, under the first of `LABEL_FIELDS` that it has.

    Raises:
        ValueError: it has none, or something else than text, integers or a list of them.
    """
    for name in LABEL_FIELDS:
        if fields.get(name) is not None:
            return labels_of_value(fields[name])
    raise ValueError("it has no label")


def labels_of_value(value: Any) -> Labels:
    """Labels of a value as JSON or parquet has it.

    Raises:
        ValueError: it is nothing but text, an integer, or a list of one of them.
    """
    values = value if isinstance(value, list) else [value]
    if not values or any(v is None for v in values):
        raise ValueError("it has no label" if value is None or value == [] else "a label is null")
    kinds = {type(v) for v in values}
    if kinds == {int}:
        return tuple(dict.fromkeys(map(str, values))), "index"
    if kinds == {str}:
        return tuple(dict.fromkeys(map(checked_label, values))), "name"
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(f"its label is of type {found}; expected text, an integer, or a list of them")


def labels_of_text(text: str) -> Labels:
    """The one label of a text.

    Raises:
        ValueError: it is blank or too long.
    """
    return (checked_label(text),), "text"


def labels_of_json(content: bytes) -> Labels:
    """Labels of a JSON object.

    Raises:
        ValueError: it is no object with usable labels.
    """
    return labels_of_record(json_object(content))


def json_object(content: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: it is something else.
    """
    try:
        fields = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is a JSON {type(fields).__name__}, not an object")
    return fields


def checked_label(text: str) -> str:
    """The label without blanks around it.

    Raises:
        ValueError: nothing is left, it has a line break, or it is too long.
    """
    label = text.strip()
    if not label:
        raise ValueError("its label is empty")
    if "\n" in label or "\r" in label:
        raise ValueError(f"its label has a line break: {label[:40]!r}")
    if len(label) > MOST_LABEL_CHARACTERS:
        raise ValueError(
            f"its label has {len(label):,} characters; the most are {MOST_LABEL_CHARACTERS:,}"
        )
    return label
