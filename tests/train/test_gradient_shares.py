"""Shares of a step's gradient: against a backward pass for each image, and with culprits."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from tests.recipes import recipe_with
from vit_ray.config import Recipe
from vit_ray.train.gradient_shares import (
    MOST_ROUNDS,
    Columns,
    StepGradient,
    find_culprits,
    second_moment_rms,
    step_gradient,
)
from vit_ray.train.objective import build_objective, make_image_losses, make_loss

MODEL = {
    "name": "ViT",
    "image_size": 8,
    "depth": 2,
    "width": 16,
    "mlp_dim": 32,
    "num_heads": 2,
    "patch_size": 4,
}
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": ({"positions": "relative"}, {}),
    "sigmoid with dropout": ({"dropout": 0.1, "stochastic_depth": 0.2}, {"loss": "sigmoid"}),
    "masked patches": ({"dropout": 0.1}, {"loss": "masked_patch"}),
    "mixed in pairs": ({}, {"mixup": 0.5, "cutmix": 1.0}),
}


def recipe_of(model: dict[str, Any], train: dict[str, Any], batch: int) -> Recipe:
    return recipe_with(
        model={**MODEL, **model},
        train={"precision": "fp32", "global_batch_size": batch, **train},
    )


def started(recipe: Recipe, num_classes: int = 10) -> torch.nn.Module:
    """With a head that is not zero, or nothing but the head had a gradient."""
    torch.manual_seed(0)
    model = build_objective(recipe, num_classes)
    if recipe.train.loss != "masked_patch":
        torch.nn.init.normal_(model.head.weight, std=0.1)  # type: ignore[union-attr,arg-type]
    return model


def columns_of(count: int, seed: int = 0, side: int = 8) -> Columns:
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, side, side, 3), generator=random, dtype=torch.uint8)
    labels = torch.randint(0, 10, (count, 1), generator=random)
    return images, labels, torch.arange(count) + 100 * seed


@pytest.mark.parametrize("name", RECIPES)
def test_shares_are_the_products_of_gradients_of_single_images(name: str) -> None:
    recipe = recipe_of(*RECIPES[name], batch=6)
    model, columns = started(recipe), columns_of(6)
    found = step_gradient(model, make_image_losses(recipe), columns, 3)
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradient(of: int | None) -> torch.Tensor:
        model.zero_grad()
        losses = make_image_losses(recipe)(model, *columns, 3)
        (losses.mean() if of is None else losses[of]).backward()
        return torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).double()

    whole = gradient(None)
    wanted = [float(gradient(i) @ whole / (6 * whole @ whole)) for i in range(6)]
    assert found.shares.tolist() == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert float(found.shares.sum()) == pytest.approx(1.0, abs=1e-4)
    assert found.norm == pytest.approx(float(whole.norm()), rel=1e-4)


def test_a_batch_of_several_passes_has_the_shares_of_one() -> None:
    recipe = recipe_of({}, {}, batch=10)
    model, columns = started(recipe), columns_of(10)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    found = step_gradient(model, make_image_losses(recipe), columns, 0, images_per_pass=4)
    assert sizes == [4, 4, 2] * 2
    make_loss(recipe)(model, *columns, 0).backward()
    assert len(found.shares) == 10
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.by_name[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("positions", ["learned_1d", "relative"])
def test_the_largest_attention_logit_is_the_one_before_softmax(
    positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"depth": 1, "positions": positions}
    recipe = recipe_of(options, {}, batch=4)
    model, columns = started(recipe), columns_of(4)
    attention = model.blocks[0].attention  # type: ignore[index,union-attr]
    for parameter in model.parameters():  # a class token of zeros asks for nothing
        torch.nn.init.normal_(parameter, std=0.3)
    found = step_gradient(model, make_image_losses(recipe), columns, 0)
    caught: list[torch.Tensor] = []
    attention.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    masks: list[torch.Tensor | None] = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def noting(q: torch.Tensor, *args: Any, attn_mask: torch.Tensor | None) -> torch.Tensor:
        masks.append(attn_mask)
        return fused(q, *args, attn_mask=attn_mask)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    make_loss(recipe)(model, *columns, 0)
    q, k, _ = attention.qkv(caught[0])
    mask = torch.zeros(1, 2, 1, k.shape[1]) if masks[0] is None else masks[0]
    by_hand = max(
        float((q[i, 0, 8 * h : 8 * h + 8] @ k[i, b, 8 * h : 8 * h + 8]).detach()) / 8**0.5
        + float(mask.detach().expand(4, 2, -1, -1)[i, h, 0, b])
        for i in range(4)
        for h in range(2)
        for b in range(k.shape[1])  # of the last block, only the class token asks
    )
    assert (masks[0] is None) == (positions == "learned_1d")
    assert found.largest_logit == pytest.approx(by_hand, rel=1e-4)
    assert found.logit_layer == "blocks.0.attention"


def test_rms_is_that_of_the_update_without_momentum() -> None:
    gradient = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    second = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([1.0])}
    found = second_moment_rms(gradient, second, scale=2.0)
    assert found == pytest.approx({"a": (4 * (9 + 16) / 2) ** 0.5, "b": 2.0})
    assert list(found) == ["a", "b"]


def gradients(vectors: list[list[float]]) -> Any:
    """Measures as `step_gradient`, of images whose gradients are these vectors."""
    each = torch.tensor(vectors, dtype=torch.float64)

    def measure(places: list[int]) -> StepGradient:
        some = each[places]
        mean = some.mean(0)
        shares = some @ mean / (len(some) * mean @ mean)
        return StepGradient(torch.zeros(len(some)), shares, float(mean.norm()), {}, None, "")

    return measure


def test_the_search_ends_where_leaving_out_one_image_after_another_does_not_help() -> None:
    calls = 0

    def measure(places: list[int]) -> StepGradient:
        nonlocal calls
        calls += 1
        shares = torch.zeros(len(places), dtype=torch.float64)
        shares[0] = 1.0
        return StepGradient(shares, shares, 100.0, {}, None, "")

    whole = measure(list(range(400)))
    assert find_culprits(measure, whole, usual=1.0) is None
    assert calls == 1 + MOST_ROUNDS


USUAL = [[1.0, 0.0]] * 14
CASES: dict[str, tuple[list[list[float]], list[int] | None]] = {
    "no larger than usual": ([*USUAL, [1.0, 0.5], [2.0, 0.0]], []),
    "all are larger": ([[9.0, 0.0]] * 16, None),
    "one": ([[60.0, 0.0], *USUAL, [1.0, 0.0]], [0]),
    "one, and the others are a little above usual": ([[60.0, 0.0], *[[1.1, 0.0]] * 15], [0]),
    "two that pull in other directions": ([[0.0, 50.0], *USUAL, [-40.0, 0.0]], [0, 15]),
}


def test_images_that_are_mixed_are_left_out_together() -> None:
    measure = gradients([*USUAL[:5], [70.0, 0.0], *USUAL[:10]])
    whole = measure(list(range(16)))
    assert find_culprits(measure, whole, usual=1.01, unit=2) == [4, 5]


@pytest.mark.parametrize("name", CASES)
def test_culprits_are_the_images_without_which_the_gradient_is_usual(name: str) -> None:
    vectors, wanted = CASES[name]
    measure = gradients(vectors)
    assert find_culprits(measure, measure(list(range(16))), usual=1.01) == wanted


BATCH, STEPS = 128, 600


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 (1797, 8, 8, 3) and int64 (1797, 1)."""
    found = load_digits()
    grey = np.round(found.images * (255.0 / 16.0)).astype(np.uint8)
    return torch.from_numpy(np.repeat(grey[..., None], 3, axis=3)), torch.from_numpy(
        found.target.astype(np.int64)
    )[:, None]


