"""`verify` of a run: its checkpoints' bytes, and whether its samples followed the planned order."""

import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vit_ray.checkpoints.checkpoint import Position, Progress
from vit_ray.checkpoints.checkpoint_format import PartialCheckpointError
from vit_ray.checkpoints.run_checkpoints import checkpoint_of_step, list_checkpoints
from vit_ray.checkpoints.sample_digest import add_digests, samples_digest
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.named_run import NamedRun, find_run
from vit_ray.storage import locate


def verify_run(source: str) -> int:
    """Check all checkpoints of a run and print the findings; returns 1 if anything is wrong.

    Raises:
        ValueError: as `find_run`.
    """
    run, num_problems = find_run(source), 0
    samples = _Samples(run)
    for step, folder in reversed(list_checkpoints(locate(run.recipe.run_folder))):
        try:
            checkpoint = checkpoint_of_step(folder, step)
            checkpoint.verify()
            found, problem = samples.checked(checkpoint.position), ""
        except PartialCheckpointError:
            print(f"step {step:,}: incomplete: still being written, or interrupted and never used")
            continue
        except (ValueError, OSError) as error:  # of the checkpoint, or of the shards
            found, problem = "", str(error)
        num_problems += bool(problem)
        print(f"step {step:,}: {problem or f'files whole; {found}'}")
    return 1 if num_problems else 0


class _Order:
    """Digests of a run's samples in a given order; each step is computed once."""

    def __init__(self, samples_of: Callable[[int], NDArray[np.int64]], size: int) -> None:
        self._samples_of, self._size = samples_of, size
        self._known: dict[int, tuple[int, int]] = {}
        """By first step: the step after the last one, and the digest."""

    def digest(self, first: int, end: int) -> int:
        """Of the steps from `first` to before `end`; `end` never decreases for the same `first`."""
        start, digest = self._known.get(first, (first, 0))
        for step in range(start, end):
            of_step = samples_digest(step * self._size, self._samples_of(step))
            digest = add_digests(digest, of_step)
            self._known[first] = step + 1, digest  # kept in case a later step cannot be read
        return digest

    def has_been_fed(self, progress: Progress) -> bool:
        """Whether the digest of a checkpoint matches these samples."""
        digest = self.digest(progress.digest_from, progress.step)
        return f"{digest:016x}" == progress.samples_digest


class _Samples:
    """The samples that a run trained on, by the digests of its checkpoints."""

    def __init__(self, run: NamedRun) -> None:
        batches, self._size = SeenBatches(run.resolved), run.recipe.train.global_batch_size
        self._planned = _Order(batches.planned, self._size)
        self._decoded = _Order(lambda step: batches.batch(step)["sample"], self._size)

    def checked(self, position: Position) -> str:
        """What was found right about the samples of a checkpoint.

        Images are decoded only if the planned order differs, to see which of them were replaced.

        Raises:
            ValueError: they do not follow the order, or that cannot be decided; or, as OSError,
                images cannot be read.
        """
        progress = position.progress
        if not progress.samples_digest:
            return "no digest of samples"
        steps = f"steps {progress.digest_from:,} to {progress.step - 1:,}"
        if self._planned.has_been_fed(progress):
            return f"samples of {steps} in the planned order"
        num_images = (progress.step - progress.digest_from) * self._size
        print(
            f"decodes the {num_images:,} images of {steps}, because undecodable ones may be "
            "replaced",
            file=sys.stderr,
        )
        if self._decoded.has_been_fed(progress):
            return (
                f"samples of {steps} in the planned order, with neighbours in place of undecodable "
                "images"
            )
        raise ValueError(f"the samples of {steps} differ from the planned order; this is a defect")
