"""Plain data to a checked schema: each problem with its dotted key and the nearest valid key."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, get_args

import pydantic
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from vit_ray.config.secrets import redact

NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
"""Names of runs, which are those of folders."""
_ALLOWED: Final = {
    NAME: "letters from A to Z, digits, and `.`, `_`, `+` or `-` after the first, without spaces"
}
"""What a pattern allows, as a user reads it."""

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


class InvalidValueError(ValueError):
    """Some values do not fit the schema."""

    types: frozenset[str] = frozenset()
    """Pydantic's names of the problems, such as `int_type`."""


def validated(schema: type[Model], tree: dict[str, Any], where: str) -> Model:
    """A checked instance of a schema from plain data.

    Raises:
        InvalidValueError: as `load_recipe`; every problem is listed.
    """
    try:
        # JSON mode is strict about types but accepts a list for a tuple, as YAML needs.
        return schema.model_validate_json(json.dumps(tree))
    except pydantic.ValidationError as error:
        found = error.errors()
        # A tuple whose items failed is also reported as too short; only report the items' own
        # problems.
        causes = [p for p in found if p["type"] != "too_short"] or found
        problems = [_describe(schema, p) for p in causes if not _is_of_other_kind(p, causes)]
        refusal = InvalidValueError(redact(f"{where}: " + "; ".join(dict.fromkeys(problems))))
        refusal.types = frozenset(problem["type"] for problem in found)
        raise refusal from None


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


_BRANCH: Final = re.compile(r".*[\[(,]|^(constrained-)?(int|float|bool|str)$")
"""Pydantic's names of the branches of a union that it tried; users did not write that."""
_CONTAINERS: Final = {"tuple_type", "list_type", "dict_type", "model_type"}
_SCALARS: Final = {"int_type", "float_type", "bool_type", "string_type", "literal_error"}


def _place(problem: Any) -> list[Any]:
    """The keys and list positions that lead to the value."""
    return [one for one in problem["loc"] if isinstance(one, int) or not _BRANCH.match(one)]


def _is_of_other_kind(problem: Any, found: Sequence[Any]) -> bool:
    """Whether it is about a branch of a union that the value was not meant for, and another problem
    says more: a number is not to become a list, nor a list or section a number or a text.
    """
    place = _place(problem)
    others = [p for p in found if _place(p)[: len(place)] == place and p is not problem]
    if isinstance(problem["input"], (list, dict)):
        says_more = any(
            _place(p) != place or p["type"] not in _CONTAINERS | _SCALARS for p in others
        )
        return problem["type"] in _SCALARS and says_more
    return problem["type"] in _CONTAINERS and bool(others)


def _describe(schema: type[BaseModel], problem: Any) -> str:
    where = _place(problem)
    key, given = ".".join(map(str, where)), problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    match problem["type"]:
        case "extra_forbidden":
            valid = _section_at(schema, where[:-1]).model_fields
            hint = nearest_key(schema, key, list(valid))
            meant = f"; did you mean {hint}?" if hint else ""
            return f"unknown key {key}{meant} (valid in this section: {', '.join(valid)})"
        case "missing":
            return f"{key} is required but not given"
        case "model_type" | "model_attributes_type":
            fields = _section_at(schema, where).model_fields
            first = next((one for one in fields if fields[one].is_required()), next(iter(fields)))
            if given is None:
                return f"{key} is empty: give keys below it, such as {first}, or leave {key} out"
            return (
                f"{key}={given!r}: {key} is a section of keys; did you mean {key}.{first}={given}?"
            )
        case "tuple_type" | "list_type":
            field = _section_at(schema, where[:-1]).model_fields.get(str(where[-1]))
            has_example = field is not None and isinstance(field.default, tuple) and field.default
            example = value_text(field.default if field and has_example else [given])
            return f"{key}={given!r}: a list is needed, such as {example}"
        case "string_pattern_mismatch" if allowed := _ALLOWED.get(problem["ctx"]["pattern"]):
            return f"{key}={given!r}: use {allowed}"
        case "dict_type":
            return f"{key}={given!r}: a mapping is needed, such as {{NAME: VALUE}}"
        case "value_error":
            return f"{key}: {message}" if key else message
    return f"{key}={given!r}: {message}"


def nearest_key(schema: type[BaseModel], key: str, valid: Sequence[str]) -> str | None:
    """The key that was meant: an alias here, a near or longer key here, then either anywhere.

    Args:
        valid: keys of its section, which may be of a list.
    """
    section, dot, unknown = key.rpartition(".")
    prefix, everything = section + dot, dotted_keys(schema)
    alias = _ALIASES.get(unknown)
    alias = alias if alias in everything else None
    if alias and alias.startswith(prefix):
        return alias
    near = difflib.get_close_matches(unknown, valid, 1, 0.6)
    near += [name for name in valid if name.startswith(f"{unknown}_")]  # train.zero
    if near:
        return f"{prefix}{near[0]}"
    last = {name.rpartition(".")[2]: name for name in reversed(everything)}
    far = difflib.get_close_matches(unknown, last, 1, 0.75)
    return alias or (last[far[0]] if far else None)


def _section_at(schema: type[BaseModel], where: list[Any]) -> type[BaseModel]:
    """The section that the keys and list positions lead to."""
    for part in where:
        if not isinstance(part, int):
            schema = section_type(schema.model_fields[part].annotation) or schema
    return schema


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


def dotted_keys(schema: type[BaseModel]) -> list[str]:
    """Every key of a schema, sections and values."""
    return [key for key, _ in fields_below(schema)]


def value_text(value: Any) -> str:
    """A recipe's value as a user writes it: lists in JSON, everything else as text."""
    return json.dumps(value, default=str) if isinstance(value, (tuple, list, dict)) else str(value)
