"""The host of runs in this process, without Ray, and the record and control of a run in it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from vit_ray.launch.record.run_host import HostedRun, RunControl, RunHost, RunRecord
from vit_ray.tracking.metrics_log import RunOpening


class Here:
    """As Ray's handle of a host that is in this process; arguments travel pickled."""

    def __init__(self) -> None:
        self.host = RunHost()
        self.calls: list[tuple[str, list[int]]] = []
        """Methods, and the size of each argument."""

    def __reduce__(self) -> Any:
        raise AssertionError("a host stays where it is")

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **named: Any) -> Callable[[], Any]:
            sent = [pickle.dumps(one) for one in (*args, *named.values())]
            self.calls.append((name, [len(one) for one in sent]))
            given = [pickle.loads(one) for one in sent[: len(args)]]
            found = getattr(self.host, name)(*given, **named)
            return partial(getattr, SimpleNamespace(found=found), "found")

        return SimpleNamespace(remote=remote)

    def die(self) -> None:
        """As when Ray starts the process again: nothing that was in memory is left."""
        for run in self.host._runs.values():
            if run.tracker is not None:
                run.tracker._points.end(5)
                run.tracker._files.end(5)
                run._held[-1]()
        self.host = RunHost()

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)


class RunHere(HostedRun):
    """Calls return what they give when they are made."""

    def answer(self, call: Callable[[], Any], limit_s: float, left_s: float | None = None) -> Any:
        return call()


def hosted_here(opening: RunOpening, here: Here | None = None) -> HostedRun:
    """A run whose host is in this process, opened."""
    run = RunHere(here or Here(), opening)
    run.open()
    return run


def recorded_here(opening: RunOpening, here: Here | None = None) -> tuple[RunRecord, RunControl]:
    """Record and control of such a run."""
    run = hosted_here(opening, here)
    return RunRecord(run), RunControl(run)
