"""Multiply-adds against Table 6 of the paper and against torch's own counter."""

from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.models.small import FAMILIES, small_model, some_images
from vit_ray.models import build_model
from vit_ray.models.flops import forward_macs, training_exaflops, training_macs
from vit_ray.models.masked import MaskedPatchObjective, Target
from vit_ray.models.vit import VisionTransformer

JFT_IMAGES = 303_000_000

# Name, epochs, exaFLOPs of Table 6, tolerance. R50+L/16 at 7 epochs is printed as 859, which
# disagrees with half of its own 14-epoch row; 834 is that half. B/32 prints 55 where the
# convention of all other rows gives 56.3.
TABLE_6 = [
    ("ViT-B/32", 7, 55, 0.025),
    ("ViT-B/16", 7, 224, 0.01),
    ("ViT-L/32", 7, 196, 0.01),
    ("ViT-L/16", 7, 783, 0.01),
    ("ViT-L/16", 14, 1567, 0.01),
    ("ViT-H/14", 14, 4262, 0.01),
    ("R50x1", 7, 50, 0.025),
    ("R50x2", 7, 199, 0.01),
    ("R101x1", 7, 96, 0.01),
    ("R152x1", 7, 141, 0.01),
    ("R152x2", 7, 563, 0.01),
    ("R152x2", 14, 1126, 0.01),
    ("R200x3", 14, 3306, 0.01),
    ("R50x1+ViT-B/32", 7, 106, 0.01),
    ("R50x1+ViT-B/16", 7, 274, 0.01),
    ("R50x1+ViT-L/32", 7, 246, 0.01),
    ("R50x1+ViT-L/16", 7, 834, 0.01),
    ("R50x1+ViT-L/16", 14, 1668, 0.01),
]


@pytest.mark.parametrize(("name", "epochs", "exaflops", "tolerance"), TABLE_6)
def test_training_cost_is_that_of_table_6(
    name: str, epochs: int, exaflops: float, tolerance: float
) -> None:
    assert training_exaflops(name, JFT_IMAGES, epochs) == pytest.approx(exaflops, rel=tolerance)


# GMACs of google-research/vision_transformer's models with 1000 classes.
@pytest.mark.parametrize(
    ("name", "image_size", "gmacs"),
    [
        ("ViT-Ti/16", 224, 1.254),
        ("ViT-S/16", 224, 4.599),
        ("ViT-S/32", 224, 1.143),
        ("ViT-B/32", 224, 4.41),
        ("ViT-B/16", 224, 17.56),
        ("ViT-L/16", 224, 61.56),
        ("ViT-H/14", 224, 167.30),
        ("ViT-B/16", 384, 55.5),
        ("ViT-L/16", 512, 362),
        ("ViT-H/14", 518, 1017),
    ],
)
def test_forward_cost_is_that_of_the_reference(name: str, image_size: int, gmacs: float) -> None:
    assert forward_macs(name, 1000, image_size) / 1e9 == pytest.approx(gmacs, rel=1e-3)


def counted_macs(name: str, image_size: int | tuple[int, int], **options: Any) -> int:
    """Multiply-adds that torch counts as the model runs on the meta device."""
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    with torch.device("meta"):
        model = build_model(name, 10, image_size, **options)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            images = torch.empty(1, 3, *size)
            if isinstance(model, VisionTransformer):
                # Whole, as Table 6 counts; `features` leaves out what the head does not see.
                model.head(model.pool(model.encode(model.embed(images))))
            else:
                model(images)
    flops: int = counter.get_total_flops()
    return flops // 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ViT", {}),
        ("ViT", {"pool": "gap", "representation": True}),
        ("ViT", {"positions": "learned_2d", "positions_at": "every_layer"}),
        ("ViT", {"positions": "relative"}),
        ("Axial-ViT", {"representation": True}),
    ],
)
def test_every_product_of_a_vit_is_counted(name: str, options: dict[str, Any]) -> None:
    expected = counted_macs(name, (40, 64), **FAMILIES[name], **options)
    assert forward_macs(name, 10, (40, 64), **FAMILIES[name], **options) == expected


def test_axial_attention_is_counted_exactly_and_the_root_at_valid_positions() -> None:
    sizes = FAMILIES["AxialResNet"]
    dense = counted_macs("AxialResNet", 32, **sizes)
    # Torch counts the 7 x 7 root dense. Padded by 2 before and 3 after, the first of its 16 outputs
    # along a side has 2 taps beside the image, and the last two have 1 and 3.
    beside = ((16 * 7) ** 2 - (16 * 7 - 2 - 1 - 3) ** 2) * 3 * 64
    assert forward_macs("AxialResNet", 10, 32, **sizes) == dense - beside


@pytest.mark.parametrize("name", ["R50x1", "R50x1+ViT-B/16", "R152x2"])
def test_convolutions_without_their_padding_cost_less_than_dense(name: str) -> None:
    dense = counted_macs(name, 224)
    # The part of dense taps that lie on padding at 224 pixels: 3 to 5 % of a ResNet (measured by
    # XLA's cost analysis against dense counting), less where an encoder stands behind it.
    assert 0.95 * dense < forward_macs(name, 10) < 0.995 * dense


def test_padding_is_the_only_difference_to_torchs_count() -> None:
    size = {"stages": (1, 1), "width_factor": 1}
    dense = [counted_macs("ResNet", side, **size) / side**2 for side in (64, 1024)]
    valid = [forward_macs("ResNet", 10, side, **size) / side**2 for side in (64, 1024)]
    # Borders shrink with the size of the image, and with them the difference.
    assert valid[0] < 0.97 * dense[0]
    assert valid[1] == pytest.approx(dense[1], rel=3e-3)


