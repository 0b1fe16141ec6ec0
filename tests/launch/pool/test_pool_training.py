"""What becomes of a training when its pool ends, on pools that are fake: no Ray."""

import contextlib
import os
import pickle
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from tests.launch.pool.pools import CLUSTER, Pools
from tests.worker.fakes import make_job
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.pool import pool_training
from vit_ray.launch.pool import worker_pool as pool
from vit_ray.launch.pool.actor_calls import PROCESS_DIED
from vit_ray.launch.pool.group_callbacks import OwnEnvironment
from vit_ray.launch.pool.placement_wait import NoPlaceError, StoppedWaitingError
from vit_ray.launch.pool.pool_training import MOST_POOLS, RunFailedError
from vit_ray.launch.pool.worker_pool import (
    PoolEndedError,
    PoolLostError,
    PoolShape,
    driver_environment,
    pool_environment,
)
from vit_ray.launch.record.run_host import HostedRun, RunControl
from vit_ray.outcomes import Failure
from vit_ray.tracking.metrics_log import RunOpening


def test_a_training_whose_pool_is_lost_goes_on_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, PoolLostError("the streams' process has died"), None)
    pools.train(tmp_path)
    text = "the streams' process has died; training continues with new workers"
    assert pools.events == [("worker failed", text, 0)]


def test_pools_are_not_lost_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, *[PoolLostError("gone")] * MOST_POOLS)
    with pytest.raises(RunFailedError, match="gone"):
        pools.train(tmp_path)
    assert "4 such losses without a new checkpoint between them" in pools.events[-1][1]


def test_pools_lost_with_checkpoints_between_them_are_replaced_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, *[PoolLostError("gone")] * 3 * MOST_POOLS, None)
    steps = iter(range(0, 100, 10))
    newest = [step for step in steps for _ in range(MOST_POOLS - 1)]
    monkeypatch.setattr(pool_training, "newest_step", lambda _: newest.pop(0))
    pools.train(tmp_path)
    assert len(pools.events) == 3 * MOST_POOLS


def test_a_group_that_has_ended_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, PoolEndedError("worker 0: bad data"))
    with pytest.raises(RunFailedError, match="worker 0: bad data"):
        pools.train(tmp_path)


def test_a_stop_before_there_are_workers_is_no_failure_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, PoolLostError("gone"), StoppedWaitingError("SIGTERM"))
    pools.train(tmp_path)
    text = "SIGTERM; no workers were running, so no checkpoint was written"
    assert pools.events[-1] == ("stopped", text, 0)


def test_a_stop_does_not_hide_what_the_run_had_failed_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = Pools(monkeypatch, StoppedWaitingError("SIGTERM"))
    with pytest.raises(RunFailedError, match="disk full"):
        pools.train(tmp_path, failure=Failure("disk full"))
    assert pools.events == []


