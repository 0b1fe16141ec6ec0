"""Which rank holds which part of the training state, in the same form for every ZeRO stage.

A `Fragment` is a range of consecutive elements of one parameter, with the fp32 master weights and
the optimizer state of those elements as views into the engine's own memory. Checkpoints, averaging
and weight exchange work on fragments, and so on any stage and any number of workers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit_ray.deepspeed_internals import (
    Place,
    flat_groups,
    forget_gathered,
    place_of,
    shard_of,
)

State = dict[Any, dict[str, Any]]


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + len(weight)) of the flattened parameter `name`.

    Attributes:
        weight: fp32 master weights (n,), a view: writing to it changes the run.
        owner: the tensor that the optimizer steps; its state is kept under this key.
        offset: where the fragment starts in the flattened `owner`.
    """

    name: str
    start: int
    weight: Tensor
    owner: Tensor
    offset: int

    def state(self, optimizer_state: State, key: str) -> Tensor:
        """View (n,) of one kind of optimizer state."""
        whole = optimizer_state[self.owner][key].view(-1)
        return whole.narrow(0, self.offset, self.weight.numel())


def local_fragments(engine: Any, names: dict[nn.Parameter, str]) -> list[Fragment]:
    """All state on this rank; every element of the model is held by at least one rank.

    Args:
        engine: an initialized DeepSpeed engine.
        names: each trained parameter of the module and its name.
    """
    stage, optimizer, found = engine.zero_optimization_stage(), engine.optimizer, []
    for parameter, name in names.items():
        if stage == 0:
            place: Place | None = Place(0, optimizer.masters[parameter], 0, parameter.numel())
        else:
            place = place_of(optimizer, parameter, stage, engine.global_rank)
        if place is not None:
            weight = place.owner.data.view(-1).narrow(0, place.offset, place.size)
            found.append(Fragment(name, place.start, weight, place.owner, place.offset))
    return found


def owned_fragments(
    local: list[Fragment], rank: int, world_size: int, stage: int
) -> list[Fragment]:
    """The part of the state that this rank owns; ranks own disjoint parts of everything.

    A rank owns its ZeRO shards as they are. What stage 0 replicates is cut into `world_size` equal
    ranges, so that saving and averaging cost each rank only its share there too.
    """
    if stage > 0:
        return local
    total = sum(fragment.weight.numel() for fragment in local)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    owned, position = [], 0
    for fragment in local:
        size = fragment.weight.numel()
        begin, end = max(first - position, 0), min(last - position, size)
        if begin < end:
            weight = fragment.weight[begin:end]
            start, offset = fragment.start + begin, fragment.offset + begin
            owned.append(Fragment(fragment.name, start, weight, fragment.owner, offset))
        position += size
    return owned


def frozen_fragments(
    engine: Any, names: dict[nn.Parameter, str], exact: dict[str, Tensor]
) -> list[Fragment]:
    """This rank's share of untrained parameters, in host memory, cut as ZeRO 3 cuts parameters.

    The module may have rounded them, so these are the values to keep.

    Args:
        names: parameters of the module, and their names.
        exact: their first values, unsharded, by name.
    """
    found = []
    for name in names.values():
        values = exact[name].reshape(-1)
        per_rank = -(-len(values) // engine.world_size)
        start = engine.global_rank * per_rank
        share = values[start : start + per_rank].to("cpu", torch.float32, copy=True)
        if len(share):
            found.append(Fragment(name, start, share, share, 0))
    return found


def stepped_tensors(engine: Any) -> list[Tensor]:
    """What the optimizer steps, in an order that is the same on all ranks."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage:
        return flat_groups(optimizer, stage)
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


Parts = dict[str, list[tuple[int, Tensor]]]
"""Parameter name -> list of (start, values (n,))."""


def weights_by_name(fragments: list[Fragment], values: list[Tensor]) -> Parts:
    """Values of fragments, grouped by their parameter."""
    grouped: Parts = {}
    for fragment, value in zip(fragments, values, strict=True):
        grouped.setdefault(fragment.name, []).append((fragment.start, value))
    return grouped


def exchange_weights(engine: Any, names: dict[nn.Parameter, str], new: Parts) -> None:
    """Give the module's own (possibly bf16) weights the values held as fragments.

    Every rank calls this. Masters that are separate from the module are not changed.

    Args:
        new: fp32 values of the fragments that this rank owns.
    """
    if engine.zero_optimization_stage() == 3:
        forget_gathered(engine)  # the next forward pass would not see the change
        # `zero.GatheredParameters` would send whole parameters from one rank.
        for parameter, name in names.items():
            shard = shard_of(parameter)
            base = engine.global_rank * shard.numel()
            for start, values in new.get(name, []):
                shard.narrow(0, start - base, values.numel()).copy_(values)
        return
    for parameter, name in names.items():
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        for start, values in new.get(name, []):
            full.narrow(0, start, values.numel()).copy_(values)
        torch.distributed.all_reduce(full)
        parameter.data.copy_(full.view_as(parameter))
