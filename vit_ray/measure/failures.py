"""What failures cost a run: its expected goodput, and the best time between two checkpoints.

Failures come independently at a constant rate, as in J. T. Daly, "A higher order estimate of the
optimum checkpoint interval for restart dumps" (Future Generation Computer Systems 22, 2006), of
which the two formulas are. `simulated_s` plays single runs; it shares no formula with them.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_AUTO_S: Final = 3600.0
"""Longest interval that `checkpoint.every_minutes=auto` takes: not all failures are of hardware."""


def best_interval_s(stall_s: float, failure_s: float) -> float:
    """Seconds of training between two checkpoints that waste the least time.

    Young's sqrt(2 stall failure) with Daly's higher orders; while a stall is shorter than the time
    between failures, the goodput is within 0.1 % of that at the exact optimum.

    Args:
        stall_s: for which training stands still for a checkpoint.
        failure_s: mean time between two failures of the run.
    """
    part = stall_s / (2 * failure_s)
    if part >= 1:
        return failure_s
    young_s = math.sqrt(2 * stall_s) * math.sqrt(failure_s)
    return young_s * (1 + math.sqrt(part) / 3 + part / 9) - stall_s


@dataclass(frozen=True)
class Interruptions:
    """What interrupts a run, in seconds.

    Attributes:
        failure_s: mean time between two failures; inf = there are none.
        restart_s: from a failure until the run trains again from its newest checkpoint.
        stall_s: for which training stands still for a checkpoint.
        write_s: from there until the checkpoint is whole, beside the training.
    """

    failure_s: float
    restart_s: float
    stall_s: float
    write_s: float = 0.0

    @property
    def best_interval_s(self) -> float:
        """As the function, but no checkpoint begins before the one before it is whole."""
        return max(best_interval_s(self.stall_s, self.failure_s), self.write_s)

    def goodput(self, interval_s: float) -> float:
        """Expected share of the wall clock of a long run that trains something new.

        A checkpoint that is whole only `write_s` after it was taken costs as much as a restart
        that is longer by that: an attempt of n intervals has to last n (interval + stall) + write.

        Args:
            interval_s: of training between two checkpoints.
        """
        period_s = interval_s + self.stall_s
        if math.isinf(self.failure_s):
            return interval_s / period_s
        lost = (self.restart_s + self.write_s) / self.failure_s
        part = period_s / self.failure_s
        # interval / (failure (e^part - 1)) e^-lost, which large exponents do not overflow.
        return interval_s / (self.failure_s * -math.expm1(-part)) * math.exp(-part - lost)

    def simulated_s(
        self, interval_s: float, work_s: float, num_runs: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """Wall clock of runs that each do `work_s` of training, shape (num_runs,).

        Each plays attempts until one of them ends the work. Endless where `goodput` is 0.
        """
        period_s = interval_s + self.stall_s
        left_s, wall_s = np.full(num_runs, work_s), np.zeros(num_runs)
        begin_s = 0.0  # of an attempt, until it trains
        while (runs := np.flatnonzero(left_s > 0)).size:
            fails_s = rng.exponential(self.failure_s, runs.size)
            num_saves = np.maximum(np.ceil(left_s[runs] / interval_s) - 1, 0)
            needs_s = begin_s + left_s[runs] + num_saves * self.stall_s
            num_whole = np.floor(np.maximum(fails_s - begin_s - self.write_s, 0) / period_s)
            wall_s[runs] += np.minimum(fails_s, needs_s)
            saved_s = np.minimum(num_whole, num_saves) * interval_s
            left_s[runs] = np.where(fails_s < needs_s, left_s[runs] - saved_s, 0)
            begin_s = self.restart_s
        return wall_s
