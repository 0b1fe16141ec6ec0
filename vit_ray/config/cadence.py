"""When something recurs: every N steps, at further steps, or never."""


def is_due(step: int, every_steps: int | None, at_steps: tuple[int, ...] = ()) -> bool:
    """Whether it is due when `step` steps are completed; `every_steps` None = not by steps."""
    return (every_steps is not None and step % every_steps == 0) or step in at_steps
