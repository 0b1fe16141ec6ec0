"""What a person sees of a run that works."""

import time

from vit_ray.launch import terminal as progress
from vit_ray.outcomes import EventKind
from vit_ray.tracking.run_state import Event, RunStatus


def test_a_log_has_each_event_once_and_the_time_left_by_the_steps_of_this_attempt(
    monkeypatch, capsys
):
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    now_s, status = [100.0], RunStatus(step=100, events=[Event(EventKind.RESUMED, "from step 100")])
    monkeypatch.setattr(progress.time, "monotonic", lambda: now_s[0])
    looks = []

    class Repeated:
        def __init__(self, update: object) -> None:
            looks.append(update)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(progress, "repeated", Repeated)
    record = type("Record", (), {"status": lambda self, limit_s: status})()
    with progress.shown_progress(record, "run", 1000):
        (look,) = looks
        look(False)
        for step, seconds in ((120, 10.0), (150, 15.0), (150, 10.0), (150, 55.0), (1000, 425.0)):
            status.step, now_s[0] = step, now_s[0] + seconds
            status.metrics |= {"train/loss": 2.5, "train/lr": 1e-3}
            look(False)
    assert capsys.readouterr().err.splitlines() == [
        "run: starting workers",
        "run: resumed: from step 100",
        "run: step 100/1000, ETA --:--",
        "run: step 120/1000, ETA 0:07:20, loss 2.500, lr 1.00e-03",  # 0.5 s a step
        "run: step 150/1000, ETA 0:07:05, loss 2.500, lr 1.00e-03",
        "run: step 150/1000, ETA 0:07:05, loss 2.500, lr 1.00e-03",
        "run: step 150/1000, no step for 0:01:05, loss 2.500, lr 1.00e-03",
        "run: step 1000/1000, ETA 0:00:00, loss 2.500, lr 1.00e-03",
    ]


def test_the_display_itself_ends_with_the_run(capsys):
    record = type("Record", (), {"status": lambda self, limit_s: RunStatus(step=3)})()
    with progress.shown_progress(record, "run", 4):
        time.sleep(0)
    assert capsys.readouterr().err.splitlines()[-1].startswith("run: step 3/4, ETA ")
