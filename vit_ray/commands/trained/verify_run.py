"""`verify` of a run: its checkpoints' bytes, and that its samples were those of its order."""

from __future__ import annotations

from vit_ray.checkpoints.checkpoint import Checkpoint, Progress, read_checkpoint
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError, PartialCheckpointError
from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.checkpoints.sample_digest import add_digests, samples_digest
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.named_run import NamedRun, find_run
from vit_ray.storage import locate


def verify_run(source: str) -> int:
    """Check all checkpoints of a run and print what is found; 1 if anything is wrong.

    Raises:
        ValueError: as `find_run`.
    """
    run, num_problems = find_run(source), 0
    order = _Order(run)
    for step, folder in reversed(list_checkpoints(locate(run.recipe.run_folder))):
        try:
            checkpoint = read_checkpoint(folder)
            checkpoint.verify()
        except PartialCheckpointError:
            print(f"step {step:,}: not whole: still being written, or cut off and never used")
            continue
        except DamagedCheckpointError as error:
            problem = str(error)
        else:
            problem = _samples_problem(order, checkpoint.position.progress)
        num_problems += bool(problem)
        print(f"step {step:,}: {problem or _found(checkpoint)}")
    return 1 if num_problems else 0


def _found(checkpoint: Checkpoint) -> str:
    progress = checkpoint.position.progress
    if not progress.samples_digest:
        return "files whole; it has no digest of samples"
    return (
        f"files whole; samples of steps {progress.digest_from:,} to {progress.step - 1:,} in order"
    )


class _Order:
    """Digests of a run's samples by the order alone, each step computed once."""

    def __init__(self, run: NamedRun) -> None:
        self._batches, self._size = SeenBatches(run.resolved), run.recipe.train.global_batch_size
        self._known: dict[int, tuple[int, int]] = {}
        """By first step: the step after the last one, and the digest."""

    def digest(self, first: int, end: int) -> int:
        """Of the steps from `first` to before `end`, which never falls for the same `first`."""
        start, digest = self._known.get(first, (first, 0))
        for step in range(start, end):
            of_step = samples_digest(step * self._size, self._batches.planned(step))
            digest = add_digests(digest, of_step)
        self._known[first] = end, digest
        return digest


def _samples_problem(order: _Order, progress: Progress) -> str:
    """What is wrong with the samples that the run was fed; empty if nothing is."""
    if not progress.samples_digest:
        return ""
    digest = order.digest(progress.digest_from, progress.step)
    if f"{digest:016x}" == progress.samples_digest:
        return ""
    first, last = progress.digest_from, progress.step - 1
    return (
        f"steps {first:,} to {last:,} were fed other samples than the order has. An image that "
        "cannot be decoded is replaced by its neighbour: verify the data set with "
        "verify.decode_fraction=1; if it has no such image, this is a defect"
    )
