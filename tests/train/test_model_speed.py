"""The search for a model's speed and largest batch, on a CPU under a cap of memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.config.command_sections import BenchmarkModelsConfig
from vit_ray.train.memory import model_speed
from vit_ray.train.memory.memory_estimate import estimate_memory, inference_bytes
from vit_ray.train.memory.model_speed import NUM_CLASSES, BatchSpeed, ModelSpeed, measure_model

MODEL = {
    "name": "ViT", "patch_size": 4, "depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2,
}  # fmt: skip


def small(**changes: Any) -> tuple[Recipe, BenchmarkModelsConfig]:
    section = {"models": [{"label": "small", "model": MODEL}]}
    recipe = recipe_with(
        "speed",
        model={**MODEL, "image_size": 8},
        train={"precision": "fp32", "zero_stage": 0},
        benchmark_models={**section, "image_sizes": [8], "max_batch_size": 8, **changes},
    )
    assert recipe.benchmark_models is not None
    return recipe, recipe.benchmark_models


@pytest.mark.slow
def test_real_passes_are_timed_for_every_mode_and_whole_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_speed, "TIMED_S", 1e-3)
    recipe, config = small(image_sizes=[7, 8, 17], max_batch_size=3)
    device, found = measure_model(recipe, config, use_gpu=False)
    assert device == "CPU"
    assert [(one.mode, one.image_size) for one in found] == [
        ("inference", 8), ("inference", 16), ("training", 8), ("training", 16),
    ]  # fmt: skip
    for one in found:
        assert [batch.batch_size for batch in one.batches] == [1, 2, 3]
        assert one.ended_by == "max_batch_size"
        assert all(batch.images_per_s > 0 for batch in one.batches)
        name = f"benchmark/{one.mode}_{one.image_size}px"
        assert one.metrics().keys() == {
            f"{name}_images_per_s", f"{name}_fastest_batch", f"{name}_batch_at_least",
        }  # fmt: skip


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes that are not run, of a second per 100 images; the batch sizes that were prepared."""
    prepared: list[int] = []

    def prepare(recipe: Any, mode: Any, batch_size: int, device: Any) -> Any:
        prepared.append(batch_size)
        return lambda: batch_size

    def seconds(run_pass: Callable[[], int], device: Any) -> float:
        return run_pass() / 100

    monkeypatch.setattr(model_speed, "_prepared", prepare)
    monkeypatch.setattr(model_speed, "_median_s", seconds)
    return prepared


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_on_a_cpu_no_batch_is_tried_that_the_estimate_says_is_too_large(
    mode: str, steady: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_speed, "MAX_PASS_S", 1e9)
    recipe, config = small(modes=[mode], memory_gib=0.002, max_batch_size=4096)
    _, (found,) = measure_model(recipe, config, use_gpu=False)
    assert found.ended_by == "memory"

    def gib(batch_size: int) -> float:
        if mode == "training":
            step = recipe.with_changes(train={"global_batch_size": batch_size})
            return estimate_memory(step, NUM_CLASSES, batch_size, 1).total
        return inference_bytes(recipe, NUM_CLASSES, batch_size) / 2**30

    largest = found.largest_batch
    below = 2 ** (largest.bit_length() - 1)
    assert gib(largest) <= 0.002 < gib(largest + max(1, below // 8))
    assert max(steady) == largest
    assert found.metrics()[f"benchmark/{mode}_8px_largest_batch"] == largest


def test_a_pass_that_would_take_too_long_is_not_tried(
    steady: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_speed, "MAX_PASS_S", 0.5)
    recipe, config = small(modes=["inference"], max_batch_size=4096)
    _, (found,) = measure_model(recipe, config, use_gpu=False)
    assert (found.ended_by, found.largest_batch) == ("pass time", 32)
    assert max(steady) == 32


def test_a_pass_that_runs_out_of_memory_ends_the_search_and_other_errors_end_it_loudly(
    steady: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, config = small(modes=["inference"], max_batch_size=64)

    def crowded(run_pass: Callable[[], int], device: Any) -> float:
        if run_pass() > 21:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run_pass() / 100

    monkeypatch.setattr(model_speed, "_median_s", crowded)
    _, (found,) = measure_model(recipe, config, use_gpu=False)
    assert (found.ended_by, found.largest_batch) == ("memory", 20)  # 16, and eighths of it above

    def broken(*_: Any) -> float:
        raise RuntimeError("expected scalar type Float")

    monkeypatch.setattr(model_speed, "_median_s", broken)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        measure_model(recipe, config, use_gpu=False)


def test_a_model_that_holds_not_even_one_image_is_said_to_hold_none(steady: list[int]) -> None:
    recipe, config = small(modes=["inference"], memory_gib=1e-6)
    _, (found,) = measure_model(recipe, config, use_gpu=False)
    assert not steady
    assert found.fastest is None
    assert found.metrics() == {"benchmark/inference_8px_largest_batch": 0.0}


def test_the_speed_is_that_of_the_fastest_batch() -> None:
    batches = (BatchSpeed(1, 10.0), BatchSpeed(2, 30.0), BatchSpeed(4, 20.0))
    found = ModelSpeed("training", 224, batches, "memory").metrics()
    assert found == {
        "benchmark/training_224px_images_per_s": 30.0,
        "benchmark/training_224px_fastest_batch": 2.0,
        "benchmark/training_224px_largest_batch": 4.0,
    }
