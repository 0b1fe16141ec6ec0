"""Which samples the global batches have, in 48 worlds and for large batches."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

import vit_ray
from tests.net.sets import NUM_LARGE, NUM_SMALL, converted, digest

WORLD_SIZES = (1, 2, 3, 8)
WINDOWS = (0, 96)
RESUMED_STEPS = (0, 5, 43)
HELD_OUT = (0.0, 0.1)
BATCH, STEPS, READ_STEPS = 24, 64, 8
LARGE_BATCH, LARGE_STEPS, LARGE_SIZES = 4096, 2, (1, 2, 8)


def record(folder: Path) -> dict[str, Any]:
    """A digest of each world's samples, and of what the numbers stand for."""
    sets = {name: vit_ray.open_dataset(str(converted() / name)) for name in ("small", "large")}
    found: dict[str, Any] = {f"the set {name}": _rows(data) for name, data in sets.items()}
    for size, window, step, share in itertools.product(
        WORLD_SIZES, WINDOWS, RESUMED_STEPS, HELD_OUT
    ):
        name = f"{size} ranks, window {window}, from step {step}, {share} held out"
        found[name] = _samples(
            sets["small"], BATCH, size, slice(0, READ_STEPS),
            epochs=STEPS * BATCH / round(NUM_SMALL * (1 - share)),
            start=step * BATCH, seed=11, shuffle_window=window, held_out_fraction=share,
        )  # fmt: skip
    for size in LARGE_SIZES:
        epochs = LARGE_STEPS * LARGE_BATCH / NUM_LARGE
        found[f"batch {LARGE_BATCH}, {size} ranks"] = _samples(
            sets["large"], LARGE_BATCH, size, slice(0, LARGE_STEPS), epochs=epochs, seed=11
        )
    return found


def _rows(data: Any) -> dict[str, Any]:
    """Keys and labels in the order of the samples' numbers."""
    rows = repr([(sample.key, sample.labels) for sample in data])
    return {"images": len(data), "classes": list(data.classes), "rows": digest(rows.encode())}


def _samples(data: Any, batch: int, size: int, steps: slice, **options: Any) -> str:
    """Of the global batches, put together from those of the ranks."""
    worlds = [data.iter_batches(batch, 8, rank=r, world_size=size, **options) for r in range(size)]
    ranks = [[part["sample"] for part in world[steps]] for world in worlds]
    batches = [np.concatenate(parts).astype(np.int64) for parts in zip(*ranks, strict=True)]
    assert len(batches) == steps.stop
    return digest(*(samples.tobytes() for samples in batches))
