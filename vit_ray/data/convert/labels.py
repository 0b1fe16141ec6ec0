"""Labels of one image as its source gives them, and the classes of a whole source.

Several labels are a list: a JSON list, a list column of parquet, or a CSV column `labels`. Text is
one label, even if it contains commas. Text is compared in Unicode's form NFC.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.rows import LabelKind, Row
from vit_ray.data.shards import RESERVED_NAMES

MOST_CLASSES: Final = 1_000_000
MOST_LABEL_CHARACTERS: Final = 1000
# Most bytes of a `.cls` file of a tar shard.
MOST_TEXT_BYTES: Final = 1 << 16
# Most bytes of a `.json` file of a tar shard, and of a line of a list.
MOST_JSON_BYTES: Final = 1 << 20
LABEL_FIELDS: Final = ("labels", "label", "cls", "class")
_INTEGER: Final = re.compile(r"-?[0-9]{1,100}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
# Images of which half would not have labels of their own.
_MANY: Final = 1000
# How tables write that there is no value, in lower case.
_MISSING: Final = {"nan", "none", "null", "na", "n/a", "<na>", "#n/a", "nat"}

Labels = tuple[tuple[str, ...], LabelKind]
LabelsAre = Literal["auto", "names", "indices"]


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
    found, shown = [n for n in dict.fromkeys(usual) if n in names], ", ".join(sorted(names)[:20])
    if wanted is not None and wanted not in names:
        raise ValueError(f"{whose} has no convert.{what}_field={wanted!r}, only {shown}")
    if wanted is None and len(found) != 1:
        several = f"several fields that may be the {what}: {', '.join(found)}"
        none = f"no field {' or '.join(dict.fromkeys(usual))}, only {shown}"
        raise ValueError(
            f"{whose} has {several if found else none}; choose one with convert.{what}_field"
        )
    return wanted or found[0]


def labels_of_value(value: Any) -> Labels:
    """Labels of a value from JSON or parquet.

    Raises:
        ValueError: it is not text, an integer, or a list of these; or a list of zeros and ones
            with a place for each class.
    """
    values = value if isinstance(value, list) else [value]
    if not values or any(v is None for v in values):
        raise ValueError("it has no label" if value is None or value == [] else "a label is null")
    kinds = {type(v) for v in values}
    if kinds <= {int, str}:
        check_no_places(values)
    if kinds == {int}:
        return tuple(dict.fromkeys(map(str, values))), "index"
    if kinds == {str}:
        return tuple(dict.fromkeys(map(checked_label, values))), "name"
    found = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise ValueError(f"its label is of type {found}; expected text, an integer, or a list of them")


def check_no_places(values: Sequence[Any]) -> None:
    """Raises ValueError for zeros and ones, with a place for each class, in numbers or as text."""
    if len(values) > len({*values}) and {*map(str, values)} <= {"0", "1"}:
        raise ValueError(
            f"its labels {list(values[:9])} are zeros and ones, with a place for each class "
            "(one-hot or multi-hot); store the numbers or names of its classes instead"
        )


def json_object(content: bytes) -> dict[str, Any]:
    """A JSON object; raises ValueError if it is something else."""
    try:
        fields = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"it is a JSON {type(fields).__name__}, not an object")
    return fields


def stored_text(value: Any) -> str | None:
    """A value of `convert.columns` as it is stored: text unchanged, anything else as JSON.

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


def check_columns(columns: Sequence[str]) -> None:
    """Raises ValueError if a name is given twice, or is a column of every data set."""
    for place, name in enumerate(columns):
        if name in RESERVED_NAMES or name in columns[:place]:
            raise ValueError(
                f"convert.columns={list(columns)}: {name!r} is given twice, or is one of "
                f"{list(RESERVED_NAMES)}, which data sets have; name other fields"
            )


def _has_control_character(text: str) -> bool:
    """Whether it looks like another text, or spans lines."""
    return not text.isprintable() and any(unicodedata.category(one) == "Cc" for one in text)


def checked_label(text: str) -> str:
    """The label without blanks around it, in the form NFC.

    Raises:
        ValueError: nothing is left, it has a line break or another control character, or it is too
            long.
    """
    label = unicodedata.normalize("NFC", text.strip())
    if not label:
        raise ValueError("its label is empty")
    if "\n" in label or "\r" in label:
        raise ValueError(f"its label has a line break: {label[:40]!r}")
    if _has_control_character(label):
        raise ValueError(f"its label has an invisible control character: {label[:40]!r}")
    if len(label) > MOST_LABEL_CHARACTERS:
        raise ValueError(
            f"its label has {len(label):,} characters; at most {MOST_LABEL_CHARACTERS:,} are "
            "allowed"
        )
    return label


