"""A slow rank is the one that the figures name, though all ranks' steps take equally long.

Each rank has a clock of its own, which only its work moves on; where ranks meet, all leave at the
time of the last that came.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.training.engine_runs import GLOBAL_BATCH, batch, build_engine
from tests.training.ranks import run_ranks
from tests.worker.fakes import FakeHooks, short_recipe
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config.training_sections import TrainConfig
from vit_ray.measure.meters import Compute, DeviceTimes
from vit_ray.training.collectives import all_sum
from vit_ray.training.loop import RankContext, TrainingLoop

STEPS, RANKS, MICRO, SLOW = 4, 2, 2, 1
CPU = torch.device("cpu")


class RankClock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._all_reduce = torch.distributed.all_reduce
        torch.distributed.all_reduce = self._meet

    def __call__(self) -> float:
        return self.now_s

    def _meet(self, *args: Any, **kwargs: Any) -> Any:
        latest = torch.tensor([self.now_s], dtype=torch.float64)
        self._all_reduce(latest, op=torch.distributed.ReduceOp.MAX)
        self.now_s = float(latest)
        return self._all_reduce(*args, **kwargs)


def figures_of(rank: int, slow_part: str, stage: int) -> dict[str, float]:
    """What a rank logs at the last step, of which each part takes 1 s, and one 10 s on `SLOW`."""
    clock = RankClock()

    def work(part: str) -> None:
        clock.now_s += 10.0 if (rank, part) == (SLOW, slow_part) else 1.0

    train = TrainConfig(zero_stage=stage, precision="fp32", averaging=0.0)
    engine = build_engine(train, RANKS, MICRO)
    plain = engine._loss_function

    def loss(*args: Any) -> torch.Tensor:
        work("forward")
        return plain(*args)

    def batches() -> Iterator[dict[str, Any]]:
        share = GLOBAL_BATCH // RANKS
        for step in range(STEPS):
            work("data")
            images, labels = (part[:share].numpy() for part in batch(step))
            yield {"image": images, "labels": labels, "sample": labels[:, 0]}

    engine._loss_function = loss  # type: ignore[assignment]
    engine.forward_times = DeviceTimes(CPU, clock)
    hooks = FakeHooks()
    context = RankContext(STEPS, rank, RANKS, MICRO, partial(all_sum, device=CPU))
    chosen = short_recipe(optim={"steps": STEPS}, train={"global_batch_size": GLOBAL_BATCH})
    TrainingLoop(engine, batches(), chosen, context, hooks, Progress(), Compute(1), clock).run()
    return hooks.logged[-1][1]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("slow_part", "stage"), [("forward", 0), ("data", 2)])
def test_the_slow_rank_is_named_and_its_own_work_is_told(slow_part, stage):
    figures = run_ranks(RANKS, figures_of, slow_part, stage)
    assert figures[0]["perf/step_ms_median"] == figures[1]["perf/step_ms_median"]
    passes = GLOBAL_BATCH // RANKS // MICRO
    others_ms = 1e3 * (1 + passes)
    slow_ms = 1e3 * (1 + 10 * passes if slow_part == "forward" else 10 + passes)
    for seen in figures:
        assert seen["perf/slowest_rank"] == SLOW
        assert seen["perf/own_ms_max"] == slow_ms
        assert seen["perf/own_ms_median"] == (others_ms + slow_ms) / 2
