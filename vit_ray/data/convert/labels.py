"""Labels of one image as its source gives them, and the classes of a whole source.

Several labels are a list: a JSON list, a list column of parquet, or a CSV column `labels`. Text is
one label, even if it contains commas. Text is compared in Unicode's form NFC.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.rows import LabelKind, Row, Unit

MOST_CLASSES: Final = 1_000_000
# Most bytes of a text file of a tar shard, and of a line of a list.
MOST_TEXT_BYTES: Final = 1 << 20
LABEL_FIELDS: Final = ("labels", "label", "cls", "class")
_INTEGER: Final = re.compile(r"-?[0-9]{1,100}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
# A list as text, or zeros and ones with a place for each class.
_LIST: Final = re.compile(r"[\[(].*[\])]|[01](\.0*)?([ ,;|]+[01](\.0*)?)+")
# Unicode's category Cc: what spans lines, or makes a text look like another one.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Images of which half would not have labels of their own.
_MANY: Final = 1000
# How tables write that there is no value, in lower case.
_MISSING: Final = {"nan", "none", "null", "na", "n/a", "<na>", "#n/a", "nat"}

Labels = tuple[tuple[str, ...], LabelKind]
LabelsAre = Literal["auto", "names", "indices"]


def labelled(
    row: Row, unit: Unit, read: Callable[..., tuple[Labels, Mapping[str, Any]]], *arguments: Any
) -> Row:
    """The row with its labels and columns; an error in them is its problem.

    Args:
        read: gives the labels, and the fields that `convert.columns` names some of.
    """
    if row.problem is not None:
        return row
    try:
        (labels, kind), fields = read(*arguments)
        extra = tuple(stored_text(fields.get(name)) for name in unit.config.columns)
    except ValueError as error:
        return replace(row, problem=str(error))
    return replace(row, labels=labels, kind=kind, extra=extra)


def labels_of_record(fields: Mapping[str, Any], label_field: str | None) -> Labels:
    """Labels of an object; raises ValueError as `chosen_field` and `labels_of_value`."""
    given = [name for name, value in fields.items() if value is not None]
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
    candidates = [wanted] if wanted else list(dict.fromkeys(usual))
    found = [name for name in candidates if name in names]
    if len(found) == 1:
        return str(found[0])
    raise ValueError(
        f"{whose} needs one field for the {what} ({wanted or ' or '.join(dict.fromkeys(usual))}), "
        f"and has {', '.join(sorted(names)[:20]) or 'none'}; choose it with convert.{what}_field"
    )


def check_columns(wanted: Iterable[str], names: list[str], whose: str) -> None:
    """Raises ValueError for a column that is missing, or there twice."""
    for name in wanted:
        if names.count(name) != 1:
            raise ValueError(
                f"{whose} has {names.count(name) or 'no'} columns {name!r}; it has {names[:20]}"
            )


def labels_of_value(value: Any) -> Labels:
    """Labels of a value from JSON or parquet.

    Raises:
        ValueError: it is not text, an integer, or a list of these; or a list of zeros and ones
            with a place for each class.
    """
    values = value if isinstance(value, list) else [value]
    if not values or None in values:
        raise ValueError("it has no label" if value in (None, []) else "a label is null")
    kinds = {type(v) for v in values}
    if kinds not in ({int}, {str}):
        found = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"its label is of type {found}; expected text, an integer, or a list of them"
        )
    check_no_places(values)
    if kinds == {int}:
        return tuple(dict.fromkeys(map(str, values))), "index"
    return tuple(dict.fromkeys(map(checked_label, values))), "name"


def check_no_places(values: Sequence[Any]) -> None:
    """Raises ValueError for zeros and ones, with a place for each class, in numbers or as text."""
    if len(values) > len({*values}) and {*map(str, values)} <= {"0", "1"}:
        raise ValueError(
            f"its labels {list(values[:9])} are zeros and ones, with a place for each class "
            "(one-hot or multi-hot); store the numbers or names of its classes instead"
        )


def json_object(content: str | bytes, whose: str = "it") -> dict[str, Any]:
    """A JSON object; raises ValueError if it is something else."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{whose} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{whose} is a JSON {type(fields).__name__}, not an object")
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
    if isinstance(value, bytes):
        raise ValueError("a field of convert.columns contains bytes, which are not text")
    return str(value)


