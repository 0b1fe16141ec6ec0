"""Which of a run's checkpoints counts, and that nothing else is ever deleted."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.written import (
    SHAPES,
    WEIGHTS_0,
    WEIGHTS_1,
    flip,
    position,
    read_names,
    snapshot_of,
    snapshots,
    values,
    write_checkpoint,
    write_snapshots,
)
from vit_ray.checkpoints import run_checkpoints
from vit_ray.checkpoints.checkpoint import (
    PROGRESS,
    Checkpoint,
    Progress,
    folder_name,
    open_checkpoint,
    read_checkpoint,
    write_note,
)
from vit_ray.checkpoints.checkpoint_format import COMMIT, DamagedCheckpointError
from vit_ray.checkpoints.run_checkpoints import (
    begin_training,
    checkpoint_to_resume,
    find_weights,
    give_up_checkpoints,
    list_checkpoints,
    newest_checkpoint,
    prune,
    read_weights,
)
from vit_ray.storage import Location


def names(run: Location) -> list[str]:
    return sorted(path.name for path in Path(run.path).iterdir())


def contents(folder: Location) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder.path).iterdir()}


def all_contents(run: Location) -> dict[str, dict[str, bytes]]:
    return {name: contents(run.child(name)) for name in names(run)}


def stays_none(step: int) -> bool:
    return False


def is_any(step: int) -> bool:
    return True


def damage(path: Path, accident: str, rng: random.Random) -> None:
    """Of a file, or of the folder of a checkpoint in which it lies."""
    folder, content = path.parent, path.read_bytes()
    if accident == "delete":
        path.unlink()
    elif accident == "cut":
        path.write_bytes(content[: rng.randrange(len(content) or 1)])
    elif accident == "flip" and content:
        flipped = bytearray(content)
        flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
    elif accident == "copy":
        name = f"weights-{rng.randrange(9):05d}-of-0000{rng.randrange(9)}.safetensors"
        (folder / name).write_bytes(content)
    elif accident == "swap":
        other = rng.choice(sorted(folder.iterdir()))
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif accident == "everything":
        shutil.rmtree(folder)
        folder.mkdir()
    elif accident == "rename":
        folder.rename(folder.parent / folder_name(7))
    else:
        (folder / rng.choice(["rest-x.json", ".nfs0001", "commit.json.bak"])).write_bytes(content)


# Damage that the marker, or its absence, shows.
LOSSES = [
    ("delete", COMMIT),
    ("delete", WEIGHTS_0),
    ("flip", COMMIT),
    ("cut", WEIGHTS_0),
    ("everything", COMMIT),
    ("rename", COMMIT),
]


@pytest.mark.parametrize(("accident", "name"), LOSSES)
def test_a_bad_one_is_passed_over_with_one_warning_and_given_up_only_on_request(
    run, accident, name
):
    write_checkpoint(run, 1)
    damage(Path(write_checkpoint(run, 2).path) / name, accident, random.Random(0))
    before, warnings = all_contents(run), list[str]()
    found = checkpoint_to_resume(run, warnings.append)
    assert found.position.step == 1
    (text,) = warnings
    (bad,) = (folder for step, folder in list_checkpoints(run) if step > 1)
    assert bad.path in text
    found.folder.delete()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Nothing was changed\. Restore one"):
            checkpoint_to_resume(run)
    del before[folder_name(1)]
    assert all_contents(run) == before
    give_up_checkpoints(run, print)  # resume=from_zero
    begin_training(run)
    assert checkpoint_to_resume(run) is None
    # What was given up is never deleted, unless nothing of it is whole.
    for step in (8, 9, 10):
        write_checkpoint(run, step)
    prune(run, is_any, keep_last=2, stays=stays_none)
    assert folder_name(8) not in names(run)
    assert accident == "everything" or Path(bad.path).name in names(run)


def test_no_run_starts_over_beside_a_good_checkpoint_and_one_damaged_inside_is_given_up(run):
    """Only reading it shows that; else workers would try it at each start."""
    write_checkpoint(run, 1)
    flip(write_checkpoint(run, 2))
    with pytest.raises(ValueError, match=r"can be used \(step 1\)"):
        give_up_checkpoints(run, print)
    assert [open_checkpoint(folder) is None for _, folder in list_checkpoints(run)] == [False] * 2
    flip(run.child(folder_name(1)))
    warnings: list[str] = []
    give_up_checkpoints(run, warnings.append)
    begin_training(run)
    given_up = "its bytes do not match its checksum; given up"
    assert [given_up in text for text in warnings] == [True] * 2
    assert checkpoint_to_resume(run) is None
    assert Path(run.path, folder_name(1), f"{COMMIT}.damaged").exists()  # its marker is kept


def test_a_run_whose_checkpoints_have_all_gone_does_not_start_at_step_0(run):
    """As by a bucket's lifecycle rule, or by hand."""
    folder = write_checkpoint(run, 1)
    write_note(run, checkpoint=read_checkpoint(folder).sha256)
    folder.delete()
    with pytest.raises(ValueError, match="their folders are gone"):
        checkpoint_to_resume(run)
    run.child(PROGRESS).write(b"changed")
    with pytest.raises(ValueError, match="their folders are gone"):
        checkpoint_to_resume(run)


