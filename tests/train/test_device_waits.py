"""How often the host waits for the device in a step, counted on a device that only pretends."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.train.engine_runs import GLOBAL_BATCH, batch, build_engine, run_steps
from tests.train.ranks import run_ranks
from tests.train.test_loop import FakeHooks, recipe
from vit_ray.config.training_sections import TrainConfig
from vit_ray.measure.meters import Compute
from vit_ray.train.collectives import ProcessGroup
from vit_ray.train.loop import RankContext, run_training
from vit_ray.train.progress import Progress

RANKS, MICRO, STEPS = 2, 2, 6
KINDS = [(stage, precision) for stage in range(4) for precision in ("fp32", "bf16")]
# What brings a value of a tensor to the host; from a GPU, none of them comes before it has it.
READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero", "equal"}


class Reads(TorchFunctionMode):
    """Counts the host's reads of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def reads_by_step(rank: int) -> dict[Any, list[int]]:
    """By kind: reads from handing out a step's passes to the next step's."""
    return {kind: _reads_of(rank, *kind) for kind in KINDS}


def _reads_of(rank: int, stage: int, precision: str) -> list[int]:
    from deepspeed.accelerator import get_accelerator

    train = TrainConfig(zero_stage=stage, precision=precision, averaging=0.9)
    engine = build_engine(train, RANKS, MICRO)
    share = GLOBAL_BATCH // RANKS
    counts: list[int] = []
    reads = Reads()

    def synchronize(*_: Any) -> None:
        reads.names.append("synchronize")

    with mock.patch.object(type(get_accelerator()), "synchronize", synchronize), reads:

        def batches() -> Iterator[dict[str, Any]]:
            for number in range(STEPS):
                images, labels = batch(number)
                mine = slice(rank * share, (rank + 1) * share)
                rows = {"image": images[mine], "labels": labels[mine]}
                samples = torch.arange(share)
                reads.names.clear()
                yield {**rows, "sample": samples}
                counts.append(len(reads.names))

        chosen = recipe(
            optim={"steps": STEPS, "schedule": "constant", "warmup_steps": 0},
            train={"global_batch_size": GLOBAL_BATCH, "log_every_steps": 3},
        )
        context = RankContext(STEPS, rank, RANKS, MICRO, ProcessGroup(engine.device))
        run_training(engine, batches(), chosen, context, FakeHooks(), Progress(), Compute(1))
    engine.close()
    return counts


@pytest.fixture(scope="module")
def reads() -> dict[Any, list[int]]:
    return run_ranks(RANKS, reads_by_step)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once_and_once_more_for_the_figures_of_a_window(
    reads: dict[Any, list[int]], kind: Any
) -> None:
    # Steps are logged at 1, 3 and 6; what follows the last is not counted. In its first step
    # stage 3 records the order of the layers.
    assert reads[kind][1:] == [1, 2, 1, 1]
    assert kind[0] == 3 or reads[kind][0] == 2


class PretendedStream:
    """Notes which streams it waits for."""

    waited: list[Any]

    def __init__(self) -> None:
        self.waited = []

    def wait_stream(self, other: Any) -> None:
        self.waited.append(other)

    def record_event(self, *_: Any) -> None:
        pass


def with_overlap(rank: int, stage: int, precision: str) -> tuple[list[float], int, int]:
    """Losses; the host's waits; waits of the computing stream for the sums beside it."""
    from deepspeed.accelerator import get_accelerator

    from vit_ray.train import engine as module

    accelerator, waits, plain = get_accelerator(), [], module.deepspeed_config
    computing = PretendedStream()
    pretended = {
        "is_synchronized_device": lambda self: False,
        "resolves_data_dependency": lambda self: False,
        "synchronize": lambda self, *_: waits.append(1),
        "current_stream": lambda self, *_: computing,
        "default_stream": lambda self, *_: computing,
        "stream": lambda self, _: contextlib.nullcontext(),
        "Stream": property(lambda self: PretendedStream),
    }
    for name, value in pretended.items():
        setattr(type(accelerator), name, value)
    torch.Tensor.record_stream = lambda self, _: None  # type: ignore[method-assign]

    def overlapping(*args: Any) -> dict[str, Any]:
        config = plain(*args)
        config["zero_optimization"]["overlap_comm"] = True
        return config

    module.deepspeed_config = overlapping
    engine = build_engine(TrainConfig(zero_stage=stage, precision=precision), RANKS, MICRO)
    waits.clear()
    computing.waited.clear()
    losses = run_steps(engine, 0, 3, MICRO)
    reductions = engine._engine.optimizer.reduction_stream
    return losses, len(waits), computing.waited.count(reductions)


def without_overlap(rank: int, stage: int, precision: str) -> list[float]:
    engine = build_engine(TrainConfig(zero_stage=stage, precision=precision), RANKS, MICRO)
    return run_steps(engine, 0, 3, MICRO)


@pytest.mark.parametrize("stage", [1, 2])
def test_sums_beside_the_backward_pass_keep_the_stream_waiting_and_not_the_host(
    stage: int,
) -> None:
    passes = 3 * GLOBAL_BATCH // RANKS // MICRO
    losses, host, stream = run_ranks(RANKS, with_overlap, stage, "bf16")[0]
    assert host == 0
    assert stream >= passes
    assert losses == run_ranks(RANKS, without_overlap, stage, "bf16")[0]
