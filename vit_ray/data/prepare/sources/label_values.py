"""Labels of one image as the source gives them, with how it marks them.

Several labels are a list: a JSON list, a list column of parquet, or a CSV column `labels`. Text is
one label, even if it contains commas.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vit_ray.data.prepare.sources.entries import LabelKind

MOST_LABEL_CHARACTERS: Final = 1000
MOST_TEXT_BYTES: Final = 1 << 16
"""Most bytes of a `.cls` file of a tar shard."""
MOST_JSON_BYTES: Final = 1 << 20
"""Most bytes of a `.json` file of a tar shard, and of a line of a list."""

LABEL_FIELDS: Final = ("labels", "label", "cls", "class")

Labels = tuple[tuple[str, ...], LabelKind]


def labels_of_record(fields: Mapping[str, Any], label_field: str | None = None) -> Labels:
    """Labels of a JSON object, from `label_field` or its field among `LABEL_FIELDS`.

    Raises:
        ValueError: it has none, several of these, or something other than text, integers or a list
            of them.
    """
    given = [name for name, value in fields.items() if value is not None]
    if not given or not {label_field, *LABEL_FIELDS} & {*given}:
        raise ValueError(f"it has no {'label' if label_field is None else repr(label_field)}")
    return labels_of_value(fields[chosen_field("label", label_field, LABEL_FIELDS, given, "it")])


def chosen_field(
    what: str, wanted: str | None, usual: Sequence[str], names: Sequence[str], whose: str
) -> str:
    """The name of the field with the image, or the label.

    Args:
        what: `image` or `label`, as in `convert.image_field`.
        wanted: by the user; None takes the only usual name that is there.
        names: of the existing fields.

    Raises:
        ValueError: it does not exist, or several of the usual names do.
    """
    if not names:
        raise ValueError(f"{whose} is empty; give a file with fields for images and labels")
    found = [name for name in dict.fromkeys(usual) if name in names]
    if wanted is not None and wanted not in names:
        raise ValueError(
            f"{whose} has no convert.{what}_field={wanted!r}, only {', '.join(sorted(names)[:20])}"
        )
    if wanted is None and len(found) != 1:
        several = f"several fields that may be the {what}: {', '.join(found)}"
        none = f"no field {' or '.join(dict.fromkeys(usual))}, only {', '.join(sorted(names)[:20])}"
        raise ValueError(
            f"{whose} has {several if found else none}; choose one with convert.{what}_field"
        )
    return wanted or found[0]


def labels_of_value(value: Any) -> Labels:
    """Labels of a value from JSON or parquet.

    Raises:
        ValueError: it is not text, an integer, or a list of these.
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


def has_control_character(text: str) -> bool:
    """Whether it looks like another text, or spans lines."""
    return not text.isprintable() and any(unicodedata.category(one) == "Cc" for one in text)


def checked_label(text: str) -> str:
    """The label without blanks around it.

    Raises:
        ValueError: nothing is left, it has a line break or another control character, or it is too
            long.
    """
    label = text.strip()
    if not label:
        raise ValueError("its label is empty")
    if "\n" in label or "\r" in label:
        raise ValueError(f"its label has a line break: {label[:40]!r}")
    if has_control_character(label):
        raise ValueError(f"its label has an invisible control character: {label[:40]!r}")
    if len(label) > MOST_LABEL_CHARACTERS:
        raise ValueError(
            f"its label has {len(label):,} characters; at most {MOST_LABEL_CHARACTERS:,} are "
            "allowed"
        )
    return label