def test_a_run_killed_in_its_first_save_starts_again_unless_that_was_committed(run):
    training = begin_training(run)
    folder = write_checkpoint(run, 1, ranks=1)
    warnings: list[str] = []
    assert checkpoint_to_resume(run, warnings.append) is None
    assert folder.path in warnings[0]
    assert begin_training(run) == training
    flip(write_checkpoint(run, 1), COMMIT)  # and the run was killed before its note
    with pytest.raises(ValueError, match="was changed; passed over"):
        checkpoint_to_resume(run)


def test_the_newest_whose_marker_is_shown_late_is_taken(run, monkeypatch):
    """By a network disk; an older one without a marker has none."""
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    plain, looks = Location.list_files, list[str]()

    def shows_late(place: Location, *, recursive: bool = True) -> list[Any]:
        looks.append(place.path)
        found = list(plain(place, recursive=recursive))
        if looks.count(newest.path) == 1:
            return [info for info in found if info.base_name != COMMIT]
        return found

    monkeypatch.setattr(Location, "list_files", shows_late)
    warnings: list[str] = []
    found = checkpoint_to_resume(run, warnings.append)
    assert (found.position.step, warnings) == (2, [])


def test_who_reads_an_active_run_takes_the_checkpoint_that_has_replaced_the_listed_ones(
    run, monkeypatch
):
    write_checkpoint(run, 1)
    write_checkpoint(run, 2, ranks=1)
    read = run_checkpoints.read_checkpoint

    def read_slowly(folder: Location) -> Checkpoint:
        if folder.path.endswith("step-00000001"):
            monkeypatch.setattr(run_checkpoints, "read_checkpoint", read)
            write_checkpoint(run, 3)
            prune(run, is_any, keep_last=1, stays=stays_none)
        return read(folder)

    monkeypatch.setattr(run_checkpoints, "read_checkpoint", read_slowly)
    warnings: list[str] = []
    found = newest_checkpoint(run, warnings.append)
    assert (found.position.step, warnings) == (3, [])


def test_storage_that_stays_away_decides_nothing(run, monkeypatch):
    write_checkpoint(run, 1)
    newest = write_checkpoint(run, 2)
    plain = Location.read_range

    def away(self: Location, offset: int, length: int | None = None) -> bytes:
        if self.path.startswith(newest.path):
            raise OSError("Input/output error")
        return plain(self, offset, length)

    monkeypatch.setattr(Location, "read_range", away)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint_to_resume(run)


def test_pruning_keeps_the_newest_whole_ones_the_permanent_and_what_was_given_up(run):
    """What a kill has left of a save or of a deletion goes once newer ones are whole."""
    write_checkpoint(run, 1, ranks=1)
    write_checkpoint(run, 2).child(COMMIT).delete()
    Path(write_checkpoint(run, 3).child(COMMIT).path).rename(
        run.child(f"{folder_name(3)}/{COMMIT}.damaged").path
    )
    write_checkpoint(run, 4)
    write_checkpoint(run, 6, ranks=1)
    before = names(run)
    prune(run, is_any, keep_last=2, stays=stays_none)
    assert names(run) == before
    for step in (5, 7):
        write_checkpoint(run, step)
    prune(run, is_any, keep_last=2, stays=lambda step: step == 4)
    assert names(run) == [folder_name(step) for step in (3, 4, 5, 6, 7)]


class KilledError(BaseException):
    """A process ends here."""


def test_a_kill_in_the_middle_of_a_deletion_leaves_nothing_that_counts_or_stays(run, monkeypatch):
    def killed(place: Location) -> None:
        if Path(place.path).is_dir():
            raise KilledError
        Path(place.path).unlink()

    for step in (1, 2, 3):
        write_checkpoint(run, step)
    plain = Location.delete
    monkeypatch.setattr(Location, "delete", killed)
    with pytest.raises(KilledError):
        prune(run, is_any, keep_last=2, stays=stays_none)
    monkeypatch.setattr(Location, "delete", plain)
    assert open_checkpoint(run.child(folder_name(1))) is None
    assert newest_checkpoint(run, below=3).position.step == 2
    prune(run, is_any, keep_last=2, stays=stays_none)
    assert names(run) == [folder_name(step) for step in (2, 3)]


def test_weights_are_found_in_a_run_or_in_a_checkpoint(run):
    folder = write_checkpoint(run, 2)
    assert find_weights(run.path).position.step == 2
    assert find_weights(folder.path).position.step == 2
    Path(folder.path).rename(Path(run.path) / "mine")
    assert find_weights(f"{run.path}/mine").position.step == 2
    flip(run.child("mine"), COMMIT)
    Path(run.path, "empty").mkdir()
    for place, named in (("mine", "was changed"), ("empty", "no whole"), ("none", "not there")):
        with pytest.raises(ValueError, match=f"{place}.*{named}"):
            find_weights(f"{run.path}/{place}")


