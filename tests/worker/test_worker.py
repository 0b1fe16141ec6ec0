"""What a worker builds before its first step, and on which device."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import ray.exceptions
import ray.train.torch
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.training.ranks import run_ranks
from tests.worker.fakes import BATCH, FakeEngine, make_job, short_recipe
from vit_ray import trust_modules
from vit_ray.checkpoints.checkpoint import Position, Progress
from vit_ray.models import build_model
from vit_ray.outcomes import RunFailedError
from vit_ray.training import memory_estimate
from vit_ray.worker import worker
from vit_ray.worker.attempt import smaller_micro_batch
from vit_ray.worker.entry import GroupBackend, use_own_interface
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.worker import initial_model, set_up_attempt, training_device

TINY = {"depth": 1, "width": 8, "mlp_dim": 8, "num_heads": 1, "patch_size": 8}
MODEL = {"name": "ViT", "image_size": 16, **TINY}


@pytest.mark.parametrize(("mixup", "fewest"), [(0.0, 1), (0.8, 2)])
def test_the_fewest_images_that_do_not_fit_end_the_run(tmp_path, mixup, fewest):
    job = make_job(tmp_path, train={"mixup": mixup})
    assert smaller_micro_batch(job, 3).limit == fewest
    with pytest.raises(RunFailedError, match=f"a pass of {fewest} does not fit") as caught:
        smaller_micro_batch(job, fewest)
    assert type(caught.value) is RunFailedError  # the others may have room


@pytest.mark.parametrize(
    ("asked", "limit", "taken"), [("auto", None, 4), ("auto", 2, 2), (8, None, 8)]
)
def test_a_pass_takes_what_a_trial_has_found_or_an_earlier_attempt_or_the_recipe_says(
    monkeypatch, asked, limit, taken
):
    """On a GPU that is not there, on which a trial finds room for 4 images."""
    monkeypatch.setattr(memory_estimate, "tried_micro_batch", lambda *_: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    recipe = short_recipe(train={"micro_batch_size": asked})
    assert memory_estimate.chosen_micro_batch(recipe, 10, 1, limit) == taken


@pytest.mark.parametrize("every", [0, 1])
def test_mfu_is_of_the_work_that_torch_counts_without_what_is_recomputed(monkeypatch, every):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    train = {"activation_checkpointing": every, "precision": "bf16", "compile": False}
    recipe = short_recipe(model={**MODEL, "depth": 2}, train=train)
    found = memory_estimate.compute_per_image(recipe, 10)
    assert found.peak_flops == 989e12  # NVIDIA's data sheet, without sparsity
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model = build_model("ViT", 10, 16, **{**TINY, "depth": 2})
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 16, 16)).sum().backward()
    assert found.model_macs == counter.get_total_flops() // 2


def model_of(job: Any, *, loads_weights: bool = True) -> torch.nn.Module:
    link = RunLink(job.record, 0)
    return initial_model(job, link, torch.device("cpu"), loads_weights=loads_weights)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"name": "absent.Model", "image_size": 16}, "there is no module absent in"),
        (MODEL, r"init_from: .*none' is not there"),
    ],
)
def test_a_host_that_lacks_the_users_module_or_weights_ends_the_run_at_once(
    tmp_path, monkeypatch, model, told
):
    trust_modules("absent")
    job: Any = make_job(tmp_path, model=model, init_from=str(tmp_path / "none"))

    def set_up(job: Any, *_: Any) -> Any:
        return model_of(job, loads_weights=model is MODEL)

    monkeypatch.setattr(worker, "set_up_attempt", set_up)
    with pytest.raises(RunFailedError, match=told) as caught:
        worker.begin(job, RunLink(job.record, 0), *[job] * 2)
    assert type(caught.value) is RunFailedError  # others may have it


def test_the_stream_starts_again_where_an_older_checkpoint_is_restored(tmp_path, monkeypatch):
    """And all ranks take the fewest images per pass that any of them has chosen."""
    newest, older = (
        SimpleNamespace(position=Position(Progress(n), n, n * BATCH, BATCH, {}, {}, ""), sha256="")
        for n in (3, 2)
    )
    started: list[int] = []

    def start(job: Any, world_size: int, streams: Any, samples_seen: int, device: Any) -> Any:
        started.append(samples_seen)
        return iter([samples_seen])

    for name, result in {
        "read_by_first": newest, "chosen_micro_batch": 4, "all_max": [-2.0],
        "initial_model": None,
        "DeepSpeedEngine": FakeEngine(), "restore_newest": older,
        "gather_by_own_group": lambda part: [part],
    }.items():  # fmt: skip
        monkeypatch.setattr(worker, name, lambda *_, result=result, **__: result)
    monkeypatch.setattr(worker, "training_batches", start)
    job, streams = make_job(tmp_path), Any
    attempt = set_up_attempt(job, RunLink(job.record, 0), streams, torch.device("cpu"))  # type: ignore[arg-type]
    assert attempt is not None
    assert started == [3 * BATCH, 2 * BATCH]
    assert [*attempt.batches] == started[1:]
    assert attempt.progress.step == attempt.context.micro_batch_size == 2


def read_weights(rank: int, folder: Path, steps: list[int]) -> str:
    worker.load_initial_weights = lambda *_: f"weights of step {steps[rank]}"  # type: ignore[assignment]
    try:
        model_of(make_job(folder, model=MODEL, init_from="x"))
    except RuntimeError as error:
        return str(error)
    return "same"


def test_a_rank_that_reads_weights_of_another_step_does_not_train(tmp_path):
    assert run_ranks(2, read_weights, tmp_path, [8, 8]) == ["same", "same"]
    _, refused = run_ranks(2, read_weights, tmp_path, [8, 4])
    assert refused.endswith("this one: weights of step 4")


def test_gloo_takes_the_interface_of_the_nodes_address_unless_the_user_has_named_one(monkeypatch):
    addresses = {"lo": "127.0.0.1", "eth7": "10.0.0.7"}
    entries = {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine0")
    use_own_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    use_own_interface()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_deepspeed_is_told_the_gpu_that_ray_gave_and_not_the_place_in_the_host(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    # Of 16 GPUs, sorted as text: 0, 1, 10, 11, ...
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cuda", 10))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert training_device(False) == torch.device("cpu")
    assert os.environ["LOCAL_RANK"] == "2"
    assert training_device(True) == torch.device("cuda", 10)
    assert os.environ["LOCAL_RANK"] == "10"
    assert GroupBackend.share_cuda_visible_devices
