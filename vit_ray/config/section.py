"""What every section of a recipe is: frozen, strictly typed, closed to unknown keys."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from vit_ray.addresses import without_credentials
from vit_ray.config.schema import PLACE, value_text
from vit_ray.own_parts import DOTTED

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
