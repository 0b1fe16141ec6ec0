"""Commands for a recorded run: fork it, show a batch of it, verify it."""

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.checkpoints.checkpoint import (
    Position,
    Progress,
    add_digests,
    copy_checkpoint,
    read_checkpoint,
    samples_digest,
)
from vit_ray.checkpoints.checkpoint_format import PartialCheckpointError, is_committed
from vit_ray.checkpoints.run_checkpoints import begin_training, checkpoint_of_step, list_checkpoints
from vit_ray.config.loading import changed, write_yaml
from vit_ray.config.recipe import Change, on_resume, recipe_from_dict
from vit_ray.config.schema import OnResume
from vit_ray.evaluation.examples import sheet
from vit_ray.launch.dataset import batches_of, read_batch
from vit_ray.launch.named_run import changes_since, find_run, named_folder
from vit_ray.launch.resolved_run import ResolvedRun, resolve_run
from vit_ray.lock import hold_lock, is_lock_file
from vit_ray.outcomes import BRANCH_NOTE, origin_of
from vit_ray.storage import Location, locate


def fork_run(source: str, words: Sequence[str], is_dry: bool) -> None:
    """Copy a checkpoint to a new run, write its recipe, and print how to train it.

    Parent and fork share no files: each can be trained, pruned and deleted alone.

    Args:
        source: folder of the parent's checkpoints, or its id in MLflow.
        words: `step=k` of a checkpoint, `name=NEW`, and the changes of the recipe.
        is_dry: print what would be done, and write nothing.

    Raises:
        ValueError: there is no such checkpoint, a change is not possible, the name is taken, or the
            recipe or its data set is wrong.
        DamagedCheckpointError: a file of the checkpoint differs from its checksum.
    """
    step, overrides = _step_and_changes(words)
    parent, position = _parent_checkpoint(source, step, overrides)
    tree = changed({**copy.deepcopy(position.recipe), "resume": "auto"}, overrides)
    resolved = resolve_run(recipe_from_dict(tree, where="the fork").with_absolute_paths())
    changes, recipe = _checked_changes(resolved, position), resolved.recipe
    folder, file = locate(recipe.run_folder), Path(f"{recipe.name}.yaml")
    content = write_yaml(recipe.recorded()).encode()
    origin = origin_of(position.recipe["name"], step)
    if file.exists() and file.read_bytes() != content:
        raise ValueError(f"name={recipe.name}: {file} exists already; give another name")
    _refuse_taken(folder)
    size = sum(file.size for file in parent.list_files())
    print(
        f"{recipe.name}: from {origin} to step {resolved.total_steps}; "
        f"{'; '.join(map(str, changes)) or 'nothing else changes the training'}"
    )
    print(f"copies {size / 2**20:,.1f} MiB to {folder.uri}", file=sys.stderr, flush=True)
    if is_dry:
        return
    with hold_lock(folder):
        _refuse_taken(folder)  # again: another fork may have ended just now
        folder.child(BRANCH_NOTE).write(origin.encode())
        begin_training(folder)
        copy_checkpoint(parent, folder, lambda position: _of_fork(position, resolved))
    locate(str(file)).write(content)
    print(f"wrote {file}; train it with: vit-ray pretrain {file} (or finetune, as its parent)")


def _step_and_changes(words: Sequence[str]) -> tuple[int, list[str]]:
    """
    Raises:
        ValueError: not exactly one of the words is `step=k`.
    """
    steps = [word.removeprefix("step=") for word in words if word.startswith("step=")]
    if len(steps) != 1 or not steps[0].isdecimal():
        raise ValueError("give one step, such as step=100")
    return int(steps[0]), [word for word in words if not word.startswith("step=")]


def _refuse_taken(folder: Location) -> None:
    """
    Raises:
        ValueError: the run folder has other files than those of a lock.
    """
    files = folder.list_files(recursive=False)
    if folder.list_folders() or not all(is_lock_file(file.base_name) for file in files):
        raise ValueError(
            f"{folder.uri} exists already; give another name, or delete the folder if a fork was "
            "interrupted there, before it wrote its recipe"
        )


def _parent_checkpoint(
    source: str, step: int, overrides: Sequence[str]
) -> tuple[Location, Position]:
    source, run_folder = named_folder(source, overrides)
    checkpoints = {k: folder for k, folder in list_checkpoints(run_folder) if is_committed(folder)}
    if step not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise ValueError(
            f"step={step}: the steps of the complete checkpoints in {source} are: {steps}; give "
            "one of them (checkpoint.keep_steps keeps more), of the folder of a run's checkpoints "
            "or its id in MLflow"
        )
    return checkpoints[step], read_checkpoint(checkpoints[step]).position


