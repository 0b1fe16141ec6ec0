"""What `fragments.py` and `engine.py` read of DeepSpeed is there: run first on a new DeepSpeed."""

import dataclasses
import importlib
import inspect
import itertools
import sys
from importlib.metadata import version

import pytest
import torch

from tests.train.engine_runs import build_engine, run_steps
from tests.train.ranks import run_ranks
from vit_ray.config.training_sections import TrainConfig
from vit_ray.train.engine import import_deepspeed

VERSION = "0.19"

# Module, class, and what is set on its instances.
ATTRIBUTES = [
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "single_partition_of_fp32_groups"),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "reduction_stream"),
    ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "norm_for_param_grads"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "norm_for_param_grads"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "fp32_partitioned_groups_flat"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "grad_position"),
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "reduce_and_partition_stream"),
    ("runtime.engine", "DeepSpeedEngine", "global_rank"),
    ("runtime.engine", "DeepSpeedEngine", "global_steps"),
    ("runtime.engine", "DeepSpeedEngine", "enable_backward_allreduce"),
]
METHODS = [
    ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "get_param_id", ("self", "param")),
    ("runtime.engine", "DeepSpeedEngine", "empty_partition_cache", ("self",)),
    ("runtime.engine", "DeepSpeedEngine", "zero_optimization_stage", ("self",)),
    (
        "runtime.engine",
        "DeepSpeedEngine",
        "_do_optimizer_sanity_check",
        ("self", "basic_optimizer"),
    ),
    (
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        "scaled_global_norm",
        ("self", "norm_type"),
    ),
    (
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        "independent_gradient_partition_epilogue",
        ("self",),
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "independent_gradient_partition_epilogue",
        ("args", "kwargs"),  # decorated
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "_get_norm_groups",
        ("args", "kwargs"),  # decorated
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "get_grad_norm_direct",
        ("args", "kwargs"),  # decorated
    ),
    *(
        (module, name, "complete_grad_norm_calculation_for_cpu_offload", ("self", "params"))
        for module, name in (
            ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
            ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
        )
    ),
    ("runtime.engine", "DeepSpeedEngine", "is_gradient_accumulation_boundary", ("self",)),
    ("runtime.engine", "DeepSpeedEngine", "destroy", ("self",)),
]
FIELDS = [
    ("fragment_address", {"numel", "start"}),
    ("tensor_fragment", {"lp_fragment_address", "hp_fragment_address", "param_group_index"}),
]
# What `engine.py` puts another in the place of, and where it is called.
CALLED = [
    (
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        "is_invalid_grad_norm(scaled_global_grad_norm)",
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "is_invalid_grad_norm(scaled_global_grad_norm)",
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "combine_grad_norm_groups(norm_groups)",
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "self.get_grad_norm_direct(self.averaged_gradients[i], self.fp16_groups[i])",
    ),
    (
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        "mask_nan_or_inf_with_val_inplace(total_norm, device=self.device)",
    ),
    (
        "runtime.zero.stage_1_and_2",
        "DeepSpeedZeroOptimizer",
        "get_accelerator().synchronize()",
    ),
    (
        "runtime.zero.stage3",
        "DeepSpeedZeroOptimizer_Stage3",
        "self.reduce_and_partition_stream.synchronize()",
    ),
]
# What is set on parameters of the module, and where.
ON_PARAMETERS = [
    ("utils.mixed_precision_linkage", "lp_param._hp_mapping ="),
    ("runtime.zero.partition_parameters", "param.ds_numel ="),
    ("runtime.zero.partition_parameters", "param.ds_tensor ="),
]


def test_deepspeed_is_of_the_version_that_this_was_written_for() -> None:
    assert version("deepspeed").rpartition(".")[0] == VERSION


@pytest.mark.parametrize(("module", "owner", "attribute"), ATTRIBUTES)
def test_an_attribute_is_set(module: str, owner: str, attribute: str) -> None:
    source = inspect.getsource(getattr(importlib.import_module(f"deepspeed.{module}"), owner))
    assert f"self.{attribute} =" in source


@pytest.mark.parametrize(("module", "owner", "method", "parameters"), METHODS)
def test_a_method_takes_what_it_is_given(
    module: str, owner: str, method: str, parameters: tuple[str, ...]
) -> None:
    found = getattr(importlib.import_module(f"deepspeed.{module}"), owner)
    assert tuple(inspect.signature(getattr(found, method)).parameters) == parameters


@pytest.mark.parametrize(("module", "owner", "call"), CALLED)
def test_what_is_replaced_is_what_is_called(module: str, owner: str, call: str) -> None:
    found = getattr(importlib.import_module(f"deepspeed.{module}"), owner)
    assert call in inspect.getsource(found)


def test_norms_of_groups_are_one_norm_as_a_step_has_it() -> None:
    utils = importlib.import_module("deepspeed.runtime.utils")
    assert float(utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(4.0)])) == 5.0
    for bad in (-1, torch.tensor(float("nan")), torch.tensor(float("inf"))):
        assert float(utils.combine_grad_norm_groups([torch.tensor(3.0), bad])) == float("inf")


@pytest.mark.parametrize(("name", "fields"), FIELDS)
def test_an_address_has_its_fields(name: str, fields: set[str]) -> None:
    found = getattr(importlib.import_module("deepspeed.utils.tensor_fragment"), name)
    assert fields <= {field.name for field in dataclasses.fields(found)}


@pytest.mark.parametrize(("module", "line"), ON_PARAMETERS)
def test_an_attribute_is_set_on_parameters(module: str, line: str) -> None:
    assert line in inspect.getsource(importlib.import_module(f"deepspeed.{module}"))


def test_no_operator_of_deepspeed_is_tried_or_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with GPUs it would start compilers for a score of operators, on every worker."""
    operators = importlib.import_module("deepspeed.ops")
    asked: list[bool] = []
    monkeypatch.setattr(operators, "_probe_compatible_ops", lambda: asked.append(True) or {})
    monkeypatch.delitem(vars(operators), "__compatible_ops__", raising=False)
    import_deepspeed()
    assert importlib.import_module("deepspeed.comm.torch").build_shm_op() is None
    assert not asked


def compiler_after_steps(rank: int) -> list[str]:
    for stage, precision in itertools.product((0, 1, 2, 3), ("fp32", "bf16")):
        engine = build_engine(TrainConfig(zero_stage=stage, precision=precision), 1, 2)
        run_steps(engine, 0, 2, 2)
        engine.close()
    return [name for name in ("torch._dynamo", "torch._inductor.lowering") if name in sys.modules]


def test_steps_that_are_not_compiled_do_not_load_the_compiler_of_kernels() -> None:
    """It takes seconds; DeepSpeed asks for an optimizer whose import loads it."""
    (loaded,) = run_ranks(1, compiler_after_steps)
    assert loaded == ["torch._dynamo"]
