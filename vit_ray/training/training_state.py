"""The training state of one rank, in the same form for every ZeRO stage.

A `Fragment` is a range of consecutive elements of one parameter, with the fp32 master weights and
the optimizer state of those elements as views into the engine's memory. Checkpoints, averaging and
weight exchange work on fragments, and so on any stage and any number of workers.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_ray.checkpoints.checkpoint import Checkpoint, Entry, Position
from vit_ray.checkpoints.checkpoint_format import AVERAGE, WEIGHT, DamagedCheckpointError
from vit_ray.checkpoints.checkpoint_writer import Snapshot, take_snapshot
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.deepspeed_internals import flat_groups, forget_gathered, place_of, shard_of
from vit_ray.training.optimizers import STEP_COUNT, StepGuard, state_types, zero_state


class Fragment(NamedTuple):
    """Elements [start, start + size) of the flattened parameter `name`.

    Attributes:
        owner: the tensor that the optimizer steps, which is the key of the optimizer's state.
        offset: where the fragment starts in the flattened `owner`.
    """

    name: str
    start: int
    owner: Tensor
    offset: int
    size: int

    @property
    def weight(self) -> Tensor:
        """fp32 master weights (n,), a view: writing to it changes the run."""
        return self.view_of(self.owner.data)

    def view_of(self, tensor: Tensor) -> Tensor:
        """This part (n,) of a tensor with the elements of `owner`, such as optimizer state."""
        return tensor.view(-1).narrow(0, self.offset, self.size)


def local_fragments(engine: Any, names: dict[nn.Parameter, str]) -> list[Fragment]:
    """All state on this rank; every element of the model is on at least one rank.

    Args:
        engine: an initialized DeepSpeed engine.
        names: each trained parameter of the module and its name.
    """
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        return [Fragment(n, 0, optimizer.masters[p], 0, p.numel()) for p, n in names.items()]
    parts = [(n, place_of(optimizer, p, stage, engine.global_rank)) for p, n in names.items()]
    return [Fragment(name, *part) for name, part in parts if part is not None]


def owned_fragments(
    local: list[Fragment], rank: int, world_size: int, stage: int
) -> list[Fragment]:
    """The part of the state that this rank owns; ranks own disjoint parts of everything.

    A rank owns its ZeRO shards as they are. The replicas of stage 0 are cut into `world_size` equal
    ranges, so that saving and averaging cost each rank only a share there too.
    """
    if stage > 0:
        return local
    total = sum(fragment.size for fragment in local)
    first, last = total * rank // world_size, total * (rank + 1) // world_size
    owned, position = [], 0
    for fragment in local:
        begin, end = max(first - position, 0), min(last - position, fragment.size)
        if begin < end:
            owned.append(fragment._replace(start=begin, offset=begin, size=end - begin))
        position += fragment.size
    return owned


def frozen_fragments(engine: Any, exact: dict[str, Tensor]) -> list[Fragment]:
    """This rank's share of untrained parameters, in host memory, cut as ZeRO 3 cuts parameters.

    Checkpoints get these values, because the module may have rounded its parameters.

    Args:
        exact: the values before rounding, unsharded, by name.
    """
    fragments = []
    for name, values in exact.items():
        per_rank = -(-values.numel() // engine.world_size)
        start = engine.global_rank * per_rank
        share = values.reshape(-1)[start : start + per_rank].to("cpu", torch.float32, copy=True)
        if len(share):
            fragments.append(Fragment(name, start, share, 0, len(share)))
    return fragments


def fill_on_all_ranks(checkpoint: Checkpoint, entries: list[Entry]) -> str:
    """As `Checkpoint.fill`; all ranks call it, each with its own entries.

    Returns:
        On all ranks, which data that some rank needs are damaged; empty if there are none.
    """
    text, texts = "", [""] * dist.get_world_size()
    try:
        checkpoint.fill(entries)
    except DamagedCheckpointError as error:
        text = str(error)
    dist.all_gather_object(texts, text)
    return max(texts)


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
        self.fragments, self.factor, self.warms_up = fragments, factor, warms_up
        self.restart()

    def restart(self) -> None:
        """Begin at the present weights."""
        self.values = [fragment.weight.detach().clone() for fragment in self.fragments]

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

    def entries(self) -> list[Entry]:
        """Averaged values on this rank."""
        pairs = zip(self.fragments, self.values, strict=True)
        return [(AVERAGE, fragment.name, fragment.start, value) for fragment, value in pairs]


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
        self._engine, self._guard, self._optimizer = engine, guard, optimizer
        self._names, self._frozen_names = names, frozen
        self._local = local_fragments(engine, names)
        for fragment in self._local:
            values = exact[fragment.name].reshape(-1)
            fragment.weight.copy_(values[fragment.start : fragment.start + fragment.size])
        stage = train.zero_stage
        self.owned = owned_fragments(self._local, engine.global_rank, engine.world_size, stage)
        self._frozen = frozen_fragments(engine, {name: exact[name] for name in frozen.values()})
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

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The module computes with the averaged weights inside this block; all ranks enter it.

        After an error in the block the masters are not restored, because that takes all ranks and
        others may not have failed.
        """
        assert self.average is not None
        # Without ZeRO and in fp32 the module's weights are the masters: keep a copy.
        masters = [fragment.weight.detach().clone() for fragment in self.owned]
        self._exchange(self._names, self.owned, self.average.values)
        yield
        self._exchange(self._names, self.owned, masters)

    def restore(self, checkpoint: Checkpoint) -> str:
        """Continue exactly from a checkpoint; all ranks call it.

        Returns:
            As `fill_on_all_ranks`; the state is restored if it is empty.
        """
        average, has_average = self.average, checkpoint.has_average()
        entries = [*self._entries(self._local)]
        entries += [(WEIGHT, f.name, f.start, f.weight) for f in self._frozen]
        if average is not None and has_average:
            entries += average.entries()
        if damage := fill_on_all_ranks(checkpoint, entries):
            return damage
        if average is not None and not has_average:
            average.restart()
        for names, fragments in ((self._names, self.owned), (self._frozen_names, self._frozen)):
            self._exchange(names, fragments, [fragment.weight for fragment in fragments])
        position = checkpoint.position
        for entry in self._optimizer.state.values():
            if STEP_COUNT in entry:
                entry[STEP_COUNT].fill_(position.applied_steps)
        self._engine.global_steps = position.step
        self._guard.refused_steps.fill_(position.step - position.applied_steps)
        return ""

    def _exchange(
        self, names: dict[nn.Parameter, str], fragments: list[Fragment], values: list[Tensor]
    ) -> None:
        """Set the module's (possibly bf16) weights from fp32 values of the fragments that each rank
        owns; all ranks call it. Masters that are separate from the module are not changed.
        """
        parts: dict[str, list[tuple[int, Tensor]]] = defaultdict(list)
        for fragment, part in zip(fragments, values, strict=True):
            parts[fragment.name].append((fragment.start, part))
        if self._engine.zero_optimization_stage() == 3:
            forget_gathered(self._engine)  # the next forward pass would not see the change
            # `zero.GatheredParameters` would send whole parameters from one rank.
            for parameter, name in names.items():
                shard = shard_of(parameter)
                base = self._engine.global_rank * shard.numel()
                for start, part in parts[name]:
                    shard.narrow(0, start - base, part.numel()).copy_(part)
            return
        for parameter, name in names.items():
            full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            for start, part in parts[name]:
                full.narrow(0, start, part.numel()).copy_(part)
            dist.all_reduce(full)
            parameter.data.copy_(full.view_as(parameter))

    def owned_entries(self) -> Iterator[Entry]:
        """What only this rank saves, as views of the state."""
        yield from self._entries(self.owned)
        yield from self.average.entries() if self.average else ()
        for f in self._frozen:  # the average of a fixed value is the value
            for kind in (WEIGHT, AVERAGE) if self.average else (WEIGHT,):
                yield kind, f.name, f.start, f.weight

    def _entries(self, fragments: list[Fragment]) -> Iterator[Entry]:
        """Master weights and optimizer state."""
        for f in fragments:
            yield WEIGHT, f.name, f.start, f.weight
            for kind in self._kinds:
                yield kind, f.name, f.start, f.view_of(self._optimizer.state[f.owner][kind])
