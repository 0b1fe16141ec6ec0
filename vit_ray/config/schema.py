"""The schema of a recipe: what its sections are, the marks on its keys, and how data are checked.

Sections are frozen, strictly typed and closed to unknown keys. Each problem is named with its
dotted key and the nearest valid key.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Self, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from vit_ray.addresses import redact, without_credentials
from vit_ray.own_parts import DOTTED

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
"""Names of runs, which are those of folders."""
PLACE: Final = r"\S"
"""Paths: an empty text would mean the current folder."""
PATH_PATTERN: Final = r"^[^{}]*\{\}[^{}]*$"
REPOSITORY: Final = r"^hf://[\w-][\w.-]*/[\w-][\w.-]*$"
MODEL_NAME: Final = r"^[^/:'\"]+$"
"""Names of registered models (MLflow)."""
# What a pattern allows, as a user reads it.
_ALLOWED: Final = {
    PATH_PATTERN: "a path with {} once",
    REPOSITORY: "hf://OWNER/NAME",
    MODEL_NAME: "text without slashes, colons and quotes",
    PLACE: "a folder, a file or an s3:// address",
    DOTTED: "MODULE.NAME of your own",
    NAME: "letters from A to Z, digits, and `.`, `_`, `+` or `-` after the first, without spaces",
}

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")

# Keys of other systems that users type by habit.
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


Distinct = AfterValidator(_distinct)
"""For a list in which nothing may stand twice; sections in it are compared by their names."""


NO_CREDENTIALS: Final = AfterValidator(without_credentials)
Place = Annotated[str, Field(pattern=PLACE), NO_CREDENTIALS]
OwnPart = Annotated[str, Field(pattern=DOTTED)]
"""Dotted name of a part of the user's own, such as `mymodule.focal_loss` (`own_parts.py`)."""


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

    FREE = "any time"
    """It affects speed, location or display, or steps to come, not those that were trained."""
    CONFIRM = "resume=changed"
    EVALUATED = "resume=changed; it changes no weights"
    """It decides what is measured."""
    LENGTH = "longer any time, shorter with resume=changed"
    FIXED = "never"
    """With another value, a checkpoint's tensors or its position in the data would have no
    meaning."""


@dataclass(frozen=True)
class UsedIf:
    """Mark of a key that matters only if another key of its section has one of the values.

    Attributes:
        key: the other key's name.
        values: as text; none = any value other than unset and 0.
    """

    key: str
    values: tuple[str, ...] = ()


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
            ValueError: values do not go together.
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
        found = error.errors()
        # A list with a wrong section is also reported as too short.
        above = {one["loc"][:depth] for one in found for depth in range(len(one["loc"]))}
        causes = [one for one in found if one["type"] != "too_short" or one["loc"] not in above]
        problems = dict.fromkeys(_describe(schema, tree, problem) for problem in causes)
        raise ValueError(redact(f"{where}: {'; '.join(problems)}")) from None


def require(value: Value | None, key: str, hint: str) -> Value:
    """A recipe's value of a key that the command needs.

    Args:
        value: as the recipe has it.
        key: the dotted key of the section or value.
        hint: what to give, with an example where it helps.

    Raises:
        ValueError: it is not set.
    """
    if value is None:
        raise ValueError(f"{key} is not set; give {hint}")
    return value


@contextmanager
def errors_of(where: str) -> Iterator[None]:
    """A `ValueError` in the block begins with what it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _describe(schema: type[BaseModel], tree: Any, problem: Any) -> str:
    """A problem with the key of its value, what was given, and what is allowed."""
    section: type[BaseModel] | None = schema
    holder, name, given, places = schema, "", tree, list[str]()
    for part in problem["loc"]:
        if section and isinstance(part, int):  # a list of sections
            given = given[part]
        elif section and part in section.model_fields:
            holder, name, given = section, part, given.get(part)
            section = section_type(section.model_fields[part].annotation)
        else:
            break
        places.append(str(part))
    key, fields = ".".join(places), section.model_fields if section else {}
    match problem["type"]:
        case "extra_forbidden":
            unknown = f"{key}.{problem['loc'][-1]}".removeprefix(".")
            hint = nearest_key(schema, unknown, list(fields))
            meant = f"; did you mean {hint}?" if hint else ""
            return f"unknown key {unknown}{meant} (valid in this section: {', '.join(fields)})"
        case "missing" if given is None:
            return f"{key} is required but not given"
        case "model_type" | "model_attributes_type":
            first = next((one for one in fields if fields[one].is_required()), next(iter(fields)))
            return f"{key}={given} is a section of keys; give keys below it, such as {key}.{first}"
        case "value_error":
            return f"{key}: {problem['msg']}".replace(": Value error, ", ": ").removeprefix(": ")
        case "finite_number":
            allowed = "a finite number"
        case _:
            nodes = holder.model_json_schema()
            allowed = allowed_text(nodes["properties"][name], nodes.get("$defs", {}))
    shown = value_text(given) if isinstance(given, (list, dict)) else repr(given)
    return f"{key}={shown}: give {allowed}"


def allowed_text(node: dict[str, Any], defs: dict[str, Any]) -> str:
    """The values that a node of a JSON schema allows: `0 | 1 | 2`, `integer > 0 | auto`."""
    match node:
        case {"anyOf": branches}:
            return " | ".join(dict.fromkeys(allowed_text(one, defs) for one in branches))
        case {"enum": values}:
            return " | ".join(map(yaml_text, values))
        case {"const": value}:
            return yaml_text(value)
        case {"prefixItems": items}:
            return f"[{', '.join(allowed_text(item, defs) for item in items)}]"
        case {"items": items}:
            return f"[{allowed_text(items, defs)}, ...]"
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
    """The key that was meant: an alias here, a near or longer key here, then either anywhere.

    Args:
        valid: keys of its section, which may be of a list.
    """
    section, dot, unknown = key.rpartition(".")
    prefix, everything = section + dot, list(dict(fields_below(schema)))
    alias = _ALIASES.get(unknown) if _ALIASES.get(unknown) in everything else None
    if alias and alias.startswith(prefix):
        return alias
    near = difflib.get_close_matches(unknown, valid, 1, 0.6)
    near += [name for name in valid if name.startswith(f"{unknown}_")]  # train.zero
    if near:
        return f"{prefix}{near[0]}"
    last = {name.rpartition(".")[2]: name for name in reversed(everything)}
    far = difflib.get_close_matches(unknown, last, 1, 0.75)
    return alias or (last[far[0]] if far else None)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this type holds, if it holds one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_type(argument) for argument in get_args(annotation))
    return next((section for section in found if section), None)


def is_list(annotation: Any) -> bool:
    """Whether a field of this type holds any number of values, and not a pair."""
    return Ellipsis in get_args(annotation) or any(map(is_list, get_args(annotation)))


def fields_below(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field of a schema, sections and values in their order, by its dotted key."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}", field
        if section := section_type(field.annotation):
            yield from fields_below(section, f"{prefix}{name}.")


def value_text(value: Any) -> str:
    """A recipe's value as a user writes it: lists in JSON, everything else as text."""
    return json.dumps(value, default=str) if isinstance(value, (tuple, list, dict)) else str(value)
