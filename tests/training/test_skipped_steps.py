"""A step that two real ranks skip together: a loss is not finite on one of them, or very large."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.engine_runs import GLOBAL_BATCH, batch, build_engine
from tests.training.ranks import run_ranks
from tests.worker.fakes import FakeHooks, FakeRun, short_recipe
from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.config.training_sections import TrainConfig
from vit_ray.measure.meters import Compute
from vit_ray.training import loop
from vit_ray.training.collectives import all_sum
from vit_ray.training.loop import Ending, RankContext, TrainingLoop
from vit_ray.worker.attempt import Attempt
from vit_ray.worker.run_link import RunLink

RANKS, MICRO, BAD = 2, 2, 2
SHARE = GLOBAL_BATCH // RANKS
CPU = torch.device("cpu")


def batches_of(rank: int, numbers: list[int]) -> Iterator[dict[str, Any]]:
    mine = slice(rank * SHARE, (rank + 1) * SHARE)
    for number in numbers:
        images, labels = (part[mine].numpy() for part in batch(number))
        samples = torch.arange(GLOBAL_BATCH)[mine].numpy() + number * GLOBAL_BATCH
        yield {"image": images, "labels": labels, "sample": samples}


def train_on(
    rank: int, train: TrainConfig, numbers: list[int], factor: float
) -> tuple[dict[str, torch.Tensor], list[tuple[str, str, int]], Progress]:
    """Weights and averages, history and position after a step of each batch; rank 1's loss in step
    `BAD` is multiplied."""
    loop.NORMS_IN_MEDIAN = 8  # type: ignore[misc]
    engine = build_engine(train, RANKS, MICRO)
    plain, actor = engine._loss_function, FakeRun()

    def loss(module: Any, images: Any, labels: Any, samples: Any, step: int) -> torch.Tensor:
        value: torch.Tensor = plain(module, images, labels, samples, step)
        return value * factor if (rank, step) == (1, BAD) else value

    class Hooks(FakeHooks):
        link = RunLink(actor, rank)  # type: ignore[arg-type]
        context = RankContext(len(numbers), rank, RANKS, MICRO, partial(all_sum, device=CPU))
        job: Any = SimpleNamespace(recipe=SimpleNamespace(train=train))
        on_bad_step: Any = Attempt.on_bad_step
        on_skipped_steps: Any = Attempt.on_skipped_steps
        _described: Any = Attempt._described

    hooks: Any = Hooks()
    hooks.engine = engine
    engine._loss_function = loss  # type: ignore[assignment]
    chosen = short_recipe(
        optim={"steps": len(numbers), "schedule": "constant", "warmup_steps": 0},
        train={"global_batch_size": GLOBAL_BATCH, "skip_above": train.skip_above},
    )
    progress, stream = Progress(), batches_of(rank, numbers)
    ending = TrainingLoop(engine, stream, chosen, hooks.context, hooks, progress, Compute(1)).run()
    assert ending is Ending.FINISHED
    weights = {name: p.detach().clone() for p, name in engine._names.items()}
    for name, parts in engine.average.by_name().items():
        weights |= {f"average of {name} from {start}": values for start, values in parts}
    return weights, actor.events, progress


@pytest.mark.parametrize(("kind", "stage"), [("not finite", 0), ("step skipped", 2)])
def test_a_bad_step_is_skipped_by_all_ranks_as_if_its_batch_had_not_been_there(kind, stage):
    bad_factor, skip_above = (float("nan"), None) if kind == "not finite" else (1e3, 20.0)
    train = TrainConfig(
        zero_stage=stage, precision="fp32", averaging=0.5, nonfinite="skip", skip_above=skip_above
    )
    skipped = run_ranks(RANKS, train_on, train, [0, 1, BAD, 3, 4], bad_factor)
    without = run_ranks(RANKS, train_on, train, [0, 1, 3, 4], 1.0)
    for (weights, _, progress), (wanted, _, _) in zip(skipped, without, strict=True):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
        assert (progress.step, progress.nonfinite_steps) == (5, 0)
        assert progress.skipped_steps == (kind == "step skipped")
    ((found, text, step),) = skipped[0][1]
    # A step that is skipped by its norm is named at the next log, here after step 4.
    assert (found, step) == (kind, BAD + 1 if kind == "not finite" else 4)
    assert f"of step {BAD} is" in text
    samples = ", ".join(str(n) for n in range(BAD * GLOBAL_BATCH, (BAD + 1) * GLOBAL_BATCH))
    assert f"Samples {samples}." in text  # of both ranks
