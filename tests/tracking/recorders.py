"""The actor of a command in this process, without Ray, and recorders of runs in it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from vit_ray.tracking.metrics_log import RunOpening
from vit_ray.tracking.recorder import Recorder, RunRecords


class Here:
    """As Ray's handle of an actor that is in this process; arguments travel pickled."""

    def __init__(self, uri: str) -> None:
        self.uri, self.actor = uri, RunRecords(uri)

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            given = pickle.loads(pickle.dumps(args))
            try:
                return Answer(getattr(self.actor, name)(*given))
            except Exception as error:
                return Answer(None, error)

        return SimpleNamespace(remote=remote)

    def die(self) -> None:
        """As when Ray starts the process again: nothing that was in memory is left."""
        for run in self.actor._runs.values():
            run.tracker.stop(30)
            run._exit.close()
        self.actor = RunRecords(self.uri)


class Answer:
    """What a call returns."""

    def __init__(self, found: Any, error: Exception | None = None) -> None:
        self.found, self.error = found, error


def recorded_here(opening: RunOpening, here: Here | None = None) -> Recorder:
    """A recorder of a run whose actor is in this process, opened."""
    actor = here or Here(opening.config.uri)
    run = Recorder(actor, opening.log_path, opening.run_name)
    run.open(opening)
    return run
