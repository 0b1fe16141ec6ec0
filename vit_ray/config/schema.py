"""The schema of a recipe: the base of its sections, the marks on its keys, and its validation.

Sections are frozen, strictly typed and closed to unknown keys. An error names the dotted key and
the nearest valid key.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Final, Self, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from vit_ray.addresses import redact, without_credentials
from vit_ray.own_parts import DOTTED

# Names of runs, which are also names of folders.
NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
# A path; an empty text would mean the current folder.
_PATH: Final = r"\S"
PATH_PATTERN: Final = r"^[^{}]*\{\}[^{}]*$"
REPOSITORY: Final = r"^hf://[\w-][\w.-]*/[\w-][\w.-]*$"
# Names of registered models (MLflow).
MODEL_NAME: Final = r"^[^/:'\"]+$"
# Help texts for these patterns.
_ALLOWED: Final = {
    PATH_PATTERN: "a path with {} once",
    REPOSITORY: "hf://OWNER/NAME",
    MODEL_NAME: "text without slashes, colons and quotes",
    _PATH: "a folder, a file or an s3:// address",
    DOTTED: "MODULE.NAME of your own",
    NAME: "letters from A to Z, digits, and `.`, `_`, `+` or `-` after the first, without spaces",
}

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")

# Keys that users know from other programs.
_ALIASES = {
    **dict.fromkeys(("lr", "base_lr", "max_lr"), "optim.learning_rate"),
    **dict.fromkeys(("wd", "decay"), "optim.weight_decay"),
    **dict.fromkeys(("bs", "batch", "batch_size"), "train.global_batch_size"),
    **dict.fromkeys(("micro_batch", "device_batch_size"), "train.micro_batch_size"),
    **dict.fromkeys(("epoch", "num_epochs", "max_epochs"), "optim.epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "optim.steps"),
    **dict.fromkeys(("gpus", "num_gpus", "nproc_per_node", "world_size"), "workers.num_workers"),
    **dict.fromkeys(("model_name", "arch"), "model.name"),
    **dict.fromkeys(("img_size", "resolution", "input_size"), "model.image_size"),
    **dict.fromkeys(("optimizer", "opt"), "optim.name"),
    **dict.fromkeys(("scheduler", "lr_schedule", "lr_scheduler"), "optim.schedule"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "optim.warmup_steps"),
    **dict.fromkeys(("clip_grad", "max_grad_norm", "gradient_clipping"), "optim.clip_norm"),
    **dict.fromkeys(("dtype", "amp"), "train.precision"),
    **dict.fromkeys(("ema", "model_ema", "ema_decay"), "train.averaging"),
    **dict.fromkeys(("pretrained", "checkpoint_path", "weights"), "init_from"),
    **dict.fromkeys(("output_dir", "out_dir", "log_dir"), "output"),
    **dict.fromkeys(("data_dir", "data_path", "train_data", "dataset"), "data.train"),
}


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Below1 = Annotated[float, Field(ge=0.0, lt=1.0)]
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegativeFloat = Annotated[float, Field(ge=0.0)]
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?"
_LABEL_KEY = re.compile(rf"([a-zA-Z0-9][a-zA-Z0-9_.-]*/)?{_LABEL}")
_LABEL_VALUE = re.compile(rf"!?({_LABEL}|in\({_LABEL}(, ?{_LABEL})*\))")


def _distinct(values: tuple[Any, ...]) -> tuple[Any, ...]:
    names = [getattr(value, "name", value) for value in values]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ValueError(f"{value_text(names)} has {name} twice; list each once")
    return values


# For a list without repeated values; sections in it are compared by their names.
Distinct = AfterValidator(_distinct)


NO_CREDENTIALS: Final = AfterValidator(without_credentials)
Place = Annotated[str, Field(pattern=_PATH), NO_CREDENTIALS]
# Dotted name of a custom component, such as `mymodule.focal_loss` (`own_parts.py`).
OwnPart = Annotated[str, Field(pattern=DOTTED)]


def _are_labels(selector: dict[str, str]) -> dict[str, str]:
    for key, value in selector.items():
        if not (_LABEL_KEY.fullmatch(key) and _LABEL_VALUE.fullmatch(value)):
            raise ValueError(
                f"{{{key}: {value!r}}} does not select nodes by a label of Ray's; give {{LABEL: "
                "VALUE}}, with the value '!VALUE', 'in(A, B)' or '!in(A, B)' where needed"
            )
    # Ray 2.60 accepts `in(A, B)`, but then looks for " B".
    return {key: value.replace(" ", "") for key, value in selector.items()}


LabelSelector = Annotated[dict[str, str], AfterValidator(_are_labels)]
ImageSize = Positive | tuple[Positive, Positive]


class OnResume(Enum):
    """Mark of a key: whether a run may be resumed with another value of it.

    A section's mark is the default for its keys. Keys that no training reads have no mark.
    """

    # Affects speed, location, display or coming steps, but not the steps that were trained.
    FREE = "any time"
    CONFIRM = "resume=changed"
    # Decides what is measured.
    EVALUATED = "resume=changed; it changes no weights"
    LENGTH = "longer any time, shorter with resume=changed"
    # With another value, a checkpoint's tensors or its position in the data would have no meaning.
    FIXED = "never"


class Section(BaseModel):
    """Base of every section: frozen, strict types, unknown keys and infinite numbers refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self

    def _check(self) -> None:
        """
        Raises:
            ValueError: the section's values contradict each other.
        """


