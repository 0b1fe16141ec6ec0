"""Few-shot least squares against scikit-learn's Ridge: time and memory of the whole solution.

    python benchmarks/few_shot.py [--images 50000] [--width 768] [--classes 1000] [--rounds 3]

Both get the same float32 features and labels, whiten them, append the constant, fit one ridge
regression onto {-1, +1}^K over all images, and predict `--tests` images. Each solution of each
round is a process of its own, one after the other, so that its peak memory is its own; the peak
includes the features (147 MiB for the default) and the libraries.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray

from vit_ray.evaluate.few_shot import L2, few_shot_accuracy

Features = NDArray[np.float32]
SOLUTIONS = ("vit_ray", "scikit-learn")


def make(count: int, width: int, classes: int, seed: int) -> tuple[Features, NDArray[np.int64]]:
    """Features in clusters that overlap, equally many of each class."""
    centres = np.random.default_rng(0).normal(size=(classes, width)).astype(np.float32)
    labels = np.arange(count) % classes
    noise = np.random.default_rng(seed).normal(size=(count, width), scale=6.0)
    return centres[labels] + noise.astype(np.float32), labels


def by_vit_ray(options: argparse.Namespace, train: tuple, test: tuple) -> float:  # type: ignore[type-arg]
    shots = options.images // options.classes
    found = few_shot_accuracy(*train, *test, num_classes=options.classes, shots=(shots,), seeds=1)
    return found[shots]


def by_scikit_learn(options: argparse.Namespace, train: tuple, test: tuple) -> float:  # type: ignore[type-arg]
    from sklearn.linear_model import Ridge

    features, labels = train
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-5

    def augmented(x: Features) -> Features:
        return np.hstack([(x - mean) / deviation, np.full((len(x), 1), 100.0, np.float32)])

    targets = np.full((len(labels), options.classes), -1.0, np.float32)
    targets[np.arange(len(labels)), labels] = 1.0
    ridge = Ridge(alpha=L2, fit_intercept=False, solver="cholesky")
    ridge.fit(augmented(features), targets)
    return float(np.mean(ridge.predict(augmented(test[0])).argmax(axis=1) == test[1]))


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One solution in this process."""
    train = make(options.images, options.width, options.classes, 1)
    test = make(options.tests, options.width, options.classes, 2)
    solve = by_vit_ray if options.only == "vit_ray" else by_scikit_learn
    if options.only != "vit_ray":
        import sklearn.linear_model  # noqa: F401 - before the clock starts
    start_s = time.perf_counter()
    accuracy = solve(options, train, test)
    elapsed_s = time.perf_counter() - start_s
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"s": elapsed_s, "peak_gib": peak_gib, "accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("images", 50_000), ("width", 768), ("classes", 1000), ("tests", 10_000), ("rounds", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=SOLUTIONS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SOLUTIONS}
    for _ in range(options.rounds):
        for name, results in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout))
    for name, results in found.items():
        medians = {k: statistics.median(r[k] for r in results) for k in results[0]}
        print(
            f"{name:12}  {medians['s']:6.2f} s  {medians['peak_gib']:5.2f} GiB at its peak  "
            f"top-1 {medians['accuracy']:.4f}"
        )
    ratios = [a["s"] / b["s"] for a, b in zip(*found.values(), strict=True)]
    print(f"vit_ray takes {statistics.median(ratios):.2f} x the time of scikit-learn (by rounds)")


if __name__ == "__main__":
    main()
