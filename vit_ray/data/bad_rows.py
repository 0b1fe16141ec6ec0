"""Rows that cannot be decoded while training: counted over all tasks, and stopped above a limit.

Counts live in the cluster's key-value store, so that a stream without bad rows costs nothing.
"""

from dataclasses import dataclass
from typing import Final

from ray.experimental.internal_kv import _internal_kv_list, _internal_kv_put

_PREFIX: Final = "vit_ray/bad_rows"


@dataclass(frozen=True)
class BadRowLimit:
    """How many distinct rows of a data set the tasks of one stream may find undecodable.

    `stream` names the stream in the cluster.
    """

    stream: str
    num_images: int
    max_fraction: float

    def note(self, bad: dict[int, str]) -> None:
        """Count bad rows: sample number to description.

        Raises:
            ValueError: if more than the allowed fraction of the data set is bad.
        """
        if not bad:
            return
        for sample, description in bad.items():
            _internal_kv_put(f"{self._folder}/{sample}".encode(), description.encode())
        total = len(_internal_kv_list(self._folder.encode()))
        if total > self.max_fraction * self.num_images:
            raise ValueError(
                f"{total} of {self.num_images} images cannot be decoded, above "
                f"data.max_bad_fraction={self.max_fraction}; one of them is "
                f"{next(iter(bad.values()))}; run jobs/verify.py, or raise the limit."
            )

    @property
    def _folder(self) -> str:
        return f"{_PREFIX}/{self.stream}"
