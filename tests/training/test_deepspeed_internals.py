"""What the functions of DeepSpeed's door do; `tests/test_internals.py` finds the names."""

import importlib
import itertools
import sys

import pytest
import torch

from tests.training.engine_runs import build_engine, run_steps
from tests.training.ranks import run_ranks
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import import_deepspeed


def test_norms_of_groups_are_one_norm_as_a_step_has_it() -> None:
    utils = importlib.import_module("deepspeed.runtime.utils")
    assert float(utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(4.0)])) == 5.0
    for bad in (-1, torch.tensor(float("nan")), torch.tensor(float("inf"))):
        assert float(utils.combine_grad_norm_groups([torch.tensor(3.0), bad])) == float("inf")


def test_no_operator_of_deepspeed_is_tried_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_steps_that_are_not_compiled_do_not_load_the_compiler() -> None:
    """It takes seconds. torch's optimizers import it at their first step, and DeepSpeed imports an
    optimizer that loads the compiler of kernels."""
    (loaded,) = run_ranks(1, compiler_after_steps, (0, 1, 2), ("adamw", "sgd"))
    assert loaded == []


def test_steps_under_zero_3_do_not_load_the_compiler_of_kernels() -> None:
    """DeepSpeed excludes its hooks from compilation, for which it loads the rest."""
    (loaded,) = run_ranks(1, compiler_after_steps, (3,), ("adamw",))
    assert loaded == ["torch._dynamo"]
