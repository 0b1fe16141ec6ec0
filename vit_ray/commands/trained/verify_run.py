"""`verify` of a run: its checkpoints' bytes, and that its samples were those of its order."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vit_ray.checkpoints.checkpoint import Progress, read_checkpoint
from vit_ray.checkpoints.checkpoint_format import DamagedCheckpointError, PartialCheckpointError
from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.checkpoints.sample_digest import add_digests, samples_digest
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.named_run import find_run
from vit_ray.storage import locate


def verify_run(source: str) -> int:
    """Check all checkpoints of a run and print what is found; 1 if anything is wrong.

    Raises:
        ValueError: as `find_run`.
    """
    run, num_problems = find_run(source), 0
    batches, size = SeenBatches(run.resolved), run.recipe.train.global_batch_size
    planned = _Order(batches.planned, size)
    decoded = _Order(lambda step: batches.batch(step)["sample"], size)
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
            problem, samples = _samples(planned, decoded, checkpoint.position.progress)
        num_problems += bool(problem)
        print(f"step {step:,}: {problem or f'files whole; {samples}'}")
    return 1 if num_problems else 0


class _Order:
    """Digests of a run's samples by its order, each step computed once."""

    def __init__(self, samples_of: Callable[[int], NDArray[np.int64]], size: int) -> None:
        self._samples_of, self._size = samples_of, size
        self._known: dict[int, tuple[int, int]] = {}
        """By first step: the step after the last one, and the digest."""

    def digest(self, first: int, end: int) -> int:
        """Of the steps from `first` to before `end`, which never falls for the same `first`."""
        start, digest = self._known.get(first, (first, 0))
        for step in range(start, end):
            of_step = samples_digest(step * self._size, self._samples_of(step))
            digest = add_digests(digest, of_step)
        self._known[first] = end, digest
        return digest

    def has_been_fed(self, progress: Progress) -> bool:
        """Whether the digest of a checkpoint is of these samples."""
        digest = self.digest(progress.digest_from, progress.step)
        return f"{digest:016x}" == progress.samples_digest


def _samples(planned: _Order, decoded: _Order, progress: Progress) -> tuple[str, str]:
    """What is wrong with the samples that the run was fed, or what is right with them.

    Images are decoded only where the order alone differs: to see which of them cannot be.
    """
    if not progress.samples_digest:
        return "", "it has no digest of samples"
    steps = f"steps {progress.digest_from:,} to {progress.step - 1:,}"
    if planned.has_been_fed(progress):
        return "", f"samples of {steps} in order"
    print(f"decodes the images of {steps}: some may be replaced", file=sys.stderr, flush=True)
    if decoded.has_been_fed(progress):
        return "", f"samples of {steps} in order, with neighbours of images that cannot be decoded"
    problem = f"{steps} were fed other samples than the order has; this is a defect"
    elsewhere = ", unless its history says that a worker has replaced an image (data.decode=device)"
    return problem + elsewhere, ""