def test_a_file_of_mlflow_that_is_being_created_is_no_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Pools(monkeypatch, None).train(tmp_path, away_at="sqlite:////home/mlflow.db")
    note = "MLflow is still creating or opening sqlite:////home/mlflow.db; "
    assert capsys.readouterr().err.startswith(note)
    assert not caplog.records
    Pools(monkeypatch, None).train(tmp_path, away_at="http://user:secret@mlflow:5000")
    assert "mlflow:5000 does not answer; " in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (StoppedWaitingError("Ctrl-C"), "abandon"),  # its controller may wait for ten minutes
        (NoPlaceError("no GPU"), "abandon"),
        (PoolEndedError("bad data"), "close"),
        (KeyboardInterrupt(), "close"),
        (None, "close"),
    ],
)
def test_only_a_group_that_has_no_place_is_not_waited_for(
    error: BaseException | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    class FakePool:
        server = "server"

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def close(self) -> None:
            calls.append("close")

        def abandon(self) -> None:
            calls.append("abandon")

    monkeypatch.setattr(pool, "WorkerPool", FakePool)
    expected = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with expected, pool.open_pool(shape(), "/runs/a", is_private=True) as opened:
        assert opened.server == "server"
        if error is not None:
            raise error
    assert calls == [left]


@pytest.mark.parametrize(
    ("is_private", "dashboard", "keeps"),
    [(True, "0", False), (True, "1", True), (False, "0", True)],
)
def test_processes_of_reading_tasks_import_beside_the_server_where_ray_is_this_drivers(
    is_private: bool, dashboard: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 5 CPUs two workers take 2 x 1.5, and reading tasks 0.66 each of the rest."""
    started: list[Any] = []
    handle = SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "07"))
    options = SimpleNamespace(remote=lambda **how: started.append(how) or handle)
    actor = SimpleNamespace(options=lambda **_: options)
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "remote", lambda _: actor)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 5.0})
    taken_back: list[str] = []
    monkeypatch.setattr(pool, "remove_groups", taken_back.append)
    monkeypatch.setattr(pool, "start_beside_server", lambda tasks, cores: started.append(tasks))
    monkeypatch.setattr(pool, "start_data_actors", lambda: started.append("data actors"))
    monkeypatch.setattr(pool.WorkerPool, "_run_workers", lambda *_: None)
    monkeypatch.setenv("VIT_RAY_DASHBOARD", dashboard)
    opened = pool.WorkerPool(
        replace(shape(), num_workers=2, cpus_per_worker=1.5, reading_cpus=0.66),
        "/runs/a",
        is_private=is_private,
    )
    # Places that an earlier pool of this run holds, whose driver has died, are found by its name.
    assert [opened.name] == [f"{name}-07" for name in taken_back]
    how = {"keeps_statistics": keeps, "warms_up": not is_private, "cpus_per_rank": 1.5}
    assert started == [how, 3 if is_private else "data actors"]


DIED = [ray.exceptions.RayActorError(), ray.exceptions.OutOfMemoryError("the host has no memory")]


def raises(error: Exception) -> Any:
    """A method of an actor whose process has ended so."""

    def answered() -> None:
        raise error

    return SimpleNamespace(remote=lambda *_: answered)


def answers(value: Any) -> Any:
    """A method of an actor that answers."""
    return SimpleNamespace(remote=lambda *_: lambda: value)


def pool_with(monkeypatch: pytest.MonkeyPatch, **server: Any) -> pool.WorkerPool:
    """A pool whose controller lives and whose workers have no place."""
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference())
    monkeypatch.setattr(pool, "StreamSource", lambda *_: None)
    monkeypatch.setattr(ray, "put", lambda streams: None)
    methods = {name: answers(False) for name in ("assign", "wait_until_ended", "is_placed")}
    its = {**methods, "closed": answers((False, None)), **server}
    one = object.__new__(pool.WorkerPool)
    one.shape, one.server = shape(), SimpleNamespace(**its)
    return one


@pytest.mark.parametrize("method", ["assign", "wait_until_ended", "closed", "is_placed"])
@pytest.mark.parametrize("error", DIED)
def test_a_pool_is_lost_when_the_process_of_its_server_has_ended(
    error: Exception, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pool_with(monkeypatch, **{method: raises(error)})
    with pytest.raises(PoolLostError, match="process of the pool's server"):
        one.run(make_job(tmp_path), {})


@pytest.mark.parametrize(("error", "is_lost"), [*((e, True) for e in DIED), (OSError("x"), False)])
def test_a_pool_is_lost_when_the_process_of_its_controller_has_ended(
    error: Exception, is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pool_with(monkeypatch, closed=answers((True, error)))
    with pytest.raises(PoolEndedError) as raised:
        one.run(make_job(tmp_path), {})
    assert isinstance(raised.value, PoolLostError) == is_lost
    assert raised.value.__cause__ is error


@pytest.mark.parametrize("error", DIED)
def test_a_record_whose_process_has_ended_is_not_taken_for_a_lost_pool(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = RunOpening(TrackingConfig(), "run", tmp_path / "metrics.jsonl")
    host = SimpleNamespace(ask=raises(error))
    job = replace(make_job(tmp_path), control=RunControl(HostedRun(host, opening)))
    with pytest.raises(RuntimeError, match="the process of the run's record has died") as raised:
        pool_with(monkeypatch).run(job, {})
    assert not isinstance(raised.value, PoolEndedError)
    assert isinstance(raised.value, PROCESS_DIED)  # for those that go on without the record


class GivenUp:
    """The thread that minds a controller whose group is taken back: it may ask for it late."""

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self.now_s = 0.0

    def take_back(self, name: str) -> None:
        assert name == "pool-07"
        self._looks -= 1

    def is_alive(self) -> bool:
        return self._looks > 0

    def join(self, timeout_s: float) -> None:
        self.now_s += timeout_s


@pytest.mark.parametrize(
    ("leave", "looks", "takes_s"),
    [
        ("abandon", 0, 0.0),
        ("abandon", 1, 0.5),
        ("abandon", 5, 2.5),  # its controller asks for a place only then
        ("abandon", 10_000, pool.ABANDON_S),
        ("close", 0, pool.CLOSE_S),
        ("close", 1, pool.CLOSE_S + 0.5),
    ],
)
def test_what_a_group_holds_or_waits_for_is_taken_back_until_its_controller_ends(
    leave: str, looks: int, takes_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    thread = GivenUp(looks)
    one = object.__new__(pool.WorkerPool)
    one.name, one.server = "pool-07", SimpleNamespace(close=answers(None))
    one._thread = thread  # type: ignore[assignment]
    monkeypatch.setattr(ray, "get", lambda reference, timeout: reference())
    monkeypatch.setattr(pool, "remove_groups", thread.take_back)
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(pool, "time", SimpleNamespace(monotonic=lambda: thread.now_s))
    getattr(one, leave)()
    assert killed == [one.server]
    assert thread.now_s == takes_s


def test_ray_trains_own_notes_leave_no_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = pool._trainer(shape(), "pool-07", None, is_private=True).run_config
    carried = pickle.loads(pickle.dumps(config.storage_filesystem))  # to the controller
    context = replace(config, storage_filesystem=carried).storage_context  # which tries it
    assert context.experiment_fs_path == "pools/pool-07"
    assert list(tmp_path.iterdir()) == []


def shape(**sections: Any) -> PoolShape:
    job = make_job(Path("/x"), **sections)
    return PoolShape.of(job.recipe, CLUSTER, use_gpu=False)


def test_a_pools_time_outs_are_set_in_its_controller_and_in_no_other_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in pool_environment(shape()):
        monkeypatch.delenv(key, raising=False)
    before = dict(os.environ)
    first = pool_environment(shape(workers={"collective_timeout_s": 30}))
    second = pool_environment(shape(workers={"num_workers": [1, 2]}))
    assert not second.keys() & driver_environment(is_private=True).keys()
    assert second == {
        "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
    }
    # Two pools of one driver are prepared at once: none changes what the other will read.
    callbacks = [OwnEnvironment(variables) for variables in (first, second)]
    assert os.environ == before
    callbacks[0].after_controller_start(None)
    assert os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] == "30"
    assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "600"
    os.environ.clear()
    os.environ.update(before)


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_METRICS_ENABLED", "1")
    chosen = driver_environment(is_private=True)
    assert chosen["RAY_TRAIN_METRICS_ENABLED"] == "1"
    assert "PATH" not in chosen
