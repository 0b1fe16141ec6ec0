"""Runs as MLflow has them, one row each: the only source of every report."""

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

import pandas as pd
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from vit_ray import outcomes
from vit_ray.addresses import require_store
from vit_ray.config.keys import GROUP, INIT_RUN, PARENT_TAG, recorded_before, tags_of
from vit_ray.metric_names import (
    COST_CORE_DAYS,
    DEV_TOP1,
    EVAL_TOP1,
    RESULT_EVALUATIONS,
    STUDY_EXAFLOPS,
    STUDY_IMAGES_SEEN,
    STUDY_TRAIN_IMAGES,
    TRAIN_IMAGES_PER_S,
    averaged_key,
    few_shot_top1,
    with_best,
)
from vit_ray.paper import model_family

# Kinds of runs that train; other programs' runs have no kind.
TRAININGS: Final = ("", "pretrain", "finetune", "sweep_trial", "study_cell")
# Few-shot accuracies, the first that a run has counts.
SHOTS: Final = (5, 10, 25, 1)
RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
# Folder names that say which part of a data set they hold, not which set it is.
_SPLITS: Final = {"train", "training", "train800", "train800val200", "test", "validation", "val"}
_VERSION: Final = re.compile(r"v?\d[\d._-]*")
_STATUS: Final = {
    "FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped",
    "RUNNING": "running", "SCHEDULED": "running",
}  # fmt: skip


def load_runs(uri: str, selection: str) -> pd.DataFrame:
    """A row for each run of a selection, indexed by run id, oldest first.

    Columns with a slash are metrics, columns with a dot keys of the recipe as text; the others are
    those of `_facts`. `attrs` has the store's address, the experiment, and the selected run's id.

    Args:
        uri: tracking server or SQLite address; nothing is written to it.
        selection: experiment name, or id of a run that is taken with its children.

    Raises:
        ValueError: there is no such store, experiment or run.
    """
    require_store(uri)
    client = MlflowClient(uri)
    parent = selection if RUN_ID.fullmatch(selection) else None
    if parent is None:
        experiment = client.get_experiment_by_name(selection)
    else:
        experiment = client.get_experiment(client.get_run(parent).info.experiment_id)
    if experiment is None:
        known = ", ".join(sorted(one.name for one in client.search_experiments()))
        raise ValueError(
            f"MLflow has no experiment {selection!r}; give one of {known}, or a run's id"
        )
    found = client.search_runs(  # as many as MLflow gives in one answer
        [experiment.experiment_id], order_by=["attributes.start_time ASC"], max_results=50_000
    )
    facts = {run.info.run_id: _facts(run) for run in found}
    for one in facts.values():
        one.update(_with_origin(one, facts))
    names = [name for name in facts if parent is None or parent in _above(name, facts)]
    frame = pd.DataFrame.from_dict({name: facts[name] for name in names}, orient="index")
    frame.attrs = {
        "uri": uri, "experiment": experiment.name, "experiment_id": experiment.experiment_id,
        "parent": parent,
    }  # fmt: skip
    return frame


def _facts(run: Run) -> dict[str, Any]:
    tags, params = tags_of(run.data.tags), run.data.params
    metrics = with_best({k: v for k, v in run.data.metrics.items() if is_finite(v)})
    recorded = recorded_before(params, tags)
    recipe = {key: text for key, text in recorded.items() if text != "None"}
    model = params.get("model.name", "")
    name, status = str(run.info.run_name), _STATUS[run.info.status]
    sets = _data_sets(run)
    sizes = {one["use"]: (one["images"], one["classes"]) for one in sets}
    prints = {one["use"]: one["fingerprint"] for one in sets}
    train_set = set_name(recipe.get("data.train", ""))
    test_set = set_name(recipe.get("data.eval", ""))
    # With averaged weights if the run has averaged any, else with the last weights.
    test, dev = (metrics.get(averaged_key(key), metrics.get(key)) for key in (EVAL_TOP1, DEV_TOP1))
    few_shot = next((k for n in SHOTS if (k := few_shot_top1(n)) in metrics), None)
    tested_on = sizes.get("evaluation", (None, None))
    return {
        **recipe, **metrics,
        "run_id": run.info.run_id, "name": name, "kind": tags.get("vit_ray.kind", ""),
        "parent": tags.get(PARENT_TAG), "start": run.info.start_time or 0,
        "status": "stopped early" if "vit_ray.stopped_early" in tags else status,
        "own_group": tags.get(GROUP, run.info.run_id), "own_seed": recipe.get("seed", ""),
        "origin": tags.get(INIT_RUN), "first_weights": recipe.get("init_from", ""),
        "model": model, "family": model_family(model),
        "label": tags.get("vit_ray.study_label") or model or name,
        "rate": _number(params.get("optim.learning_rate")),
        "steps": _number(params.get("optim.steps")),
        "epochs": _number(params.get("optim.epochs")),
        "fraction": _number(recipe.get("data.fraction")),
        "images": metrics.get(STUDY_TRAIN_IMAGES), "own_exaflops": metrics.get(STUDY_EXAFLOPS),
        "test": test, "dev": dev, "few_shot": metrics.get(few_shot) if few_shot else None,
        "few_shot_key": few_shot, "num_test": tested_on[0], "num_classes": tested_on[1],
        "num_dev": sizes.get("held-out evaluation", tested_on if test is None else (None,))[0],
        "best_of": metrics.get(RESULT_EVALUATIONS) if dev is None else None,
        "images_per_s": metrics.get(TRAIN_IMAGES_PER_S), "core_days": metrics.get(COST_CORE_DAYS),
        "own_share": outcomes.own_share(
            tags.get(outcomes.BRANCH_TAG, ""), _number(params.get("train.global_batch_size")),
            metrics.get(STUDY_IMAGES_SEEN),
        ),
        "data": train_set, "train_set": f"{train_set} {prints.get('training')}", "sets": sets,
        "tested_on": test_set, "test_set": f"{test_set} {prints.get('evaluation')}",
        "task": tags.get("vit_ray.transfer_task") or tags.get("vit_ray.vtab_task"),
        "stage": tags.get("vit_ray.sweep_stage"), "cells": _number(tags.get("vit_ray.num_cells")),
        "commit": tags.get("vit_ray.git_commit", "unknown"),
        "command": tags.get("mlflow.source.name", ""), "keys": [*recipe],
    }  # fmt: skip


