"""The wait for workers, on a clock of the test's own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.recipes import recipe_with
from tests.worker.fakes import make_job
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.pool import placement_wait
from vit_ray.launch.pool.placement_wait import (
    NoPlaceError,
    PlacementWait,
    StoppedWaitingError,
    describe_missing,
    lacking_now,
)


class Watched:
    def __init__(self, folder: Path, minutes: float = 5.0) -> None:
        self.now_s, self.told = 0.0, []
        self.stop: str | None = None
        self.lacking = ""
        job = make_job(folder, workers={"place_timeout_minutes": minutes})
        record: Any = SimpleNamespace(event=lambda *entry: self.told.append(entry))
        control: Any = SimpleNamespace(stop_reason=lambda: self.stop)
        job = replace(job, record=record, control=control)
        self.watch = PlacementWait(
            job, lambda: "needs a GPU", lambda: self.lacking, clock=lambda: self.now_s
        )

    def after(self, seconds: float, **states: bool) -> list[Any]:
        """What has been told until then, asked each 5 s."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 5.0
            self.watch.check(**{"is_placed": False, **states})
        return self.told


def test_what_is_missing_is_told_every_minute(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.after(55) == []
    assert [text for _, text, _ in watched.after(130)] == [
        f"no workers for {seconds} s: needs a GPU" for seconds in (60, 120, 180)
    ]


def test_workers_that_run_are_not_waited_for_and_lost_ones_are_from_then_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.after(3600, is_placed=True) == []
    assert watched.after(55) == []
    assert len(watched.after(5)) == 1


def test_what_a_placed_group_lacks_is_told_when_it_changes(tmp_path: Path) -> None:
    """Without a limit to the wait, a line a minute would be all of the run's history."""
    watched, told = Watched(tmp_path), []
    for lacking, minutes in (("2 CPUs", 300), ("1 CPU", 300), ("", 60), ("1 CPU", 300)):
        watched.lacking = lacking
        told.append(len(watched.after(60 * minutes, is_placed=True)))
    assert told == [1, 2, 2, 3]
    assert [text for _, text, _ in watched.told] == ["2 CPUs", "1 CPU", "1 CPU"]


@pytest.mark.parametrize(("cpus", "is_private", "lacks"), [
    (3, False, False), (2, False, True), (2, True, False),
])  # fmt: skip
def test_a_run_whose_reading_nodes_are_lost_lacks_them(
    cpus: int, is_private: bool, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two workers hold the CPUs of the node that is left."""
    left = ClusterShape(2, cpus, 0, 0.0, is_private=is_private)
    monkeypatch.setattr(placement_wait, "shape", lambda _: left)
    text = lacking_now(recipe_with(workers={"num_workers": 2}), use_gpu=False)
    assert ("leave 0 of 2 CPUs for reading data" in text and "start nodes" in text) == lacks
    assert bool(text) == lacks


def test_gpus_that_join_later_are_not_lacking_to_a_run_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its workers were placed by `auto` when there were none."""
    monkeypatch.setattr(placement_wait, "shape", lambda _: ClusterShape(3, 8, 1, 0.0))
    recipe = recipe_with(workers={"num_workers": 2, "use_gpu": "auto"})
    assert lacking_now(recipe, use_gpu=False) == ""
    assert "needs 2 GPUs; the cluster has 1" in lacking_now(recipe, use_gpu=True)


def test_a_head_that_does_not_answer_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: float) -> ClusterShape:
        raise ray.exceptions.RpcError("the head is away")

    monkeypatch.setattr(placement_wait, "shape", fail)
    assert lacking_now(recipe_with(), use_gpu=False) == ""


def test_the_wait_has_an_end_that_names_its_knob(tmp_path: Path) -> None:
    watched = Watched(tmp_path, minutes=3.0)
    watched.after(180)
    with pytest.raises(NoPlaceError, match=r"needs a GPU \(workers.place_timeout_minutes=3\)"):
        watched.after(60)


def test_a_stop_ends_the_wait_at_the_next_look(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.after(20)
    watched.stop = "Ctrl-C"
    with pytest.raises(StoppedWaitingError, match=r"^Ctrl-C$"):
        watched.after(5)


def test_a_stop_of_workers_that_run_is_theirs_to_hear(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.stop = "Ctrl-C"
    assert watched.after(3600, is_placed=True) == []


def test_it_is_said_what_is_needed_what_there_is_and_what_to_do() -> None:
    text = describe_missing(4, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 2.0}, {"CPU": 3.0})
    assert text == (
        "4 workers need 8 CPU (the cluster has 16, 3 of them free), 4 GPU (the cluster has 2, "
        "0 of them free); start nodes, wait for or end what else runs there, or "
        "lower workers.num_workers"
    )


def test_nodes_that_drain_are_named_since_their_free_cpus_cannot_be_used() -> None:
    text = describe_missing(2, {"CPU": 1.5}, {"CPU": 4.0}, {"CPU": 4.0}, ["10.0.0.5"])
    assert "4 of them free); draining nodes among them take no new work: 10.0.0.5; start" in text
