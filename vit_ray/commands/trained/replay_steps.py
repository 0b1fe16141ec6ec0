"""Training again the steps from a checkpoint to a later one, in this process, on its CPUs."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from vit_ray.checkpoints.checkpoint import (
    Checkpoint,
    Progress,
    folder_name,
    read_checkpoint,
)
from vit_ray.checkpoints.checkpoint_format import commit
from vit_ray.checkpoints.snapshot import write_snapshot
from vit_ray.config import Recipe
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.named_run import NamedRun
from vit_ray.measure.meters import Compute
from vit_ray.storage import Location
from vit_ray.train.engine.collectives import all_sum
from vit_ray.train.engine.deepspeed_engine import DeepSpeedEngine
from vit_ray.train.loop import Batch, LoopHooks, RankContext, run_training
from vit_ray.train.objective import build_objective, make_loss
from vit_ray.worker.process_group import RankPlace, joined_process_group, open_store

_HOST = "127.0.0.1"
_CPU = torch.device("cpu")
_TIMEOUT_S = 600.0
_MOST_IMAGES = 64
"""Images per pass, unless the recipe sets up to twice as many: other pass sizes round sums
differently, and a training that is close to diverging amplifies the difference at every step."""


def images_per_pass(recipe: Recipe) -> int:
    """Of a replay: the recipe's own size, or one that fits on this machine."""
    own, size = recipe.train.micro_batch_size, recipe.train.global_batch_size
    if isinstance(own, int) and own <= 2 * _MOST_IMAGES:
        return own
    passes = range(-(-size // _MOST_IMAGES), size + 1)
    least = recipe.train.least_pass
    return next(size // n for n in passes if size % n == 0 and size // n % least == 0)


def replay_steps(run: NamedRun, checkpoint: Checkpoint, step: int, folder: Location) -> Checkpoint:
    """The checkpoint that the run would have had after `step` steps, written below `folder`.

    It equals the run's own bit by bit on the same kind of processor, with as many threads, workers
    and images per pass; else up to rounding.

    Raises:
        ValueError: the run rolled back in between, after which its weights are those of an older
            checkpoint.
    """
    recipe = run.recipe.with_changes(train={"zero_stage": 0, "offload": False, "compile": False})
    size, micro = recipe.train.global_batch_size, images_per_pass(recipe)
    batches, target = SeenBatches(run.resolved), folder.child(folder_name(step))

    def read() -> Iterator[Batch]:
        yield from map(batches.batch, range(checkpoint.position.step, step))

    def handle(policy: str | None, progress: Progress, *_: object) -> None:
        if policy == "rollback":
            raise ValueError(
                f"step {progress.step - 1} made the run roll back; explain it, or a step before it"
            )

    def save(progress: Progress) -> None:
        if progress.step == step:
            position = replace(
                checkpoint.position,
                progress=copy.deepcopy(progress),
                applied_steps=engine.state.applied_steps,
                samples_seen=step * size,
            )
            write_snapshot(engine.state.snapshot(position), target)
            commit(target, 1, lambda: None)

    hooks = LoopHooks(
        note_step=lambda _: None,
        log=lambda *_: None,
        evaluate=lambda _: {},
        save=save,
        wait_until_saved=lambda: None,
        note_evaluation=lambda _: True,
        handle_nonfinite=partial(handle, recipe.train.nonfinite),
        handle_spike=partial(handle, recipe.train.on_spike),
        save_is_wanted=lambda _: False,
        is_stopping=lambda: False,
    )
    store, place = open_store(_HOST, _TIMEOUT_S), RankPlace.of(0, [_HOST])
    with joined_process_group(
        place,
        _CPU,
        f"{_HOST}:{store.port}",
        store,
        host=_HOST,
        backend="gloo",
        timeout_s=_TIMEOUT_S,
    ):
        num_classes = len(run.resolved.manifest.classes)
        engine = DeepSpeedEngine(
            build_objective(recipe, num_classes),
            recipe.train,
            recipe.optim,
            micro_batch_size=micro,
            accumulation_steps=size // micro,
            loss_function=make_loss(recipe),
        )
        engine.restore(checkpoint)
        sums = partial(all_sum, device=_CPU)
        context = RankContext(run.resolved.total_steps, 0, 1, micro, sums, until_step=step)
        progress = copy.deepcopy(checkpoint.position.progress)
        run_training(engine, read(), recipe, context, hooks, progress, Compute(1))
        engine.close()
    return read_checkpoint(target)
