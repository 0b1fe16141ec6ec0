"""Labels of one image as its source gives them, and the classes of a whole source.

Several labels are a list: a JSON list, a list column of parquet, or a CSV column `labels`. Text is
one label, even if it contains commas. Text is compared in Unicode's form NFC.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.convert.rows import LabelKind, Row

# Maximum size of a text file in a tar shard.
MAX_TEXT_BYTES: Final = 1 << 20
# Usual names of fields, in lower case, of encoded images and of labels.
IMAGE_FIELDS: Final = ("image", "img", "jpg", "picture", "image/encoded")
LABEL_FIELDS: Final = ("label", "labels", "fine_label", "cls", "class")
_INTEGER: Final = re.compile(r"-?[0-9]{1,100}")
# An index without leading zeros, of at most a million classes.
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,5}")
_NUMBER: Final = re.compile(r"[+-]?([0-9]+([.,][0-9]*)?|[.,][0-9]+)([eE][+-]?[0-9]+)?")
# A list as text, or a one-hot or multi-hot vector as text.
_LIST: Final = re.compile(r"[\[(].*[\])]|[01](\.0*)?([ ,;|]+[01](\.0*)?)+")
_ONE_HOT: Final = (
    "zeros and ones with a place for each class (one-hot or multi-hot); store the numbers or names "
    "of its classes instead"
)
# Unicode's category Cc: line breaks, and characters that nobody sees.
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# From this number of images on, labels of which most occur once are probably no classes.
_MANY_IMAGES: Final = 1000
# What tables write for a missing value, in lower case.
_MISSING: Final = {"nan", "none", "null", "na", "n/a", "<na>", "#n/a", "nat"}


def row_or_problem(row: Row, build: Callable[..., Row], *arguments: Any) -> Row:
    """The row that `build(row, *arguments)` returns; its ValueError becomes the row's problem."""
    try:
        return build(row, *arguments)
    except ValueError as error:
        return replace(row, problem=str(error))


def labelled(
    row: Row,
    fields: dict[str, Any],
    config: ConvertConfig,
    label_field: str | None,
    text_kind: LabelKind = "name",
) -> Row:
    """The row with its labels, and with the fields of `convert.columns` as text.

    Args:
        fields: of the source; the label is text, an integer, or a list of texts or of integers.
        label_field: the field with the label; None takes the only one with a usual name.
        text_kind: what labels are if they are texts; integers are indices.

    Raises:
        ValueError: there is no label, or several fields may be the label; or the label has another
            type or is a one-hot list.
    """
    if label_field not in fields:
        names = [name for name, value in fields.items() if value is not None]
        label_field = chosen_field("label", label_field, LABEL_FIELDS, names, "it")
    value = fields[label_field]
    values = value if isinstance(value, list) else [value]
    kinds = set(map(type, values))
    if kinds not in ({int}, {str}):
        raise ValueError(f"its label is {value!r:.80}, not text, an integer, or a list of them")
    texts = list(map(str, values)) if kinds == {int} else list(map(checked_label, values))
    if len(texts) > len({*texts}) and {*texts} <= {"0", "1"}:
        raise ValueError(f"its labels {texts[:9]} are {_ONE_HOT}")
    return replace(
        row,
        labels=tuple(dict.fromkeys(texts)),
        kind="index" if kinds == {int} else text_kind,
        extra=tuple(stored_text(fields.get(name)) for name in config.columns),
    )


def chosen_field(
    what: str, wanted: str | None, usual: Sequence[str], names: Sequence[str], subject: str
) -> str:
    """The name of the field with the image or the label.

    Args:
        what: `image` or `label`, as in `convert.image_field`.
        wanted: the user's choice; None takes the only usual name that exists, in any case.
        names: the existing fields.
        subject: begins the error message.

    Raises:
        ValueError: no field or several have the wanted name, or one of the usual names.
    """
    candidates = [wanted] if wanted else list(dict.fromkeys(usual))
    existing = [name for name in names if (name if wanted else name.lower()) in candidates]
    if len(existing) == 1:
        return existing[0]
    raise ValueError(
        f"{subject} needs one field for the {what} ({' or '.join(candidates)}), "
        f"and has {', '.join(sorted(names)[:20]) or 'none'}; choose it with convert.{what}_field"
    )


