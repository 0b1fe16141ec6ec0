"""Which trainings run side by side, and what flows get: the schedule as arithmetic, no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.recipes import recipe_with
from vit_ray.experiments import runner
from vit_ray.experiments.runner import Flow, Room, Runner, Work, makespan, room_of
from vit_ray.experiments.training import Outcome, Training
from vit_ray.launch.run import RunResult
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.outcomes import TrialState
from vit_ray.tracking.metrics_log import RunOpening


def work(name: str = "run", takes: Room | None = None, hours: float = 0.0, **keys: Any) -> Work:
    recipe = recipe_with(name, **keys)
    opening = RunOpening(recipe.tracking, "parent", Path("log"))
    return Work(Training(recipe, "finetune", opening, ""), takes=takes, hours=hours)


def on_gpus(*counts: int) -> list[Work]:
    return [work(str(place), Room(count, 1.0)) for place, count in enumerate(counts)]


def flow_of(parts: list[Any]) -> Flow[list[Any]]:
    return (yield parts)


def started(one: Runner) -> list[str]:
    """Names of all that start now."""
    found = []
    while (each := one.next()) is not None:
        found.append(each.training.recipe.name)
    return found


def end(one: Runner, parts: list[Work], *places: int) -> None:
    for place in places:
        one.end(parts[place], Outcome(TrialState.FINISHED, error=str(place)))


def test_those_start_in_their_order_that_find_room_among_those_that_run() -> None:
    parts = on_gpus(4, 8, 2, 4, 1)
    one = Runner(flow_of(parts), lambda: Room(8, 16))
    assert started(one) == ["0", "2", "4"]  # 4 + 2 + 1 of 8
    end(one, parts, 2, 4)
    assert started(one) == ["3"]
    end(one, parts, 0, 3)
    assert started(one) == ["1"]
    assert not one.is_over
    end(one, parts, 1)
    assert one.is_over
    assert [each.error for each in one.result] == list("01234")  # in the order of the parts


@pytest.mark.parametrize(
    ("room", "names"),
    [
        (Room(8, 1), ["0"]),  # CPUs are counted, too
        (Room(8, 16, runs=2), ["0", "2"]),
        (Room(2, 16), ["0"]),  # wider than the cluster: it is refused where it is placed
        (Room(99, 99), list("01234")),
    ],
)
def test_cpus_and_the_number_of_trainings_bound_what_starts(room: Room, names: list[str]) -> None:
    assert started(Runner(flow_of(on_gpus(4, 8, 2, 4, 1)), lambda: room)) == names


def test_shares_of_a_cpu_fill_it() -> None:
    parts = [work(str(k), Room(0.0, 0.6 + 0.4)) for k in range(3)]
    assert started(Runner(flow_of(parts), lambda: Room(0.0, 2.0))) == ["0", "1"]


def planned(hours: list[float], *gpus: int) -> Flow[Any]:
    pairs = zip(hours, gpus or [1] * len(hours), strict=True)
    return flow_of([work(takes=Room(count, 1.0), hours=each) for each, count in pairs])


def test_the_makespan_is_that_of_grahams_example() -> None:
    # Graham 1969: longest first takes 4m - 1 on m machines, where 3m would do.
    hours = [5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0]
    assert makespan(planned(hours), Room(3, 99)) == 11.0
    assert makespan(planned(hours), Room(1, 99)) == sum(hours)
    assert makespan(planned(hours), Room(7, 99)) == max(hours)
    assert makespan(planned([]), Room(1, 1)) == 0.0


def test_wide_trainings_wait_for_one_another() -> None:
    # 8 and 4 GPUs do not fit 8 at once; the two of 4 do.
    assert makespan(planned([3.0, 2.0, 2.0], 8, 4, 4), Room(8, 99)) == 5.0


def test_a_flow_waits_for_its_parts_and_none_for_those_of_others() -> None:
    """Two cells, each with two fine-tunings: the last ones begin when their cell has ended."""

    def cell(hours: float) -> Flow[None]:
        yield from planned([hours])
        yield [planned([1.0]), planned([2.0])]

    assert makespan(flow_of([cell(3.0), cell(1.0)]), Room(9, 9)) == 5.0
    # One at a time, the first cell with all of its own comes first.
    assert makespan(flow_of([cell(3.0), cell(1.0)]), Room(1, 9)) == 10.0
    order: list[str] = []

    def named(name: str) -> Flow[None]:
        yield [work(name)]
        yield [work(f"{name}1"), work(f"{name}2")]

    one = Runner(flow_of([named("a"), named("b")]), lambda: Room(1, 1))
    while (each := one.next()) is not None:
        order.append(each.training.recipe.name)
        one.end(each, Outcome(TrialState.FINISHED))
    assert order == ["a", "a1", "a2", "b", "b1", "b2"]


def test_nodes_that_come_are_used_while_others_run_and_those_that_go_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", -1.0)
    parts, room = on_gpus(1, 1, 1, 1), Room(1, 9)
    one = Runner(flow_of(parts), lambda: room)
    assert started(one) == ["0"]
    room = Room(2, 9)
    assert started(one) == ["1"]
    room = Room(1, 9)
    end(one, parts, 0)
    assert started(one) == []
    end(one, parts, 1)
    assert started(one) == ["2"]


def test_what_takes_gpus_where_there_are_some_takes_them_when_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first runs on CPUs, as there are no GPUs yet; the next ones have one GPU in turn."""
    monkeypatch.setattr(runner, "LOOK_S", -1.0)
    workers = {"num_workers": 1, "use_gpu": "auto"}
    parts, room = [work(str(k), workers=workers) for k in range(3)], Room(0, 1)
    assert room_of(parts[0].training.recipe, room).gpus == 0
    one = Runner(flow_of(parts), lambda: room)
    assert started(one) == ["0"]
    room = Room(1, 64)
    assert started(one) == ["1"]
    end(one, parts, 0)
    assert started(one) == []


