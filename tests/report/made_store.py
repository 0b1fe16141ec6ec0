"""Runs in MLflow with known results, as a driver and its workers record them."""

import itertools
import json
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param
from mlflow.tracking import MlflowClient

_numbers = itertools.count(1)


class Store:
    """An experiment `made` in a SQLite file of its own."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.client = MlflowClient(self.uri)
        place = f"file://{folder}/mlruns/made"
        self.experiment = self.client.create_experiment("made", artifact_location=place)

    def put(
        self, name: str, metrics: dict[str, float] | None = None,
        params: dict[str, Any] | None = None, *, kind: str = "study_cell", seed: int = 0,
        group: str | None = None, parent: str | None = None, status: str | None = "FINISHED",
        test: tuple[int, int] = (10_000, 10), data: str = "cifar10",
        tags: dict[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Record a run; its id.

        Args:
            group: of the runs that differ by the seed alone; None for a run without a recipe.
            test: images and classes of its test set, and of its dev split.
        """
        known = {"vit_ray.kind": kind, **(tags or {})}
        known |= {"vit_ray.group": group} if group else {}
        known |= {"mlflow.parentRunId": parent} if parent else {}
        start_ms = 1_700_000_000_000 + 1000 * next(_numbers)
        run = self.client.create_run(self.experiment, start_ms, known, name)
        run_id = str(run.info.run_id)
        values = {
            "seed": seed, "model.name": "ViT-B/16", "optim.name": "adamw", "data.fraction": 1.0,
            "data.train": f"/data/{data}/train", "data.eval": f"/data/{data}/test",
            **(params or {}),
        }  # fmt: skip
        points = [Metric(key, value, start_ms, 10) for key, value in (metrics or {}).items()]
        self.client.log_batch(run_id, points, [Param(k, str(v)) for k, v in values.items()])
        profile = json.dumps({"num_images": test[0], "num_classes": test[1]})
        sets = [
            DatasetInput(
                Dataset("test", f"{test[0]:032x}", "vit_ray", '{"uri": "/data"}', profile=profile),
                [InputTag("mlflow.data.context", use)],
            )
            for use in ("evaluation", "held-out evaluation")
        ]
        self.client.log_inputs(run_id, sets)
        if status is not None:
            self.client.set_terminated(run_id, status, end_time=start_ms + 900)
        return run_id


GMACS = {"ViT-S/16": 4.6, "ViT-B/16": 17.6, "R50x1": 4.1, "R101x1": 7.8}
SEEDS = range(5)
EPOCHS = (7.0, 14.0, 28.0)
IMAGES = 50_000


def accuracy(model: str, exaflops: float, seed: int) -> float:
    """Of a law of the family; a seed is as good for one family as it is bad for the other."""
    return 1 - scale_of(model, seed) * float(exaflops**-0.3)


def scale_of(model: str, seed: int) -> float:
    luck = 0.01 * (seed - 2)
    return 0.12 * (1 + luck) if model.startswith("ViT") else 0.1 * (1 - luck)


def exaflops_of(model: str, epochs: float) -> float:
    return 6e9 * GMACS[model] * IMAGES * epochs / 1e18


def write_study(store: Store) -> str:
    """Two families, five seeds; and what must not count: other data, another commit, cells that
    have not finished, and a second record of a cell.
    """
    study = store.put("study", kind="study", tags={"vit_ray.num_cells": "66"})
    for model, epochs, seed in itertools.product(GMACS, EPOCHS, SEEDS):
        _cell(store, study, model, epochs, seed)
    first = "ViT-S/16", 7.0, 0
    _cell(store, study, *first, top1=0.1, group="other data", data="pets")
    _cell(store, study, *first, top1=0.2, group="other commit", commit="beef")
    _cell(store, study, "ViT-S/16", 7.0, 5, status="FAILED")
    _cell(store, study, "ViT-S/16", 7.0, 6, status=None, top1=0.3)
    _cell(store, study, *first, status="KILLED", top1=0.4)
    return study


def _cell(
    store: Store, study: str, model: str, epochs: float, seed: int, *, top1: float | None = None,
    group: str = "", data: str = "cifar10", commit: str = "c0ffee", status: str | None = "FINISHED",
) -> None:  # fmt: skip
    exaflops = exaflops_of(model, epochs)
    known = accuracy(model, exaflops, seed) if top1 is None else top1
    store.put(
        f"study-{model}-e{epochs:g}-s{seed}{group}".replace("/", "_"),
        {"eval/top1": known, "study/exaflops": exaflops, "study/train_images": IMAGES,
         "study/forward_gmacs": GMACS[model], "train/images_per_s": 1000 / GMACS[model]},
        {"model.name": model, "optim.epochs": epochs, "data.fraction": 1.0},
        group=f"{model} {epochs:g} {group}", seed=seed, parent=study, data=data, status=status,
        tags={"vit_ray.study_label": model, "vit_ray.git_commit": commit},
    )  # fmt: skip


def write_sweep(store: Store) -> str:
    """Four rates with their top at 0.03, one that ASHA stopped, and three seeds of the best."""
    sweep = store.put("sweep", kind="sweep")
    for rate in (0.003, 0.01, 0.03, 0.1):
        is_stopped = rate == 0.003
        tags = {"vit_ray.sweep_stage": "sweep_trial"}
        tags |= {"vit_ray.stopped_early": "step 10 of 100"} if is_stopped else {}
        top1 = {0.003: 0.6, 0.01: 0.88, 0.03: 0.9, 0.1: 0.89}[rate]
        store.put(
            f"sweep-lr{rate:g}", {"dev/top1": top1, "study/exaflops": 0.5},
            # A key that the sweep does not vary, such as one that was found on the machine.
            {"optim.learning_rate": rate, "train.micro_batch_size": 8 if is_stopped else 16},
            kind="sweep_trial", group=f"trial {rate}", parent=sweep, tags=tags,
            test=(1000, 10), status="KILLED" if is_stopped else "FINISHED",
        )  # fmt: skip
    for seed, top1 in enumerate((0.91, 0.89, 0.9)):
        store.put(
            f"sweep-final-seed{seed}", {"eval/top1": top1, "study/exaflops": 0.6},
            {"optim.learning_rate": 0.03}, kind="finetune", group="final", seed=seed,
            parent=sweep, tags={"vit_ray.sweep_stage": "finetune"},
        )  # fmt: skip
    return sweep
