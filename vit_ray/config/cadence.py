"""When something recurs: every N steps, every N minutes, either, or never."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cadence:
    """`None` = not by steps, or not by time."""

    every_steps: int | None = None
    every_minutes: float | None = None
    at_steps: tuple[int, ...] = ()
    """Further steps at which it is due."""

    def is_due_at(self, step: int) -> bool:
        """By steps: whether it is due when `step` steps are completed."""
        recurs = self.every_steps is not None and step % self.every_steps == 0
        return recurs or step in self.at_steps

    def is_due_after(self, elapsed_s: float) -> bool:
        """By the clock: whether it is due `elapsed_s` after it was last done."""
        return self.every_minutes is not None and elapsed_s >= 60.0 * self.every_minutes
