"""Two processes that ask for one lock in S3 in the same moment, two hundred times."""

import functools
from pathlib import Path

import pytest

from tests.two_holders import holders, in_folder, lock_bucket

ROUNDS = 200


@pytest.mark.parametrize("is_conditional", [True, False])
def test_of_two_that_start_together_on_s3_one_holds_every_time(
    tmp_path: Path, is_conditional: bool
) -> None:
    with lock_bucket(tmp_path, is_conditional=is_conditional) as bucket:
        got = holders(functools.partial(in_folder, bucket), ROUNDS)
    assert [sum(number > 0 for number in numbers) for numbers in got] == [1] * ROUNDS
