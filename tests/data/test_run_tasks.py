import os
import time
from pathlib import Path

import pytest

from vit_ray.data.tasks import run_tasks

pytestmark = pytest.mark.usefixtures("ray_cluster")


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


def fail_first(item: int, folder: str) -> None:
    if item == 0:
        raise ValueError("the first is no good")
    time.sleep(0.2)
    Path(folder, str(item)).touch()


def die(item: int) -> None:
    os._exit(1)


def test_results_stand_in_the_order_of_the_items(tmp_path):
    """Whoever ends first: what is made of them may not depend on when tasks ran."""
    items = ["first", "second"]
    assert run_tasks(first_waits, items, str(tmp_path / "done")) == items
    assert run_tasks(square, []) == []


def test_what_a_user_can_mend_comes_back_as_it_was_said():
    with pytest.raises(ValueError, match=r"^seven is no good$"):
        run_tasks(square, [1, 7])
    with pytest.raises(OSError, match=r"^the store is away; reading eight failed after 10 att"):
        run_tasks(square, [1, 8])


def test_after_an_error_the_other_items_are_not_processed(tmp_path):
    with pytest.raises(ValueError, match="the first is no good"):
        run_tasks(fail_first, range(200), str(tmp_path))
    time.sleep(2)
    done = len(list(tmp_path.iterdir()))
    time.sleep(2)
    assert len(list(tmp_path.iterdir())) == done


def test_a_task_whose_process_dies_again_and_again_is_an_error(monkeypatch):
    monkeypatch.setattr("vit_ray.data.tasks._RETRIES", 1)
    with pytest.raises(OSError, match=r"^a task died 2 times: .*; run the same command again"):
        run_tasks(die, [1])
