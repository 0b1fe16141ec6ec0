"""The runs in MLflow as a table, which is the only source of reports."""

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import pandas as pd
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from vit_ray import outcomes
from vit_ray.addresses import require_store
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
from vit_ray.outcomes import CHANGED_PARAMS, GROUP, INIT_RUN, PARENT_TAG
from vit_ray.paper import model_family

# Kinds of runs that train; runs of other programs have no kind.
TRAININGS: Final = ("", "pretrain", "finetune", "sweep_trial", "study_cell")
# Few-shot accuracies: the first one that a run has is used.
SHOTS: Final = (5, 10, 25, 1)
RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
# Names of folders with a split of a data set.
_SPLITS: Final = {"train", "training", "train800", "train800val200", "test", "validation", "val"}
_STATUS: Final = {
    "FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped",
    "RUNNING": "running", "SCHEDULED": "running",
}  # fmt: skip


def load_runs(uri: str, selection: str) -> pd.DataFrame:
    """A row for each run of a selection, indexed by run id, oldest first.

    Columns with a slash are metrics, columns with a dot are keys of the recipe as text; the others
    are those of `_facts` and `_with_origin`. `attrs` has the experiment's name, and the selected
    run's id as `parent`.

    Args:
        uri: tracking server or SQLite address; nothing is written to it.
        selection: name of an experiment, or id of a run: it and all runs below it.

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
        names = ", ".join(sorted(one.name for one in client.search_experiments()))
        raise ValueError(
            f"MLflow has no experiment {selection!r}; give one of {names}, or a run's id"
        )
    runs = client.search_runs(  # MLflow's maximum for one answer
        [experiment.experiment_id], order_by=["attributes.start_time ASC"], max_results=50_000
    )
    facts = {run.info.run_id: _facts(run) for run in runs}
    for run_facts in facts.values():
        run_facts.update(_with_origin(run_facts, facts))
    selected = {
        run_id: run_facts
        for run_id, run_facts in facts.items()
        if parent in (None, *(link["run_id"] for link in _chain(run_facts, "parent", facts)))
    }
    frame = pd.DataFrame.from_dict(selected, orient="index")
    frame.attrs = {"experiment": experiment.name, "parent": parent}
    return frame


def _facts(run: Run) -> dict[str, Any]:
    tags, params = run.data.tags, run.data.params
    metrics = with_best({k: v for k, v in run.data.metrics.items() if is_finite(v)})
    changed: dict[str, str] = {}
    with contextlib.suppress(json.JSONDecodeError):  # MLflow limits the length of a tag
        changed = json.loads(tags.get(CHANGED_PARAMS, "{}"))  # by a restart
    recipe = {key: text for key, text in {**params, **changed}.items() if text != "None"}
    model = params.get("model.name", "")
    name, status = str(run.info.run_name), _STATUS[run.info.status]
    sets = _data_sets(run)
    sizes = {data_set["use"]: (data_set["images"], data_set["classes"]) for data_set in sets}
    fingerprints = {data_set["use"]: data_set["fingerprint"] for data_set in sets}
    train_set = set_name(recipe.get("data.train", ""))
    test_set = set_name(recipe.get("data.eval", ""))
    # By the averaged weights if the run has any, else by the last weights.
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
        "data": train_set, "train_set": f"{train_set} {fingerprints.get('training')}", "sets": sets,
        "tested_on": test_set, "test_set": f"{test_set} {fingerprints.get('evaluation')}",
        "task": tags.get("vit_ray.transfer_task") or tags.get("vit_ray.vtab_task"),
        "stage": tags.get("vit_ray.sweep_stage"), "cells": _number(tags.get("vit_ray.num_cells")),
        "commit": tags.get("vit_ray.git_commit", "unknown"),
        "command": tags.get("mlflow.source.name", ""), "keys": [*recipe],
    }  # fmt: skip


def _number(text: str | None) -> float | None:
    # None for a missing value, and for text that is no finite number.
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if is_finite(value) else None


def is_finite(value: float) -> bool:
    """Whether a recorded value is a number; an SQL store keeps infinity as the largest float."""
    return abs(value) < sys.float_info.max


def _data_sets(run: Run) -> list[dict[str, Any]]:
    """The data sets that we recorded: use, name, fingerprint, images, classes, address."""
    sets = []
    for entry in run.inputs.dataset_inputs if run.inputs else []:
        if entry.dataset.source_type != "vit_ray":  # of another program
            continue
        (use,) = (tag.value for tag in entry.tags if tag.key == "mlflow.data.context")
        profile = json.loads(str(entry.dataset.profile))
        sets.append({
            "use": use, "name": entry.dataset.name, "images": profile["num_images"],
            "classes": profile["num_classes"], "fingerprint": entry.dataset.digest,
            "from": json.loads(entry.dataset.source)["uri"],
        })  # fmt: skip
    return sets


def set_name(path: str) -> str:
    """The last folder that is no split."""
    parts = [part for part in PurePosixPath(path).parts if part not in _SPLITS]
    return parts[-1] if parts else "unknown data"


def _with_origin(run: Mapping[str, Any], facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The name of a run's parent; and group, seed and compute of the run together with the runs
    whose weights it started from.

    Compute is unknown if one of these runs is not in the experiment.
    """
    chain = _chain(run, "origin", facts)
    costs, first = [link["own_exaflops"] for link in chain], chain[-1]
    return {
        "parent_name": facts.get(run["parent"], {}).get("name"),
        "group": "/".join([
            *(link["own_group"] for link in chain), first["origin"] or first["first_weights"],
        ]),
        "seed": "/".join(link["own_seed"] for link in chain),
        "exaflops": None if first["first_weights"] or None in costs else sum(costs),
        "origin": chain[1]["run_id"] if len(chain) > 1 else None,
        "is_tuned": len(chain) > 1 or bool(first["first_weights"]),
    }  # fmt: skip


def _chain(
    run: Mapping[str, Any], key: str, facts: Mapping[str, Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The run, the run of the id under `key`, and so on; such as its parent and parent's parent."""
    chain = [run]
    while (run_id := chain[-1][key]) in facts and facts[run_id] not in chain:
        chain.append(facts[run_id])
    return chain


def trainings(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs that train: one for each group and seed, the newest finished one, else the newest.

    Runs of one name below one parent, in a study or a sweep, also count as one training.
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


def file_of(client: MlflowClient, run: pd.Series, path: str) -> bytes | None:
    """Content of a file of a run's artifacts; None if it cannot be read."""
    # After an error, also of a bucket's library, the page is written without the file.
    with TemporaryDirectory() as folder, contextlib.suppress(Exception):
        return Path(client.download_artifacts(run["run_id"], path, folder)).read_bytes()
    return None


def curve(client: MlflowClient, run_id: str, key: str, max_points: int) -> "pd.Series[float]":
    """Values of a metric by step; of more than `max_points`, equally spaced ones with the first and
    the last.
    """
    history = client.get_metric_history(run_id, key)
    points = sorted((point.step, point.timestamp, point.value) for point in history)
    latest = {step: value for step, _, value in points if is_finite(value)}
    values = pd.Series(latest, dtype=float)
    rows = np.linspace(0, len(values) - 1, max_points, dtype=int)
    return values if len(values) <= max_points else values.iloc[rows]
