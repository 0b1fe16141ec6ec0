"""The Python interface, and what it and a run's processes import: most of a small job's start."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import vit_ray
from docs.reference_hook import api_names, api_page
from tests.conftest import ROOT, Digits

PAGE = ROOT / "docs" / "python.md"


def test_what_is_offered_is_the_rooms_own_and_is_on_the_reference_page():
    api = importlib.import_module("vit_ray.api")
    assert set(vit_ray.__all__) < set(api.__all__)
    assert set(api_names()) == set(api.__all__)
    page = api_page()
    for name, module in api_names().items():
        assert getattr(api, name) is getattr(importlib.import_module(module), name)
        assert f"\n::: {module}.{name}\n" in page, name
    for name in vit_ray.__all__:
        assert getattr(vit_ray, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = vit_ray.trian  # type: ignore[attr-defined]


@pytest.fixture
def quickstart_data(digits: Digits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digits where `make quickstart` puts them, in the current folder."""
    data = tmp_path / "quickstart" / "data"
    data.mkdir(parents=True)
    for split, path in (("train", digits.train), ("test", digits.test)):
        (data / split).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster", "quickstart_data")
def test_the_pages_python_trains_predicts_and_reads_the_batches_of_a_run():
    lines = PAGE.read_text().partition("## Custom parts")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", lines, re.DOTALL):
        exec(block, names)  # noqa: S102
    assert names["result"].steps == 120
    assert len(names["predictions"]) == 5
    assert names["logits"].shape == (1, 10)
    assert names["accuracy"] > 0.6  # 0.1 is chance


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
