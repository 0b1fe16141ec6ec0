"""The training state of one rank, in the same form for every ZeRO stage.

A `Fragment` is a range of consecutive elements of one parameter, with the fp32 master weights and
the optimizer state of those elements as views into the engine's memory. Checkpoints, averaging and
weight exchange work on fragments, and so on any stage and any number of workers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_ray.checkpoints.checkpoint import Checkpoint, Entry, Position
from vit_ray.checkpoints.checkpoint_format import AVERAGE, WEIGHT, DamagedCheckpointError
from vit_ray.checkpoints.checkpoint_writer import Snapshot, take_snapshot
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import Place, flat_groups, forget_gathered, place_of, shard_of
from vit_ray.training.collectives import all_max
from vit_ray.training.optimizers import STEP_COUNT, StepGuard, state_types, zero_state

# Parameter name -> list of (start, values (n,)).
Parts = dict[str, list[tuple[int, Tensor]]]


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + len(weight)) of the flattened parameter `name`.

    Attributes:
        weight: fp32 master weights (n,), a view: writing to it changes the run.
        owner: the tensor that the optimizer steps, which is the key of the optimizer's state.
        offset: where the fragment starts in the flattened `owner`.
    """

    name: str
    start: int
    weight: Tensor
    owner: Tensor
    offset: int

    def state(self, optimizer_state: dict[Any, dict[str, Any]], key: str) -> Tensor:
        """View (n,) of one kind of optimizer state."""
        flat = optimizer_state[self.owner][key].view(-1)
        return flat.narrow(0, self.offset, self.weight.numel())


def local_fragments(engine: Any, names: dict[nn.Parameter, str]) -> list[Fragment]:
    """All state on this rank; every element of the model is on at least one rank.

    Args:
        engine: an initialized DeepSpeed engine.
        names: each trained parameter of the module and its name.
    """
    stage, optimizer, fragments = engine.zero_optimization_stage(), engine.optimizer, []
    for parameter, name in names.items():
        if stage == 0:
            part: Place | None = Place(0, optimizer.masters[parameter], 0, parameter.numel())
        else:
            part = place_of(optimizer, parameter, stage, engine.global_rank)
        if part is not None:
            weight = part.owner.data.view(-1).narrow(0, part.offset, part.size)
            fragments.append(Fragment(name, part.start, weight, part.owner, part.offset))
    return fragments


