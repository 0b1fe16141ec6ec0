"""Every family takes a step in each precision, recomputed or not, and under ZeRO 3."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.small import FAMILIES, small_model, some_images
from tests.training.ranks import run_ranks
from vit_ray.models.build import chains, recompute
from vit_ray.models.masked import MaskedPatchObjective

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("ViT", {"representation": True, "pool": "gap"}),
    ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
    ("ViT", {"positions": "relative"}),
]
LABELS = torch.tensor([1, 3])


def step(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy(model(some_images()), LABELS)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize(("family", "options"), VARIANTS)
def test_every_parameter_takes_part_in_a_step_and_recomputation_changes_no_bit(family, options):
    dropout = {"dropout": 0.3} if "ViT" in family else {}
    steps = []
    for every in (0, 1, 2):
        model = small_model(family, **options, **dropout).train()
        recompute(model, every)
        torch.manual_seed(5)
        steps.append(step(model))
    loss, gradients = steps[0]
    assert torch.isfinite(loss)
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert all(torch.isfinite(g).all() and g.any() for g in gradients.values())
    # The same kernels run twice, and dropout drops the same units.
    for recomputed_loss, recomputed in steps[1:]:
        assert torch.equal(recomputed_loss, loss)
        assert set(recomputed) == set(gradients)
        assert all(torch.equal(recomputed[name], gradients[name]) for name in gradients)


def test_checkpointing_is_wrapped_around_blocks_that_do_not_know_of_it():
    """Of torch's own encoder; a position table or a stem of convolutions is no block."""
    runs: list[int] = []
    found = []
    for every in (0, 1, 2):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.3, batch_first=True)
        model = nn.Sequential(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.TransformerEncoder(layer, 4)
        )
        assert [len(chain) for chain in chains(model)] == [4]
        recompute(model, every)
        for block in model[1].layers:
            block.linear1.register_forward_hook(lambda *_: runs.append(1))
        torch.manual_seed(5)
        runs.clear()
        model(torch.ones(2, 3, 16)).square().sum().backward()
        assert len(runs) == 4 + {0: 0, 1: 4, 2: 2}[every]
        found.append([p.grad for p in model.parameters()])
    for plain, *again in zip(*found, strict=True):
        assert all(torch.equal(plain, gradient) for gradient in again)
    assert not any(chains(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_follows_float32(family):
    # Few convolutions: they are slow in it on a CPU.
    options = {"stages": (1,)} if "stages" in FAMILIES[family] else {}
    reference = step(small_model(family, **options))
    model = small_model(family, **options).bfloat16()
    assert model(some_images()).dtype == torch.float32
    loss, gradients = step(model)
    # bfloat16 keeps 8 bits, an error of 0.4 % an operation, over some ten operations.
    assert loss.item() == pytest.approx(reference[0].item(), rel=0.05)
    ours = torch.cat([gradients[name].float().flatten() for name in reference[1]])
    theirs = torch.cat([gradient.flatten() for gradient in reference[1].values()])
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.99


PARTITIONED = [
    *((family, {}) for family in FAMILIES),
    ("ViT", {"positions": "relative", "pool": "gap", "representation": True}),
    ("ViT", {"positions": "learned_2d", "positions_at": "every_layer_shared", "dropout": 0.1}),
]


def zero_losses(family: str, options: dict[str, object], stage: int, every: int) -> list[float]:
    """Of three steps of Adam on one batch; nothing of the model stays gathered between uses."""
    import deepspeed  # here, as it takes seconds, which the ranks have behind them

    model = small_model(family, **options)
    recompute(model, every)
    settings = ("param_persistence_threshold", "max_live_parameters", "prefetch_bucket_size")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **{f"stage3_{key}": 0 for key in settings}},
    }
    trained = MaskedPatchObjective(model) if family == "R+ViT" else model
    parameters = [p for p in trained.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=trained, model_parameters=parameters, config=config)
    torch.manual_seed(3)
    seen = []
    for _ in range(3):
        if trained is model:
            loss = F.cross_entropy(engine(some_images()), torch.tensor([0, 1]))
        else:
            loss = engine(some_images(), torch.arange(2))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return seen


def zero_losses_by_stage(rank: int) -> list[dict[int, list[float]]]:
    """Without ZeRO and with its last stage, for every case with and without recomputation."""
    return [
        {stage: zero_losses(family, options, stage, every) for stage in (0, 3)}
        for family, options in PARTITIONED
        for every in (0, 1)
    ]


@pytest.mark.slow
def test_partitioned_models_take_the_same_steps_as_whole_ones():
    """Of a parameter there is nothing outside its own module's forward."""
    found = run_ranks(1, zero_losses_by_stage)[0]
    assert len(found) == 2 * len(PARTITIONED)
    for case in found:
        # The optimiser adds up flattened parameters, and so rounds another way.
        assert case[3] == pytest.approx(case[0], rel=1e-5)
        assert case[3][2] < case[3][0]
