"""Which of a run's checkpoints counts, and that nothing else is ever deleted."""

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints.written import flip, snapshots, write_checkpoint, write_snapshot
from vit_ray.checkpoints import run_checkpoints
from vit_ray.checkpoints.checkpoint import (
    Checkpoint,
    folder_name,
    open_checkpoint,
    read_checkpoint,
)
from vit_ray.checkpoints.checkpoint_format import COMMIT
from vit_ray.checkpoints.run_checkpoints import (
    NEWEST,
    NONE_YET,
    NoUsableCheckpointError,
    begin_without_checkpoint,
    find_weights,
    list_checkpoints,
    newest_verified_checkpoint,
    note_newest,
    prune,
)
from vit_ray.storage import Location, locate


def names(run: Location) -> list[str]:
    return sorted(path.name for path in Path(run.path).iterdir())


def ignore(_: str) -> None:
    """Told about what these tests do not look at."""


def test_a_damaged_one_is_set_aside_whole_and_told_with_what_to_do(run: Location) -> None:
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    flip(newest)
    before = {p.name: p.read_bytes() for p in Path(newest.path).iterdir()}
    told: list[str] = []
    checkpoint = newest_verified_checkpoint(run, told.append)
    assert checkpoint is not None
    assert checkpoint.position.step == 1
    assert names(run) == ["step-00000001", "step-00000002.damaged"]
    aside = Path(run.path) / "step-00000002.damaged"
    assert {p.name: p.read_bytes() for p in aside.iterdir()} == before
    (text,) = told
    assert "rank-00000-of-00002.safetensors: its bytes do not match" in text
    assert f"set aside as {aside}" in text
    assert "Repair it and rename it back, or delete it" in text


def test_one_that_is_set_aside_and_repaired_counts_again(run: Location) -> None:
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    flip(newest)
    newest_verified_checkpoint(run, ignore)
    aside = locate(newest.path + ".damaged")
    flip(aside)
    Path(aside.path).rename(newest.path)
    checkpoint = newest_verified_checkpoint(run, ignore)
    assert checkpoint is not None
    assert checkpoint.position.step == 2


def test_a_second_one_of_the_same_step_is_set_aside_beside_the_first(run: Location) -> None:
    write_checkpoint(run, 1)
    for _ in range(3):
        flip(write_checkpoint(run, 2))
        newest_verified_checkpoint(run, ignore)
    assert names(run) == [
        "step-00000001",
        "step-00000002.damaged",
        "step-00000002~2.damaged",
        "step-00000002~3.damaged",
    ]


def test_who_only_reads_changes_nothing(run: Location) -> None:
    write_checkpoint(run, 1)
    flip(write_checkpoint(run, 2))
    assert find_weights(run.path).position.step == 1
    assert names(run) == ["step-00000001", "step-00000002"]


