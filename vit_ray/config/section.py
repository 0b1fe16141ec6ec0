"""What every section of a recipe is: frozen, strictly typed, closed to unknown keys."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegativeFloat = Annotated[float, Field(ge=0.0)]
ImageSize = Positive | tuple[Positive, Positive]


class Section(BaseModel):
    """Base of every section: frozen, strict types, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )
