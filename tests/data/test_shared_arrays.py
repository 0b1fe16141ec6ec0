"""Large arrays are one file that all processes of a host map; without Ray."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import multiprocessing
import resource
import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vit_ray.data import shared_arrays
from vit_ray.data.order import Order
from vit_ray.data.selection import RowSelection
from vit_ray.data.shared_arrays import LEAST_BYTES, Int64Array, shared_array

ROWS = np.arange(300_000, dtype=np.int32) % 3 + 1
"""Of so many row groups that their order is shared."""
POSITIONS = np.arange(0, 2 * int(ROWS.sum()), 997)
COUNT = LEAST_BYTES // 8
COUNTS = np.arange(5)
NUMBERS = np.arange(COUNT, dtype=np.int64)


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's folder for temporary files is the test's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared_arrays._warn_once.cache_clear()


def names(tmp_path: Path) -> set[str]:
    """Of all files."""
    return {path.name for path in tmp_path.glob("*/*")}


def numbers(factor: int = 1) -> Int64Array:
    """Numbers under a key of their own."""
    return shared_array((factor,), COUNTS, (COUNT,), lambda: factor * NUMBERS)


def order_digest(order: Order) -> str:
    """Of some places of two epochs."""
    places = order.places(POSITIONS)
    columns = (places.epochs, places.groups, places.rows)
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


def mapped_kib(folder: str) -> dict[str, int]:
    """What this process maps of a folder's files, by the kind of memory."""
    found: dict[str, int] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_inside = rest[-1].startswith(folder) if rest else False
        elif is_inside and rest[-1] == "kB":
            found[name[:-1]] = found.get(name[:-1], 0) + int(rest[0])
    return found


def read_order(folder: str, both: Any, answers: Any) -> None:
    """In a process of its own: the digest of the order, and the memory that it takes."""
    tempfile.tempdir = folder
    order = Order(ROWS, seed=7)
    digest = order_digest(order)
    both.wait(60)
    answers.put((digest, mapped_kib(folder)))
    both.wait(60)


def test_two_processes_have_one_order_in_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("spawn")
    both, answers = context.Barrier(2), context.Queue()
    readers = [
        context.Process(target=read_order, args=(str(tmp_path), both, answers)) for _ in range(2)
    ]
    for reader in readers:
        reader.start()
    found = [answers.get(timeout=60) for _ in readers]
    for reader in readers:
        reader.join(60)
    monkeypatch.setattr(shared_arrays, "LEAST_BYTES", 1 << 40)
    alone = order_digest(Order(ROWS, seed=7))
    for digest, kib in found:
        assert digest == alone
        # The orders of two epochs: a row group's number and its first position, 8 bytes each.
        # The kernel may have taken some pages from one of the processes, on a busy machine.
        assert kib["Rss"] >= 2 * 2 * 8 * len(ROWS) / 1024 / 2
        assert kib["Private_Clean"] + kib["Private_Dirty"] <= kib["Rss"] / 4
        assert kib["Pss"] <= 0.75 * kib["Rss"]


@pytest.mark.parametrize("rows", [ROWS, ROWS.astype(np.int64), ROWS[::-1]])
def test_no_order_is_taken_for_another(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compared with the one that a process computes for itself."""

    def digests() -> list[str]:
        orders = [Order(rows, seed=3), Order(rows, seed=4), Order(rows, 3, is_shuffled=False)]
        return [order_digest(order) for order in orders]

    shared = digests()
    assert digests() == shared  # now from the files
    monkeypatch.setattr(shared_arrays, "LEAST_BYTES", 1 << 40)
    assert digests() == shared
    assert len(set(shared)) == 3


def test_shares_of_two_data_sets_and_seeds_are_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def masks() -> list[bytes]:
        found = []
        for rows, seed in ((ROWS, 1), (ROWS, 2), (ROWS[::-1], 1)):
            total = int(rows.sum())
            one: Any = SimpleManifest(rows)
            selection = RowSelection(seed, 0, total // 3, total)
            found.append(selection.mask(one, np.arange(0, total, 101)).tobytes())
        return found

    monkeypatch.setattr(shared_arrays, "LEAST_BYTES", 1)
    shared = masks()
    assert masks() == shared
    monkeypatch.setattr(shared_arrays, "LEAST_BYTES", 1 << 40)
    assert masks() == shared
    assert len(set(shared)) == 3


class SimpleManifest(SimpleNamespace):
    """As much of one as a selection reads."""

    def __init__(self, rows: Any) -> None:
        firsts = np.concatenate([[0], np.cumsum(rows)])
        super().__init__(rows=rows, first_samples=firsts, num_row_groups=len(rows))

    __hash__ = object.__hash__


def test_of_many_that_start_together_one_computes_it() -> None:
    together, computed = threading.Barrier(8), list[int]()

    def make() -> Int64Array:
        computed.append(1)
        return NUMBERS

    def read(_: int) -> Int64Array:
        together.wait(30)
        return shared_array((0,), COUNTS, (COUNT,), make)

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(read, range(8)):
            np.testing.assert_array_equal(found, NUMBERS)
    assert len(computed) == 1


def test_what_is_shared_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        numbers()[0] = 1


def test_a_small_array_is_no_file(tmp_path: Path) -> None:
    shared_array((0,), COUNTS, (COUNT - 1,), lambda: NUMBERS[1:])
    assert not list(tmp_path.iterdir())


def test_files_that_no_process_maps_are_deleted_and_no_others(tmp_path: Path) -> None:
    kept, dropped = numbers(1), numbers(2)
    (own,) = tmp_path.iterdir()
    mine = {"notes.txt", "a" * 63, "0" * 65}
    for name in mine:
        (own / name).touch()
    written = names(tmp_path)
    del dropped
    found = numbers(3)
    assert len(written - names(tmp_path)) == 1
    assert mine < names(tmp_path)
    assert len(names(tmp_path)) == len(mine) + 2
    np.testing.assert_array_equal(numbers(2), 2 * NUMBERS)
    np.testing.assert_array_equal(kept, NUMBERS)
    np.testing.assert_array_equal(found, 3 * NUMBERS)


def test_what_no_process_maps_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        taken = sum(file.stat().st_size for file in Path(folder).iterdir())
        return SimpleNamespace(free=3 * LEAST_BYTES - taken)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    numbers(1)
    np.testing.assert_array_equal(numbers(2), 2 * NUMBERS)
    assert not caplog.messages
    assert len(names(tmp_path)) == 1


def test_another_version_of_the_functions_is_not_given_an_old_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = numbers(1)
    monkeypatch.setattr(shared_arrays, "_VERSION", shared_arrays._VERSION + 1)
    new = shared_array((1,), COUNTS, (COUNT,), lambda: 7 * NUMBERS)
    np.testing.assert_array_equal(old, NUMBERS)
    np.testing.assert_array_equal(new, 7 * NUMBERS)


@pytest.mark.parametrize("cut", [0, 1, 4096, 8 * COUNT, 8 * COUNT + 3])
def test_what_a_killed_process_has_left_is_written_again(tmp_path: Path, cut: int) -> None:
    numbers()
    (file,) = tmp_path.glob("*/*")
    whole = file.read_bytes()
    file.write_bytes(whole[:cut])
    np.testing.assert_array_equal(numbers(), NUMBERS)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("at", [0, 8 * COUNT // 2, 8 * COUNT - 1, 8 * COUNT])
def test_a_damaged_file_is_written_again(tmp_path: Path, at: int) -> None:
    numbers()
    (file,) = tmp_path.glob("*/*")
    whole = file.read_bytes()
    with file.open("r+b") as changed:
        changed.seek(at)
        changed.write(bytes([whole[at] ^ 1]))
    np.testing.assert_array_equal(numbers(), NUMBERS)
    assert file.read_bytes() == whole


@pytest.mark.parametrize("does", ["deletes", "writes"])
def test_a_file_that_another_process_changes_before_the_lock_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    numbers()
    (path,) = tmp_path.glob("*/*")
    whole, made, lock = path.read_bytes(), list[int](), fcntl.flock
    path.unlink()

    def change_first(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        if does == "deletes":
            path.unlink()
        else:
            path.write_bytes(whole)
        lock(file, operation)

    def make() -> Int64Array:
        made.append(1)
        return NUMBERS

    monkeypatch.setattr(fcntl, "flock", change_first)
    found = shared_array((1,), COUNTS, (COUNT,), make)
    np.testing.assert_array_equal(found, NUMBERS)
    assert path.read_bytes() == whole
    assert len(made) == (does == "deletes")


def expect_own(caplog: pytest.LogCaptureFixture, reason: str, tmp_path: Path) -> None:
    """Both arrays are right and made once, no file is left, and the reason is said once."""
    made = list[int]()

    def make(factor: int) -> Int64Array:
        made.append(factor)
        return factor * NUMBERS

    with caplog.at_level(logging.WARNING):
        for factor in (1, 2):
            found = shared_array((factor,), COUNTS, (COUNT,), partial(make, factor))
            np.testing.assert_array_equal(found, factor * NUMBERS)
    assert made == [1, 2]
    (said,) = caplog.messages
    assert said.startswith("the order of the data set is not shared between processes: ")
    assert reason in said
    assert not [file for file in tmp_path.glob("*/*") if file.stat().st_size]


def test_a_host_without_room_keeps_own_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = SimpleNamespace(free=2 * LEAST_BYTES - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    expect_own(caplog, "has no room for 4 MiB", tmp_path)


def test_a_disk_that_fills_up_meanwhile_keeps_nothing_of_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LEAST_BYTES // 2, before[1]))
    try:
        expect_own(caplog, "File too large", tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("kind", ["open to others", "a link", "a file"])
def test_a_folder_that_another_user_may_have_made_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    numbers()
    (own,) = tmp_path.iterdir()
    shutil.rmtree(own)
    if kind == "open to others":
        own.mkdir()
        own.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "other").mkdir(mode=0o700)
        own.symlink_to(tmp_path / "other")
    else:
        own.touch()
    reason = "File exists" if kind == "a file" else "is not this user's alone"
    expect_own(caplog, reason, tmp_path)


def test_a_writer_that_hangs_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_arrays, "WAIT_S", 0.1)
    kept = [numbers(factor) for factor in (1, 2)]
    paths = [*tmp_path.glob("*/*")]
    assert len(kept) == len(paths)
    with contextlib.ExitStack() as held:
        for path in paths:
            path.unlink()
            file = held.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        expect_own(caplog, "another process has not written it in 0.1 s", tmp_path)
