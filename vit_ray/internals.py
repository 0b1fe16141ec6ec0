"""Use of libraries beyond their public interface: private names, and hidden optional imports.

A private name is listed in the only file that may use it: `ray_internals.py`,
`deepspeed_internals.py` or `mlflow_internals.py`. `tests/test_internals.py` checks that each name
exists in the installed version.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Internal:
    """A private name of a library, why it is used, and what is expected of it.

    Attributes:
        name: attribute of the module; empty = the module itself.
        upstream: issue or pull request of the library about it; empty = none is known.
        parameters: method, or "" for the name itself, to its expected parameters, in order.
        attributes: attributes of an instance or of the class.
        source: expressions that its source must contain, because this project replaces them.
    """

    module: str
    name: str
    why: str
    upstream: str
    parameters: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: tuple[str, ...] = ()
    source: tuple[str, ...] = ()


_LOCK: Final = threading.RLock()


@contextlib.contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Hide modules from imports in the block, unless they have been imported already.

    For optional imports that take seconds and are not used: libraries imported in the block behave
    as if `names` were not installed. Other threads cannot import them during the block either, so
    use this at the start of a process.
    """
    with _LOCK:
        hidden = [name for name in names if name not in sys.modules]
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        try:
            yield
        finally:
            for name in hidden:
                if sys.modules.get(name, name) is None:
                    del sys.modules[name]