def test_nothing_starts_after_a_stop_and_flows_know_that_they_were_stopped() -> None:
    ends: list[str] = []

    @contextmanager
    def open_run() -> Iterator[None]:
        try:
            yield
        except RunStoppedError:
            ends.append("stopped")
            raise

    def nested() -> Flow[None]:
        with open_run():
            yield [work("a"), work("b")]

    is_stopped = False
    one = Runner(flow_of([nested()]), lambda: Room(1, 1, runs=1), lambda: is_stopped)
    first = one.next()
    assert first is not None
    is_stopped = True
    assert one.next() is None
    assert not one.is_over  # it comes to its end
    one.end(first, Outcome(TrialState.FAILED, is_cut=True))
    assert one.is_over
    one.close()
    assert ends == ["stopped"]
    assert one.result is None


def test_what_was_cut_short_is_no_outcome_for_its_flow() -> None:
    parts = on_gpus(1, 1)
    one = Runner(flow_of(parts), lambda: Room(2, 9))
    started(one)
    one.end(parts[0], Outcome(TrialState.FAILED, is_cut=True))
    end(one, parts, 1)
    assert one.result is None


def test_an_error_of_a_flow_lets_those_that_run_come_to_their_end() -> None:
    def broken() -> Flow[None]:
        yield on_gpus(1)
        raise RuntimeError("the record is gone")

    first, *others = (broken(), *on_gpus(1, 1, 1))
    one = Runner(flow_of([first, *others]), lambda: Room(2, 9))
    running = [one.next(), one.next()]
    for each in running:
        assert each is not None
        one.end(each, Outcome(TrialState.FINISHED))
    assert one.is_over
    assert isinstance(one.error, RuntimeError)
    assert one.next() is None