def owned_fragments(
    local: list[Fragment], rank: int, world_size: int, stage: int
) -> list[Fragment]:
    """The part of the state that this rank owns; ranks own disjoint parts of everything.

    A rank owns its ZeRO shards as they are. The replicas of stage 0 are cut into `world_size` equal
    ranges, so that saving and averaging cost each rank only a share there too.
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

    Checkpoints get these values, because the module may have rounded its parameters.

    Args:
        names: parameters of the module, and their names.
        exact: the values before rounding, unsharded, by name.
    """
    fragments = []
    for name in names.values():
        values = exact[name].reshape(-1)
        per_rank = -(-len(values) // engine.world_size)
        start = engine.global_rank * per_rank
        share = values[start : start + per_rank].to("cpu", torch.float32, copy=True)
        if len(share):
            fragments.append(Fragment(name, start, share, share, 0))
    return fragments


def weights_by_name(fragments: list[Fragment], values: list[Tensor]) -> Parts:
    """Values of fragments, grouped by their parameter."""
    grouped: Parts = {}
    for fragment, value in zip(fragments, values, strict=True):
        grouped.setdefault(fragment.name, []).append((fragment.start, value))
    return grouped


def exchange_weights(engine: Any, names: dict[nn.Parameter, str], new: Parts) -> None:
    """Set the module's (possibly bf16) weights from fragments; all ranks call it.

    Masters that are separate from the module are not changed.

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
        dist.all_reduce(full)
        parameter.data.copy_(full.view_as(parameter))


class WeightAverage:
    """Running average of the fp32 master weights, started at their first values.

    Each rank averages only the fragments that it owns (arXiv:2010.11929, B.1.1: factor 0.9999), so
    the average costs 4 bytes per element over all ranks together, under every ZeRO stage.

    Args:
        factor: of the average, in each step.
        warms_up: step t averages by (1 + t) / (10 + t) if that is less, as TensorFlow's
            `ExponentialMovingAverage` with `num_updates`: otherwise a short run's average is mostly
            the initial weights.
    """

    def __init__(self, fragments: list[Fragment], factor: float, *, warms_up: bool) -> None:
        self.fragments = fragments
        self.factor = factor
        self.warms_up = warms_up
        self.values: list[Tensor] = [f.weight.detach().clone() for f in fragments]

    @torch.no_grad()
    def update(self, refused: Tensor, applied_steps: Tensor) -> None:
        """After an optimizer step: average = factor x average + (1 - factor) x weight.

        Args:
            refused: scalar; 1 if the step was not applied, which leaves the average unchanged too,
                else 0.
            applied_steps: scalar; steps that moved the weights so far, including this one.
        """
        share = torch.full_like(refused, 1.0 - self.factor)
        if self.warms_up:
            # With offload the averages are on the CPU, and the count of steps is on the GPU.
            share = torch.maximum(share, 9.0 / (10.0 + applied_steps.to(share.device)))
        share = share * (1.0 - refused)
        for value, fragment in zip(self.values, self.fragments, strict=True):
            value.lerp_(fragment.weight, share)

    def by_name(self) -> Parts:
        """Averaged values on this rank."""
        return weights_by_name(self.fragments, self.values)

    @contextmanager
    def applied(self, engine: Any, names: dict[nn.Parameter, str]) -> Iterator[None]:
        """The module computes with the averaged weights inside this block; all ranks enter it.

        After an error in the block the masters are not restored, because that takes all ranks and
        others may not have failed.
        """
        # Without ZeRO and in fp32 the module's weights are the masters: keep a copy.
        masters = [f.weight.detach().clone() for f in self.fragments]
        exchange_weights(engine, names, self.by_name())
        yield
        exchange_weights(engine, names, weights_by_name(self.fragments, masters))


class TrainingState:
    """Master weights, optimizer state and averages of one rank of a DeepSpeed engine.

    Args:
        names: of the trained parameters.
        frozen: names of the parameters that the recipe keeps fixed.
        exact: weights of both to start from, in fp32, by name.

    Attributes:
        owned: fragments that only this rank saves and averages.
    """

    def __init__(
        self,
        engine: Any,
        names: dict[nn.Parameter, str],
        frozen: dict[nn.Parameter, str],
        exact: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        optim: OptimConfig,
        guard: StepGuard,
    ) -> None:
        self.shapes = {name: list(values.shape) for name, values in exact.items()}
        self._engine, self._guard = engine, guard
        self._names, self._frozen_names = names, frozen
        self._optimizer = optimizer
        self._local = local_fragments(engine, self._names)
        for fragment in self._local:
            values = exact[fragment.name].reshape(-1)
            fragment.weight.copy_(values[fragment.start : fragment.start + len(fragment.weight)])
        rank, world_size, stage = engine.global_rank, engine.world_size, train.zero_stage
        self.owned = owned_fragments(self._local, rank, world_size, stage)
        self._frozen = frozen_fragments(engine, self._frozen_names, exact)
        types = state_types(optim)
        self._kinds = tuple(key for key in types if key != STEP_COUNT)
        # A trial step at initialization leaves a step count behind in some stages only.
        optimizer.state.clear()
        wrapper = engine.optimizer
        for tensor in flat_groups(wrapper, stage) if stage else wrapper.masters.values():
            optimizer.state[tensor] = zero_state(tensor, types)
        self.average = (
            WeightAverage(self.owned, train.averaging, warms_up=train.averaging_warmup)
            if train.averaging
            else None
        )

    @property
    def applied_steps(self) -> int:
        """Steps that moved the weights."""
        entries = self._optimizer.state.values()
        counts = [int(entry[STEP_COUNT]) for entry in entries if STEP_COUNT in entry]
        return counts[0] if counts else int(self._engine.global_steps - self._guard.refused_steps)

    def snapshot(self, position: Position, memory: dict[str, Tensor] | None = None) -> Snapshot:
        """Host copy of the state that this rank owns; `memory` as for `take_snapshot`."""
        engine, entries = self._engine, self.owned_entries()
        return take_snapshot(entries, position, engine.global_rank, engine.world_size, memory)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly from a checkpoint; all ranks call it.

        Raises:
            DamagedCheckpointError: on all ranks, if data that some rank needs are damaged.
        """
        has_average = checkpoint.has_average()
        entries = [(WEIGHT, f.name, f.start, f.weight) for f in (*self._local, *self._frozen)]
        for kind in self._kinds:
            state = self._optimizer.state
            entries += [(kind, f.name, f.start, f.state(state, kind)) for f in self._local]
        if self.average is not None and has_average:
            averages = zip(self.owned, self.average.values, strict=True)
            entries += [(AVERAGE, f.name, f.start, average) for f, average in averages]
        self._fill(checkpoint, entries)
        if self.average is not None and not has_average:
            for average, fragment in zip(self.average.values, self.owned, strict=True):
                average.copy_(fragment.weight)
        for names, fragments in ((self._names, self.owned), (self._frozen_names, self._frozen)):
            masters = weights_by_name(fragments, [f.weight for f in fragments])
            exchange_weights(self._engine, names, masters)
        position = checkpoint.position
        for entry in self._optimizer.state.values():
            if STEP_COUNT in entry:
                entry[STEP_COUNT].fill_(position.applied_steps)
        self._engine.global_steps = position.step
        self._guard.refused_steps.fill_(position.step - position.applied_steps)

    def _fill(self, checkpoint: Checkpoint, entries: list[Entry]) -> None:
        damage, rank, device = [""], dist.get_rank(), torch.device(self._engine.device)
        try:
            checkpoint.fill(entries)
        except DamagedCheckpointError as error:
            damage = [str(error)]
        (last_damaged,) = all_max([rank if damage[0] else -1.0], device)
        if last_damaged >= 0:
            dist.broadcast_object_list(damage, src=int(last_damaged), device=device)
            raise DamagedCheckpointError(damage[0])

    def owned_entries(self) -> Iterator[Entry]:
        """What only this rank saves, as views of the state."""
        for f in self.owned:
            yield WEIGHT, f.name, f.start, f.weight
            for kind in self._kinds:
                yield kind, f.name, f.start, f.state(self._optimizer.state, kind)
        for name, parts in (self.average.by_name() if self.average else {}).items():
            yield from ((AVERAGE, name, start, values) for start, values in parts)
        for f in self._frozen:  # the average of a fixed value is the value
            for kind in (WEIGHT, AVERAGE) if self.average else (WEIGHT,):
                yield kind, f.name, f.start, f.weight
