"""Which failed test is run a second time, and that a session with one is counted as passed."""

import pytest

from tests.rerun import refusal

NAME = "tests/test_a.py::test_a@ray"


@pytest.mark.parametrize(
    ("history", "failed", "reason"),
    [
        ({}, [NAME], None),
        ({}, [NAME, "tests/test_b.py::test_b@ray"], "2 tests failed"),
        ({}, ["tests/test_a.py::test_a@tests/test_a.py"], "does not run under Ray"),
        ({"now": "tests/test_b.py::test_b@ray"}, [NAME], "already run again in this run"),
        ({"before": NAME, "now": None}, [NAME], "one of the last 10 runs"),
    ],
)
def test_one_test_under_ray_is_run_again_unless_it_was_in_the_last_ten_runs(
    history, failed, reason
):
    found = refusal(history, "now", failed)
    assert found is None if reason is None else reason in (found or "")
