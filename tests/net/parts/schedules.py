"""Learning rates of every step, for each schedule with and without its options."""

from pathlib import Path
from typing import Any

from tests.net.adapters import lr_at
from tests.net.commands import RECIPE
from vit_ray.config import load_recipe

STEPS = 40
SCHEDULES = {
    "linear": ["optim.schedule=linear"],
    "linear to 1e-5": ["optim.schedule=linear", "optim.end_learning_rate=1e-5"],
    "cosine": ["optim.schedule=cosine"],
    "cosine to 1e-5": ["optim.schedule=cosine", "optim.end_learning_rate=1e-5"],
    "constant": ["optim.schedule=constant"],
    "steps": ["optim.schedule=steps"],
    "steps at 0.5": ["optim.schedule=steps", "optim.decay_at=[0.5]"],
    "cooldown": ["optim.schedule=cooldown"],
    "cooldown of a half": [
        "optim.schedule=cooldown", "optim.cooldown_fraction=0.5", "optim.end_learning_rate=1e-5",
    ],
}  # fmt: skip


def record(folder: Path) -> dict[str, Any]:
    found = {}
    always = [f"optim.steps={STEPS}", "optim.learning_rate=3e-3"]
    for name, keys in SCHEDULES.items():
        for warmup in (0, 7):
            optim = load_recipe(RECIPE, [*always, *keys, f"optim.warmup_steps={warmup}"]).optim
            rates = [lr_at(step, optim, STEPS).hex() for step in range(STEPS)]
            found[f"{name}, warm-up {warmup}"] = " ".join(rates)
    return found