def test_who_reads_an_active_run_takes_the_checkpoint_that_has_replaced_the_listed_ones(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(run, 1)
    write_checkpoint(run, 2, ranks=1)
    read = run_checkpoints.read_checkpoint

    def read_slowly(folder: Location) -> Checkpoint:
        if folder.path.endswith("step-00000001"):
            monkeypatch.setattr(run_checkpoints, "read_checkpoint", read)
            write_checkpoint(run, 2)
            note_newest(run, 2)
            prune(run, keep_last=1)
        return read(folder)

    monkeypatch.setattr(run_checkpoints, "READ_AGAIN_S", 0.0)
    monkeypatch.setattr(run_checkpoints, "read_checkpoint", read_slowly)
    assert find_weights(run.path).position.step == 2
    assert names(run) == [NEWEST, "step-00000002"]


@pytest.mark.parametrize("lost", ["index", "marker", "tensors", "everything", "flipped"])
def test_a_run_with_checkpoints_and_none_usable_refuses_to_start_over(
    run: Location, lost: str
) -> None:
    folder = write_checkpoint(run, 1)
    path = Path(folder.path)
    if lost == "flipped":
        flip(folder)
    elif lost == "everything":
        shutil.rmtree(path)
        path.mkdir()
    else:
        name = {"index": "rank-00001-of-00002.json", "marker": COMMIT}
        (path / name.get(lost, "rank-00000-of-00002.safetensors")).unlink()
    left = sorted(p.name for p in path.iterdir())
    for _ in range(2):
        with pytest.raises(NoUsableCheckpointError, match=r"Nothing was changed\. Restore one"):
            newest_verified_checkpoint(run, ignore)
    assert sorted(p.name for p in path.iterdir()) == left


def test_one_that_is_only_set_aside_still_holds_the_run_from_starting_over(run: Location) -> None:
    flip(write_checkpoint(run, 1))
    Path(run.path, "step-00000001").rename(Path(run.path, "step-00000001.damaged"))
    with pytest.raises(NoUsableCheckpointError, match="all of them have been set aside before"):
        newest_verified_checkpoint(run, ignore)


def test_a_run_told_to_start_over_sets_everything_aside(run: Location) -> None:
    flip(write_checkpoint(run, 1))
    write_checkpoint(run, 2, ranks=1)
    told: list[str] = []
    begin_without_checkpoint(run, told.append)
    assert names(run) == [NONE_YET, "step-00000001.damaged", "step-00000002.damaged"]
    assert len(told) == 2
    assert newest_verified_checkpoint(run, ignore) is None


def test_no_run_starts_over_beside_a_good_checkpoint(run: Location) -> None:
    write_checkpoint(run, 1)
    with pytest.raises(ValueError, match="step-00000001 can be used"):
        begin_without_checkpoint(run, ignore)
    assert names(run) == ["step-00000001"]


def test_a_run_killed_in_its_first_save_starts_again_by_itself(run: Location) -> None:
    training = begin_without_checkpoint(run, ignore)
    assert begin_without_checkpoint(run, ignore) == training
    write_checkpoint(run, 1, ranks=1)
    told: list[str] = []
    assert newest_verified_checkpoint(run, told.append) is None
    assert names(run) == [NONE_YET, "step-00000001.damaged"]
    assert "holds the parts of 1 of 2 ranks" in told[0]


def test_a_read_that_fails_once_costs_no_checkpoint(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    plain, left = Location.read_range, [FileNotFoundError("gone?"), None]

    def flaky(self: Location, offset: int, length: int | None = None) -> bytes:
        error = left.pop(0) if left and self.path.startswith(newest.path) else None
        if error:
            raise error
        return plain(self, offset, length)

    monkeypatch.setattr(Location, "read_range", flaky)
    told: list[str] = []
    checkpoint = newest_verified_checkpoint(run, told.append)
    assert checkpoint is not None
    assert checkpoint.position.step == 2
    assert told == []


@pytest.mark.parametrize("error", [FileNotFoundError("gone?"), OSError("Input/output error")])
def test_storage_that_stays_away_decides_nothing(
    run: Location, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    plain = Location.read_range

    def away(self: Location, offset: int, length: int | None = None) -> bytes:
        if self.path.startswith(newest.path):
            raise error
        return plain(self, offset, length)

    monkeypatch.setattr(Location, "read_range", away)
    with pytest.raises(OSError, match=str(error)):
        newest_verified_checkpoint(run, ignore)
    assert names(run) == ["step-00000001", "step-00000002"]


def test_one_that_is_being_removed_is_not_called_damaged(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(run, 1)
    gone = write_checkpoint(run, 2)
    plain = Location.read_range

    def removed(self: Location, offset: int, length: int | None = None) -> bytes:
        if self.path.startswith(gone.path):
            gone.delete()
        return plain(self, offset, length)

    monkeypatch.setattr(Location, "read_range", removed)
    told: list[str] = []
    checkpoint = newest_verified_checkpoint(run, told.append)
    assert checkpoint is not None
    assert checkpoint.position.step == 1
    assert told == []


def test_pruning_keeps_the_newest_the_permanent_and_what_is_being_written(run: Location) -> None:
    for step in (1, 2, 3, 4):
        write_checkpoint(run, step)
    write_checkpoint(run, 5, ranks=1)
    assert prune(run, keep_last=2, keep={1}) == [2]
    assert names(run) == [folder_name(step) for step in (1, 3, 4, 5)]


def test_pruning_does_not_count_a_damaged_one(run: Location) -> None:
    for step in (1, 2, 3):
        write_checkpoint(run, step)
    flip(run.child(folder_name(3)))
    assert prune(run, keep_last=1) == [1]
    assert names(run) == ["step-00000002", "step-00000003"]


def test_pruning_sets_old_halves_aside(run: Location) -> None:
    write_checkpoint(run, 1, ranks=1)
    write_checkpoint(run, 2)
    told: list[str] = []
    assert prune(run, keep_last=1, warn=told.append) == []
    assert names(run) == ["step-00000001.damaged", "step-00000002"]
    assert "holds the parts of 1 of 2 ranks" in told[0]


class KilledError(BaseException):
    """A process ends here."""


@pytest.fixture
def half_deleted(run: Location, monkeypatch: pytest.MonkeyPatch) -> Location:
    """A run whose process was killed while it deleted the first of three checkpoints."""
    plain = Location.delete

    def deletes_half(place: Location) -> None:
        if Path(place.path).is_dir():
            for path in sorted(Path(place.path).iterdir())[1::2]:
                path.unlink()
            raise KilledError
        plain(place)

    for step in (1, 2, 3):
        write_checkpoint(run, step)
    monkeypatch.setattr(Location, "delete", deletes_half)
    with pytest.raises(KilledError):
        prune(run, keep_last=2)
    monkeypatch.setattr(Location, "delete", plain)
    assert len(list((Path(run.path) / folder_name(1)).iterdir())) == 3  # of 5
    return run


def test_what_a_crash_left_of_a_deletion_goes_with_the_next(half_deleted: Location) -> None:
    told: list[str] = []
    prune(half_deleted, keep_last=2, warn=told.append)
    assert names(half_deleted) == [folder_name(2), folder_name(3)]
    assert told == []


def test_what_a_crash_left_of_a_deletion_is_not_set_aside_by_the_next_start(
    half_deleted: Location,
) -> None:
    for step in (2, 3):
        shutil.rmtree(Path(half_deleted.path) / folder_name(step))
    told: list[str] = []
    with pytest.raises(NoUsableCheckpointError, match="none of them can be used"):
        newest_verified_checkpoint(half_deleted, told.append)
    begin_without_checkpoint(half_deleted, told.append)
    assert names(half_deleted) == [NONE_YET]
    assert told == []


def test_a_checkpoint_that_was_to_go_and_is_needed_again_stays(half_deleted: Location) -> None:
    """The newer ones are damaged, and no file of the old one was deleted yet."""
    shutil.rmtree(Path(half_deleted.path) / folder_name(1))
    write_checkpoint(half_deleted, 1)
    for step in (2, 3):
        flip(half_deleted.child(folder_name(step)))
    found = newest_verified_checkpoint(half_deleted, ignore)
    assert found is not None
    assert found.position.step == 1
    write_checkpoint(half_deleted, 2)
    prune(half_deleted, keep_last=2)
    assert folder_name(1) in names(half_deleted)
    assert not any("deleting" in name for name in names(half_deleted))


def test_of_saves_that_were_never_whole_the_last_two_stay_and_what_was_whole(run: Location) -> None:
    for step in range(1, 7):
        write_checkpoint(run, step, ranks=2 if step == 2 else 1)
    flip(run.child(folder_name(2)))
    write_checkpoint(run, 7)
    told: list[str] = []
    prune(run, keep_last=2, warn=told.append)
    aside = [f"{folder_name(step)}.damaged" for step in (2, 5, 6)]
    assert names(run) == [*aside, folder_name(7)]
    assert told[-1] == (
        "deleted 3 folders that were set aside and never whole (step-00000004.damaged, "
        "step-00000003.damaged, step-00000001.damaged); the last 2 stay, and what may have been "
        "whole: 3 folders"
    )
    prune(run, keep_last=2, warn=told.append)
    assert len(told) == 7


def test_a_save_in_which_rank_0_wrote_nothing_never_was_whole(run: Location) -> None:
    for step in range(1, 5):
        write_snapshot(snapshots(step)[1], run.child(folder_name(step)))
    write_checkpoint(run, 5)
    prune(run, keep_last=1, warn=ignore)
    assert names(run) == [*(f"{folder_name(step)}.damaged" for step in (3, 4)), folder_name(5)]


def test_a_checkpoint_whose_marker_was_lost_is_not_taken_for_one_that_never_was_whole(
    run: Location,
) -> None:
    for step in range(1, 6):
        write_checkpoint(run, step)
        (Path(run.path) / folder_name(step) / COMMIT).unlink()
    write_checkpoint(run, 6)
    prune(run, keep_last=1, warn=ignore)
    assert names(run) == [*(f"{folder_name(step)}.damaged" for step in range(1, 6)), folder_name(6)]


def test_the_note_of_a_deletion_goes_when_its_checkpoint_counts_again(
    half_deleted: Location,
) -> None:
    """Else what is left of it after a damage would be deleted."""
    first = half_deleted.child(folder_name(1))
    shutil.rmtree(first.path)
    write_checkpoint(half_deleted, 1)
    prune(half_deleted, keep_last=3)
    flip(first)
    prune(half_deleted, keep_last=3, warn=ignore)
    assert names(half_deleted) == ["step-00000001.damaged", "step-00000002", "step-00000003"]


def test_weights_are_found_in_a_run_or_in_a_checkpoint(run: Location) -> None:
    folder = write_checkpoint(run, 2)
    assert find_weights(run.path).position.step == 2
    assert find_weights(folder.path).position.step == 2
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        find_weights(f"{run.path}/nothing")


def write_best(run: Location, *, of: int) -> None:
    """Steps 2, 4 and 6, the last of which says which is the best."""
    for step in (2, 4, 6):
        folder = run.child(folder_name(step))
        for one in snapshots(step):
            progress = replace(one.position.progress, metrics={"result/step": float(min(step, of))})
            write_snapshot(replace(one, position=replace(one.position, progress=progress)), folder)


@pytest.mark.parametrize("best", [2, 4, 6])
def test_a_run_that_keeps_its_best_hands_that_on(run: Location, best: int) -> None:
    write_best(run, of=best)
    assert find_weights(run.path).position.step == best
    assert find_weights(run.child(folder_name(6)).path).position.step == 6
    newest = newest_verified_checkpoint(run)
    assert newest is not None
    assert newest.position.step == 6  # from which it goes on


@pytest.mark.parametrize("is_there", [True, False])
def test_a_best_that_cannot_be_used_is_never_replaced_by_another(
    run: Location, is_there: bool
) -> None:
    write_best(run, of=4)
    folder = run.child(folder_name(4))
    if is_there:
        flip(folder)
    else:
        shutil.rmtree(folder.path)
    why = "its bytes do not match" if is_there else "it is not there"
    with pytest.raises(ValueError, match=f"step-00000004, cannot be used: .*{why}"):
        find_weights(run.path)


def break_something(folder: Path, rng: random.Random) -> None:
    """One accident to a checkpoint's folder."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    path = rng.choice(paths)
    content = path.read_bytes()
    accident = rng.choice(["delete", "cut", "flip", "empty", "copy", "swap", "stray", "folder"])
    if accident == "delete":
        path.unlink()
    elif accident == "cut":
        path.write_bytes(content[: rng.randrange(len(content) + 1)])
    elif accident == "flip" and content:
        at = rng.randrange(len(content))
        path.write_bytes(
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        )
    elif accident == "empty":
        path.write_bytes(b"")
    elif accident == "copy":
        (folder / f"rank-{rng.randrange(9):05d}-of-0000{rng.randrange(9)}.json").write_bytes(
            content
        )
    elif accident == "swap":
        other = rng.choice(paths)
        other_content = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(other_content)
    elif accident == "stray":
        (folder / rng.choice(["rank-x.json", ".nfs0001", "commit.json.bak"])).write_bytes(content)
    else:
        (folder / "rank-00001-of-00002").mkdir(exist_ok=True)


@pytest.mark.slow(after=10)
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_folders_the_newest_good_one_is_opened_and_kept(
    run: Location, seed: int
) -> None:
    rng = random.Random(seed)
    steps = range(1, 5)
    for step in steps:
        write_checkpoint(run, step)
        for _ in range(rng.choice([0, 0, 1, 3])):
            break_something(Path(run.path) / folder_name(step), rng)
    good = [s for s in steps if is_as_written(run.child(folder_name(s)), s)]
    unusable = [s for s in steps if open_checkpoint(run.child(folder_name(s))) is None]
    for _ in range(2):
        told: list[str] = []
        try:
            checkpoint = newest_verified_checkpoint(run, told.append)
        except NoUsableCheckpointError:
            assert not good
            assert names(run) == [folder_name(step) for step in steps]
            return
        assert checkpoint is not None
        assert checkpoint.position.step == max(good)
        keep_last = rng.choice([1, 2])
        prune(run, keep_last, warn=told.append)
        left = [s for s, _ in list_checkpoints(run) if s in good]
        assert left == sorted(good, reverse=True)[:keep_last]
        kept = {name.partition("~")[0].removesuffix(".damaged") for name in names(run)}
        assert {folder_name(step) for step in unusable} <= kept
        good = left


def is_as_written(folder: Location, step: int) -> bool:
    """By comparing every file that a rank writes with a fresh copy."""
    fresh = write_checkpoint(locate(f"{folder.path}.fresh"), step)
    same = all(
        (Path(folder.path) / path.name).is_file()
        and (Path(folder.path) / path.name).read_bytes() == path.read_bytes()
        for path in Path(fresh.path).iterdir()
    )
    shutil.rmtree(f"{folder.path}.fresh")
    if same:
        read_checkpoint(folder).verify()
    return same


def test_a_note_of_no_checkpoint_that_was_left_behind_goes_when_one_is_found(run: Location) -> None:
    begin_without_checkpoint(run, ignore)
    only = write_checkpoint(run, 1)
    assert newest_verified_checkpoint(run, ignore) is not None
    flip(only)
    with pytest.raises(NoUsableCheckpointError):
        newest_verified_checkpoint(run, ignore)
