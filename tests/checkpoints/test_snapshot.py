"""A rank's part of a checkpoint in host memory."""

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from tests.checkpoints.written import position, snapshot_of
from vit_ray.checkpoints.checkpoint_writer import Snapshot, take_snapshot

NAMES = ["blocks.10.w", "blocks.2.w", "a", "a.b", "\u00e4", 'quoted "name"', "last"]


def state(scale: float = 1.0) -> dict[str, Tensor]:
    """Tensors of several sizes, two of them empty, whose keys are not sorted."""
    sizes = {f"weight|{name}|{i}": 3 * i for i, name in enumerate(NAMES)}
    return {key: scale * torch.arange(1.0, size + 1) for key, size in sizes.items()}


def content(taken: Snapshot) -> bytes:
    return taken.memory["weights"].numpy().tobytes()


def test_its_memory_is_the_file_that_safetensors_writes():
    taken = snapshot_of(0, 1, state(), position(1))
    assert content(taken) == save(state())
    counts = {key: values.numel() for key, values in state().items()}
    assert taken.tensors == {"weights": counts}


def test_what_weights_do_not_need_is_in_a_file_of_its_own():
    tensors = {f"{kind}|w|0": torch.ones(3) for kind in ("exp_avg", "weight", "average", "u")}
    taken = snapshot_of(0, 1, tensors, position(1))
    files = {part: memory.numpy().tobytes() for part, memory in taken.memory.items()}
    assert files == {
        "weights": save({"weight|w|0": tensors["weight|w|0"]}),
        "averages": save({"average|w|0": tensors["average|w|0"]}),
        "rest": save({key: tensors[key] for key in ("exp_avg|w|0", "u|w|0")}),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_precision_is_kept_in_fp32(dtype):
    kept = {key: values.to(dtype) for key, values in state(0.1).items()}
    expected = save({key: values.float() for key, values in kept.items()})
    assert content(snapshot_of(0, 1, kept, position(1))) == expected


def test_views_are_copied_by_their_values():
    """Views of one storage that overlap, have gaps or repeat an element."""
    whole = torch.arange(12.0)
    views = {"weight|a|0": whole[2:8], "weight|b|0": whole[4:10], "weight|c|0": whole[::3],
             "weight|d|0": whole[:1].expand(5), "weight|e|0": whole[5:5]}  # fmt: skip
    expected = save({key: values.clone() for key, values in views.items()})
    taken = snapshot_of(0, 1, views, position(1))
    whole.zero_()
    assert content(taken) == expected


def test_the_next_one_takes_the_memory_that_it_is_given_if_it_has_the_size():
    entries = [("weight", "a", 0, torch.ones(5)), ("weight", "b", 0, torch.zeros(7))]
    memory = take_snapshot(entries, position(1), 0, 1).memory
    for _, _, _, values in entries:
        values.add_(1.0)
    entries[1] = ("weight", "c", 0, entries[1][3])  # of another name, and of the same size
    again = take_snapshot(entries, position(2), 0, 1, memory)
    assert again.memory["weights"].data_ptr() == memory["weights"].data_ptr()
    assert content(again) == save(
        {"weight|a|0": torch.full((5,), 2.0), "weight|c|0": torch.ones(7)}
    )
    before = content(again)
    fewer = take_snapshot(entries[:1], position(3), 0, 1, memory)
    assert content(fewer) == save({"weight|a|0": torch.full((5,), 2.0)})
    assert content(again) == before
