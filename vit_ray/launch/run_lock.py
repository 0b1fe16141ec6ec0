"""One driver at a time for a run, on any cluster: the lock of the run's folder."""

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from vit_ray.lock import HeldError, hold_lock
from vit_ray.storage import Location, UnavailableError


@contextmanager
def lock_run(folder: Location) -> Iterator[int]:
    """Hold the run in `folder` inside this block; yields the token for `check_lock`.

    The process ends if another driver has nevertheless taken the run.

    Raises:
        ValueError: another driver holds it.
        OSError: the folder cannot be written.
    """
    runs, _, name = folder.uri.rpartition("/")
    with contextlib.ExitStack() as held:
        try:
            number = held.enter_context(hold_lock(folder, _end_process))
        except HeldError as error:
            raise ValueError(
                f"run {name!r} in {runs} is in use by another driver: {error}; "
                "wait for it or stop it, or choose another name"
            ) from None
        except UnavailableError:
            raise
        except OSError as error:
            raise OSError(
                f"{folder.uri} cannot be written: {error}; choose another output, or check its "
                "access rights and free space"
            ) from error
        yield number


def _end_process(reason: str) -> None:
    """Two drivers of one run would mix their checkpoints; Ray ends this driver's workers."""
    print(f"error: {reason}; this driver ends", file=sys.stderr, flush=True)
    os._exit(1)