def test_the_directives_of_work_are_followed() -> None:
    """A point is drawn when it starts, a rung may stop it, and its end is noted."""
    noted: list[Any] = []
    part = work("drawn")
    other = work("other").training
    part.draw = lambda: other
    part.goes_on = lambda training, outcome: training is other and outcome.steps == 1
    part.on_end = lambda training, outcome: noted.append((training, outcome.steps))
    one = Runner(flow_of([part]), lambda: Room(1, 1))
    assert one.next() is part
    assert part.training is other
    at = {steps: RunResult("", "", steps, 9, {}, "") for steps in (1, 2)}
    assert one.goes_on(part, Outcome(TrialState.STOPPED_EARLY, at[1]))
    assert not one.goes_on(part, Outcome(TrialState.STOPPED_EARLY, at[2]))
    one.end(part, Outcome(TrialState.STOPPED_EARLY, at[2]))
    assert noted == [(other, 2)]


def alike(count: int, **keys: Any) -> list[Work]:
    """Trainings of two workers that read the same, whatever their rate."""
    return [
        work(
            f"run{k}",
            optim={"learning_rate": 0.1 * (k + 1), "steps": 10},
            workers={"num_workers": 2, "use_gpu": False},
            **keys,
        )
        for k in range(count)
    ]


def sharing(parts: list[Work]) -> list[int]:
    return [one.training.num_sharing for one in parts]


def test_trainings_know_how_many_start_with_them_and_read_the_same() -> None:
    others = [work("other", seed=7, workers={"num_workers": 2, "use_gpu": False})]
    parts = [*alike(2), *others, *alike(3)]
    one = Runner(flow_of(parts), lambda: Room(0, 12.0))
    assert len(started(one)) == 4
    assert sharing(parts) == [3, 3, 0, 3, 0, 0]
    alone = alike(2)
    one = Runner(flow_of(alone), lambda: Room(0, 12.0, runs=1))
    started(one)
    end(one, alone, 0)
    started(one)
    assert sharing(alone) == [0, 0]


def test_places_wait_for_each_other_so_that_trainings_start_in_waves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(runner.time, "monotonic", lambda: now_s)
    parts = alike(9)
    one = Runner(flow_of(parts), lambda: Room(0, 99, runs=3))
    assert started(one) == ["run0", "run1", "run2"]
    now_s += 100.0
    end(one, parts, 0)
    assert started(one) == []
    now_s += 4.9  # 5 % of 100 s
    end(one, parts, 1)
    assert started(one) == []
    now_s += 0.2
    assert started(one) == ["run3", "run4"]
    assert sharing(parts)[3:5] == [2, 2]
    now_s += 30.0
    end(one, parts, 2)
    now_s += 0.1
    end(one, parts, 3)
    assert started(one) == []
    now_s += 0.1
    end(one, parts, 4)
    assert started(one) == ["run5", "run6", "run7"]  # nobody is left to wait for
    now_s += 10_000.0
    end(one, parts, 5)
    assert started(one) == ["run8"]  # the last has nobody to start with


def test_a_place_waits_for_none_that_reads_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(runner.time, "monotonic", lambda: now_s)
    parts = [*alike(2), *alike(3, seed=5)]
    one = Runner(flow_of(parts), lambda: Room(0, 99, runs=2))
    assert started(one) == ["run0", "run1"]
    now_s += 100.0
    end(one, parts, 0)
    assert started(one) == ["run0"]


def test_what_reads_something_else_does_not_wait_with_a_place_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(runner.time, "monotonic", lambda: now_s)
    others = [
        work(name, seed=5, workers={"cpus_per_worker": 0.1, "use_gpu": False})
        for name in ("first", "second")
    ]
    parts = [*alike(7), *others]
    one = Runner(flow_of(parts), lambda: Room(0, 11.6))  # four of 2.66 CPUs and one of 0.76
    assert started(one) == ["run0", "run1", "run2", "run3", "first"]
    now_s += 100.0
    end(one, parts, 0, 1)
    assert started(one) == ["second"]