def validated(schema: type[Model], tree: dict[str, Any], where: str) -> Model:
    """A checked instance of a schema from plain data.

    Raises:
        ValueError: as `load_recipe`; every problem is listed.
    """
    try:
        # JSON mode is strict about types but accepts a list for a tuple, as YAML needs.
        return schema.model_validate_json(json.dumps(tree, default=os.fspath))
    except pydantic.ValidationError as error:
        errors = error.errors()
        # A list with an invalid section is also reported as too short.
        parents = {e["loc"][:depth] for e in errors for depth in range(len(e["loc"]))}
        causes = [e for e in errors if e["type"] != "too_short" or e["loc"] not in parents]
        problems = dict.fromkeys(_describe(schema, tree, cause) for cause in causes)
        raise ValueError(redact(f"{where}: {'; '.join(problems)}")) from None


def require(value: Value | None, key: str, hint: str) -> Value:
    """The value of a key that a command needs.

    Args:
        key: dotted key of the section or value.
        hint: what to set it to, perhaps with an example.

    Raises:
        ValueError: the value is None.
    """
    if value is None:
        raise ValueError(f"{key} is not set; give {hint}")
    return value


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Prefix the text of a `ValueError` in the block with `where`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _describe(schema: type[BaseModel], tree: Any, problem: Any) -> str:
    """Text of pydantic's problem: the dotted key, the value, and what is allowed."""
    section: type[BaseModel] | None = schema
    parent, name, value, parts = schema, "", tree, list[str]()
    for part in problem["loc"]:
        if section and isinstance(part, int):  # a list of sections
            value = value[part]
        elif section and part in section.model_fields:
            parent, name, value = section, part, value.get(part)
            section = section_type(section.model_fields[part].annotation)
        else:
            break
        parts.append(str(part))
    key, fields = ".".join(parts), section.model_fields if section else {}
    match problem["type"]:
        case "extra_forbidden":
            unknown = f"{key}.{problem['loc'][-1]}".removeprefix(".")
            hint = nearest_key(schema, unknown, list(fields))
            meant = f"; did you mean {hint}?" if hint else ""
            return f"unknown key {unknown}{meant} (valid in this section: {', '.join(fields)})"
        case "missing" if value is None:
            return f"{key} is required but not given"
        case "model_type" | "model_attributes_type":
            first = next((k for k in fields if fields[k].is_required()), next(iter(fields)))
            return f"{key}={value} is a section of keys; give keys below it, such as {key}.{first}"
        case "value_error":
            return f"{key}: {problem['msg']}".replace(": Value error, ", ": ").removeprefix(": ")
    text = value_text(value) if isinstance(value, (list, dict)) else repr(value)
    return f"{key}={text}: give {_allowed(parent, name)}"


