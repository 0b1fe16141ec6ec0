"""Checks of what a training needs: the machine that starts it, storage, Ray and MLflow.

Each check runs alone, so that one command reports all faults before any GPU is paid for. The checks
leave no files.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from vit_ray.addresses import redact, sqlite_file
from vit_ray.config import Recipe
from vit_ray.storage import locate

# GiB of /dev/shm, where Ray keeps waiting batches; without space Ray writes them to a disk.
LEAST_SHARED_GIB: Final = 1.0
# Open files per process; Ray on a busy node has thousands of sockets.
LEAST_FILES: Final = 4096


def run_doctor(recipe: Recipe) -> int:
    """Print the result of each check; exit code 1 if one would keep a run from starting."""
    num_faults = 0
    for what, is_right, text in examine(recipe.with_absolute_paths()):
        num_faults += not is_right
        print(f"{'ok  ' if is_right else 'BAD '} {what:14} {text}", flush=True)
    return 1 if num_faults else 0


def examine(recipe: Recipe) -> Iterator[tuple[str, bool, str]]:
    """The result of each check: its name, whether it passed, and a text."""
    checks: dict[str, Callable[[Recipe], str]] = {
        "packages": _packages,
        "GPUs": _gpus,
        "shared memory": _shared_memory,
        "open files": _open_files,
        "Ray": _ray,
        "MLflow": _mlflow,
        "output": _output,
        "data.train": lambda _: _data_set(recipe.data.train),
        "data.eval": lambda _: _data_set(recipe.data.eval),
    }
    for what, check in checks.items():
        try:
            yield what, True, check(recipe)
        except Exception as error:  # after any error, the other checks must run too
            yield what, False, redact(str(error) or repr(error))


def _packages(_: Recipe) -> str:
    from vit_ray.ray_internals import VERSION

    versions = {name: metadata.version(name) for name in ("ray", "torch", "deepspeed", "mlflow")}
    if not versions["ray"].startswith(f"{VERSION}."):
        raise ValueError(
            f"ray is {versions['ray']}; install ray {VERSION}, which vit_ray is written for"
        )
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _gpus(recipe: Recipe) -> str:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not names and recipe.workers.use_gpu is True and not os.environ.get("RAY_ADDRESS"):
        raise ValueError("none here, with workers.use_gpu=true; set it to auto or false")
    return f"{len(names)} x {names[0]}" if names else "none on this machine"


def _shared_memory(_: Recipe) -> str:
    free_gib = shutil.disk_usage("/dev/shm").free / 2**30  # noqa: S108 - Ray's own place
    if free_gib < LEAST_SHARED_GIB:
        raise ValueError(
            f"{free_gib:.1f} GiB free in /dev/shm: give the container more (`--shm-size`, or an "
            "emptyDir of medium Memory)"
        )
    return f"{free_gib:.1f} GiB free in /dev/shm"


def _open_files(_: Recipe) -> str:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # Ray raises the soft limit to it
    if 0 <= hard < LEAST_FILES:  # -1 is no limit
        raise ValueError(f"{hard} at a time: raise the limit of the container")
    return f"{hard} at a time" if hard > 0 else "any number at a time"


def _ray(_: Recipe) -> str:
    from vit_ray.launch.connection import check_address

    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return "RAY_ADDRESS is not set: the command starts its own Ray here"
    check_address(address)
    return f"answers at {address}"


def _mlflow(recipe: Recipe) -> str:
    from vit_ray.tracking.mlflow_client import asking, refuse_deleted
    from vit_ray.tracking.store_requests import safe_uri

    uri = recipe.tracking.uri
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        if not os.access(_existing(file), os.W_OK):
            raise ValueError(f"{file} cannot be created; choose another tracking.uri")
        return f"{file} will be created"
    with asking(uri) as client:
        experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    if experiment is not None:
        refuse_deleted(experiment)
    return f"{safe_uri(uri)} answers"


def _output(recipe: Recipe) -> str:
    from vit_ray.launch.run import check_rights

    folder = locate(recipe.output)
    check_rights(locate(str(_existing(Path(folder.path)))) if folder.is_local else folder)
    return f"{folder.uri}: writing, reading, listing and deleting work"


def _existing(path: Path) -> Path:
    # The path, or the nearest folder above it that exists.
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def _data_set(path: str | None) -> str:
    from vit_ray.data import open_dataset

    if path is None:
        return "not set"
    manifest = open_dataset(path)
    return f"{manifest.num_images:,} images of {manifest.num_classes:,} classes in {manifest.path}"
