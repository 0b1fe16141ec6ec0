"""One process at a time for a folder."""

import contextlib
import errno
import functools
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from tests.data import s3_server
from vit_ray import lock
from vit_ray.lock import HeldError, Owner, check_lock, hold_lock, this_process
from vit_ray.outcomes import LockLostError
from vit_ray.storage import RIGHTS_PROBE, Location, locate

HOLD = """
import sys
from vit_ray.lock import hold_lock
from vit_ray.storage import locate
with hold_lock(locate(sys.argv[1]), print) as number:
    print(number, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return locate(str(tmp_path / "runs" / "a"))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"PATIENCE": 0.3, "RELEASE": 0.1, "POLL": 0.02, "HEARTBEAT": 0.05, "SETTLE": 2.0}
    for name, seconds in limits.items():
        monkeypatch.setattr(lock, f"{name}_S", seconds)


def is_held(folder: Location, match: str | None = None) -> bool:
    with pytest.raises(HeldError, match=match), hold_lock(folder, pytest.fail):
        pass
    return True


def elsewhere(folder: Location, number: int, **changes: object) -> Owner:
    """A lock file as another machine writes it."""
    owner = {**this_process(folder), "host": "node-7", **changes}
    folder.child(f"lock-{number:08d}.json").write(json.dumps(owner).encode())
    return owner


LIMIT_S = 60.0


def _ask(place: Callable[[int], str], rounds: int, together: Any, answers: Any) -> None:
    lock.RELEASE_S, lock.POLL_S = 0.02, 0.01
    lock.SETTLE_S = 2.0
    s3_server.forget_clients()
    for index in range(rounds):
        folder = locate(place(index))
        together.wait(LIMIT_S)
        try:
            with hold_lock(folder, lambda _: None) as number:
                answers.put((index, number))
                together.wait(LIMIT_S)  # until the other has been told
        except HeldError:
            answers.put((index, 0))
            together.wait(LIMIT_S)


def holders(place: Callable[[int], str], rounds: int) -> list[list[int]]:
    """Of each round what the two processes got: their numbers, 0 for a refusal; sorted.

    Args:
        place: a module's function: the folder of a round.
    """
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(2), context.Queue()
    asking = [
        context.Process(target=_ask, args=(place, rounds, together, answers)) for _ in range(2)
    ]
    for process in asking:
        process.start()
    got: list[list[int]] = [[] for _ in range(rounds)]
    for _ in range(2 * rounds):
        index, number = answers.get(timeout=LIMIT_S)
        got[index].append(number)
    for process in asking:
        process.join(LIMIT_S)
    return [sorted(numbers) for numbers in got]


def in_folder(root: str, index: int) -> str:
    return f"{root}/{index:03d}"


def after_one_that_died(root: str, index: int) -> str:
    """A folder whose holder has ended without letting go."""
    path = in_folder(root, index)
    dead = {**this_process(locate(path)), "process": 2**22 + 1, "started": "1"}
    locate(path).child("lock-00000001.json").write(json.dumps(dead).encode())
    return path


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("place", "number"), [(in_folder, 1), (after_one_that_died, 2)])
def test_of_two_that_start_together_one_holds(tmp_path, place, number):
    got = holders(functools.partial(place, str(tmp_path)), 200)  # type: ignore[arg-type]
    assert got == [[0, number]] * 200


@pytest.fixture(params=["conditional", "plain"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder in a store that heeds If-None-Match, or in one that ignores it."""
    (tmp_path / "locks").mkdir()
    is_conditional = request.param == "conditional"
    server = s3_server.serve_conditional_s3() if is_conditional else s3_server.serve_s3(tmp_path)
    with server as port, s3_server.this_process_uses(port, timeout_s=60):  # moto starts in seconds
        if is_conditional:
            s3_server.create_bucket("locks")
        yield "s3://locks/runs"


@pytest.mark.slow
def test_of_two_that_start_together_on_s3_one_holds(bucket):
    got = holders(functools.partial(in_folder, bucket), 50)
    assert [sum(number > 0 for number in numbers) for numbers in got] == [1] * 50


def test_on_s3_it_is_held_renewed_and_let_go(bucket, caplog, request):
    folder = locate(f"{bucket}/a")
    with hold_lock(folder, pytest.fail) as number:
        file = folder.child(f"lock-{number:08d}.json")
        first = file.read()
        while file.read() == first:
            time.sleep(0.02)
        assert is_held(folder, r"in use by process \d+ of .* on .* since ")
        check_lock(folder, number)
    with hold_lock(folder, pytest.fail) as next_number:
        assert next_number > number
    is_told = "this object store ignores If-None-Match" in caplog.text
    assert is_told == ("plain" in request.node.name)


def test_it_is_refused_while_a_process_holds_it_and_free_when_that_was_killed(folder):
    command = [sys.executable, "-c", HOLD, folder.path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout.readline() == "1\n"
        assert is_held(folder, f"process {other.pid} of .* on ")
        other.kill()
    with hold_lock(folder, pytest.fail) as number:
        assert number == 2
        assert [info.base_name for info in folder.list_files()] == ["lock-00000002.json"]
    with hold_lock(folder, pytest.fail) as number:
        assert number == 3  # no number is used twice


def test_a_process_with_the_number_of_a_dead_holder_is_not_the_holder(folder):
    elsewhere(folder, 1, host=platform.node(), process=os.getppid(), started="earlier")
    with hold_lock(folder, pytest.fail) as number:
        assert number == 2


def test_a_machine_that_is_silent_is_followed_and_cannot_come_back(folder, monkeypatch, caplog):
    elsewhere(folder, 4)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: elsewhere(folder, 4, heartbeat=1))
        assert is_held(folder, "on node-7")
    with hold_lock(folder, pytest.fail) as number:
        assert number == 5
        assert [m for m in caplog.messages if "node-7" in m and "waiting up to" in m]
        elsewhere(folder, 4, heartbeat=7)  # a renewal that was on its way
        check_lock(folder, number)
        with pytest.raises(LockLostError, match=r"taken over by process \d+ of .* on "):
            check_lock(folder, 4)


