"""Labels of one image as its source gives them, and the classes of a whole source.

Several labels are a list: a JSON list, a list column of parquet, or a CSV column `labels`. Text is
one label, even if it contains commas. Text is compared in Unicode's form NFC.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.rows import LabelKind, Row

MOST_CLASSES: Final = 1_000_000
# Maximum size of a text file in a tar shard, and of a line of a list.
MAX_TEXT_BYTES: Final = 1 << 20
LABEL_FIELDS: Final = ("labels", "label", "cls", "class")
_INTEGER: Final = re.compile(r"-?[0-9]{1,100}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
# A list as text, or a one-hot or multi-hot vector as text.
_LIST: Final = re.compile(r"[\[(].*[\])]|[01](\.0*)?([ ,;|]+[01](\.0*)?)+")
# Unicode's category Cc: line breaks, and characters that nobody sees.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# From this number of images on, labels of which most occur once are probably no classes.
_MANY_IMAGES: Final = 1000
# What tables write for a missing value, in lower case.
_MISSING: Final = {"nan", "none", "null", "na", "n/a", "<na>", "#n/a", "nat"}

Labels = tuple[tuple[str, ...], LabelKind]
LabelsAre = Literal["auto", "names", "indices"]


def row_or_problem(row: Row, build: Callable[..., Row], *arguments: Any) -> Row:
    """The row that `build(row, *arguments)` returns; its ValueError becomes the row's problem."""
    try:
        return build(row, *arguments)
    except ValueError as error:
        return replace(row, problem=str(error))


def labelled(row: Row, labels: Labels, fields: Mapping[str, Any], columns: Sequence[str]) -> Row:
    """The row with its labels, and with the fields of `convert.columns` as text."""
    texts, kind = labels
    extra = tuple(stored_text(fields.get(name)) for name in columns)
    return replace(row, labels=texts, kind=kind, extra=extra)


def labels_of_record(fields: Mapping[str, Any], label_field: str | None) -> Labels:
    """Labels of an object; raises ValueError as `chosen_field` and `labels_of_value`."""
    names = [name for name, value in fields.items() if value is not None]
    return labels_of_value(fields[chosen_field("label", label_field, LABEL_FIELDS, names, "it")])


def chosen_field(
    what: str, wanted: str | None, usual: Sequence[str], names: Sequence[str], subject: str
) -> str:
    """The name of the field with the image or the label.

    Args:
        what: `image` or `label`, as in `convert.image_field`.
        wanted: the user's choice; None takes the only usual name that exists.
        names: the existing fields.
        subject: begins the error message.

    Raises:
        ValueError: the wanted field does not exist, or none or several of the usual ones do.
    """
    candidates = [wanted] if wanted else list(dict.fromkeys(usual))
    existing = [name for name in candidates if name in names]
    if len(existing) == 1:
        return existing[0]
    raise ValueError(
        f"{subject} needs one field for the {what} ({' or '.join(candidates)}), "
        f"and has {', '.join(sorted(names)[:20]) or 'none'}; choose it with convert.{what}_field"
    )


def check_columns(wanted: Iterable[str], names: list[str], file: str) -> None:
    """Raises ValueError for a column that is missing or duplicated."""
    for name in wanted:
        if names.count(name) != 1:
            raise ValueError(
                f"{file} has {names.count(name) or 'no'} columns {name!r}; it has {names[:20]}"
            )


def labels_of_value(value: Any) -> Labels:
    """Labels of a value from JSON or parquet.

    Raises:
        ValueError: the value is not text, an integer, or a list of these; or it is a one-hot list.
    """
    values = value if isinstance(value, list) else [value]
    if not values or None in values:
        raise ValueError("it has no label" if value in (None, []) else "a label is null")
    kinds = {type(v) for v in values}
    if kinds not in ({int}, {str}):
        types = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"its label is of type {types}; expected text, an integer, or a list of them"
        )
    refuse_one_hot(values)
    if kinds == {int}:
        return tuple(dict.fromkeys(map(str, values))), "index"
    return tuple(dict.fromkeys(map(checked_label, values))), "name"


def refuse_one_hot(values: Sequence[Any]) -> None:
    """Raises ValueError for a one-hot or multi-hot vector, of numbers or texts."""
    if len(values) > len({*values}) and {*map(str, values)} <= {"0", "1"}:
        raise ValueError(
            f"its labels {list(values[:9])} are zeros and ones, with a place for each class "
            "(one-hot or multi-hot); store the numbers or names of its classes instead"
        )


