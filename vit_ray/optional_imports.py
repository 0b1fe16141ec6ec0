"""Importing libraries without what they use only if it is there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Final

_LOCK: Final = threading.RLock()


@contextlib.contextmanager
def hide_modules(*names: str) -> Iterator[None]:
    """Let imports inside the block find none of these, unless they have been imported already.

    For optional imports that cost seconds and that nothing here uses, in processes of our own:
    what is imported inside behaves as where `names` are not installed. Other threads that import
    one of them meanwhile would not find it either, so this belongs to the start of a process.
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