def checked_names(names: Sequence[str], whose: str) -> list[str]:
    """Class names in the form NFC.

    Raises:
        ValueError: two have the same name, or names that look the same.
    """
    if hidden := [name for name in names if _has_control_character(name)]:
        raise ValueError(
            f"{whose} has the class name {hidden[0]!r} with an invisible control character; remove "
            "it"
        )
    normal = [unicodedata.normalize("NFC", name) for name in names]
    counts = Counter(name.strip() for name in normal)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(
            f"{whose} has several classes with the name {twice[0]!r}; give each its own name"
        )
    return normal


@dataclass
class SourceFacts:
    """What is kept of some units in addition to their rows.

    Attributes:
        kinds: of their labels, as `Row.kind`.
        counts: of labels that an image has.
        declared: class names of the units that declare them.
        columns: those that are passed through and that some image has.
        fields: `image` or `label`, and a field that they are read from, if a unit has only one.
        damages: position and reason for each unit whose rows end before it does.
        digest: differs between the images of different units.
        bytes: of all images whose length is known, and of the fields that are passed through.
    """

    labels: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    declared: set[tuple[str, ...]] = field(default_factory=set)
    columns: set[str] = field(default_factory=set)
    fields: set[tuple[str, str]] = field(default_factory=set)
    damages: list[str] = field(default_factory=list)
    digest: str = ""
    rows: int = 0
    bytes: int = 0
    unknown_lengths: int = 0

    @classmethod
    def of(cls, stored: dict[str, Any]) -> "SourceFacts":
        """From JSON, which has lists for sets and tuples."""
        sets = ("labels", "kinds", "counts", "columns")
        found = {name: set(stored[name]) for name in sets}
        found |= {name: set(map(tuple, stored[name])) for name in ("declared", "fields")}
        return cls(**stored | found)

    def add(self, row: Row, columns: tuple[str, ...] = ()) -> None:
        """Count a row."""
        self.rows += 1
        if row.problem is None:
            self.labels.update(row.labels)
            self.kinds.add(row.kind)
            self.counts.add(len(row.labels))
            values = zip(columns, row.extra, strict=True)
            self.columns.update(name for name, value in values if value is not None)
            self.bytes += max(row.length, 0) + row.extra_bytes
            self.unknown_lengths += row.length < 0
            check_class_count(len(self.labels), "the source")

    def __add__(self, other: "SourceFacts") -> "SourceFacts":
        pairs = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        return SourceFacts(**{n: a | b if type(a) is set else a + b for n, (a, b) in pairs.items()})


def classes_of(
    facts: SourceFacts, config: ConvertConfig, *, of_folders: bool
) -> tuple[list[str], bool]:
    """Class names, and whether labels are indices; errors as `class_names`."""
    if facts.labels == {"0", "1"} and facts.counts == {2}:
        raise ValueError(
            "convert: every image has the labels 0 and 1, as lists do with a place for each class "
            "(one-hot or multi-hot); store the numbers or names of its classes instead"
        )
    names = list(config.classes or ()) or _declared_names(facts)
    if names is None and facts.rows >= _MANY and len(facts.labels) > facts.rows // 2:
        raise ValueError(
            f"convert: {facts.rows:,} images have {len(facts.labels):,} different labels, such as "
            f"{min(facts.labels)[:60]!r}; check convert.label_field, or give convert.classes"
        )
    return class_names(facts.labels, facts.kinds, names, config.labels_are, of_folders=of_folders)


def _declared_names(facts: SourceFacts) -> list[str] | None:
    """The names that the files of a source declare; raises ValueError if they differ."""
    declared = sorted(facts.declared)
    if len(declared) > 1:
        differing = [(a, b) for a, b in zip(*declared[:2], strict=False) if a != b]
        such = f", such as {differing[0][0]!r} and {differing[0][1]!r}" if differing else ""
        raise ValueError(
            f"convert: files of the source declare different class names{such}; give them by "
            "convert.classes, or convert some of the files"
        )
    return list(declared[0]) if declared else None