def json_object(content: str | bytes, subject: str = "it") -> dict[str, Any]:
    """A JSON object; raises ValueError if the content is something else."""
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{subject} is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{subject} is a JSON {type(fields).__name__}, not an object")
    return fields


def stored_text(value: Any) -> str | None:
    """A value of `convert.columns` as stored: text unchanged, other values as JSON.

    Raises:
        ValueError: the value contains bytes.
    """
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_text_of)


def _text_of(value: Any) -> str:
    # Of dates, and of other values that JSON does not have.
    if isinstance(value, bytes):
        raise ValueError("a field of convert.columns contains bytes, which are not text")
    return str(value)


def checked_label(text: str) -> str:
    """The label stripped, in the form NFC.

    Raises:
        ValueError: the label is empty, or has a line break or another control character.
    """
    label = unicodedata.normalize("NFC", text.strip())
    if not label:
        raise ValueError("its label is empty")
    if _CONTROL.search(label):
        raise ValueError(f"its label has a line break or control character: {label[:40]!r}")
    return label


def checked_names(names: Any, subject: str) -> list[str]:
    """Class names stripped, in the form NFC.

    Raises:
        ValueError: they are not texts, two are the same, or one has a line break or another control
            character.
    """
    if not isinstance(names, list | tuple) or any(type(name) is not str for name in names):
        raise ValueError(f"{subject}: its class names are not a list of texts: {str(names)[:80]}")
    normal = [unicodedata.normalize("NFC", name.strip()) for name in names]
    counts = Counter(normal)
    if wrong := [name for name in normal if counts[name] > 1 or _CONTROL.search(name)]:
        raise ValueError(
            f"{subject} has the class name {wrong[0]!r} twice, or with a line break or control "
            "character; correct it"
        )
    return normal


@dataclass
class SourceFacts:
    """Facts of the rows of a source.

    Attributes:
        columns: for each of `convert.columns`, how many images have it.
        declared: class names of the units that declare them.
        kinds: kinds of labels, as in `Row.kind`.
        counts: the numbers of labels that images have.
        bytes: total size of the images of known size.
    """

    columns: dict[str, int]
    declared: set[tuple[str, ...]] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    counts: set[int] = field(default_factory=set)
    rows: int = 0
    bytes: int = 0

    def add(self, rows: pa.Table) -> None:
        """Count rows, of `ROW_SCHEMA`."""
        self.rows += len(rows)
        usable = rows.filter(pc.is_null(rows["problem"]))
        self.labels.update(pc.list_flatten(usable["labels"]).unique().to_pylist())
        self.kinds.update(usable["kind"].unique().to_pylist())
        self.counts.update(pc.list_value_length(usable["labels"]).unique().to_pylist())
        lengths = usable["length"].to_numpy()
        self.bytes += int(lengths[lengths > 0].sum())
        for index, name in enumerate(self.columns):
            values = pc.list_element(usable["extra"], index)
            self.columns[name] += len(values) - values.null_count


def check_not_empty(facts: SourceFacts, config: ConvertConfig) -> None:
    """Raises ValueError for a source without rows."""
    if not facts.rows:
        raise ValueError(f"convert.source={config.source!r} holds no images; check its format")


def classes_of(
    facts: SourceFacts, config: ConvertConfig, *, of_folders: bool
) -> tuple[list[str], dict[str, int]]:
    """Class names in label order, and the class index of each label of the source.

    If neither the recipe nor the source gives names, the sorted labels are the class names;
    integers are sorted as numbers.

    Args:
        of_folders: labels are the names of folders: class names, even if they look like numbers.

    Raises:
        ValueError: a label is not one of the names, or the meaning of the labels is not clear.
    """
    if facts.labels == {"0", "1"} and facts.counts == {2}:
        raise ValueError(
            "convert: every image has the labels 0 and 1, as lists do with a place for each class "
            "(one-hot or multi-hot); store the numbers or names of its classes instead"
        )
    declared = sorted(facts.declared)
    if config.classes or len(declared) == 1:
        return _named_classes(facts, list(config.classes or declared[0]), config.labels_are)
    if declared:
        raise ValueError(
            f"convert: files of the source declare different class names, {declared[0][:5]} and "
            f"{declared[1][:5]}; give them by convert.classes, or convert some of the files"
        )
    if facts.rows >= _MANY_IMAGES and len(facts.labels) > facts.rows // 2:
        raise ValueError(
            f"convert: {facts.rows:,} images have {len(facts.labels):,} different labels, such as "
            f"{min(facts.labels)[:60]!r}; check convert.label_field, or give convert.classes"
        )
    names = _unnamed_classes(facts, config.labels_are, of_folders=of_folders)
    return names, {name: index for index, name in enumerate(names)}


