"""How a private name of a library is listed in the one file that may use it, its door.

The doors are `ray_internals.py`, `deepspeed_internals.py` and `mlflow_internals.py`;
`tests/test_internals.py` finds every name in the installed version.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Internal:
    """One private name of a library, why it is used, and what is expected of it."""

    module: str
    name: str
    """In the module; empty = the module itself."""
    why: str
    upstream: str
    """Issue or pull request of the library where it is discussed; empty = none is known."""
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Method, or "" for the name itself, to the parameters that it must have, in their order."""
    attributes: tuple[str, ...] = ()
    """Of an instance or of the class."""
    source: tuple[str, ...] = ()
    """Expressions that its source must contain: what is replaced is what is called."""
