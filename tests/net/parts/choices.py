"""Which images a fraction, a split, a dev split, a subset and few-shot draws choose."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import vit_ray
from tests.net.adapters import dev_split
from tests.net.commands import must_run, words
from tests.net.sets import converted, digest

SEEDS = range(5)
BATCH = 15  # a divisor of all epochs in training
SUBSETS = {"count": 100, "fraction": 0.25}


def record(folder: Path) -> dict[str, Any]:
    source = converted() / "small"
    data = vit_ray.open_dataset(str(source))
    found: dict[str, Any] = {}
    for seed in SEEDS:
        for fraction in (0.1, 0.5):
            found[f"fraction {fraction}, seed {seed}"] = _epoch(data, seed, fraction=fraction)
        for share in (0.1, 0.25):
            name, split = f"{share} held out, seed {seed}", {"held_out_fraction": share}
            found[name] = _epoch(data, seed, **split)
            found[f"{name}, evaluated"] = _epoch(data, seed, training=False, **split)
        both = {"fraction": 0.5, "held_out_fraction": 0.1}
        found[f"half of nine tenths, seed {seed}"] = _epoch(data, seed, **both)
        rest, dev = dev_split(str(source), str(folder / "dev"), 0.2, seed)
        found[f"dev split, seed {seed}"] = {"rest": _keys(rest), "dev": _keys(dev)}
    found.update(_subsets(source, folder))
    found["few-shot"] = _few_shot()
    return found


def _epoch(data: Any, seed: int, **keys: Any) -> str:
    """Count and digest of the images of an epoch."""
    chosen: list[int] = []
    for batch in data.iter_batches(BATCH, 8, seed=seed, shuffle_window=0, **keys):
        is_image = batch.get("weight", np.ones(BATCH)) > 0  # an evaluation fills its last batch
        chosen += batch["sample"][is_image].tolist()
    return f"{len(chosen)} images, {digest(json.dumps(sorted(chosen)).encode())}"


def _keys(path: str) -> str:
    """Of a data set, in its order."""
    keys = [sample.key for sample in vit_ray.open_dataset(path)]
    return f"{len(keys)} images, {digest(json.dumps(keys).encode())}"


def _subsets(source: Path, folder: Path) -> dict[str, Any]:
    listed = [sample.key for sample in vit_ray.open_dataset(str(source))][5:290:7]
    (folder / "keys.txt").write_text("\n".join(listed) + "\n")
    chosen = {
        f"{key} {value}, seed {seed}": [f"subset.{key}={value}", f"seed={seed}"]
        for key, value in SUBSETS.items()
        for seed in SEEDS
    }
    chosen["listed keys"] = ["subset.keys=keys.txt"]
    must_run(
        folder,
        [words("subset", *more, source=source, destination=name) for name, more in chosen.items()],
    )
    return {f"subset, {name}": _keys(str(folder / name)) for name in chosen}


def _few_shot() -> dict[str, float]:
    """Accuracies on features that are chance, so that each draw has its own."""
    random = np.random.default_rng(17)
    labels = {name: np.arange(count) % 10 for name, count in (("train", 400), ("test", 3000))}
    features = {name: random.normal(size=(len(each), 12)) for name, each in labels.items()}
    found = {}
    for seeds in SEEDS:
        accuracies = vit_ray.few_shot_accuracy(
            features["train"], labels["train"], features["test"], labels["test"],
            num_classes=10, shots=(1, 5, 10), seeds=seeds + 1,
        )  # fmt: skip
        found.update({f"{seeds + 1} seeds, {n} shots": round(a, 9) for n, a in accuracies.items()})
    return found
