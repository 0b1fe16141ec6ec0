import pytest

from vit_ray.retry import (
    ONE_ATTEMPT,
    DeniedError,
    RetryPolicy,
    TransientError,
    retry_policy,
    with_retries,
)


class Flaky:
    """Fails with the given errors or messages, one after the other, and then succeeds."""

    def __init__(self, *errors: str | OSError) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            error = self.errors.pop(0)
            raise OSError(error) if isinstance(error, str) else error
        return "done"


# What pyarrow says for each answer, measured against a proxy that gave it.
TRANSIENT = [
    "When reading: AWS Error SLOW_DOWN during GetObject operation",
    "AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body.",
    "AWS Error UNKNOWN (HTTP status 500) during HeadObject operation: No response body.",
    "AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 52, nothing came",
    "AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 28, Timeout was reached",
    "AWS Error SERVICE_UNAVAILABLE during PutObject operation",
    "AWS Error INTERNAL_FAILURE during GetObject operation",
]


@pytest.mark.parametrize("error", [*TRANSIENT, TransientError("any words")])
def test_what_passes_is_tried_again_with_growing_waits(error: str | OSError) -> None:
    waits: list[float] = []
    flaky = Flaky(*[error] * 5)
    assert with_retries(flaky, "reading", sleep=waits.append) == "done"
    assert flaky.calls == 6
    assert all(0.5 <= wait / (0.2 * 2**i) <= 1.5 for i, wait in enumerate(waits))


@pytest.mark.parametrize(
    "error", ["AWS Error ACCESS_DENIED during HeadObject operation", DeniedError("ACCESS_DENIED")]
)
def test_a_refusal_is_tried_again_only_a_little(error: str | OSError) -> None:
    flaky = Flaky(*[error] * 9)
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        with_retries(flaky, "reading", sleep=lambda _: None)
    assert flaky.calls == 3


def test_a_refusal_is_tried_no_more_often_than_anything() -> None:
    flaky = Flaky(*["AWS Error ACCESS_DENIED during HeadObject operation"] * 9)
    with pytest.raises(OSError, match="ACCESS_DENIED"):
        with_retries(flaky, "reading", ONE_ATTEMPT, sleep=lambda _: None)
    assert flaky.calls == 1


@pytest.mark.parametrize("error", [FileNotFoundError("SLOW_DOWN/a"), OSError("No space left")])
def test_what_will_not_pass_is_not_tried_again(error: OSError) -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        raise error

    with pytest.raises(OSError, match=str(error)):
        with_retries(fail, "writing", sleep=lambda _: None)
    assert len(calls) == 1


def test_it_ends_after_the_attempts_and_says_how_many() -> None:
    flaky = Flaky(*[TRANSIENT[0]] * 99)
    with pytest.raises(OSError, match="SLOW_DOWN") as caught:
        with_retries(flaky, "reading x", RetryPolicy(attempts=4), sleep=lambda _: None)
    assert caught.value.__notes__ == ["reading x failed after 4 attempts."]


def test_it_ends_when_the_budget_is_spent() -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    flaky = Flaky(*[TRANSIENT[0]] * 99)
    policy = RetryPolicy(attempts=99, budget_s=10.0)
    with pytest.raises(OSError, match="SLOW_DOWN"):
        with_retries(flaky, "reading", policy, sleep=sleep, clock=lambda: now[0])
    assert now[0] <= 10.0


def test_waits_differ_between_workers() -> None:
    waits: list[float] = []
    for _ in range(5):
        with_retries(Flaky(TRANSIENT[0]), "reading", sleep=waits.append)
    assert len(set(waits)) == 5


def test_retries_within_retries_are_not_multiplied() -> None:
    waits: list[float] = []
    flaky = Flaky(*[TRANSIENT[0]] * 99)

    def inner() -> str:
        return with_retries(flaky, "reading x", sleep=waits.append)

    def outer() -> str:
        return with_retries(inner, "making y", sleep=waits.append)

    with pytest.raises(OSError, match="SLOW_DOWN") as caught:
        with_retries(outer, "making z", sleep=waits.append)
    assert flaky.calls == RetryPolicy().attempts
    assert len(waits) == flaky.calls - 1
    assert caught.value.__notes__ == [f"reading x failed after {flaky.calls} attempts."]


def test_an_outer_operation_is_tried_again_for_what_is_not_retried_within_it() -> None:
    flaky = Flaky(TRANSIENT[0])

    def operation() -> str:
        with_retries(lambda: "found", "listing", sleep=lambda _: None)
        return flaky()

    assert with_retries(operation, "making y", sleep=lambda _: None) == "done"


def test_what_is_within_follows_the_policy_around_it() -> None:
    told: list[str] = []
    flaky = Flaky(*[TRANSIENT[0]] * 99)

    def inner() -> str:
        return with_retries(flaky, "reading x", sleep=lambda _: None)

    four = RetryPolicy(attempts=4, tell=told.append)
    with retry_policy(four), pytest.raises(OSError, match="SLOW_DOWN"):
        with_retries(inner, "making y", sleep=lambda _: None)
    with pytest.raises(OSError, match="SLOW_DOWN"):
        with_retries(inner, "making y", four, sleep=lambda _: None)
    assert flaky.calls == 2 * 4
    assert [text.partition(":")[0] for text in told] == ["reading x"] * 6
    with pytest.raises(OSError, match="SLOW_DOWN"):
        inner()
    assert flaky.calls == 2 * 4 + RetryPolicy().attempts