@pytest.fixture(scope="module")
def learnt() -> tuple[torch.nn.Module, Any, torch.Tensor, torch.Tensor]:
    """A small ViT that has learnt the digits, and what it was trained on."""
    recipe = recipe_of({"width": 32, "mlp_dim": 64, "patch_size": 2}, {}, BATCH)
    images, labels = digits()
    model = started(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    random, loss_of = torch.Generator().manual_seed(0), make_loss(recipe)
    for step in range(STEPS):
        chosen = torch.randperm(len(images), generator=random)[:BATCH]
        loss_of(model, images[chosen], labels[chosen], chosen, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, make_image_losses(recipe), images, labels


def drawn(images: torch.Tensor, labels: torch.Tensor, seed: int) -> Columns:
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:BATCH]
    return images[chosen], labels[chosen], chosen


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("kind", "num_seeds"), [("contrast", 5), ("contrast", 20), ("labels", 20), ("nothing", 20)]
)
def test_planted_culprits_are_found_and_none_where_there_are_none(
    learnt: tuple[torch.nn.Module, Any, torch.Tensor, torch.Tensor], kind: str, num_seeds: int
) -> None:
    model, losses_of, images, labels = learnt
    count = {"contrast": 4, "labels": 8, "nothing": 0}[kind]
    recalls, precisions, alarms = [], [], 0
    for seed in range(num_seeds):
        step, *controls = (drawn(images, labels, 3 * seed + i) for i in range(3))
        random = torch.Generator().manual_seed(seed)
        bad = torch.randperm(BATCH, generator=random)[:count]
        pixels, classes, samples = step
        if kind == "contrast":
            pixels = pixels.double()  # uint8 does not hold such contrasts
            pixels[bad] = 127.5 + 20.0 * (pixels[bad] - 127.5)
        elif kind == "labels":
            other = torch.randint(1, 10, (count, 1), generator=random)
            classes[bad] = (classes[bad] + other) % 10

        def measure(places: list[int]) -> StepGradient:
            part = pixels[places], classes[places], samples[places]  # noqa: B023
            return step_gradient(model, losses_of, part, 0)

        usual = max(step_gradient(model, losses_of, one, 0).norm for one in controls)
        found = find_culprits(measure, measure(list(range(BATCH))), usual)
        assert found is not None
        alarms += bool(found)
        hits = len(set(found) & set(bad.tolist()))
        recalls.append(hits / max(1, count))
        precisions.append(hits / max(1, len(found)))
    if kind == "nothing":
        assert alarms <= num_seeds // 20
    else:
        assert np.mean(recalls) >= 0.9, recalls
        assert np.mean(precisions) >= 0.8, precisions
