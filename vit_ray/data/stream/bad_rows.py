"""Rows that cannot be decoded during training: counted over all tasks; too many stop the run.

Counts are in the cluster's key-value store, so that a stream without bad rows costs nothing.
"""

import logging
from dataclasses import dataclass, field
from typing import Final

from vit_ray.data.stream.batches import refuse_too_many
from vit_ray.ray_internals import _internal_kv_list, _internal_kv_put

_PREFIX: Final = "vit_ray/bad_rows"
_PROCESSES: Final = 1024
"""The remaining allowance is divided among this many processes between two counts."""

_LOG: Final = logging.getLogger(__name__)


@dataclass
class BadRowLimit:
    """How many distinct rows of a data set the tasks of one stream may find undecodable.

    `stream` names the stream in the cluster. Every process has one of these per stream.
    """

    stream: str
    num_images: int
    max_fraction: float
    _known: set[int] = field(default_factory=set, init=False)
    _uncounted: int = field(default=0, init=False)
    _until_count: float = field(default=0.0, init=False)

    def note(self, bad: dict[int, str]) -> None:
        """Count bad rows: sample number to description.

        Raises:
            ValueError: more than the allowed fraction of the data set is bad.
        """
        folder = f"{_PREFIX}/{self.stream}"
        new = {sample: text for sample, text in bad.items() if sample not in self._known}
        for sample, description in new.items():
            _LOG.warning("not decodable, replaced by another row: %s", description)
            _internal_kv_put(f"{folder}/{sample}".encode(), description.encode())
        self._known.update(new)
        self._uncounted += len(new)
        # Counting over all processes reads every key. As long as no process has used up its share
        # of the remaining allowance, all together have not exceeded it either.
        if not new or self._uncounted < self._until_count:
            return
        total = len(_internal_kv_list(f"{folder}/".encode()))
        allowed = self.max_fraction * self.num_images
        refuse_too_many(total, self.num_images, self.max_fraction, next(iter(new.values())))
        self._uncounted, self._until_count = 0, (allowed - total) / _PROCESSES
