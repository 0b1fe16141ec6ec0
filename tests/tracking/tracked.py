"""Trackers and recorders of runs in this process, and what MLflow has of them."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlflow.tracking import MlflowClient

from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.run_records import RunRecords
from vit_ray.tracking.tracker import Tracker

NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens


def started(config, name, log_path, wait_s=10.0, **fields):
    return Tracker.begin(RunOpening(config, name, log_path, **fields), wait_s=wait_s)


def losses(tracker, steps):
    """Each step's number is its loss."""
    for step in steps:
        tracker.log.metrics(step, {"train/loss": float(step)})


def recorded(config, name, log_path, steps=(), **fields):
    """A tracker that has recorded these steps, and has ended."""
    tracker = started(config, name, log_path, **fields)
    losses(tracker, steps)
    assert tracker.finish()
    return tracker


def history(uri, run_id, key="train/loss"):
    points = MlflowClient(uri).get_metric_history(str(run_id), key)
    return sorted((point.step, point.value) for point in points)


def run_of(uri, run_id):
    return MlflowClient(uri).get_run(str(run_id))


def only_run(uri, experiment="trials"):
    client = MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return found


def event_texts(uri, run_id):
    client = MlflowClient(uri)
    files = sorted(file.path for file in client.list_artifacts(run_id, "history"))
    found = [json.loads(Path(client.download_artifacts(run_id, f)).read_text()) for f in files]
    return [event["text"] for events in found for event in events]


class Hanging:
    """Calls of a method wait until `may_answer` is set; the first one sets `has_begun`."""

    def __init__(self, monkeypatch, owner, name, hangs=lambda *_: True):
        self.has_begun, self.may_answer = threading.Event(), threading.Event()
        method = getattr(owner, name)

        def hanging(*args, **fields):
            if hangs(*args):
                self.has_begun.set()
                assert self.may_answer.wait(60)
            return method(*args, **fields)

        monkeypatch.setattr(owner, name, hanging)


class Here:
    """As Ray's handle of an actor that is in this process; arguments travel pickled."""

    def __init__(self, uri: str) -> None:
        self.uri, self.actor = uri, RunRecords(uri)

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            return getattr(self.actor, name)(*pickle.loads(pickle.dumps(args)))

        return SimpleNamespace(remote=remote)

    def die(self) -> None:
        """As when Ray starts the process again: nothing that was in memory is left."""
        for run in self.actor._runs.values():
            run.tracker.stop(30)
            run._exit.close()
        self.actor = RunRecords(self.uri)


def recorded_here(opening: RunOpening, here: Here | None = None) -> Recorder:
    """A recorder of a run whose actor is in this process, opened."""
    actor = here or Here(opening.config.uri)
    run = Recorder(actor, opening.log_path, opening.run_name)
    run.open(opening)
    return run
