"""One Ray cluster for the whole session, a process of its own, and small real data sets on it."""

import contextlib
import ctypes
import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import foreign_settings  # noqa: F401

# Before Ray is imported anywhere: a token of this session's own, since its ports are open to the
# network, and no accelerator that DeepSpeed could mistake the machine for.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
os.environ.setdefault("DS_ACCELERATOR", "cpu")
# More threads cost more than they bring for tensors as small as those of tests, and wait for each
# other where a machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A thread that outlives its test, and with it the limits of `store_requests`, would try for
# minutes, and keep others from finding their runs.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
# The head's idle processes serve the next test; by default those beyond its CPUs end in a second.
os.environ["RAY_num_workers_soft_limit"] = "16"  # noqa: SIM112
# Ray starts a cluster at its first use (`ray.put`), for which nothing sets a limit: a test without
# `ray_head` fails instead. Ray reads this when it is imported.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
# Submitted jobs say `python`, as a person in an active environment does.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

import pytest
import ray

del os.environ["RAY_ENABLE_AUTO_CONNECT"]

from tests.data.converting import convert, in_this_process
from tests.net.cluster import free_ports
from tests.rerun import pytest_sessionfinish  # noqa: F401
from vit_ray.data.convert.digits import write_digits

ROOT = Path(__file__).parents[1]

# Under `nohup` it is ignored, which processes of tests would inherit: they would not hear it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow",
        choices=["no", "also", "only"],
        default="no",
        help="tests marked `slow`: leave them out, run them with the others, or run them alone",
    )


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select by `--slow`, then group the tests for the processes that share them.

    All that need Ray go to one process, which starts it. The others go file by file, since those
    of a file share what their fixtures compute.
    """
    chosen = config.getoption("slow")
    if chosen != "also":
        cases: Counter[str] = Counter()
        selected, deselected = [], []
        for item in items:
            mark, function = item.get_closest_marker("slow"), item.nodeid.split("[")[0]
            cases[function] += 1
            is_slow = mark is not None and cases[function] > mark.kwargs.get("after", 0)
            (selected if is_slow == (chosen == "only") else deselected).append(item)
        items[:] = selected
        config.hook.pytest_deselected(items=deselected)
    items.sort(key=lambda item: needs(item, "ray_head"))  # Ray is started once
    for item in items:
        group = "ray" if needs(item, "ray_head") else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: a quarter of the time went into collecting garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def needs(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ray ends after its last test: its idle processes take a third of a CPU (measured)."""
    yield
    if needs(item, "ray_head") and nextitem is not None and not needs(nextitem, "ray_head"):
        (head,) = item._fixtureinfo.name2fixturedefs["ray_head"]  # type: ignore[attr-defined]
        head.finish(item._request)  # type: ignore[attr-defined]


@pytest.fixture(scope="module", autouse=True)
def collection_of_new_objects_alone() -> None:
    """Compiled graphs leave millions of objects, at which every collection would look again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds those of the tests, and the home of the processes of `ray_head`."""
    folders = tmp_path_factory.mktemp("own")
    os.environ["HOME"] = tempfile.mkdtemp(prefix="home", dir=folders)
    return folders


@pytest.fixture(autouse=True)
def nothing_but_the_test(own_folders: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """An empty working directory, an empty home, and the environment that the session began with.

    So no test finds `quickstart/`, `runs/`, caches or settings, or what an earlier one has left;
    only a home is the cluster's where a test uses one.
    """
    before, folder = dict(os.environ), os.getcwd()
    os.chdir(tempfile.mkdtemp(prefix="cwd", dir=own_folders))
    if not needs(request.node, "ray_head"):
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home", dir=own_folders)
    yield
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def usual_settings(nothing_but_the_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No store of MLflow's (it sets its variable itself); damaged files are read again at once."""
    from vit_ray.checkpoints import checkpoint_format

    monkeypatch.setattr(checkpoint_format, "READ_AGAIN_S", 0.0)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def schema_made_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Copy MLflow's schema into each new SQLite file: making it takes more than a second."""
    utils = sys.modules.get("mlflow.store.db.utils")
    if utils is None or hasattr(utils, "make_schema"):
        return
    utils.make_schema = utils._initialize_tables
    first = tmp_path_factory.mktemp("schema") / "mlflow.db"

    def initialize(engine: Any) -> None:
        path = Path(engine.url.database or "")
        is_new = engine.dialect.name == "sqlite" and path.is_file() and path.stat().st_size == 0
        if is_new and first.exists():
            engine.dispose()
            shutil.copyfile(first, path)
        else:
            utils.make_schema(engine)
            if is_new:
                shutil.copyfile(path, first)

    utils._initialize_tables = initialize


_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclass(frozen=True)
class Head:
    address: str
    dashboard: str


@pytest.fixture(scope="session")
def ray_head() -> Iterator[Head]:
    """A head node with 4 logical CPUs and the job server."""
    # All its own: the agent of another cluster on this machine holds the usual ones.
    port, dashboard, client, agent, agent_grpc, metrics = free_ports(6)
    # Ray's sockets have names of at most 107 bytes, so the folder's must be short.
    folder = Path(tempfile.mkdtemp(prefix="vr", dir="/tmp"))
    command = [
        str(Path(sys.executable).parent / "ray"), "start", "--head", "--block",
        f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}",
        f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--metrics-export-port={metrics}",
        "--num-cpus=4", "--num-gpus=0", "--object-store-memory=600000000",
        f"--temp-dir={folder}", "--disable-usage-stats",
    ]  # fmt: skip
    environment = {**os.environ, "RAY_JOB_STOP_WAIT_TIME_S": "120"}  # as the cluster files have it
    with open(folder / "head.log", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, preexec_fn=_end_with_parent,
        )  # fmt: skip
        try:
            for opened in (port, dashboard, agent):  # the agent runs submitted jobs
                _wait_for(opened, process, folder / "head.log")
            yield Head(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}")
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)  # of up to 30 s in which Ray waits for its own processes
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    """A test session that is killed leaves no Ray behind that goes on working."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while True:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        is_late = process.poll() is not None or time.monotonic() > deadline
        assert not is_late, f"port {port} did not open: {log.read_text()[-3000:]}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def ray_cluster(ray_head: Head) -> Iterator[Head]:
    for attempt in range(3):  # a busy head may not know its own node at the first call
        try:
            ray.init(address=ray_head.address, log_to_driver=False, logging_level="ERROR")
            break
        except ConnectionError:
            if attempt == 2:
                raise
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray_head
    ray.shutdown()


@pytest.fixture(scope="session")
def working_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a job needs, which does not change while it is packed."""
    folder = tmp_path_factory.mktemp("working_dir")
    ignored = shutil.ignore_patterns("__pycache__")
    for part in ("vit_ray", "jobs"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    return folder


@dataclass(frozen=True)
class Digits:
    """The handwritten digits: as files, and converted."""

    images: Path
    train: str
    test: str


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """1,797 real images, 1,497 of them for training."""
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder / "images")
    with in_this_process():
        for split in ("train", "test"):
            convert(str(folder / "images" / split), str(folder / split), rows_per_row_group=32)
    return Digits(folder / "images", str(folder / "train"), str(folder / "test"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)