def checked_label(text: str) -> str:
    """The label without blanks around it, in the form NFC.

    Raises:
        ValueError: nothing is left, or it has a line break or another control character.
    """
    label = unicodedata.normalize("NFC", text.strip())
    if not label:
        raise ValueError("its label is empty")
    if _CONTROL.search(label):
        raise ValueError(f"its label has a line break or control character: {label[:40]!r}")
    return label


def checked_names(names: Any, whose: str) -> list[str]:
    """Class names without blanks around them, in the form NFC.

    Raises:
        ValueError: they are not texts, two are the same, or one has a line break or another control
            character.
    """
    if not isinstance(names, list | tuple) or any(type(name) is not str for name in names):
        raise ValueError(f"{whose}: its class names are not a list of texts: {str(names)[:80]}")
    normal = [unicodedata.normalize("NFC", name.strip()) for name in names]
    counts = Counter(normal)
    if wrong := [name for name in normal if counts[name] > 1 or _CONTROL.search(name)]:
        raise ValueError(
            f"{whose} has the class name {wrong[0]!r} twice, or with a line break or control "
            "character; correct it"
        )
    return normal


@dataclass
class SourceFacts:
    """What is known of the rows of a source.

    Attributes:
        kinds: of their labels, as `Row.kind`.
        counts: of labels that an image has.
        declared: class names of the units that declare them.
        columns: for each of `convert.columns`, how many images have it.
        bytes: of all images whose length is known; `text_bytes` of the columns.
    """

    columns: dict[str, int]
    declared: set[tuple[str, ...]] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    rows: int = 0
    bytes: int = 0
    text_bytes: int = 0
    unknown_lengths: int = 0

    def add(self, rows: pa.Table) -> None:
        """Count rows, of `ROW_SCHEMA`."""
        self.rows += len(rows)
        usable = rows.filter(pc.is_null(rows["problem"]))
        self.labels.update(pc.list_flatten(usable["labels"]).unique().to_pylist())
        self.kinds.update(usable["kind"].unique().to_pylist())
        self.counts.update(pc.list_value_length(usable["labels"]).unique().to_pylist())
        lengths = usable["length"].to_numpy()
        self.bytes += int(lengths[lengths > 0].sum())
        self.unknown_lengths += int((lengths < 0).sum())
        for place, name in enumerate(self.columns):
            values = pc.list_element(usable["extra"], place)
            self.columns[name] += len(values) - values.null_count
            self.text_bytes += pc.sum(pc.utf8_length(values)).as_py() or 0
        check_class_count(len(self.labels))


def check_not_empty(facts: SourceFacts, config: ConvertConfig) -> None:
    """Raises ValueError for a source without rows."""
    if not facts.rows:
        raise ValueError(f"convert.source={config.source!r} holds no images; check its format")


def check_class_count(count: int) -> None:
    """Raises ValueError for more labels than any data set has classes."""
    if count > MOST_CLASSES:
        raise ValueError(
            f"convert: more than {MOST_CLASSES:,} different labels; check convert.label_field"
        )


