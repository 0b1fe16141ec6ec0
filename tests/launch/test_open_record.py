"""How the record of a run ends, whatever ends the run; the recorder is a fake one."""

from typing import Any

import pytest
import ray

from tests.launch.test_recorded import _plan as described
from vit_ray.config import load_recipe
from vit_ray.launch import open_record as module
from vit_ray.launch.cluster import ClusterShape
from vit_ray.launch.open_record import OpenRecord, open_record
from vit_ray.launch.stopping import RunStoppedError
from vit_ray.tracking.run_status import RunOpening


class Recorder:
    """Answers at once, and remembers."""

    def __init__(self, finish: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.is_released = False
        self._finish = finish

    def __getattr__(self, name: str) -> Any:
        recorder = self

        class Method:
            @staticmethod
            def remote(*args: Any) -> Any:
                recorder.calls.append((name, *args))
                return recorder._finish if name == "finish" else None

        return Method

    def release(self) -> None:
        self.is_released = True

    def ended(self) -> list[Any]:
        return [args[0] for name, *args in self.calls if name == "finish"]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    made.openings = []

    def start(opening: RunOpening, node_id: str | None) -> Recorder:
        made.openings.append((opening, node_id))
        return made

    def answer(reference: Any, *_: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    monkeypatch.setattr(module, "start_recorder", start)
    monkeypatch.setattr(module, "answer", answer)
    return made


def opened(**options: Any) -> Any:
    recipe = load_recipe("digits", ["tracking.uri=sqlite:///x.db"])
    return open_record(recipe, "pretrain", described(), ClusterShape(1, 2, 0, 0.0), **options)


def test_work_that_is_done_is_finished_and_work_that_is_not_was_stopped(recorder: Recorder) -> None:
    with opened() as record:
        record.is_complete = True
    with opened():
        pass
    assert recorder.ended() == ["FINISHED", "KILLED"]
    assert recorder.is_released


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("no rate came to its end"), "FAILED"),
        (RunStoppedError("stopped"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
@pytest.mark.parametrize("is_complete", [False, True])
def test_an_error_ends_the_record_and_passes(
    recorder: Recorder, error: BaseException, status: str, is_complete: bool
) -> None:
    def work(record: OpenRecord) -> None:
        record.is_complete = is_complete
        raise error

    with pytest.raises(type(error)), opened() as record:
        work(record)
    assert recorder.ended() == [status]
    assert recorder.is_released


@pytest.mark.parametrize(
    "error", [RuntimeError("has not answered"), ray.exceptions.RayActorError()]
)
def test_the_result_stands_where_the_recorder_has_died(
    recorder: Recorder, error: Exception
) -> None:
    recorder._finish = error
    with opened() as record:
        record.is_complete = True
    assert recorder.is_released


def test_what_a_run_is_told_joins_what_every_run_has(recorder: Recorder) -> None:
    with opened(run_id="abc", tags={"a": "b"}, node_id="n1", resume_step=3):
        pass
    ((opening, node_id),) = recorder.openings
    assert (opening.run_id, opening.resume_step, node_id) == ("abc", 3, "n1")
    assert opening.tags["a"] == "b"
    assert opening.tags["vit_ray.data_fingerprint"] == "f" * 64
    assert opening.params["model.depth"] == "4"
    assert recorder.calls[0][:2] == ("text", "recipe.yaml")
