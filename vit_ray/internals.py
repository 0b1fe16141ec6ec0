"""How a private name of a library is listed in the one file that may use it.

These files are `ray_internals.py`, `deepspeed_internals.py` and `mlflow_internals.py`;
`tests/test_internals.py` finds every name in the installed version.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Internal:
    """One private name of a library, why it is used, and what is expected of it."""

    module: str
    name: str
    """Attribute of the module; empty = the module itself."""
    why: str
    upstream: str
    """Issue or pull request of the library that discusses it; empty = none is known."""
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Method, or "" for the name itself, to the parameters that it must have, in order."""
    attributes: tuple[str, ...] = ()
    """Attributes of an instance or of the class."""
    source: tuple[str, ...] = ()
    """Expressions that its source must contain, because the code replaces them."""