def test_an_unknown_option_is_refused_as_in_building() -> None:
    with pytest.raises(ValueError, match="has no option pool"):
        forward_macs("R50x1", 10, pool="gap")


def counted_training(
    family: str, side: int, every: int = 0, masked: Target | None = None, **options: Any
) -> tuple[int, int]:
    """Multiply-adds of forward and backward pass as torch counts them, in products of matrices."""
    with torch.device("meta"), sdpa_kernel(SDPBackend.MATH):
        model: Any = build_model(family, 10, side, **FAMILIES[family], **options)
        if masked is not None:
            model = MaskedPatchObjective(model, masked)
        model.set_activation_checkpointing(every)
        images = torch.empty(1, 3, side, side)
        with FlopCounterMode(display=False) as counter:
            samples = () if masked is None else (torch.zeros(1, dtype=torch.int64),)
            output = model(images, *samples).sum()
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            output.backward()
    return forward // 2, counter.get_total_flops() // 2


# Every product of these is counted exactly, none on padding.
EXACT = [
    ("ViT", {}),
    ("ViT", {"pool": "gap", "representation": True}),
    ("ViT", {"positions": "relative"}),
    ("ViT", {"dropout": 0.1}),
    ("ViT", {"stochastic_depth": 0.1}),
    ("ViT", {"positions": "sincos_2d", "pool": "gap"}),
    ("Axial-ViT", {}),
]


@pytest.mark.slow(after=8)
@pytest.mark.parametrize(("family", "options"), EXACT)
@pytest.mark.parametrize("every", [1, 2, 0])
def test_a_step_is_counted_as_it_is_computed(
    family: str, options: dict[str, Any], every: int
) -> None:
    macs = training_macs(family, 10, 32, recompute_every=every, **FAMILIES[family], **options)
    forward, backward = counted_training(family, 32, every, **options)
    assert macs.forward == forward
    assert macs.backward + macs.recomputed == backward
    assert macs.model == macs.forward + macs.backward
    assert macs.hardware == forward + backward
    assert (macs.recomputed > 0) == (every > 0)


class CountedProducts(TorchDispatchMode):
    """Adds up multiply-adds of what runs inside, by torch's formulas."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.macs += flops(*args, **(kwargs or {}), out_val=found) // 2
        return found


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("family", "options", "every"),
    [
        ("ViT", {"depth": 1}, 1),
        ("Axial-ViT", {}, 2),
        ("ViT", {}, 2),
        ("Axial-ViT", {}, 1),
        ("ViT", {"pool": "gap"}, 1),
        ("ViT", {"pool": "gap"}, 2),
    ],
)
def test_a_compiled_block_is_recomputed_whole(
    family: str, options: dict[str, Any], every: int
) -> None:
    count = CountedProducts()

    def compiled(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            with count:
                return graph(*args)

        return make_boxed_func(run)

    # As inductor, but for the machine code: what counts is which products are in which graph.
    backend = aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        partition_fn=min_cut_rematerialization_partition,
    )
    passes = {}
    for recomputes in (0, every):
        torch._dynamo.reset()
        model = small_model(family, 10, 32, **options)
        model.set_activation_checkpointing(recomputes)
        for block in model.blocks:
            block.compile(backend=backend)
        with sdpa_kernel(SDPBackend.MATH):
            count.macs = 0
            model(some_images(1)).sum().backward()
        passes[recomputes] = count.macs
    sizes = {**FAMILIES[family], **options}
    macs = training_macs(family, 10, 32, recompute_every=every, compiles=True, **sizes)
    assert passes[every] - passes[0] == macs.recomputed


@pytest.mark.parametrize("target", ["mean_color", "downsized", "full_patch"])
def test_masked_patches_are_counted_with_their_predictions(target: Target) -> None:
    macs = training_macs("ViT", 10, 32, masked_target=target, **FAMILIES["ViT"])
    assert (macs.forward, macs.backward) == counted_training("ViT", 32, masked=target)


def test_a_hybrids_patches_are_projected_before_they_are_predicted() -> None:
    # Convolutions, which torch counts on their padding too, are the same in both.
    sizes, gap = FAMILIES["R+ViT"], {"pool": "gap"}
    masked = training_macs("R+ViT", 10, 32, masked_target="full_patch", **sizes, **gap)
    plain = training_macs("R+ViT", 10, 32, **sizes, **gap)
    counted = counted_training("R+ViT", 32, masked="full_patch", **gap)
    forward, backward = counted_training("R+ViT", 32, **gap)
    assert masked.forward - plain.forward == counted[0] - forward
    assert masked.backward - plain.backward == counted[1] - backward


@pytest.mark.parametrize("family", ["ResNet", "AxialResNet", "R+ViT"])
def test_convolutions_have_two_gradients_but_the_first(family: str) -> None:
    macs = training_macs(family, 10, 64, recompute_every=1, **FAMILIES[family])
    forward, backward = counted_training(family, 64, 1)
    # Torch counts taps on padding too: a tenth of a map of 16 pixels and less.
    assert 0.85 * forward < macs.forward <= forward
    assert 0.85 * backward < macs.backward + macs.recomputed <= backward


@pytest.mark.parametrize(("name", "ratio"), [("ViT-B/16", 1.074), ("ViT-H/14", 1.027)])
def test_the_papers_count_is_above_what_is_computed(name: str, ratio: float) -> None:
    computed = training_macs(name, 1000).forward
    assert forward_macs(name, 1000) / computed == pytest.approx(ratio, abs=1e-3)
