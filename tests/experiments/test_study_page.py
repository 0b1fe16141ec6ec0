"""The page of a study while it runs: after each cell, by a thread that nobody waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.flows import Parent, in_process
from tests.experiments.studies import resolved, study_recipe, study_row, study_tree, trained
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.experiments import study
from vit_ray.experiments import write_page as page
from vit_ray.experiments.runner import Room
from vit_ray.experiments.study import StudyRun
from vit_ray.experiments.study_cells import CellResult, study_cells, study_of
from vit_ray.experiments.write_page import page_meanwhile

LIMIT_S = 5.0
"""Of a test that would hang; none waits that long."""


class Pages:
    """Stands for `write_page`: says when one begins, and ends it when it is allowed to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.written: list[str | None] = []
        self.error = error

    def __call__(self, recipe: Any, run_id: str | None, watch_s: Any) -> None:
        self.begun.release()
        assert self.may_end.acquire(timeout=LIMIT_S)
        self.written.append(run_id)
        if self.error:
            raise self.error

    def await_one(self) -> None:
        assert self.begun.acquire(timeout=LIMIT_S)


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    return study_recipe(tmp_path, [study_row("small"), study_row("large", width=64)])


def pages(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> Pages:
    made = Pages(error)
    monkeypatch.setattr(page, "write_page", made)
    monkeypatch.setattr(page, "FIRST_PAGE_S", 0.0)
    monkeypatch.setattr(page, "TIMES_ITS_COST", 0)
    return made


@contextmanager
def begun(made: Pages, recipe: Any) -> Iterator[Callable[[], None]]:
    """A long job that has called for its first page, which has begun."""
    with page_meanwhile(recipe, "id") as renew:
        renew()
        made.await_one()
        yield renew


def test_calls_that_come_while_a_page_is_written_have_the_next_one_in_common(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    made = pages(monkeypatch)
    with begun(made, recipe) as renew:
        for _ in range(3):
            renew()  # returns at once: the page is still being written
        assert made.written == []
        made.may_end.release()
        made.await_one()
        made.may_end.release(2)
        assert not made.begun.acquire(timeout=0.2)  # nothing has ended since
    assert made.written == ["id", "id"]


def test_the_end_waits_for_the_page_that_is_being_written_and_begins_no_other(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    made = pages(monkeypatch)
    with begun(made, recipe) as renew:
        renew()
        made.may_end.release(2)
    assert len(made.written) in (1, 2)  # the second may have begun before the end
    before = len(made.written)
    renew()
    assert len(made.written) == before
    assert "page" not in {thread.name for thread in threading.enumerate()}


def test_the_end_goes_on_without_a_page_that_hangs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = pages(monkeypatch)
    monkeypatch.setattr(page, "END_S", 0.05)
    with begun(made, recipe):
        pass
    assert made.written == []
    assert "a page of run id is still being written after 0.05 s" in caplog.text
    made.may_end.release()
    for thread in threading.enumerate():
        if thread.name == "page":
            thread.join(10)


def test_a_page_that_fails_is_told_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = pages(monkeypatch, OSError("disk full"))
    made.may_end.release(2)
    with caplog.at_level(logging.WARNING), begun(made, recipe) as renew:
        renew()
        made.await_one()
    assert len(made.written) == 2
    assert "no report of run id for now" in caplog.text
    assert "disk full" in caplog.text


def test_without_a_run_in_mlflow_there_is_nothing_to_write(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    made = pages(monkeypatch)
    with page_meanwhile(recipe, None) as renew:
        renew()
        assert not made.begun.acquire(timeout=0.2)


def test_pages_that_take_long_are_seldom(monkeypatch: pytest.MonkeyPatch, recipe: Any) -> None:
    made = pages(monkeypatch)
    monkeypatch.setattr(page, "TIMES_ITS_COST", 1e9)  # of any time that a clock can tell
    made.may_end.release(2)
    with begun(made, recipe) as renew:
        renew()
        assert not made.begun.acquire(timeout=0.2)


def test_a_short_job_has_its_page_at_the_end_alone(
    monkeypatch: pytest.MonkeyPatch, recipe: Any
) -> None:
    made = pages(monkeypatch)
    monkeypatch.setattr(page, "FIRST_PAGE_S", 3600.0)
    with page_meanwhile(recipe, "id") as renew:
        renew()
        assert not made.begun.acquire(timeout=0.2)


@pytest.mark.parametrize("finished_before", [0, 1])
def test_a_study_renews_its_page_at_each_cell_but_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished_before: int
) -> None:
    tree = study_tree(
        tmp_path,
        [study_row(label, rate) for label, rate in zip("abc", (0.1, 0.2, 0.3), strict=True)],
    )
    recipe = recipe_from_dict(tree, "test")
    cells = study_cells(recipe)

    def train(recipe: Any, **_: Any) -> Any:
        if recipe.name == cells[1].name:
            raise OSError("disk full")
        return trained()

    parent = Parent()
    in_process(monkeypatch, parent, train, lambda: Room(0, 1.7))
    monkeypatch.setattr(study, "cluster_room", lambda *_: Room(0, 1.7))
    known = {one.name: CellResult(one, {}, "id", True) for one in cells[:finished_before]}
    renewed: list[int] = []
    StudyRun(
        study_of(recipe), cells, [resolved() for _ in cells], known, parent,
        lambda: renewed.append(sum(call[0] == "child_ended" for call in parent.calls.made)),
    ).run()  # fmt: skip
    assert renewed == [1, 2][finished_before:]
