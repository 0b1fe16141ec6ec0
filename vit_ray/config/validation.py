"""Plain data to a checked schema: each problem by its dotted key, with the nearest valid one."""

from __future__ import annotations

import difflib
import json
import re
from typing import Any, TypeVar, get_args

import pydantic
from pydantic import BaseModel

from vit_ray.config.secrets import redact

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")

# What people type who come from other systems.
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
    """Some values are not as the schema has them."""

    types: frozenset[str] = frozenset()
    """Pydantic's names of what is wrong, such as `int_type`."""


def validated(schema: type[Model], tree: dict[str, Any], where: str) -> Model:
    """A checked instance of a schema from plain data.

    Raises:
        InvalidValueError: as `load_recipe`; every problem is listed.
    """
    try:
        # JSON mode is strict about types but lets a list stand for a tuple, as YAML needs.
        return schema.model_validate_json(json.dumps(tree))
    except pydantic.ValidationError as error:
        found = error.errors()
        # A tuple whose items failed counts as too short as well; only the items' own faults help.
        causes = [p for p in found if p["type"] != "too_short"] or found
        problems = [_describe(schema, problem) for problem in causes]
        refusal = InvalidValueError(redact(f"{where}: " + "; ".join(dict.fromkeys(problems))))
        refusal.types = frozenset(problem["type"] for problem in found)
        raise refusal from None


def require(value: Value | None, key: str, hint: str) -> Value:
    """What a recipe gives for a key that the job at hand cannot do without.

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


def _describe(schema: type[BaseModel], problem: Any) -> str:
    where = [part for part in problem["loc"] if not _is_union_branch(part)]
    key = ".".join(str(part) for part in where)
    if problem["type"] == "extra_forbidden":
        return _describe_unknown(schema, where)
    given = problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{key} is required but not given"
    if problem["type"] in ("model_type", "model_attributes_type"):
        first = _keys_of(schema, where)[0]
        return f"{key}={given!r}: {key} is a section of keys; did you mean {key}.{first}={given}?"
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{key}={given!r}: a list is needed, such as {_example(schema, where, given)}"
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}={given!r}: {message}"


def _example(schema: type[BaseModel], where: list[Any], given: Any) -> str:
    """The list that a key has by default, else one of what was given."""
    *section, name = where
    model = schema
    for part in section:
        if isinstance(part, int):
            return value_text([given])
        model = section_type(model.model_fields[str(part)].annotation) or model
    field = model.model_fields.get(str(name))
    default = field.default if field else None
    return value_text(list(default) if isinstance(default, tuple) and default else [given])


def _is_union_branch(part: Any) -> bool:
    """Pydantic names the branch of a union it tried; users did not write that."""
    return (
        isinstance(part, str)
        and re.search(r"[\[(,]|^(constrained-)?(int|float|bool|str)$", part) is not None
    )


def _describe_unknown(schema: type[BaseModel], where: list[Any]) -> str:
    section, unknown = where[:-1], str(where[-1])
    valid = _keys_of(schema, section)
    prefix = "".join(f"{part}." for part in section)
    hint = _nearest(schema, prefix, unknown, valid)
    meant = f"; did you mean {hint}?" if hint else ""
    return f"unknown key {prefix}{unknown}{meant} (valid in this section: {', '.join(valid)})"


def _nearest(schema: type[BaseModel], prefix: str, unknown: str, valid: list[str]) -> str | None:
    """The key that was meant: an alias here, a near or longer key here, then either anywhere."""
    everything = dotted_keys(schema)
    alias = _ALIASES.get(unknown)
    alias = alias if alias in everything else None
    if alias and alias.startswith(prefix):
        return alias
    if near := difflib.get_close_matches(unknown, valid, 1, 0.6):
        return f"{prefix}{near[0]}"
    if begun := [key for key in valid if key.startswith(f"{unknown}_")]:
        return f"{prefix}{begun[0]}"  # train.zero
    last = {key.rpartition(".")[2]: key for key in reversed(everything)}
    far = difflib.get_close_matches(unknown, last, 1, 0.75)
    return alias or (last[far[0]] if far else None)


def _keys_of(schema: type[BaseModel], section: list[Any]) -> list[str]:
    model = schema
    for part in section:
        if isinstance(part, int):
            continue
        model = section_type(model.model_fields[str(part)].annotation) or model
    return list(model.model_fields)


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The section that a field of this type holds, if it holds one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (section_type(argument) for argument in get_args(annotation))
    return next((section for section in found if section), None)


def is_list(annotation: Any) -> bool:
    """Whether a field of this type holds any number of values, and not a pair of them."""
    return Ellipsis in get_args(annotation) or any(map(is_list, get_args(annotation)))


def dotted_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key of a schema, sections and values, in the order of their fields."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        section = section_type(field.annotation)
        if section is not None:
            keys += dotted_keys(section, f"{prefix}{name}.")
    return keys


def value_text(value: Any) -> str:
    """A value of a recipe as a person writes it: lists in JSON, the rest as text."""
    return json.dumps(value, default=str) if isinstance(value, (tuple, list, dict)) else str(value)
