"""Learning rate as a pure function of the step, so that resuming needs no scheduler state."""

import math

from vit_ray.config.training_sections import OptimConfig


def lr_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of the 0-based `step`: linear warm-up from zero, then the decay.

    Linear and cosine decay run from `learning_rate` after the warm-up to `end_learning_rate`
    at `total_steps`; `steps` multiplies by 0.1 at each share of `total_steps` in `decay_at`;
    `cooldown` is constant, and then falls linearly to `end_learning_rate` over its last share.
    """
    peak, end = config.learning_rate, config.end_learning_rate
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == "linear":
        return end + (peak - end) * (1.0 - progress)
    if config.schedule == "cosine":
        return end + (peak - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "cooldown":
        left = total_steps - cooldown_start(config, total_steps)
        return end + (peak - end) * min(1.0, max(0.0, (total_steps - step) / left))
    if config.schedule == "steps":
        return peak * 0.1 ** sum(step / total_steps >= share for share in config.decay_at)
    return peak


def cooldown_start(config: OptimConfig, total_steps: int) -> int:
    """Steps before the cool-down of `schedule=cooldown`, warm-up included."""
    return total_steps - max(1, round(config.cooldown_fraction * total_steps))