def json_object(content: str, subject: str = "it") -> dict[str, Any]:
    """A JSON object; raises ValueError if the content is something else."""
    try:
        return {**json.loads(content)}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{subject} is not a JSON object ({error})") from error


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
        raise ValueError(f"convert: every image has the labels 0 and 1, as do {_ONE_HOT}")
    declared = sorted(facts.declared)
    if len(declared) > 1 and not config.classes:
        raise ValueError(
            f"convert: files of the source declare different class names, {declared[0][:5]} and "
            f"{declared[1][:5]}; give them by convert.classes, or convert some of the files"
        )
    names = list(config.classes or next(iter(declared), ()))
    if not names and config.labels_are == "indices":
        indices = map(int, filter(_INDEX.fullmatch, facts.labels))
        names = list(map(str, range(max(indices, default=0) + 1)))
    if names:
        texts = _labels_of_classes(names, facts, config.labels_are)
    else:
        is_lenient = of_folders or config.labels_are == "names"
        names = texts = _unnamed_classes(facts, is_lenient=is_lenient)
    return names, {text: index for index, text in enumerate(texts)}


def _labels_of_classes(names: list[str], facts: SourceFacts, labels_are: str) -> list[str]:
    """The label of each class whose name is known: its name or its index.

    Labels are indices as the recipe or the source says, else if only labels are integers.
    """
    labels, kinds = sorted(facts.labels), facts.kinds
    indices = list(map(str, range(len(names))))
    are_indices = labels_are == "indices"
    if labels_are == "auto" and kinds - {"name"} and names != indices:
        are_indices = kinds == {"index"} or all(map(_INTEGER.fullmatch, labels))
        if are_indices and kinds != {"index"} and any(map(_INTEGER.fullmatch, names)):
            raise ValueError(
                f"convert: labels such as {labels[:5]} may be names or indices of the classes "
                f"{names[:5]}; set convert.labels_are=names or convert.labels_are=indices"
            )
    texts = indices if are_indices else names
    if unknown := sorted(facts.labels.difference(texts)):
        expected = f"indices of the {len(names)} classes" if are_indices else "in the classes"
        raise ValueError(
            f"convert: labels {unknown[:5]} are not {expected} {names[:20]}; correct "
            "convert.classes, or set convert.labels_are to names or indices"
        )
    return texts


def _unnamed_classes(facts: SourceFacts, *, is_lenient: bool) -> list[str]:
    """The class names from the labels.

    Args:
        is_lenient: only two spellings of one class are refused, and not texts that are probably no
            labels, or integers other than 0 to n - 1.
    """
    labels = sorted(facts.labels)
    spellings = Counter(map(str.casefold, labels))
    advice = "correct them, or list all classes in convert.classes"
    if alike := [label for label in labels if spellings[label.casefold()] > 1]:
        raise ValueError(f"convert: the labels {alike[:4]} differ only in capitals; {advice}")
    missing = [label for label in labels if label.lower() in _MISSING]
    decimals = [label for label in labels if not _INTEGER.fullmatch(label)]
    numbers = [] if decimals or "name" in facts.kinds else sorted(map(int, labels))
    problems: dict[str, object] = {
        f"the label {missing[:1]} usually means that there is none": missing,
        f"the labels {labels[:2]} are truth values, and not class names": (
            spellings.keys() <= {"true", "false"}
        ),
        f"labels such as {decimals[:3]} are numbers with decimals, and not integers": (
            decimals and all(map(_NUMBER.fullmatch, labels))
        ),
        f"labels such as {labels[:2]} are lists, or {_ONE_HOT}": all(map(_LIST.fullmatch, labels)),
        f"{facts.rows:,} images have {len(labels):,} different labels, such as "
        f"{[label[:60] for label in labels[:1]]}; check convert.label_field": (
            facts.rows >= _MANY_IMAGES and len(labels) > facts.rows // 2
        ),
        f"labels such as {labels[:3]} are {len(numbers)} integers from {min(numbers, default=0)} "
        f"to {max(numbers, default=0)}, and not 0 to {len(numbers) - 1} (-1 by convention: not "
        "labelled); set convert.labels_are=indices to keep them": (
            numbers != list(range(len(numbers)))
        ),
    }
    likely = [problem for problem, is_so in problems.items() if is_so]
    if likely and labels and not is_lenient:
        raise ValueError(f"convert: {likely[0]}; {advice}, or set convert.labels_are=names")
    return sorted(labels, key=lambda text: (int(text), text)) if numbers else labels
