"""What the functions of DeepSpeed's door do; `tests/test_internals.py` finds the names."""

import importlib
import itertools
import sys
from typing import Any

import pytest
import torch

from tests.training.engine_runs import build_engine, run_steps
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import import_deepspeed


def test_no_operator_of_deepspeed_is_tried_or_compiled(monkeypatch):
    """On a machine with GPUs it would start compilers for a score of operators, on every worker."""
    operators = importlib.import_module("deepspeed.ops")
    asked: list[bool] = []
    monkeypatch.setattr(operators, "_probe_compatible_ops", lambda: asked.append(True) or {})
    monkeypatch.delitem(vars(operators), "__compatible_ops__", raising=False)
    import_deepspeed()
    assert importlib.import_module("deepspeed.comm.torch").build_shm_op() is None
    assert not asked


def compiler_after_steps(rank: int, stages: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    for stage, name, precision in itertools.product(stages, names, ("fp32", "bf16")):
        train, optim = TrainConfig(zero_stage=stage, precision=precision), OptimConfig(name=name)
        engine = build_engine(train, 1, 2, optim)
        run_steps(engine, 0, 2, 2)
        engine.close()
    return [name for name in ("torch._dynamo", "torch._inductor.lowering") if name in sys.modules]


@pytest.mark.parametrize(
    ("stages", "names", "imported"),
    [((0, 1, 2), ("adamw", "sgd"), []), ((3,), ("adamw",), ["torch._dynamo"])],
)
def test_steps_that_are_not_compiled_do_not_load_the_compiler(stages, names, imported):
    """It takes seconds. torch's optimizers import it at their first step, and DeepSpeed imports an
    optimizer that loads the compiler of kernels. Hooks of stage 3 are excluded from compilation,
    for which it loads the rest."""
    assert run_ranks(1, compiler_after_steps, stages, names) == [imported]


def norms_of_stage_3(rank: int, precision: str) -> list[tuple[float, float]]:
    """Of each group of weights in three steps: by the engine, and by DeepSpeed's own method."""
    engine = build_engine(TrainConfig(zero_stage=3, precision=precision), 2, 2)
    zero, found = engine._engine.optimizer, []
    kept = zero.get_grad_norm_direct

    def both(gradients: Any, parameters: Any) -> torch.Tensor:
        norm: torch.Tensor = kept(gradients, parameters)
        theirs = type(zero).get_grad_norm_direct(zero, gradients, parameters)
        found.append((float(norm), float(theirs)))
        return norm

    zero.get_grad_norm_direct = both
    run_steps(engine, 0, 3, 2)
    return found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_norms_of_stage_3_are_deepspeeds_to_the_last_bit(precision):
    found = run_ranks(2, norms_of_stage_3, precision)
    assert found[0] == found[1]
    assert len(found[0]) == 3 * 2  # what decays and what does not
    assert all(ours == theirs > 0 for ours, theirs in found[0])
