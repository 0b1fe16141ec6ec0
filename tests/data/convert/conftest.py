"""Conversions that are stopped."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from vit_ray.data.convert import conversion, shards


@contextlib.contextmanager
def stopped_at(monkeypatch: pytest.MonkeyPatch, function: str, *, is_done: bool) -> Iterator[None]:
    """A conversion that is stopped at the call of one of its functions, or right after it."""
    module: Any = conversion if hasattr(conversion, function) else shards
    original = getattr(module, function)

    def interrupted(*arguments: Any) -> None:
        if is_done:
            original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, function, interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield
