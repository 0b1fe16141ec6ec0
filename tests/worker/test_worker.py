"""What a worker builds before its first step."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.training.ranks import run_ranks
from tests.worker.fakes import make_job
from vit_ray import trust_modules
from vit_ray.models import build_model
from vit_ray.models.weights import save_weights
from vit_ray.worker import worker
from vit_ray.worker.attempt import smaller_micro_batch, work_per_image
from vit_ray.worker.job import UnrecoverableError
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.worker import check_same_on_all_ranks, choose_micro_batch, initial_model

TINY = {"name": "ViT", "depth": 1, "width": 8, "mlp_dim": 8, "num_heads": 1, "patch_size": 8}


@pytest.mark.parametrize(("mixup", "least"), [(0.0, "one image"), (0.8, "a pair of images")])
def test_the_fewest_images_that_do_not_fit_end_the_run(tmp_path, mixup, least):
    job = make_job(tmp_path, train={"mixup": mixup})
    assert smaller_micro_batch(job, 3).limit == (2 if mixup else 1)
    with pytest.raises(UnrecoverableError, match=f"{least} per pass does not fit") as caught:
        smaller_micro_batch(job, 2 if mixup else 1)
    assert not caught.value.is_agreed


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """World sizes that were tried for, on a GPU that is not there; each finds 4 images."""
    tried: list[int] = []

    def find(recipe: Any, num_classes: int, world_size: int, device: Any) -> int:
        tried.append(world_size)
        return 4

    monkeypatch.setattr(worker, "tried_micro_batch", find)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return tried


def test_ranks_take_what_the_smallest_of_them_has_found(tmp_path, gpu):
    job, found = make_job(tmp_path, train={"micro_batch_size": "auto"}), list[int]()

    def agree(images: int) -> int:
        found.append(images)
        return 2  # another rank has found fewer

    assert choose_micro_batch(job, 1, agree) == 2
    assert (gpu, found) == ([1], [4])


def test_a_trial_does_not_limit_what_a_recipe_asks_for(tmp_path, gpu):
    assert choose_micro_batch(make_job(tmp_path, train={"micro_batch_size": 8}), 1, int) == 8
    assert gpu == []


@pytest.mark.parametrize("every", [0, 1])
def test_mfu_is_of_the_work_that_torch_counts_without_what_is_recomputed(
    tmp_path, gpu, monkeypatch, every
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    options = {**TINY, "depth": 2}
    train = {"activation_checkpointing": every, "precision": "bf16", "compile": False}
    found = work_per_image(make_job(tmp_path, model={**options, "image_size": 16}, train=train))
    assert found.peak_flops == 989e12  # NVIDIA's data sheet, without sparsity
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model: Any = build_model(options.pop("name"), 10, 16, **options)
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 16, 16)).sum().backward()
    assert found.model_macs == counter.get_total_flops() // 2


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "check_same_on_all_ranks", lambda report, device: None)


def model_of(job: Any, *, loads_weights: bool = True) -> torch.nn.Module:
    link = RunLink(job.record, 0)
    return initial_model(job, link, torch.device("cpu"), loads_weights=loads_weights)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"name": "absent.Model"}, "there is no module absent in"),
        (TINY, r"init_from: .*none' is not there"),
    ],
)
def test_a_host_that_lacks_the_users_module_or_weights_ends_the_run_at_once(tmp_path, model, told):
    trust_modules("absent")
    weights = str(tmp_path / "none")
    job = make_job(tmp_path, model={**model, "image_size": 16}, init_from=weights)
    with pytest.raises(UnrecoverableError, match=told) as caught:
        model_of(job, loads_weights=model is TINY)
    assert not caught.value.is_agreed  # others may have it


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("classes", "kind", "frozen", "is_refused"),
    [
        (7, "train", ["head"], True),
        (7, "train", ["norm"], False),
        (3, "train", ["head"], False),  # the head that the weights have fits
        (7, "evaluate", ["head"], False),
    ],
)
def test_a_head_that_the_weights_lack_is_not_frozen(tmp_path, classes, kind, frozen, is_refused):
    weights = tmp_path / "weights.safetensors"
    options: dict[str, Any] = {key: value for key, value in TINY.items() if key != "name"}
    save_weights(build_model("ViT", classes, 16, **options), weights, "vit_ray")
    model = {**TINY, "image_size": 16}
    job = make_job(tmp_path, kind, model=model, init_from=str(weights), optim={"frozen": frozen})
    job = replace(job, new_head="auto", num_classes=3)
    refused = pytest.raises(UnrecoverableError, match="new one of zeros would never learn")
    with refused if is_refused else nullcontext():
        model_of(job)


def check_weights(rank: int, steps: list[int]) -> str:
    try:
        check_same_on_all_ranks(f"weights of step {steps[rank]}", torch.device("cpu"))
    except RuntimeError as error:
        return str(error)
    return "same"


def test_ranks_that_read_weights_of_different_steps_do_not_train():
    assert run_ranks(2, check_weights, [8, 8]) == ["same", "same"]
    for rank, told in enumerate(run_ranks(2, check_weights, [8, 4])):
        assert f"this one: weights of step {8 - 4 * rank}" in told
