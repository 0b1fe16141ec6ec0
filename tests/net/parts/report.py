"""Answers on three pages, of a store whose runs have known results."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param

from tests.net.commands import must_run
from tests.net.sets import write_recipe

START_MS = 1_700_000_000_000
GMACS = {
    "ViT-Ti/16": 1.3, "ViT-S/16": 4.6, "ViT-B/16": 17.6,
    "R50x1": 4.1, "R101x1": 7.8, "R152x1": 11.6,
}  # fmt: skip
IMAGES = 50_000
KNOWN = {
    "study": {"compute at equal accuracy": (0.1 / 0.12) ** (1 / 0.3), "exaFLOPs": 1.382},
    "sweep": {"rate": 0.03, "mean": 90.0, "deviation": 1.0, "exaFLOPs": 3.8},
    "one": {"accuracy": 75.0, "low end of Wilson's interval": 74.14},
}
"""Numbers that the text or a table of a page has."""


class Run(NamedTuple):
    """As a training records it; `varied` are keys of its recipe."""

    name: str
    kind: str
    varied: dict[str, Any]
    metrics: dict[str, float]
    parent: str = ""
    tags: dict[str, str] = {}


def record(folder: Path) -> dict[str, Any]:
    """Whether each page has its known answers."""
    one = Run("one", "pretrain", {"optim.epochs": 7.0}, {"eval/top1": 0.75, "eval/loss": 0.9})
    _write(folder, [*_study(), *_sweep(), one])
    must_run(folder, [["report", str(write_recipe(folder, name))] for name in KNOWN])
    found = {}
    for name in KNOWN:
        (page,) = (folder / "runs").glob(f"{name}*/*.html")
        text = page.read_text()
        found[name] = {answer: _has(text, number) for answer, number in KNOWN[name].items()}
    return found


def _study() -> Iterator[Run]:
    """Power laws of two families: error = a x exaFLOPs ^ -0.3, one point apart by seed."""
    yield Run("study", "study", {}, {"study/cells": 36.0})
    for model, epochs, seed in itertools.product(GMACS, (7.0, 14.0, 28.0), (0, 1)):
        exaflops = 6e9 * GMACS[model] * IMAGES * epochs / 1e18
        scale = 0.12 if model.startswith("ViT") else 0.1
        top1 = round(1 - scale * exaflops**-0.3 + 0.01 * seed, 4)
        metrics = {
            "study/exaflops": exaflops, "study/forward_gmacs": GMACS[model], "eval/top1": top1,
            "few_shot/5_shot_top1": top1 - 0.1, "study/images_seen": IMAGES * epochs,
        }  # fmt: skip
        varied = {"model.name": model, "optim.epochs": epochs, "seed": seed}
        name = f"study-{model.replace('/', '_')}-e{epochs:g}-s{seed}"
        yield Run(name, "study_cell", varied, metrics, "study", {"vit_ray.study_label": model})


def _sweep() -> Iterator[Run]:
    """Four rates, a parabola over their logarithm with its top at 0.03; the best, three seeds."""
    yield Run("sweep", "sweep", {}, {"sweep/learning_rate": 0.03})
    trial, retraining = (
        {"vit_ray.sweep_stage": stage, "mlflow.vit_ray.sweep_stage": stage}  # at the base revision
        for stage in ("sweep_trial", "finetune")
    )
    for rate in (0.003, 0.01, 0.03, 0.1):
        top1 = 0.9 - 0.1 * math.log10(rate / 0.03) ** 2
        varied = {"optim.learning_rate": rate, "optim.steps": 100, "data.held_out_fraction": 0.2}
        metrics = {"dev/top1": top1, "study/exaflops": 0.5}
        yield Run(f"sweep-lr{rate:g}", "sweep_trial", varied, metrics, "sweep", trial)
    for seed, top1 in enumerate((0.91, 0.89, 0.9)):
        varied = {"optim.learning_rate": 0.03, "optim.steps": 100, "seed": seed}
        metrics = {"eval/top1": top1, "study/exaflops": 0.6}
        yield Run(f"sweep-s{seed}", "finetune", varied, metrics, "sweep", retraining)


def _write(folder: Path, runs: list[Run]) -> None:
    """Into `folder/mlflow.db`, one a second."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.create_experiment("net", f"{folder}/mlruns")
    profile = json.dumps({"num_images": 10_000, "num_classes": 10})
    test = Dataset("test", f"{10_000:016x}", "vit_ray", '{"uri": "/data/test"}', profile=profile)
    evaluated = DatasetInput(test, [InputTag("mlflow.data.context", "evaluation")])
    ids: dict[str, str] = {}
    for number, run in enumerate(runs):
        start_ms = START_MS + 1_000 * number
        alike = {key: value for key, value in run.varied.items() if key != "seed"}
        tags = {"vit_ray.kind": run.kind, "vit_ray.group": f"{run.kind} {alike}", **run.tags}
        tags |= {"mlflow.parentRunId": ids[run.parent]} if run.parent else {}
        always = {"seed": 0, "model.name": "ViT-B/16", "data.fraction": 1.0}
        params = {"optim.learning_rate": 0.001, **always, **run.varied}
        held = {"study/train_images": float(IMAGES), **run.metrics}
        made = client.create_run(experiment, start_ms, tags, run.name).info.run_id
        client.log_batch(
            made,
            [Metric(key, value, start_ms + 500, 10) for key, value in held.items()],
            [Param(key, str(value)) for key, value in params.items()],
        )
        client.log_inputs(made, [evaluated])
        client.set_terminated(made, end_time=start_ms + 900)
        ids[run.name] = made


def _has(page: str, number: float) -> bool:
    """Whether the page's text has the number, rounded to about three digits."""
    shown = re.sub(r"<(script|style|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    found = re.findall(r"\d+(?:\.\d+)?", unescape(re.sub(r"<[^>]*>", " ", shown)))
    return any(math.isclose(float(one), number, rel_tol=0.01) for one in found)