def class_names(
    found: Set[str],
    kinds: Set[str],
    names: list[str] | None,
    labels_are: LabelsAre,
    *,
    of_folders: bool = False,
) -> tuple[list[str], bool]:
    """Class names in label order, and whether labels are indices into them.

    Without names they are the labels, sorted, as numbers if they are integers.

    Args:
        found: labels of the source.
        kinds: how the source marks its labels: `name`, `index`, or neither.
        names: as given or declared.
        of_folders: labels are the names of folders, and so class names even if they look like
            numbers.

    Raises:
        ValueError: a label is not one of the names, or the meaning of the labels is not clear.
    """
    labels = sorted(found)
    check_class_count(len(labels), "the source")
    if names is None:
        _check_spelling(labels, is_lenient=of_folders or labels_are == "names")
        are_numbers = "name" not in kinds and all(map(_INTEGER.fullmatch, labels))
        if labels_are == "indices":
            if wrong := [one for one in labels if not are_numbers or str(abs(int(one))) != one]:
                raise ValueError(
                    f"convert.labels_are=indices: labels such as {wrong[:5]} are not integers from "
                    "0 on; correct them, or set convert.labels_are=names"
                )
            count = max(map(int, labels), default=-1) + 1
            check_class_count(count, "the source")
            return [str(index) for index in range(count)], True  # a name for every index
        if are_numbers and not of_folders and labels_are == "auto":
            _check_gapless(labels)
        return sorted(labels, key=lambda text: (int(text), text)) if are_numbers else labels, False
    are_indices = _are_indices(labels, kinds, names, labels_are)
    allowed = {str(i) for i in range(len(names))} if are_indices else set(names)
    if unknown := [label for label in labels if label not in allowed]:
        what = f"indices of the {len(names)} classes" if are_indices else "in the classes"
        raise ValueError(
            f"convert: labels {unknown[:5]} are not {what} {names[:20]}; correct convert.classes, "
            "or set convert.labels_are to names or indices"
        )
    return list(names), are_indices


def _check_spelling(labels: list[str], *, is_lenient: bool) -> None:
    """Raises ValueError for labels that are probably one class in two spellings, or no labels."""
    advice = "correct them, or list all classes in convert.classes"
    spellings = defaultdict(list)
    for label in labels:
        spellings[label.casefold()].append(label)
    if alike := [names for names in spellings.values() if len(names) > 1]:
        raise ValueError(f"convert: the labels {alike[0]} differ only in capitals; {advice}")
    if is_lenient:
        return
    if missing := [label for label in labels if label.lower() in _MISSING]:
        raise ValueError(
            f"convert: the label {missing[0]!r} usually means that there is none; {advice}, or set "
            "convert.labels_are=names"
        )
    if labels and {label.lower() for label in labels} <= {"true", "false"}:
        raise ValueError(
            f"convert: the labels {labels} are truth values, and not class names; {advice}, or "
            "set convert.labels_are=names"
        )
    others = [label for label in labels if not _INTEGER.fullmatch(label)]
    if others and all(map(_NUMBER.fullmatch, labels)):
        raise ValueError(
            f"convert: labels such as {others[:3]} are numbers with decimals; write integers, or "
            "set convert.labels_are=names"
        )


def _check_gapless(labels: list[str]) -> None:
    """Raises ValueError if integers are not 0 to n - 1: they may not be labels."""
    numbers = sorted(map(int, labels))
    if numbers == list(range(len(numbers))):
        return
    none = " (-1 by convention means that an image is not labelled)" if numbers[0] < 0 else ""
    raise ValueError(
        f"convert: labels such as {labels[:3]} are {len(numbers)} integers from {numbers[0]} to "
        f"{numbers[-1]}{none}, and not 0 to {len(numbers) - 1}, and the source declares no class "
        "names; set convert.labels_are=indices to keep them, convert.labels_are=names to renumber "
        "them from 0 on, or give convert.classes"
    )


def _are_indices(
    labels: list[str], kinds: Set[str], names: list[str], labels_are: LabelsAre
) -> bool:
    """As the source declares; if it does not, integers are indices when names are words.

    Raises:
        ValueError: both labels and class names are numbers, but not the same.
    """
    if labels_are != "auto" or kinds <= {"name"} or kinds == {"index"}:
        return labels_are == "indices" if labels_are != "auto" else kinds == {"index"}
    if not all(map(_INTEGER.fullmatch, labels)):
        return False
    if not any(map(_INTEGER.fullmatch, names)):
        return True
    if all(name == str(i) for i, name in enumerate(names)):
        return False
    raise ValueError(
        f"convert: labels such as {labels[:5]} may be names or indices of the classes {names[:5]}; "
        "set convert.labels_are=names or convert.labels_are=indices"
    )


def check_class_count(count: int, source: str) -> None:
    """Raises ValueError for more labels than any data set has classes."""
    if count > MOST_CLASSES:
        raise ValueError(
            f"{source!r} has more than {MOST_CLASSES:,} different labels; check convert.label_field"
        )
