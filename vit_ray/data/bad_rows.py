"""Rows that cannot be decoded while training: counted over all tasks, and stopped above a limit."""

from typing import Any

import ray


class BadRowLedger:
    """Counts the distinct bad rows that all tasks of one stream met."""

    def __init__(self) -> None:
        self._seen: dict[int, str] = {}

    def add(self, bad: dict[int, str]) -> int:
        """Note bad rows (sample number to description); the number of distinct ones so far."""
        self._seen.update(bad)
        return len(self._seen)

    def seen(self) -> dict[int, str]:
        """Every bad row so far."""
        return self._seen


class BadRowLimit:
    """A ledger together with the number of rows that it may reach."""

    def __init__(self, ledger: Any, num_images: int, max_fraction: float) -> None:
        self._ledger = ledger
        self._num_images = num_images
        self._max_fraction = max_fraction

    def note(self, bad: dict[int, str]) -> None:
        """Count bad rows.

        Raises:
            ValueError: if more than the allowed fraction of the data set is bad.
        """
        if not bad:
            return
        total = ray.get(self._ledger.add.remote(bad))
        if total > self._max_fraction * self._num_images:
            raise ValueError(
                f"{total} of {self._num_images} images cannot be decoded, above "
                f"data.max_bad_fraction={self._max_fraction}; one of them is "
                f"{next(iter(bad.values()))}; run jobs/verify.py, or raise the limit."
            )


def new_ledger() -> Any:
    """An actor that holds a ledger; it lives as long as its handle."""
    return ray.remote(num_cpus=0)(BadRowLedger).remote()
