"""Switches of a step change how it is computed, and nothing of what."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend

from benchmarks import model_step
from benchmarks.model_step import compile_blocks, measure, our_model, table
from benchmarks.step_switches import (
    SWITCHES,
    PaddedProjection,
    all_products_tried,
    attention_by,
)
from vit_ray.models.layers import PatchProjection


@pytest.fixture(autouse=True)
def small_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With the compiler's settings as they were, for the tests that follow."""
    monkeypatch.setattr(model_step, "IMAGE_SIZE", 32)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield


def test_padded_patches_are_the_same_product() -> None:
    torch.manual_seed(0)
    projection = PatchProjection(3, 40, 14)
    padded, images = copy.deepcopy(projection), torch.randn(2, 3, 28, 28)
    padded.__class__ = PaddedProjection
    shapes: list[int] = []
    plain = torch.nn.functional.linear

    def linear(patches: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        shapes.extend((patches.shape[-1], kernel.shape[-1]))
        return plain(patches, kernel, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        outputs = [one(images) for one in (projection, padded)]
    assert shapes == [588, 588, 592, 592]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(padded.weight.grad, projection.weight.grad, rtol=1e-4, atol=1e-3)


def kernels_of(model: nn.Module) -> list[str]:
    """Operations of a forward pass of compiled blocks, by graph."""
    images, graphs = torch.zeros(1, 3, 32, 32), list[str]()

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    backend = aot_autograd(fw_compiler=keep)
    for block in model_step.blocks_of(model):
        block.compile(backend=backend, dynamic=False)
    model(images)
    return graphs


FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def test_attention_of_compiled_blocks_is_by_the_kernel_that_is_named() -> None:
    torch.manual_seed(0)
    flash, math = (
        kernels_of(attention_by(backend, "ViT-Ti/16"))
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    )
    # One for all blocks but the last, which works out the class token alone, as torch chooses.
    assert len(flash) == len(math) == 2
    assert all(FLASH in graph for graph in flash)
    assert "_flash_attention" not in math[0]
    assert "softmax" in math[0]
    assert FLASH in math[1]


def test_a_kernel_is_named_only_where_all_queries_are_asked_for() -> None:
    """Of one query cuDNN's is refused."""
    shown: list[tuple[int, bool]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shown.append((query.shape[-2], torch.backends.cuda.flash_sdp_enabled()))
        return plain(query, *rest, **options)

    model = attention_by(SDPBackend.MATH, "ViT-Ti/16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        model(torch.zeros(1, 3, 32, 32))
    assert shown == [(5, False)] * 11 + [(1, True)]


def test_a_switch_that_cannot_be_or_changes_nothing_is_a_row_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TRIAL_S", "TURN_S"):
        monkeypatch.setattr(model_step, name, 0.0)
    *_, rows = measure("ViT-Ti/16", "eager", [1], torch.float32, 1, SWITCHES)
    by_peer = {row.peer: row for row in rows}
    assert by_peer["attention by cuDNN"].notes == ["RuntimeError: cuDNN has no kernel for a CPU"]
    assert by_peer["padded patches"].notes == [
        "ValueError: 768 inputs of a patch are a multiple of 16 already"
    ]
    ran = {peer for peer, row in by_peer.items() if row.wall_s and not row.notes}
    assert ran == SWITCHES.keys() - {"attention by cuDNN", "padded patches"}
    assert len({by_peer[peer].flops for peer in ran}) == 1
    assert table(rows).count(" | 1 | ") == len(ran)


def test_all_products_are_tried_where_blocks_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda _, **how: modes.append(how.get("mode", "")))
    for build in (our_model, all_products_tried):
        compile_blocks(build("ViT-Ti/16"))
    assert modes == [""] * 12 + ["max-autotune-no-cudagraphs"] * 12
