"""The Python interface, and what it and a run's processes import: most of a small job's start."""

import importlib
import os
import re
import subprocess
import sys
from typing import Any

import pytest

import vit_ray
from docs.reference_hook import api_page
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "python.md"


def test_each_name_is_imported_on_use_and_is_on_the_reference_page():
    page = api_page()
    assert set(vit_ray.__all__) == set(vit_ray.MODULES)
    for name, module in vit_ray.MODULES.items():
        assert getattr(vit_ray, name) is getattr(importlib.import_module(module), name)
        assert f"\n::: {module}.{name}\n" in page, name
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = vit_ray.trian  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_pages_python_trains_predicts_and_reads_the_batches_of_a_run(
    digits, tmp_path, monkeypatch
):
    data = tmp_path / "quickstart" / "data"  # where `make quickstart` puts it
    data.mkdir(parents=True)
    for split in ("train", "test"):
        (data / split).symlink_to(getattr(digits, split))
    monkeypatch.chdir(tmp_path)
    lines = PAGE.read_text().partition("## Custom parts")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", lines, re.DOTALL):
        exec(block, names)  # noqa: S102
    assert names["result"].steps == 120
    assert len(names["predictions"]) == 5
    assert names["logits"].shape == (1, 10)
    assert names["accuracy"] > 0.6  # 0.1 is chance


VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
PLOTS = {"scipy", "matplotlib"}
# Code that a process begins with, and what would take it a tenth of a second or more to import.
UNUSED = {
    "import vit_ray; vit_ray.load_recipe('digits')": {"torch", "ray", "mlflow", "pyarrow", "numpy"},
    "import vit_ray.launch.run, vit_ray.launch.workers": {"torch", "mlflow", "ray.tune", *PLOTS},
    "import vit_ray.commands.plan": {"deepspeed", "mlflow", "transformers", "scipy"},
    "import vit_ray.data.stream.stream_server": {"torch", "deepspeed", "mlflow", "ray.train"},
    "import vit_ray.tracking.run_records, vit_ray.tracking.mlflow_run": {"torch", "pandas", *PLOTS},
    "import vit_ray.worker.worker": {
        "mlflow", "ray.tune", "cv2", "transformers", "torch._dynamo", *PLOTS,
    },
}  # fmt: skip


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
@pytest.mark.parametrize(("code", "unused"), UNUSED.items())
def test_a_process_imports_what_it_uses_and_no_more(code, unused):
    assert last_line(f"{code}\nimport sys\nprint({unused} & {{*sys.modules}})") == "set()"


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
