"""The training state of one rank: its fragments, their averages, and checkpoints.

Everything works on fragments, and so under any ZeRO stage and on any number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vit_ray.checkpoints.checkpoint import Checkpoint, Position
from vit_ray.checkpoints.checkpoint_format import AVERAGE, WEIGHT, DamagedCheckpointError
from vit_ray.checkpoints.checkpoint_writer import Snapshot, take_snapshot
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.training.collectives import all_max
from vit_ray.training.optimizers import STEP_COUNT, StepGuard, state_types, zero_state
from vit_ray.training.training_state import (
    WeightAverage,
    exchange_weights,
    frozen_fragments,
    local_fragments,
    owned_fragments,
    stepped_tensors,
    weights_by_name,
)

if TYPE_CHECKING:
    from vit_ray.checkpoints.checkpoint import Entry


class TrainingState:
    """Master weights, optimizer state and averages that one rank of a DeepSpeed engine holds."""

    def __init__(
        self,
        engine: Any,
        names: dict[nn.Parameter, str],
        exact: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        train: TrainConfig,
        optim: OptimConfig,
        guard: StepGuard,
    ) -> None:
        """Start from `exact`: the weights of all parameters, trained and frozen, in fp32.

        Args:
            names: of the parameters, trained and frozen.
        """
        self.shapes = {name: list(values.shape) for name, values in exact.items()}
        self._engine, self._guard = engine, guard
        self._names = {p: name for p, name in names.items() if p.requires_grad}
        self._frozen_names = {p: name for p, name in names.items() if not p.requires_grad}
        self._optimizer = optimizer
        self._local = local_fragments(engine, self._names)
        for fragment in self._local:
            values = exact[fragment.name].reshape(-1)
            fragment.weight.copy_(values[fragment.start : fragment.start + len(fragment.weight)])
        rank, world_size, stage = engine.global_rank, engine.world_size, train.zero_stage
        self.owned = owned_fragments(self._local, rank, world_size, stage)
        """Fragments that only this rank saves and averages."""
        self._frozen = frozen_fragments(engine, self._frozen_names, exact)
        types = state_types(optim)
        self._kinds = tuple(key for key in types if key != STEP_COUNT)
        # A trial step at initialization leaves a step count behind in some stages only.
        optimizer.state.clear()
        for tensor in stepped_tensors(engine):
            optimizer.state[tensor] = zero_state(tensor, types)
        self.average = None
        if train.averaging:
            self.average = WeightAverage(
                self.owned, train.averaging, warms_up=train.averaging_warmup
            )

    @property
    def applied_steps(self) -> int:
        """Steps that moved the weights."""
        entries = self._optimizer.state.values()
        counts = [int(entry[STEP_COUNT]) for entry in entries if STEP_COUNT in entry]
        return counts[0] if counts else int(self._engine.global_steps - self._guard.refused_steps)

    def snapshot(self, position: Position, memory: dict[str, Tensor] | None = None) -> Snapshot:
        """Host copy of what this rank owns; `memory` as for `take_snapshot`."""
        rank, world_size = self._engine.global_rank, self._engine.world_size
        return take_snapshot(self.owned_entries(), position, rank, world_size, memory)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue exactly from a checkpoint, whatever the module's present weights; all ranks call
        it.

        Raises:
            DamagedCheckpointError: on all ranks, if what some rank needs is not as it was written.
        """
        has_average = checkpoint.has_average()
        entries = [(WEIGHT, f.name, f.start, f.weight) for f in (*self._local, *self._frozen)]
        for kind in self._kinds:
            states = ((f, f.state(self._optimizer.state, kind)) for f in self._local)
            entries += [(kind, f.name, f.start, values) for f, values in states]
        if self.average is not None and has_average:
            values = zip(self.owned, self.average.values, strict=True)
            entries += [(AVERAGE, f.name, f.start, average) for f, average in values]
        self._fill(checkpoint, entries)
        if self.average is not None and not has_average:
            self.average.restart()
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
        damage, rank, device = "", dist.get_rank(), torch.device(self._engine.device)
        try:
            checkpoint.fill(entries)
        except DamagedCheckpointError as error:
            damage = str(error)
        (last,) = all_max([rank if damage else -1.0], device)
        if last >= 0:  # a rank that has found damage tells the others
            told = [damage]
            dist.broadcast_object_list(told, src=int(last), device=device)
            raise DamagedCheckpointError(told[0])

    def owned_entries(self) -> Iterator[Entry]:
        """What only this rank saves, as views of the state."""
        for f in self.owned:
            yield WEIGHT, f.name, f.start, f.weight
            for kind in self._kinds:
                yield kind, f.name, f.start, f.state(self._optimizer.state, kind)
        for name, parts in (self.average.by_name() if self.average else {}).items():
            yield from ((AVERAGE, name, start, values) for start, values in parts)
        for f in self._frozen:  # is its own average
            for kind in (WEIGHT, AVERAGE) if self.average else (WEIGHT,):
                yield kind, f.name, f.start, f.weight