def classes_of(
    facts: SourceFacts, config: ConvertConfig, *, of_folders: bool
) -> tuple[list[str], bool]:
    """Class names, and whether labels are indices; errors as `class_names`."""
    if facts.labels == {"0", "1"} and facts.counts == {2}:
        raise ValueError(
            "convert: every image has the labels 0 and 1, as lists do with a place for each class "
            "(one-hot or multi-hot); store the numbers or names of its classes instead"
        )
    declared = sorted(facts.declared)
    if len(declared) > 1 and not config.classes:
        raise ValueError(
            f"convert: files of the source declare different class names, {declared[0][:5]} and "
            f"{declared[1][:5]}; give them by convert.classes, or convert some of the files"
        )
    names = next((list(given) for given in (config.classes, *declared) if given), None)
    if names is None and facts.rows >= _MANY and len(facts.labels) > facts.rows // 2:
        raise ValueError(
            f"convert: {facts.rows:,} images have {len(facts.labels):,} different labels, such as "
            f"{min(facts.labels)[:60]!r}; check convert.label_field, or give convert.classes"
        )
    return class_names(facts.labels, facts.kinds, names, config.labels_are, of_folders=of_folders)


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
    if names is not None:
        are_indices = _are_indices(labels, kinds, names, labels_are)
        allowed = {str(i) for i in range(len(names))} if are_indices else set(names)
        if unknown := [label for label in labels if label not in allowed]:
            what = f"indices of the {len(names)} classes" if are_indices else "in the classes"
            raise ValueError(
                f"convert: labels {unknown[:5]} are not {what} {names[:20]}; correct "
                "convert.classes, or set convert.labels_are to names or indices"
            )
        return list(names), are_indices
    _check_spelling(labels, is_lenient=of_folders or labels_are == "names")
    are_numbers = "name" not in kinds and all(map(_INTEGER.fullmatch, labels))
    if labels_are == "indices":
        if wrong := [one for one in labels if not are_numbers or str(abs(int(one))) != one]:
            raise ValueError(
                f"convert.labels_are=indices: labels such as {wrong[:5]} are not integers from 0 "
                "on; correct them, or set convert.labels_are=names"
            )
        count = max(map(int, labels), default=-1) + 1
        check_class_count(count)
        return [str(index) for index in range(count)], True  # a name for every index
    if are_numbers and not of_folders and labels_are == "auto":
        _check_gapless(labels)
    return sorted(labels, key=lambda text: (int(text), text)) if are_numbers else labels, False


def _check_spelling(labels: list[str], *, is_lenient: bool) -> None:
    """Raises ValueError for labels that are probably one class in two spellings, or no labels."""
    spellings = defaultdict(list)
    for label in labels:
        spellings[label.casefold()].append(label)
    alike = [names for names in spellings.values() if len(names) > 1]
    advice = "correct them, or list all classes in convert.classes"
    if alike:
        raise ValueError(f"convert: the labels {alike[0]} differ only in capitals; {advice}")
    missing = [label for label in labels if label.lower() in _MISSING]
    is_truth = not is_lenient and bool(labels) and spellings.keys() <= {"true", "false"}
    others = [label for label in labels if not _INTEGER.fullmatch(label)]
    are_decimals = not is_lenient and bool(others) and all(map(_NUMBER.fullmatch, labels))
    are_lists = not is_lenient and bool(labels) and all(map(_LIST.fullmatch, labels))
    problems: dict[str, object] = {
        f"the label {missing[:1]} usually means that there is none": missing and not is_lenient,
        f"the labels {labels[:2]} are truth values, and not class names": is_truth,
        f"labels such as {others[:3]} are numbers with decimals, and not integers": are_decimals,
        f"labels such as {labels[:2]} are lists, or zeros and ones with a place for each class "
        "(one-hot or multi-hot), and not class names": are_lists,
    }
    for problem, is_so in problems.items():
        if is_so:
            raise ValueError(f"convert: {problem}; {advice}, or set convert.labels_are=names")


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
    if labels_are != "auto":
        return labels_are == "indices"
    if kinds <= {"name"} or kinds == {"index"}:
        return kinds == {"index"}
    is_same = all(name == str(i) for i, name in enumerate(names))
    if is_same or not all(map(_INTEGER.fullmatch, labels)):
        return False
    if not any(map(_INTEGER.fullmatch, names)):
        return True
    raise ValueError(
        f"convert: labels such as {labels[:5]} may be names or indices of the classes {names[:5]}; "
        "set convert.labels_are=names or convert.labels_are=indices"
    )
