"""Importing libraries without their optional dependencies."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

_LOCK: Final = threading.RLock()


@contextlib.contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Make imports inside the block not find these, unless they have been imported already.

    For optional imports that cost seconds and that nothing here uses, in our own processes: what is
    imported inside behaves as if `names` were not installed. Other threads that import one of them
    meanwhile would not find it either, so use this at the start of a process.
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
