"""Seconds of a run by phase; they are part of `Progress`, and so of each checkpoint.

A resumed run continues from the seconds of its checkpoint. The time from that checkpoint to the
next attempt is then `lost`, so that a repeated step counts once. Time without a driver does not
count, nor what a driver that died did after its last checkpoint.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum

from vit_ray.metric_names import RUN_GOODPUT, RUN_GROUP, RUN_WALL_S


class Phase(StrEnum):
    """What a second of a run was spent on."""

    TRAINING = "training"
    DATA = "data_wait"
    # Processes, imports, data sets, the engine, a restore, and the first step, which compiles.
    STARTING = "starting"
    # The worker group waited for resources, without workers.
    PLACE = "place_wait"
    # Training paused for a checkpoint; writing it during training does not count.
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    LOST = "lost"


class PhaseClock:
    """The clock of one attempt on one worker; each moment belongs to one phase."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._began_s = clock, clock()
        self._phase, self._until_s = Phase.STARTING, self._began_s
        self._seconds = dict.fromkeys(Phase, 0.0)

    def resume(
        self, seconds: Mapping[str, float], until_s: float, driver_s: float, place_wait_s: float
    ) -> None:
        """Add the seconds before this attempt.

        Args:
            seconds: by phase, from the attempt's checkpoint; empty without a checkpoint.
            until_s: Unix time of that checkpoint; 0 without a checkpoint.
            driver_s: Unix time at which the driver was ready.
            place_wait_s: how long this attempt's group waited for resources.
        """
        for phase in Phase:
            self._seconds[phase] += seconds.get(phase, 0.0)
        gap_s = max(0.0, self._began_s - max(until_s, driver_s))
        waited_s = min(gap_s, place_wait_s)
        self._seconds[Phase.PLACE] += waited_s
        self._seconds[Phase.LOST if until_s > driver_s else Phase.STARTING] += gap_s - waited_s

    def note_step(self, wait_s: float) -> None:
        """A step is done, with its wait for data; the first step counts as start."""
        if self._enter(Phase.TRAINING) is Phase.TRAINING:
            self._seconds[Phase.TRAINING] -= wait_s
            self._seconds[Phase.DATA] += wait_s

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """The time in the block belongs to this phase."""
        before = self._enter(phase)
        try:
            yield
        finally:
            self._enter(before)

    def spent(self) -> tuple[dict[str, float], float]:
        """Seconds of the run by phase, and the Unix time until which they count."""
        self._enter(self._phase)
        return {str(phase): value for phase, value in self._seconds.items()}, self._until_s

    def _enter(self, phase: Phase) -> Phase:
        now_s, before = self._clock(), self._phase
        self._seconds[before] += now_s - self._until_s
        self._phase, self._until_s = phase, now_s
        return before


def phase_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """`run/goodput`, `run/wall_s`, and `run/<phase>_s` of each phase."""
    wall_s = sum(seconds.values())
    goodput = seconds[Phase.TRAINING] / wall_s if wall_s > 0 else 0.0
    parts = {f"{RUN_GROUP}{phase}_s": value for phase, value in seconds.items()}
    return {RUN_GOODPUT: goodput, RUN_WALL_S: wall_s, **parts}


def describe_phases(metrics: Mapping[str, float]) -> str:
    """`phase_metrics`, or their sums over runs, as one line; empty without them."""
    wall_s = metrics.get(RUN_WALL_S, 0.0)
    if not (seconds := round(wall_s)):
        return ""
    shares = {phase: metrics.get(f"{RUN_GROUP}{phase}_s", 0.0) / wall_s for phase in Phase}
    parts = ", ".join(
        f"{phase.replace('_', ' ')} {share:.1%}" for phase, share in shares.items() if share >= 5e-4
    )
    clock = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"goodput {shares[Phase.TRAINING]:.1%} of {clock}: {parts}"
