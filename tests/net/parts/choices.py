"""Which images a fraction, a split, a dev split, a subset and few-shot draws choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import vit_ray
from tests.net.adapters import dev_split
from tests.net.commands import must_run
from tests.net.sets import converted, digest

SEEDS = range(5)
SUBSETS = {"count": 100, "fraction": 0.25}


def record(folder: Path) -> dict[str, Any]:
    """By kind of choice and seed."""
    source = converted() / "small"
    data = vit_ray.open_dataset(str(source))
    found: dict[str, Any] = {}
    for seed in SEEDS:
        for fraction in (0.1, 0.5):
            found[f"fraction {fraction}, seed {seed}"] = _trained(data, seed, fraction=fraction)
        for share in (0.1, 0.25):
            name = f"{share} held out, seed {seed}"
            found[name] = _trained(data, seed, held_out_fraction=share)
            found[f"{name}, evaluated"] = _evaluated(data, seed, held_out_fraction=share)
        both = {"fraction": 0.5, "held_out_fraction": 0.1}
        found[f"half of nine tenths, seed {seed}"] = _trained(data, seed, **both)
        rest, dev = dev_split(str(source), str(folder / "dev"), 0.2, seed)
        found[f"dev split, seed {seed}"] = {"rest": _keys(rest), "dev": _keys(dev)}
    found.update(_subsets(source, folder))
    found["few-shot"] = _few_shot()
    return found


def _trained(data: Any, seed: int, **keys: Any) -> str:
    """Count and digest of the images of one epoch."""
    left = 1.0 - keys.get("held_out_fraction", 0.0)
    batch = _whole_batch(round(round(len(data) * left) * keys.get("fraction", 1.0)))
    batches = data.iter_batches(batch, 8, epochs=1, seed=seed, shuffle_window=0, **keys)
    return _chosen([number for part in batches for number in part["sample"].tolist()])


def _whole_batch(count: int) -> int:
    """A batch that divides the epoch."""
    return max(size for size in range(1, 33) if count % size == 0)


def _evaluated(data: Any, seed: int, **keys: Any) -> str:
    parts = data.iter_batches(16, 8, training=False, seed=seed, **keys)
    return _chosen([n for part in parts for n in part["sample"][part["weight"] > 0].tolist()])


def _chosen(numbers: list[int]) -> str:
    return f"{len(numbers)} images, {digest(json.dumps(sorted(numbers)).encode())}"


def _keys(path: str) -> str:
    """Of a data set, in its order."""
    keys = [sample.key for sample in vit_ray.open_dataset(path)]
    return f"{len(keys)} images, {digest(json.dumps(keys).encode())}"


def _subsets(source: Path, folder: Path) -> dict[str, Any]:
    (folder / "recipe.yaml").write_text("name: net\n")
    listed = [sample.key for sample in vit_ray.open_dataset(str(source))][5:290:7]
    (folder / "keys.txt").write_text("\n".join(listed) + "\n")
    chosen = {
        f"{key} {value}, seed {seed}": [f"subset.{key}={value}", f"seed={seed}"]
        for key, value in SUBSETS.items()
        for seed in SEEDS
    }
    chosen["listed keys"] = ["subset.keys=keys.txt"]
    first = ["subset", "recipe.yaml", f"subset.source={source}"]
    targets = {name: f"subset.destination={folder / name}" for name in chosen}
    must_run(folder, [[*first, targets[name], *words] for name, words in chosen.items()])
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
