"""Models under ZeRO stage 3, where a parameter is there only around its own module's forward."""

import pytest

from tests.training.ranks import run_ranks


@pytest.mark.slow
def test_partitioned_models_take_the_same_steps_as_whole_ones():
    found = run_ranks(1, _losses_by_stage)[0]
    assert len(found) == 16
    for case in found:
        # The optimiser adds up flattened parameters, and so rounds another way.
        assert case[3] == pytest.approx(case[0], rel=1e-5)
        assert case[3][2] < case[3][0]


def _losses_by_stage(rank: int) -> list[dict[int, list[float]]]:
    # Here and not above: it takes seconds, which the ranks have behind them.
    from tests.models.zero_steps import losses_by_stage

    return losses_by_stage(rank)