def _number(text: str | None) -> float | None:
    """None for a missing value, and for a text that is no finite number."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if is_finite(value) else None


def is_finite(value: float) -> bool:
    """Whether a recorded value is a number; an SQL store keeps infinity as the largest float."""
    return abs(value) < sys.float_info.max


def _data_sets(run: Run) -> list[dict[str, Any]]:
    """Data sets of a run as MLflow has them: use, name, fingerprint, images, classes, address."""
    found = []
    for one in run.inputs.dataset_inputs if run.inputs else []:
        uses = [tag.value for tag in one.tags if tag.key == "mlflow.data.context"]
        facts, place = _json(one.dataset.profile), _json(one.dataset.source)
        found.append({
            "use": uses[0] if uses else "", "name": one.dataset.name,
            "images": facts.get("num_images"), "classes": facts.get("num_classes"),
            "fingerprint": one.dataset.digest, "from": place.get("uri", one.dataset.source),
        })  # fmt: skip
    return found


def _json(text: str | None) -> dict[str, Any]:
    """An object; empty if the text is none, as in a run of another program."""
    try:
        found = json.loads(text or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def set_name(path: str) -> str:
    """The last folder that is not a split, with the one above it if it is a version."""
    parts = [part for part in PurePosixPath(path).parts if part not in _SPLITS]
    if not parts:
        return "unknown data"
    return "/".join(parts[-2:]) if _VERSION.fullmatch(parts[-1]) else parts[-1]


def _with_origin(one: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Its parent's name; group, seed and compute of a training together with those whose weights it
    started from.

    Compute is unknown if one of these is not in the experiment.
    """
    chain = [one]
    while (before := chain[-1]["origin"]) in facts and facts[before] not in chain:
        chain.append(facts[before])
    costs, last = [run["own_exaflops"] for run in chain], chain[-1]
    return {
        "parent_name": facts.get(one["parent"], {}).get("name"),
        "group": "/".join([
            *(run["own_group"] for run in chain), last["origin"] or last["first_weights"],
        ]),
        "seed": "/".join(run["own_seed"] for run in chain),
        "exaflops": None if last["first_weights"] or None in costs else sum(costs),
        "origin": chain[1]["run_id"] if len(chain) > 1 else None,
        "is_tuned": len(chain) > 1 or bool(last["first_weights"]),
    }  # fmt: skip


def _above(run_id: str, facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A run and the runs that it is below."""
    found = [run_id]
    while (parent := facts[found[-1]]["parent"]) in facts and parent not in found:
        found.append(parent)
    return found


def trainings(runs: pd.DataFrame) -> pd.DataFrame:
    """One row for each group and seed: the newest finished run, or if none has finished the newest.

    Without parents, evaluations and others that train nothing themselves. A training of a study
    or a sweep also has its own name below its parent.
    """
    trained = runs[runs["kind"].isin(TRAININGS)] if len(runs) else runs
    if not len(trained):
        return trained
    ranked = trained.assign(is_finished=trained["status"] == "finished")
    ranked = ranked.sort_values(["is_finished", "start"], kind="stable")
    is_repeated = ranked.duplicated(["group", "seed"], keep="last") | (
        ranked["parent"].notna() & ranked.duplicated(["parent", "name"], keep="last")
    )
    return trained.loc[sorted(ranked.index[~is_repeated], key=trained.index.get_loc)]


class Files:
    """Files and histories of the runs of one store, which is only read."""

    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(uri)

    def read(self, run: pd.Series, path: str) -> bytes | None:
        """Content of a file of a run's artifacts; None if it cannot be read."""
        # An error, also of a bucket's library, leaves the page without it.
        with TemporaryDirectory() as folder, contextlib.suppress(Exception):
            return Path(self._client.download_artifacts(run["run_id"], path, folder)).read_bytes()
        return None

    def names(self, run: pd.Series, folder: str | None = None) -> list[str]:
        """Files and folders in a folder of a run's artifacts; empty if they cannot be listed."""
        with contextlib.suppress(Exception):  # as in `read`
            return [str(one.path) for one in self._client.list_artifacts(run["run_id"], folder)]
        return []

    def curve(self, run_id: str, key: str, most: int) -> "pd.Series[float]":
        """Values of a metric by step, at most this many, the first and the last included."""
        history = self._client.get_metric_history(run_id, key)
        points = sorted((one.step, one.timestamp, one.value) for one in history)
        latest = {step: value for step, _, value in points if is_finite(value)}
        found = pd.Series(latest, dtype=float)
        places = [i * (len(found) - 1) // (most - 1) for i in range(most)]
        return found if len(found) <= most else found.iloc[places]
