"""A conversion by keywords."""

from typing import Any

from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data.prepare.convert import conversion
from vit_ray.data.prepare.convert.commit import ConvertReport


def config_of(source: Any, destination: Any, **options: Any) -> ConvertConfig:
    """A section `convert`; lists stand for tuples."""
    tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return ConvertConfig(source=str(source), destination=str(destination), **tuples)


def convert(source: Any, destination: Any, *, seed: int = 0, **options: Any) -> ConvertReport:
    return conversion.convert(config_of(source, destination, **options), seed)
