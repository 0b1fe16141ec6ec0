"""What only a GPU can show: `make test-gpu`; skipped where there is none.

One process and one GPU; the CPU, plain torch and Pillow are the oracles.
"""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.written import write_snapshots
from tests.models.small import small_model
from tests.recipes import recipe_with
from tests.training.engine_runs import batch, build_engine, plain_torch, position, run_steps
from tests.worker.fakes import FakeHooks, short_recipe
from vit_ray.checkpoints.checkpoint import Progress, folder_name
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import TrainConfig
from vit_ray.measure.devices import find_device
from vit_ray.measure.meters import Compute
from vit_ray.models.counter_random import sample_keys
from vit_ray.models.layers import keyed_dropout
from vit_ray.storage import locate
from vit_ray.training import loop
from vit_ray.training.collectives import all_sum
from vit_ray.training.engine import COMPILE_FAILURES, DeepSpeedEngine, compile_s
from vit_ray.training.loop import Batch, RankContext, TrainingLoop
from vit_ray.training.memory_estimate import prepared_model, tried_micro_batch
from vit_ray.training.objective import build_objective, make_loss
from vit_ray.worker.prefetch import device_batches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = torch.device("cuda", 0)
STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.backends.cudnn.allow_tf32 = False  # the patch embedding's convolution
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    torch.distributed.init_process_group(
        "nccl", store=store, rank=0, world_size=1, device_id=GPU
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield
    torch.distributed.destroy_process_group()


def engine_of(model: torch.nn.Module, loss: Any = None, **train: Any) -> DeepSpeedEngine:
    config = TrainConfig.model_validate({"compile": False, **train})
    engine = build_engine(config, 1, 4, model=model)
    engine._loss_function = loss or engine._loss_function
    return engine


@pytest.fixture(scope="module")
def cpu_losses() -> list[float]:
    """Plain torch in fp32 on the CPU."""
    model = small_model("ViT", image_size=8, patch_size=4)
    return [loss for _, loss in plain_torch(model, STEPS)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_stage_trains_as_plain_torch_on_the_cpu_and_resumes(
    cpu_losses, tmp_path, precision, stage
):
    def engine() -> DeepSpeedEngine:
        model = small_model("ViT", image_size=8, patch_size=4)
        return engine_of(model, zero_stage=stage, precision=precision)

    straight = engine()
    losses = run_steps(straight, 0, 2, 4)
    folder = locate(str(tmp_path))
    write_snapshots(folder.child(folder_name(2)), straight.state.snapshot(position(straight, 2)))
    losses += run_steps(straight, 2, STEPS, 4)
    straight.close()
    assert losses == pytest.approx(cpu_losses, rel=1e-4 if precision == "fp32" else 3e-2)

    again = engine()
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    assert not again.state.restore(checkpoint)
    found = run_steps(again, 2, STEPS, 4)
    again.close()
    assert found == pytest.approx(losses[2:], rel=1e-5 if precision == "fp32" else 5e-3)


@pytest.mark.parametrize("compiles", [False, True])
def test_masks_are_those_of_the_cpu(compiles):
    function = torch.compile(keyed_dropout) if compiles else keyed_dropout
    x = torch.ones(5, 7, 33)
    keys = sample_keys(torch.tensor([0, 1, 7, 2**40, 300_000_000]), 3, 4)
    expected = keyed_dropout(x, keys, 0.3)
    assert torch.equal(function(x.to(GPU), keys.to(GPU), 0.3).cpu(), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2])
def test_compiled_blocks_train_as_eager_ones(precision, stage):
    """With dropout, stochastic depth, recomputed activations, MixUp and CutMix."""
    model = {
        "name": "ViT", "image_size": 8, "depth": 3, "width": 192, "mlp_dim": 256, "num_heads": 3,
        "patch_size": 4, "dropout": 0.1, "stochastic_depth": 0.2,
    }  # fmt: skip
    train = {
        "precision": precision, "zero_stage": stage, "activation_checkpointing": 1, "mixup": 0.8,
        "cutmix": 1.0,
    }  # fmt: skip
    found = {}
    for compiles in (False, True):
        torch._dynamo.reset()
        recipe = recipe_with(model=model, train={**train, "global_batch_size": 8})
        torch.manual_seed(0)
        before_s = compile_s()
        model_and_loss = build_objective(recipe, 5), make_loss(recipe)
        engine = engine_of(*model_and_loss, **train, compile=compiles)
        found[compiles] = run_steps(engine, 0, 8, 4)
        assert COMPILE_FAILURES == []
        assert (compile_s() > before_s) == compiles
        engine.close()
    # Rounding grows from step to step, in bf16 to 2 % within these.
    assert found[True] == pytest.approx(found[False], rel=1e-3 if precision == "fp32" else 5e-2)


@contextlib.contextmanager
def host_waits() -> Iterator[list[Any]]:
    """A warning for each time that the host waits for the GPU, by torch's own account."""
    with warnings.catch_warnings(record=True) as found:
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_waits_once_and_once_more_for_the_figures_of_a_window(stage, monkeypatch):
    monkeypatch.setattr(loop, "NORMS_IN_MEDIAN", 4)  # of which a quarter must be known
    model = small_model("ViT", image_size=8, patch_size=4)
    engine = engine_of(model, zero_stage=stage, precision="bf16", averaging=0.9)
    parts = [
        [*(one.to(GPU) for one in batch(step)), torch.arange(8, device=GPU)] for step in range(4)
    ]
    counts = []
    chosen = short_recipe(
        optim={"steps": 4, "schedule": "constant", "warmup_steps": 0},
        train={"global_batch_size": 8, "log_every_steps": 3, "skip_above": 1e3},
    )
    with host_waits() as waits:

        def batches() -> Iterator[dict[str, Any]]:
            for part in parts:
                waits.clear()
                yield dict(zip(("image", "labels", "sample"), part, strict=True))
                counts.append(len(waits))

        context = RankContext(4, 0, 1, 4, partial(all_sum, device=GPU))
        TrainingLoop(engine, batches(), chosen, context, FakeHooks(), Progress(), Compute(1)).run()
    engine.close()
    # Steps are logged at 1, 3 and 4; what follows the last is not counted. The first one starts
    # what the others reuse.
    assert counts[1:] == [1, 2]


ENCODER = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 4}


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({"dropout": 0.1, "stochastic_depth": 0.1}, {"mixup": 0.8, "cutmix": 1.0}),
        ({}, {"loss": "sigmoid"}),
        ({"dropout": 0.1}, {"loss": "masked_patch", "masked_target": "mean_color"}),
    ],
)
def test_a_pass_waits_for_nothing_whatever_the_recipe_draws(model, train):
    recipe = recipe_with(
        model={"name": "ViT", "image_size": 8, **ENCODER, **model},
        train={"global_batch_size": 8, "precision": "bf16", **train},
    )
    module, loss = prepared_model(recipe, 5, GPU), make_loss(recipe)
    images, labels = (part.to(GPU) for part in batch(0))
    samples = torch.arange(8, device=GPU)
    loss(module, images, labels, samples, 0).backward()  # what is made once
    with host_waits() as waits:
        loss(module, images, labels, samples, 1).backward()
    assert [str(one.message) for one in waits] == []


def test_the_gpu_is_known():
    assert find_device(torch.cuda.get_device_name(GPU)) is not None


def test_batches_arrive_whole_and_in_order():
    def read() -> Iterator[Batch]:
        for i in range(40):
            yield {"image": np.full((64, 224, 224, 3), i, np.uint8), "sample": np.full(64, i)}

    busy, found = torch.randn(2048, 2048, device=GPU), []
    for got in device_batches(read(), GPU, 2, ("image", "sample")):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        image = got["image"]
        assert image.device == GPU
        found.append((int(image.min()), int(image.max()), int(got["sample"][0])))
    assert found == [(i, i, i) for i in range(40)]


def test_the_largest_batch_is_found_where_memory_ends():
    recipe = recipe_with(
        model={"name": "ViT-S/16"},
        train={"global_batch_size": 1024, "precision": "bf16", "compile": False},
    )
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(6 * 2**30 / total)
    try:
        small = tried_micro_batch(recipe, 1000, 1, GPU)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    whole = tried_micro_batch(recipe, 1000, 1, GPU)
    assert 16 <= small < 1024
    assert whole == 1024
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(GPU) < 2**30