@pytest.mark.parametrize("number", [1, 2])
def test_a_holder_hears_of_one_that_has_taken_over_and_leaves_its_file(folder, number):
    """Number 1 too: a slow store may have let two of them in."""
    lost = SimpleQueue[str]()
    with hold_lock(folder, lost.put):
        for _ in range(20):  # a heartbeat that is under way may write over it
            theirs = elsewhere(folder, number)
            with contextlib.suppress(Empty):
                assert re.search("taken over by process .* on node-7", lost.get(timeout=0.5))
                break
    assert lost.empty()
    assert json.loads(folder.child(f"lock-{number:08d}.json").read()) == theirs


def test_what_cannot_be_renewed_is_told_once_and_kept(folder, monkeypatch, caplog):
    refused = threading.Semaphore(0)

    def refuse(self: Location, *_: object) -> None:
        refused.release()
        raise OSError(errno.EIO, "Input/output error")

    with hold_lock(folder, pytest.fail), monkeypatch.context() as patch:
        patch.setattr(Location, "write", refuse)
        for _ in range(3):
            assert refused.acquire(timeout=10)
    assert caplog.text.count("cannot be renewed") == 1


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": 1}', b"\xff"])
def test_a_file_that_is_half_written_is_watched_like_one_from_elsewhere(
    folder, content, monkeypatch
):
    folder.child("lock-00000001.json").write(content)
    waits: list[float] = []
    plain = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: waits.append(s) or plain(s))
    with hold_lock(folder, pytest.fail) as number:
        assert number == 2
    assert waits  # it was not followed at once


def test_one_that_let_go_is_followed_at_once_and_no_number_is_used_twice(folder, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE_S", 60.0)
    create, others = lock._create, iter([3])

    def late(place: Location, number: int, *rest: object) -> bool:
        for newer in others:  # while this one is slow, number 2 comes and goes, and 3 follows
            elsewhere(place, newer, is_released=True)
        return create(place, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(lock, "_create", late)
    elsewhere(folder, 1, is_released=True)
    with hold_lock(folder, pytest.fail) as number:
        assert number == 4
    assert [info.base_name for info in folder.list_files()] == ["lock-00000004.json"]


def test_a_storage_that_hangs_does_not_keep_a_process_that_lets_go(folder, monkeypatch, caplog):
    monkeypatch.setattr(lock, "RELEASE_LIMIT_S", 0.1)
    answers, hangs = threading.Event(), threading.Event()
    write = Location.write

    def hang(place: Location, *arguments: object) -> None:
        hangs.set()
        answers.wait(60)
        write(place, *arguments)  # type: ignore[arg-type]

    with hold_lock(folder, pytest.fail) as number:
        monkeypatch.setattr(Location, "write", hang)
        assert hangs.wait(60)
    assert "is left: its storage does not answer" in caplog.text
    (keeper,) = [thread for thread in threading.enumerate() if thread.name == "lock"]
    answers.set()
    keeper.join(60)
    # What was written late does not stand as a sign of life.
    left = json.loads(folder.child(f"lock-{number:08d}.json").read())
    assert left["is_released"]


def test_a_copied_lock_is_not_believed_and_a_moved_one_is(folder):
    copied, moved = (Path(folder.path).with_name(name) for name in ("copied", "moved"))
    with hold_lock(folder, pytest.fail):
        shutil.copytree(folder.path, copied)
        with hold_lock(locate(str(copied)), pytest.fail) as number:
            assert number == 2
        assert is_held(folder)
        os.rename(folder.path, moved)
        assert is_held(locate(str(moved)))


def test_a_process_is_not_refused_by_a_lock_that_a_full_disk_kept_it_from_releasing(
    folder, monkeypatch
):
    monkeypatch.setattr(lock, "RELEASE_S", 60.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, hold_lock(folder, pytest.fail):
        patch.setattr(Location, "write", full)
        lock_file = folder.child("lock-00000001.json").read()
    # The end of the block tried to release it while the disk was full.
    folder.child("lock-00000001.json").write(lock_file)
    with hold_lock(folder, pytest.fail) as number:
        assert number == 2


def test_what_a_kill_leaves_of_a_file_of_the_lock_is_the_locks_too(folder):
    killed = (
        f"import os\nfrom vit_ray.storage import locate\nos.replace = lambda *_: os._exit(9)\n"
        f"locate({folder.path!r}).child('lock-00000001.json').write(b'content')"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == 9
    (left,) = (file.name for file in Path(folder.path).iterdir())
    assert lock.is_lock_file(left)
    assert lock.is_lock_file(left.replace("lock-00000001.json", RIGHTS_PROBE))
    assert not lock.is_lock_file(left.replace("lock-00000001.json", "metrics.jsonl"))
