"""Two processes that ask for one lock in S3 in the same moment, two hundred times."""

import functools

from tests.test_lock import bucket, in_folder
from tests.two_holders import holders

__all__ = ["bucket"]  # a fixture

ROUNDS = 200


def test_of_two_that_start_together_on_s3_one_holds_every_time(bucket: str) -> None:
    got = holders(functools.partial(in_folder, bucket), ROUNDS)
    assert [sum(number > 0 for number in numbers) for numbers in got] == [1] * ROUNDS
