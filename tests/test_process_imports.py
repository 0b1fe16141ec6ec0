"""What each kind of process imports, which is most of the time that a small job takes to start."""

import os
import subprocess
import sys

import pytest

VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
# Each takes a tenth of a second or more to import.
HEAVY = {
    "cv2", "deepspeed", "fastapi", "matplotlib", "mlflow", "pandas", "pyarrow", "ray", "ray.data",
    "ray.train", "ray.train.torch", "ray.tune", "rich", "s3fs", "scipy", "sklearn", "sqlalchemy",
    "tensorboardX", "torch", "torch._dynamo", "transformers",
}  # fmt: skip
# A process imports what it unpickles: the modules of the functions and classes that it is sent.
RAY_DATA = {"ray", "ray.data", "pandas", "pyarrow"}
DRIVER = RAY_DATA | {"cv2", "ray.train", "rich"}
KINDS = {
    "a recipe in Python": ("import vit_ray; vit_ray.load_recipe('digits')", set()),
    "a driver that starts workers": ("import vit_ray.launch.run, vit_ray.launch.workers", DRIVER),
    "a training worker": (
        "from vit_ray.training.engine import warm_up_process\n"
        "import vit_ray.worker.worker; warm_up_process()",
        RAY_DATA | {"ray.train", "torch", "deepspeed"},
    ),
    "the host of the recorders": (
        "import vit_ray.tracking.recorder, vit_ray.tracking.mlflow_run",
        {"ray", "mlflow", "pyarrow", "fastapi"},
    ),
    "a reading task or a stream server": (
        "import vit_ray.data.stream.ray_datasets, vit_ray.data.stream.stream_server",
        RAY_DATA | {"cv2"},
    ),
    "a dry run": ("import vit_ray.commands.dry_run", DRIVER | {"ray.tune", "torch"}),
}


def last_line(code: str, **variables: str) -> str:
    """What the code prints last in a process of its own, without the variables that are read."""
    own = {key: value for key, value in os.environ.items() if "DEDUP" not in key}
    own.pop(VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**own, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()[-1]


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_imports_what_it_uses_and_no_more(kind):
    code, allowed = KINDS[kind]
    show = f"print(*[name for name in {sorted(HEAVY)!r} if name in sys.modules])"
    assert set(last_line(f"import sys\n{code}\n{show}").split()) - allowed == set()


LINES = ["8 PYTHON worker processes have been started", "a worker died"]


@pytest.mark.parametrize(("logs", "printed"), [("0", LINES[1:]), ("1", LINES)])
def test_rays_warning_of_many_actors_is_printed_only_where_logs_are(logs, printed):
    code = (
        "import vit_ray.launch.connection; "
        "from ray._private.ray_logging import stdout_deduplicator as found; "
        f"print(found.deduplicate({{'ip': 'a', 'pid': 'raylet', 'lines': {LINES}}})[0]['lines'])"
    )
    assert last_line(code, VIT_RAY_LOGS=logs) == str(printed)


@pytest.mark.parametrize(("given", "is_on"), [({}, "False"), ({VARIABLE: "1"}, "True")])
def test_workers_have_the_drivers_environment_under_uv_run_unless_the_user_asks(given, is_on):
    """Ray reads its setting once, when it is imported (`ray_constants`, Ray 2.60)."""
    code = "import vit_ray.launch.connection; from ray._private import ray_constants as found; "
    assert last_line(f"{code} print(found.{VARIABLE})", **given) == is_on
