"""Numbers in the tables of three pages, of a store whose runs have known results."""

from __future__ import annotations

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

from tests.net.cluster import write_recipe
from tests.net.commands import must_run

START_MS = 1_700_000_000_000
GMACS = {
    "ViT-Ti/16": 1.3, "ViT-S/16": 4.6, "ViT-B/16": 17.6,
    "R50x1": 4.1, "R101x1": 7.8, "R152x1": 11.6,
}  # fmt: skip
IMAGES = 50_000
MOST_ROWS = 40
KNOWN = {
    "study": {"compute at equal accuracy": (0.1 / 0.12) ** (1 / 0.3), "exaFLOPs": 1.382},
    "sweep": {"rate": 0.03, "mean": 90.0, "deviation": 1.0, "exaFLOPs": 3.8},
    "one": {"accuracy": 75.0, "low end of Wilson's interval": 74.14},
}
"""Numbers that the text or a table of a page has."""


def record(folder: Path) -> dict[str, Any]:
    """Known answers found, and the numbers of each row of a table: no captions, no order."""
    store = Store(folder)
    _study(store)
    _sweep(store)
    store.run("one", "pretrain", {"optim.epochs": 7.0}, {"eval/top1": 0.75, "eval/loss": 0.9})
    words = {name: ["report", str(write_recipe(folder, name))] for name in KNOWN}
    must_run(folder, [*words.values()])
    found = {}
    for name in KNOWN:
        (page,) = (folder / "runs").glob(f"{name}*/*.html")
        text = page.read_text()
        known = {answer: _has(text, number) for answer, number in KNOWN[name].items()}
        found[name] = {"known": known, "tables": _numbers(text)}
    return found


def _study(store: Store) -> None:
    """Power laws of two families: error = a x exaFLOPs ^ -0.3, one point apart by seed."""
    study = store.run("study", "study", {}, {"study/cells": 36.0})
    for model, gmacs in GMACS.items():
        for epochs in (7.0, 14.0, 28.0):
            for seed in (0, 1):
                exaflops = 6e9 * gmacs * IMAGES * epochs / 1e18
                scale = 0.12 if model.startswith("ViT") else 0.1
                top1 = round(1 - scale * exaflops**-0.3 + 0.01 * seed, 4)
                metrics = {
                    "study/exaflops": exaflops, "study/forward_gmacs": gmacs, "eval/top1": top1,
                    "few_shot/5_shot_top1": top1 - 0.1, "study/images_seen": IMAGES * epochs,
                }  # fmt: skip
                varied = {"model.name": model, "optim.epochs": epochs, "seed": seed}
                name = f"study-{model.replace('/', '_')}-e{epochs:g}-s{seed}"
                label = {"vit_ray.study_label": model}
                store.run(name, "study_cell", varied, metrics, parent=study, tags=label)


def _sweep(store: Store) -> None:
    """Four rates, a parabola over their logarithm with its top at 0.03; the best, three seeds."""
    sweep = store.run("sweep", "sweep", {}, {"sweep/learning_rate": 0.03})
    stage = "mlflow.vit_ray.sweep_stage"
    for rate in (0.003, 0.01, 0.03, 0.1):
        top1 = 0.9 - 0.1 * math.log10(rate / 0.03) ** 2
        varied = {"optim.learning_rate": rate, "optim.steps": 100, "data.held_out_fraction": 0.2}
        name, tags = f"sweep-lr{rate:g}", {stage: "trial"}
        metrics = {"dev/top1": top1, "study/exaflops": 0.5}
        store.run(name, "sweep_trial", varied, metrics, parent=sweep, tags=tags)
    for seed, top1 in enumerate((0.91, 0.89, 0.9)):
        varied = {"optim.learning_rate": 0.03, "optim.steps": 100, "seed": seed}
        name, tags = f"sweep-s{seed}", {stage: "finetune"}
        metrics = {"eval/top1": top1, "study/exaflops": 0.6}
        store.run(name, "finetune", varied, metrics, parent=sweep, tags=tags)


class Store:
    """An MLflow store in which runs are recorded as trainings record them."""

    def __init__(self, folder: Path) -> None:
        self._client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        self._experiment = self._client.create_experiment("net", f"{folder}/mlruns")
        self._start_ms = START_MS

    def run(
        self, name: str, kind: str, varied: dict[str, Any], metrics: dict[str, float],
        *, parent: str | None = None, tags: dict[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Its id; `varied`: keys of its recipe."""
        self._start_ms += 1_000
        own = {"mlflow.parentRunId": parent} if parent else {}
        about = {key: value for key, value in varied.items() if key != "seed"}
        every = {
            "mlflow.runName": name, "vit_ray.kind": kind, "vit_ray.run_folder": f"/runs/{name}",
            "vit_ray.group": json.dumps([kind, about]), "mlflow.vit_ray.git_commit": "c0ffee",
            "mlflow.data.train": "/data/train", "mlflow.data.eval": "/data/test",
            "mlflow.vit_ray.data_fingerprint": "0123456789abcdef", **own, **(tags or {}),
        }  # fmt: skip
        made = self._client.create_run(self._experiment, self._start_ms, every, name).info.run_id
        params = {
            "seed": 0, "model.name": "ViT-B/16", "model.image_size": 224, "data.fraction": 1.0,
            "optim.learning_rate": 0.001, "train.global_batch_size": 128, **varied,
        }  # fmt: skip
        held = {"study/train_images": float(IMAGES), **metrics}
        self._client.log_batch(
            made,
            [Metric(key, value, self._start_ms + 500, 10) for key, value in held.items()],
            [Param(key, str(value)) for key, value in params.items()],
            [RunTag("vit_ray.cluster", "1 node, 4 CPUs, 0 GPUs")],
        )
        self._client.log_inputs(made, [_data("train", "training"), _data("test", "evaluation")])
        self._client.set_terminated(made, end_time=self._start_ms + 900)
        return str(made)


def _data(name: str, use: str) -> DatasetInput:
    images = IMAGES if use == "training" else 10_000
    profile = {"num_images": images, "num_images_of_the_whole": images, "num_classes": 10}
    source = json.dumps({"uri": f"/data/{name}"})
    data = Dataset(name, f"{images:016x}", "vit_ray", source, profile=json.dumps(profile))
    return DatasetInput(data, [InputTag("mlflow.data.context", use)])


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", html)).strip()


def _has(page: str, number: float) -> bool:
    """Whether the page's text has the number, rounded to about three digits."""
    shown = re.sub(r"<(script|style|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    found = re.findall(r"\d+(?:\.\d+)?", _text(shown))
    return any(math.isclose(float(one), number, rel_tol=0.01) for one in found)


def _numbers(page: str) -> list[str]:
    """Of each row of a table with any, sorted; a long table has the points of a figure."""
    tables = re.findall(r"<table\b.*?</table>", page, re.DOTALL)
    rows = [re.findall(r"<tr\b.*?</tr>", table, re.DOTALL) for table in tables]
    kept = [row for table in rows if len(table) <= MOST_ROWS for row in table]
    cells = [re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in kept]
    texts = [" ".join(filter(_is_number, map(_text, row))) for row in cells]
    return sorted(filter(None, texts))


def _is_number(cell: str) -> bool:
    """Such as `90.00`, `90.00 +- 1.00`, `1e-9`; not a digest."""
    is_digest = re.search(r"[0-9a-f]{8,}", cell)
    return not is_digest and re.fullmatch(r"[-+]?\d[-+\d.,e%\s]*", cell) is not None
