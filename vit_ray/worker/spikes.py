"""A finite spike of loss or gradient norm: noted, with the losses of its images, then handled."""

import io
import shlex
from collections.abc import Callable
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config import Recipe
from vit_ray.outcomes import EventKind
from vit_ray.train.engine.collectives import all_rows
from vit_ray.train.image_losses import ImageLosses
from vit_ray.train.spikes import Spike, losses_file
from vit_ray.worker.run_link import RunLink

MOST_FILES: Final = 100
"""Number of spikes in a run for which losses per image are kept."""


class SpikePolicy:
    """Carries out `train.on_spike`."""

    def __init__(
        self,
        recipe: Recipe,
        link: RunLink,
        image_losses: ImageLosses,
        device: torch.device,
        roll_back: Callable[[Progress, int | None], int | None],
    ) -> None:
        """
        Args:
            roll_back: restores the newest checkpoint, unless it is of the given step, and returns
                its step; all ranks call it.
        """
        self._recipe, self._link, self._image_losses = recipe, link, image_losses
        self._device, self._roll_back = device, roll_back
        self._restored: int | None = None

    def handle(self, progress: Progress, spike: Spike) -> None:
        """Report the spike of the step before `progress.step`, and roll back if the recipe says so.

        It rolls back to each checkpoint only once: otherwise spikes between two checkpoints would
        undo all training, while the schedule and the data advance.
        """
        policy, step = self._recipe.train.on_spike, progress.step
        if progress.spikes <= MOST_FILES:
            kept = {
                number: all_rows(rows, self._device)
                for number, rows in self._image_losses.take().items()
            }
            if kept and self._link.rank == 0:
                self._link.show_files({losses_file(step - 1): _as_parquet(kept)}, "spikes")
        is_skipped = policy == "skip" and spike.is_refused
        done = "; the step was not applied" if is_skipped else ""
        text = (
            f"step {step - 1}: {spike}{done}. "
            f"`vit-ray explain {shlex.quote(self._recipe.run_folder)} step={step - 1}` finds the "
            "cause"
        )
        self._link.note(EventKind.SPIKE, text, step)
        if policy == "rollback":
            restored, kind = self._roll_back(progress, self._restored), EventKind.SPIKE
            if restored is None:
                text = "there is no checkpoint to roll back to; training continues"
            elif restored == self._restored:
                text = f"not rolled back to step {restored} a second time; training continues"
            else:
                text = (
                    f"weights of step {restored}; training continues with the data of step {step}"
                )
                kind = EventKind.ROLLED_BACK
            self._restored = restored
            self._link.note(kind, text, step)


def _as_parquet(kept: dict[int, NDArray[np.float64]]) -> bytes:
    """Columns `step`, `sample` and `loss`, a row for each image of a batch in its order."""
    rows = np.concatenate(list(kept.values()))
    steps = np.repeat(list(kept), [len(one) for one in kept.values()])
    table = pa.table(
        {
            "step": steps,
            "sample": rows[:, 0].astype(np.int64),
            "loss": rows[:, 1].astype(np.float32),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()
