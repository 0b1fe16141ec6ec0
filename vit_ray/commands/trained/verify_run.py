"""`verify` of a run: its checkpoints' bytes, and whether its samples followed the planned order."""

import sys
from collections.abc import Callable
from functools import cache

from vit_ray.checkpoints.checkpoint import Progress, add_digests, samples_digest
from vit_ray.checkpoints.checkpoint_format import PartialCheckpointError
from vit_ray.checkpoints.run_checkpoints import checkpoint_of_step, list_checkpoints
from vit_ray.launch.dataset import SeenBatches
from vit_ray.launch.named_run import find_run
from vit_ray.storage import locate


def verify_run(source: str) -> int:
    """Check all checkpoints of a run and print the findings; returns 1 if anything is wrong.

    Raises:
        ValueError: as `find_run`.
    """
    run, num_problems = find_run(source), 0
    batches, size = SeenBatches(run.resolved), run.recipe.train.global_batch_size
    planned = cache(lambda k: samples_digest(k * size, batches.planned(k)))
    decoded = cache(lambda k: samples_digest(k * size, batches.batch(k)["sample"]))
    for step, folder in reversed(list_checkpoints(locate(run.recipe.run_folder))):
        try:
            checkpoint = checkpoint_of_step(folder, step)
            checkpoint.verify()
            found, problem = _checked(checkpoint.position.progress, planned, decoded), ""
        except PartialCheckpointError:
            print(f"step {step:,}: incomplete: still being written, or interrupted and never used")
            continue
        except (ValueError, OSError) as error:  # of the checkpoint, or of the shards
            found, problem = "", str(error)
        num_problems += bool(problem)
        print(f"step {step:,}: {problem or f'files whole; {found}'}")
    return 1 if num_problems else 0


def _checked(
    progress: Progress, planned: Callable[[int], int], decoded: Callable[[int], int]
) -> str:
    """What was found right about the samples of a checkpoint.

    Args:
        planned: the digest of a step's samples by the order alone.
        decoded: the same after images that cannot be decoded are replaced.

    Raises:
        ValueError: they do not follow the order, or that cannot be decided; or, as OSError,
            images cannot be read.
    """
    if not progress.samples_digest:
        return "no digest of samples"
    steps = range(progress.digest_from, progress.step)
    text = f"steps {progress.digest_from:,} to {progress.step - 1:,}"
    received = int(progress.samples_digest, 16)
    if add_digests(*map(planned, steps)) == received:
        return f"samples of {text} in the planned order"
    print(f"decodes the images of {text}: undecodable ones may be replaced", file=sys.stderr)
    if add_digests(*map(decoded, steps)) == received:
        return f"samples of {text} in the planned order, with neighbours for undecodable images"
    raise ValueError(f"the samples of {text} differ from the planned order; this is a defect")