def _checked_changes(resolved: ResolvedRun, position: Position) -> list[Change]:
    """The changes of the recipe and the data set that affect the training.

    Raises:
        ValueError: the fork cannot continue with a change, or would train nothing.
    """
    _, changes = changes_since(position, resolved)
    if fixed := [change for change in changes if on_resume(change.key) is OnResume.FIXED]:
        raise ValueError(
            f"{'; '.join(map(str, fixed))}: a fork keeps what the checkpoint's tensors and its "
            "place in the data depend on; give the checkpoint's own value or data set, or start a "
            "new run with init_from, which loads the weights that fit"
        )
    if resolved.total_steps <= position.step:
        raise ValueError(
            f"the fork would end after {resolved.total_steps} steps, and the checkpoint is at step "
            f"{position.step}; give a larger optim.steps or optim.epochs"
        )
    return changes


def _of_fork(position: Position, resolved: ResolvedRun) -> Position:
    # The parent's position with the fork's recipe, and without the parent's measurements.
    before = position.progress
    return replace(
        position,
        progress=Progress(
            before.step, skipped_steps=before.skipped_steps, recent_norms=before.recent_norms
        ),
        recipe=resolved.recipe.recorded(),
        data_terms=resolved.manifest.about,
        tracking_run_id=None,
    )


_MAX_DRAWN: Final = 64  # images in the picture; the table has all of them


def show_batch(source: str, words: Sequence[str], out: str | None) -> None:
    """Write the crops of a step as a picture and a table, and print their paths.

    Reads only what the step reads, without Ray, cluster and weights.

    Args:
        source: a run or recipe, as `find_run` takes it.
        words: `step=k`, and changes of the recipe.
        out: folder to write; None = named after the run and the step.

    Raises:
        ValueError: there is no such step, the folder is not empty, or as `find_run`.
    """
    step, changes = _step_and_changes(words)
    run = find_run(source, changes)
    if step >= run.total_steps:
        raise ValueError(
            f"step={step}: the run has {run.total_steps:,} steps; give one from 0 to "
            f"{run.total_steps - 1}"
        )
    folder = Path(out or f"{run.recipe.name}-step-{step}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    pixels, rows = read_batch(run, step)
    table, picture = folder / "batch.parquet", folder / "batch.png"
    pq.write_table(pa.Table.from_pylist(rows), table)
    title = f"{run.recipe.name}, step {step}"
    title += f", the first {_MAX_DRAWN} of {len(rows):,}" if len(rows) > _MAX_DRAWN else ""
    captions = [
        f"{row['sample']} {', '.join(row['classes']) or 'no label'}" for row in rows[:_MAX_DRAWN]
    ]
    sheet(list(pixels[:_MAX_DRAWN]), captions, title).save(picture)
    print(f"wrote {picture}\nwrote {table}")


def verify_run(source: str) -> int:
    """Check the files of all checkpoints of a run, and whether its samples followed the planned
    order; print the results, and return 1 if anything is wrong.

    Raises:
        ValueError: as `find_run`.
    """
    run, num_problems = find_run(source), 0
    batches, size = batches_of(run), run.recipe.train.global_batch_size
    planned = cache(lambda k: samples_digest(k * size, batches.planned(k)))
    decoded = cache(lambda k: samples_digest(k * size, batches[k]["sample"]))
    for step, folder in reversed(list_checkpoints(locate(run.recipe.run_folder))):
        try:
            checkpoint = checkpoint_of_step(folder, step)
            checkpoint.verify()
            result = (
                f"files whole; {_check_samples(checkpoint.position.progress, planned, decoded)}"
            )
        except PartialCheckpointError:
            result = "incomplete: still being written, or interrupted and never used"
        except (ValueError, OSError) as error:  # of the checkpoint, or of the shards
            result = str(error) or repr(error)
            num_problems += 1
        print(f"step {step:,}: {result}")
    return 1 if num_problems else 0


def _check_samples(
    progress: Progress, planned: Callable[[int], int], decoded: Callable[[int], int]
) -> str:
    """How the samples of a checkpoint follow the planned order, in words.

    Args:
        planned: digest of a step's samples by the order alone.
        decoded: the same after images that cannot be decoded are replaced.

    Raises:
        ValueError: the samples do not follow the order.
        OSError: images cannot be read.
    """
    if progress.samples_digest is None:
        return "no digest of samples"
    steps = range(progress.digest_from, progress.step)
    text = f"steps {progress.digest_from:,} to {progress.step - 1:,}"
    if add_digests(*map(planned, steps)) == progress.samples_digest:
        return f"samples of {text} in the planned order"
    print(f"decodes the images of {text}: undecodable ones may be replaced", file=sys.stderr)
    if add_digests(*map(decoded, steps)) == progress.samples_digest:
        return f"samples of {text} in the planned order, with neighbours for undecodable images"
    raise ValueError(f"the samples of {text} differ from the planned order; this is a defect")
