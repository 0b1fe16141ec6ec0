import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from vit_ray.data import tasks
from vit_ray.data.tasks import Display, Shown, Tally, report_done, run_tasks, shown_progress


def square(item: int) -> int:
    if item == 7:
        raise ValueError("seven is no good")
    if item == 8:
        error = OSError("the store is away")
        error.add_note("reading eight failed after 10 attempts.")
        raise error
    return item * item


def first_waits(item: str, done: str) -> str:
    if item == "first":
        while not os.path.exists(done):
            time.sleep(0.05)
    else:
        Path(done).touch()
    return item


def test_results_stand_in_the_order_of_the_items(ray_cluster, tmp_path):
    """Whoever ends first: what is made of them may not depend on when tasks ran."""
    items = ["first", "second"]
    assert run_tasks(first_waits, items, str(tmp_path / "done")) == items
    assert run_tasks(square, []) == []


def test_what_a_user_can_mend_comes_back_as_it_was_said(ray_cluster):
    with pytest.raises(ValueError, match=r"^seven is no good$"):
        run_tasks(square, [1, 7])
    with pytest.raises(OSError, match=r"^the store is away; reading eight failed after 10 att"):
        run_tasks(square, [1, 8])


def fail_first(item: int) -> None:
    if item == 0:
        raise ValueError("the first is no good")
    time.sleep(2)  # the first has failed before


def test_after_an_error_the_other_items_are_not_processed(ray_cluster, monkeypatch):
    cancelled: list[Any] = []
    plain = ray.cancel
    monkeypatch.setattr(ray, "cancel", lambda task: cancelled.append(task) or plain(task))
    with pytest.raises(ValueError, match="the first is no good"):
        run_tasks(fail_first, range(100))
    assert len(cancelled) >= 99 - ray.cluster_resources()["CPU"]


def test_tasks_are_started_as_others_end(ray_cluster, monkeypatch):
    monkeypatch.setattr("vit_ray.data.tasks._MOST", 3)
    most, plain = [0], ray.wait
    monkeypatch.setattr(
        ray, "wait", lambda some, **keys: most.append(len(some)) or plain(some, **keys)
    )
    assert run_tasks(square, range(20, 60)) == [n * n for n in range(20, 60)]
    assert max(most) == 3


def die(item: int) -> None:
    os._exit(1)


def test_a_task_whose_process_dies_again_and_again_is_an_error(ray_cluster, monkeypatch):
    monkeypatch.setattr("vit_ray.data.tasks._RETRIES", 1)
    with pytest.raises(OSError, match=r"^a task died 2 times: .*; run the same command again, wh"):
        run_tasks(die, [1])


def half_done(item: int, seen_file: str) -> int:
    report_done(item, noted=1)
    deadline_s = time.monotonic() + 30
    while not os.path.exists(seen_file) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return item


def test_tasks_report_what_they_have_done_while_others_work(ray_cluster, tmp_path, monkeypatch):
    """What the last look of the display saw: all images of all tasks, and each one noted."""
    seen: list[tuple[int, ...]] = []

    def look(_: Display, *counts: int) -> None:
        seen.append(counts)
        if counts == (0, 3, 2):
            (tmp_path / "seen").touch()

    monkeypatch.setattr(Display, "update", look)
    ended: list[int] = []
    with shown_progress(Shown("working", 60), 3, lambda: len(ended)) as tally:
        for number, images in enumerate((10, 20, 30)):
            tally.put.remote(number, images, 1)
            tally.put.remote(number, images, 1)  # a task that was tried again counts once
        deadline_s = time.monotonic() + 30
        while (0, 60, 3) not in seen and time.monotonic() < deadline_s:
            time.sleep(0.05)
    assert (0, 60, 3) in seen
    seen.clear()
    file, shown = str(tmp_path / "seen"), Shown("working", 3)
    assert run_tasks(half_done, [1, 2], file, shown=shown) == [1, 2]
    assert (0, 3, 2) in seen
    assert seen[-1] == (2, 3, 2)


class SlowTally(Tally):
    """One whose process takes long to start."""

    def __init__(self) -> None:
        time.sleep(20)
        super().__init__()


def test_a_short_round_does_not_wait_for_what_counts_it(ray_cluster, monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(tasks, "Tally", SlowTally)
    monkeypatch.setattr(ray, "get", lambda refs, **_: asked.append(refs))
    with shown_progress(Shown("working", 60), 1, lambda: 1):
        pass
    assert not asked


def test_a_log_has_a_line_every_30_s_with_rate_and_time_left(monkeypatch):
    now, written = [1000.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = Shown("converting to data/train", 10_000, "rejected")
    display = Display(shown, 4, Console(file=written, width=40))
    for second in range(1, 62):  # 100 images/s
        now[0] = 1000.0 + second
        display.update(0, 100 * second, second // 10)
    assert written.getvalue().splitlines() == [
        "converting to data/train: 3,000 of 10,000 images, 100 images/s, 3 rejected, ETA 0:01:10",
        "converting to data/train: 6,000 of 10,000 images, 100 images/s, 6 rejected, ETA 0:00:40",
    ]