def _named_classes(
    facts: SourceFacts, names: list[str], labels_are: LabelsAre
) -> tuple[list[str], dict[str, int]]:
    """The result of `classes_of` if the class names are known.

    Labels are indices as the recipe or the source says, else if only labels are integers.
    """
    labels, kinds = sorted(facts.labels), facts.kinds
    numbers = list(map(str, range(len(names))))
    are_indices = labels_are == "indices"
    if labels_are == "auto" and kinds - {"name"} and names != numbers:
        are_indices = kinds == {"index"} or all(map(_INTEGER.fullmatch, labels))
        if are_indices and kinds != {"index"} and any(map(_INTEGER.fullmatch, names)):
            raise ValueError(
                f"convert: labels such as {labels[:5]} may be names or indices of the classes "
                f"{names[:5]}; set convert.labels_are=names or convert.labels_are=indices"
            )
    index_of = {label: i for i, label in enumerate(numbers if are_indices else names)}
    if unknown := [label for label in labels if label not in index_of]:
        expected = f"indices of the {len(names)} classes" if are_indices else "in the classes"
        raise ValueError(
            f"convert: labels {unknown[:5]} are not {expected} {names[:20]}; correct "
            "convert.classes, or set convert.labels_are to names or indices"
        )
    return names, index_of


def _unnamed_classes(facts: SourceFacts, labels_are: LabelsAre, *, of_folders: bool) -> list[str]:
    """The class names from the labels."""
    labels = sorted(facts.labels)
    _check_spelling(labels, is_lenient=of_folders or labels_are == "names")
    are_numbers = "name" not in facts.kinds and all(map(_INTEGER.fullmatch, labels))
    if labels_are == "indices":
        if wrong := [
            text for text in labels
            if not are_numbers or str(abs(int(text))) != text or int(text) >= MOST_CLASSES
        ]:  # fmt: skip
            raise ValueError(
                f"convert.labels_are=indices: labels such as {wrong[:5]} are not integers from 0 "
                f"to {MOST_CLASSES - 1:,}; correct them, or set convert.labels_are=names"
            )
        return list(map(str, range(max(map(int, labels), default=-1) + 1)))
    if not are_numbers:
        return labels
    numbers = sorted(map(int, labels))
    if labels_are == "auto" and not of_folders and numbers != list(range(len(numbers))):
        hint = " (-1 by convention means that an image is not labelled)" if numbers[0] < 0 else ""
        raise ValueError(
            f"convert: labels such as {labels[:3]} are {len(numbers)} integers from {numbers[0]} "
            f"to {numbers[-1]}{hint}, and not 0 to {len(numbers) - 1}, and the source declares no "
            "class names; set convert.labels_are=indices to keep them, convert.labels_are=names to "
            "renumber them from 0 on, or give convert.classes"
        )
    return sorted(labels, key=lambda text: (int(text), text))


def _check_spelling(labels: list[str], *, is_lenient: bool) -> None:
    """Raises ValueError for two spellings of one class, and for texts that are probably no labels.

    Args:
        is_lenient: checks spellings only.
    """
    spellings = Counter(map(str.casefold, labels))
    advice = "correct them, or list all classes in convert.classes"
    if alike := [label for label in labels if spellings[label.casefold()] > 1]:
        raise ValueError(f"convert: the labels {alike[:4]} differ only in capitals; {advice}")
    if is_lenient or not labels:
        return
    missing = [label for label in labels if label.lower() in _MISSING]
    decimals = [label for label in labels if not _INTEGER.fullmatch(label)]
    problems: dict[str, object] = {
        f"the label {missing[:1]} usually means that there is none": missing,
        f"the labels {labels[:2]} are truth values, and not class names": (
            spellings.keys() <= {"true", "false"}
        ),
        f"labels such as {decimals[:3]} are numbers with decimals, and not integers": (
            decimals and all(map(_NUMBER.fullmatch, labels))
        ),
        f"labels such as {labels[:2]} are lists, or zeros and ones with a place for each class "
        "(one-hot or multi-hot), and not class names": all(map(_LIST.fullmatch, labels)),
    }
    if likely := [problem for problem, is_so in problems.items() if is_so]:
        raise ValueError(f"convert: {likely[0]}; {advice}, or set convert.labels_are=names")