def write_best(run: Location, *, of: int) -> None:
    """Steps 2, 4 and 6, the last of which says which is the best."""
    for step in (2, 4, 6):
        folder = run.child(folder_name(step))
        where = replace(
            position(step), progress=Progress(step, metrics={"result/step": float(min(step, of))})
        )
        write_snapshots(folder, *(replace(one, position=where) for one in snapshots(step)))


@pytest.mark.parametrize("best", [2, 4, 6])
def test_a_run_that_keeps_its_best_hands_that_on(run, best):
    write_best(run, of=best)
    assert find_weights(run.path).position.step == best
    assert find_weights(run.child(folder_name(6)).path).position.step == 6
    newest = checkpoint_to_resume(run)
    assert newest.position.step == 6  # from which it goes on


@pytest.mark.parametrize("is_there", [True, False])
def test_a_best_that_cannot_be_used_is_never_replaced_by_another(run, is_there):
    write_best(run, of=4)
    folder = run.child(folder_name(4))
    flip(folder)
    with pytest.raises(DamagedCheckpointError, match="do not match its checksum"):
        read_weights(run.path, None)
    if is_there:
        flip(folder, COMMIT)
    else:
        shutil.rmtree(folder.path)
    why = "was changed" if is_there else "has no commit.json"
    with pytest.raises(ValueError, match=f"step-00000004, cannot be used: .*{why}"):
        find_weights(run.path)


def test_damaged_weights_give_way_to_those_of_the_next_older_checkpoint(run, caplog):
    """An export or a fine-tuning reads them; the folders stay as they are."""
    for step in (1, 2, 3):
        write_checkpoint(run, step)
    flip(run.child(folder_name(3)))
    flip(run.child(folder_name(2)), WEIGHTS_1)
    with pytest.raises(DamagedCheckpointError, match="do not match its checksum"):
        read_weights(run.child(folder_name(3)).path, None)  # which was chosen
    before = [contents(folder) for _, folder in list_checkpoints(run)]
    found, weights = read_weights(run.path, None)
    assert found.position.step == 1
    assert all(torch.equal(weights[k], values(1)[k].view(SHAPES[k])) for k in SHAPES)
    warnings = [record.getMessage() for record in caplog.records]
    assert [text.partition(": ")[0].partition(run.path)[2] for text in warnings] == [
        f"/{folder_name(3)}/{WEIGHTS_0}",
        f"/{folder_name(2)}/{WEIGHTS_1}",
    ]
    assert [contents(folder) for _, folder in list_checkpoints(run)] == before
    flip(run.child(folder_name(1)))
    with pytest.raises(ValueError, match="none is older than step 1"):
        read_weights(run.path, None)


def test_a_fine_tuning_reads_averages_alone_where_there_are_any(run, monkeypatch):
    tensors = {"weight|a|0": torch.zeros(12), "weight|b|0": torch.zeros(5)}
    tensors |= {key.replace("weight", "average"): tensors[key] + 3 for key in tensors}
    write_snapshots(run.child(folder_name(1)), snapshot_of(0, 1, tensors, position(1)))
    read = read_names(monkeypatch)
    for averaged, expected in ((None, 3.0), (True, 3.0), (False, 0.0)):
        read.clear()
        _, weights = read_weights(run.path, averaged)
        assert weights["b"].tolist() == [expected] * 5
        kind = "averages" if expected else "weights"
        assert [name for name in read if "safetensors" in name] == [
            f"{kind}-00000-of-00001-save.safetensors"
        ]


def resumed(run: Location) -> Checkpoint:
    """What ranks that read a part each go on from together."""
    below = None
    while True:
        found = checkpoint_to_resume(run, print, below)
        try:
            found.verify()
            return found
        except DamagedCheckpointError:
            below = found.position.step


@pytest.mark.slow(after=10)
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_folders_the_newest_good_one_is_resumed(run, seed):
    rng = random.Random(seed)
    steps = range(1, 5)
    for step in steps:
        write_checkpoint(run, step)
        for _ in range(rng.choice([0, 0, 1, 3])):
            path = rng.choice(sorted((Path(run.path) / folder_name(step)).iterdir()))
            damage(path, rng.choice(["delete", "cut", "flip", "copy", "swap", "stray"]), rng)
    good = [s for s in steps if is_as_written(run, s)]
    before = names(run)
    if not good:
        with pytest.raises(ValueError, match="none of them can be used"):
            resumed(run)
    else:
        found = resumed(run)
        assert found.position.step == max(good)
        expected, weights = values(max(good)), found.weights()
        assert all(torch.equal(weights[k], expected[k].view(SHAPES[k])) for k in SHAPES)
    assert names(run) == before


def is_as_written(run: Location, step: int) -> bool:
    """By comparing every file that a rank writes with a fresh copy."""
    fresh = contents(write_checkpoint(run.child("fresh"), step))
    shutil.rmtree(run.child("fresh").path)
    folder = Path(run.path) / folder_name(step)
    return all(
        (folder / name).is_file() and (folder / name).read_bytes() == content
        for name, content in fresh.items()
    )
