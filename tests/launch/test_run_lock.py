"""One driver at a time for a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vit_ray import lock
from vit_ray.launch.prepared_run import lock_run
from vit_ray.lock import check_lock, this_process
from vit_ray.storage import Location, locate

HOLD = """
import sys
from vit_ray import lock
from vit_ray.launch.prepared_run import lock_run
from vit_ray.storage import locate
lock.HEARTBEAT_S = 0.05
with lock_run(locate(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "runs" / "a"))


def test_a_second_driver_is_refused_with_what_to_do(run, monkeypatch):
    monkeypatch.setattr(lock, "RELEASE_S", 0.1)
    refusal = (
        r"run 'a' in .*/runs is in use by another driver: process \d+ of .* on .*; wait for it "
        "or stop it, or choose another name"
    )
    with lock_run(run) as number:
        with pytest.raises(ValueError, match=refusal), lock_run(run):
            pass
        check_lock(run, number)


def test_a_driver_whose_run_was_taken_ends(run):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, run.path]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as other:
        assert other.stderr is not None
        assert other.stdout.readline() == "held\n"
        owner = {**this_process(run), "host": "node-7"}
        run.child("lock-00000002.json").write(json.dumps(owner).encode())
        assert other.wait(30) == 1
        told = other.stderr.read()
    assert " on node-7 since " in told
    assert "; this process no longer writes there; this driver ends" in told