def _allowed_text(node: dict[str, Any], defs: dict[str, Any]) -> str:
    """The values that a node of a JSON schema allows: `0 | 1 | 2`, `integer > 0 | auto`."""
    match node:
        case {"anyOf": branches}:
            return " | ".join(dict.fromkeys(_allowed_text(branch, defs) for branch in branches))
        case {"enum": values}:
            return " | ".join(map(yaml_text, values))
        case {"const": value}:
            return yaml_text(value)
        case {"prefixItems": items}:
            return f"[{', '.join(_allowed_text(item, defs) for item in items)}]"
        case {"items": items}:
            return f"[{_allowed_text(items, defs)}, ...]"
        case {"$ref": reference}:
            section = defs[reference.rpartition("/")[2]]
            return f"{{{', '.join(section.get('properties', ()))}}}"
        case {"type": "string"}:
            return _ALLOWED.get(node.get("pattern", ""), "text")
        case {"type": "boolean"}:
            return "true | false"
        case {"type": "object"}:
            return "{NAME: VALUE}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f" {sign} {node[bound]:g}" for bound, sign in signs.items() if bound in node]
    return str(node["type"]) + " and".join(bounds)


def yaml_text(value: Any) -> str:
    """A value as YAML writes it."""
    return value if isinstance(value, str) else json.dumps(value)


def nearest_key(schema: type[BaseModel], key: str, valid: Sequence[str]) -> str | None:
    """The key that an unknown key probably means: one of its section (an alias, a similar or longer
    name), or else one of any section.

    Args:
        valid: names of the keys in its section, which may be one of a list.
    """
    section, dot, unknown = key.rpartition(".")
    prefix, all_keys = section + dot, [key.name for key in keys_of(schema)]
    alias = _ALIASES.get(unknown) if _ALIASES.get(unknown) in all_keys else None
    if alias and alias.startswith(prefix):
        return alias
    similar = difflib.get_close_matches(unknown, valid, 1, 0.6)
    similar += [name for name in valid if name.startswith(f"{unknown}_")]  # train.zero
    if similar:
        return f"{prefix}{similar[0]}"
    by_name = {name.rpartition(".")[2]: name for name in reversed(all_keys)}
    names = difflib.get_close_matches(unknown, by_name, 1, 0.75)
    return alias or (by_name[names[0]] if names else None)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section in the type of a field; None for a field without sections."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (section_type(argument) for argument in get_args(annotation))
    return next((section for section in sections if section), None)


def is_list(annotation: Any) -> bool:
    """Whether a field of this type takes a list of any length."""
    return Ellipsis in get_args(annotation) or any(map(is_list, get_args(annotation)))


@dataclass(frozen=True)
class Key:
    """A key or a section of a recipe.

    Attributes:
        name: dotted.
        schema: the section that has the key.
        on_resume: its mark, or that of its section.
    """

    name: str
    schema: type[BaseModel]
    field: FieldInfo
    on_resume: OnResume | None

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def default(self) -> str:
        """The default in YAML, or `required`."""
        return "required" if self.field.is_required() else yaml_text(self.field.default)

    @property
    def allowed(self) -> str:
        return _allowed(self.schema, self.name.rpartition(".")[2])

    @property
    def meaning(self) -> str:
        return one_line(self.field.description)


def keys_of(
    schema: type[BaseModel], prefix: str = "", mark: OnResume | None = None
) -> Iterator[Key]:
    """Every key and section of a schema, in their order.

    Args:
        prefix, mark: of the section that the schema describes.
    """
    for name, field in schema.model_fields.items():
        marks = [note for note in field.metadata if isinstance(note, OnResume)]
        on_resume = marks[0] if marks else mark
        yield Key(f"{prefix}{name}", schema, field, on_resume)
        if section := section_type(field.annotation):
            yield from keys_of(section, f"{prefix}{name}.", on_resume)


def one_line(text: str | None) -> str:
    """A docstring on one line."""
    return " ".join((text or "").split())


@cache
def _json_schema(schema: type[BaseModel]) -> dict[str, Any]:
    return schema.model_json_schema()


def _allowed(schema: type[BaseModel], name: str) -> str:
    json_schema = _json_schema(schema)
    return _allowed_text(json_schema["properties"][name], json_schema.get("$defs", {}))


def value_text(value: Any) -> str:
    """A recipe's value as a user writes it: lists in JSON, everything else as text."""
    return json.dumps(value, default=str) if isinstance(value, (tuple, list, dict)) else str(value)
