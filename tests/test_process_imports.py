"""What each kind of process imports, which is most of the time that a small job takes to start."""

import subprocess
import sys

import pytest

# Each takes a tenth of a second or more to import.
HEAVY = {
    "alembic", "botocore", "cv2", "deepspeed", "fastapi", "matplotlib", "mlflow", "pandas",
    "pyarrow", "ray", "ray.data", "ray.train", "ray.train.torch", "ray.tune", "rich", "s3fs",
    "scipy", "sklearn", "sqlalchemy", "tensorboardX", "torch", "transformers",
}  # fmt: skip

# A process imports what it unpickles: the modules of the functions and classes that it is sent.
RAY_DATA = {"ray", "ray.data", "pandas", "pyarrow"}
KINDS = {
    "the host of the recorders": (
        "import vit_ray.tracking.run_host, vit_ray.tracking.run_actor",
        {"ray", "mlflow", "pyarrow", "fastapi"},
    ),
    "a reading task": ("import vit_ray.data.stream.ray_datasets", RAY_DATA | {"cv2"}),
    "a lane's server": ("import vit_ray.launch.lane_server", RAY_DATA | {"cv2"}),
    "Ray Train's controller": ("import vit_ray.launch.ray_policies", RAY_DATA | {"ray.train"}),
    "a training worker": (
        "from vit_ray.train.engine import import_deepspeed\n"
        "import vit_ray.train.worker; import_deepspeed()",
        RAY_DATA | {"ray.train", "torch", "deepspeed"},
    ),
    "a trial's process": ("import ray.tune", RAY_DATA | {"ray.train", "ray.tune", "rich"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_imports_what_it_uses_and_no_more(kind: str) -> None:
    code, allowed = KINDS[kind]
    show = f"print(*[name for name in {sorted(HEAVY)!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{show}"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert imported <= allowed, imported - allowed
