"""Checkpoints on disk: whole by their marker, read back, and nothing else in their place."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints.written import position, snapshots, values, write_checkpoint, write_snapshot
from tests.recipes import recipe_with
from vit_ray.checkpoints import checkpoint_format
from vit_ray.checkpoints.checkpoint import (
    Position,
    Progress,
    folder_name,
    read_checkpoint,
)
from vit_ray.checkpoints.checkpoint_format import (
    COMMIT,
    DamagedCheckpointError,
    PartialCheckpointError,
    file_of_rank,
)
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.storage import Location


def test_what_was_written_is_read_back_whole(run: Location) -> None:
    write_checkpoint(run, 3)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.position == position(3)
    checkpoint.verify()
    weights = checkpoint.weights()
    assert torch.equal(weights["a"], values(3)["a"].view(3, 4))
    assert torch.equal(weights["b"], values(3)["b"])
    assert not checkpoint.has_average()


def test_fragments_of_any_cut_are_filled(run: Location) -> None:
    write_checkpoint(run, 3)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    target = torch.zeros(6)
    checkpoint.fill([("weight", "a", 4, target)])
    assert target.tolist() == [7, 8, 9, 10, 11, 12]


def test_state_that_was_not_saved_is_an_error(run: Location) -> None:
    write_checkpoint(run, 3)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    target = torch.zeros(12)
    with pytest.raises(DamagedCheckpointError, match="12 elements of exp_avg"):
        checkpoint.fill([("weight", "a", 0, torch.zeros(12)), ("exp_avg", "a", 0, target)])


def files_of(folder: Location) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder.path).iterdir())}


def rewrite_index(folder: Location, rank: int, change: Callable[[dict], None]) -> None:
    """Change a rank's index, and the marker as if it had been committed so."""
    path = Path(folder.path) / f"rank-{rank:05d}-of-00002.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    marker = Path(folder.path) / COMMIT
    content = json.loads(marker.read_text())
    del content["sha256"]
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    content["files"][path.name] = {"bytes": path.stat().st_size, "sha256": sha256}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    marker.write_text(json.dumps(content, indent=1))


def test_the_marker_lists_every_file_with_its_size_and_checksum(run: Location) -> None:
    files = files_of(write_checkpoint(run, 1))
    content = json.loads(files.pop(COMMIT))
    assert content["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }


def test_it_is_no_checkpoint_until_the_last_rank_has_committed(run: Location) -> None:
    folder = run.child(folder_name(2))
    first, second = snapshots(2)
    assert not write_snapshot(second, folder)
    with pytest.raises(PartialCheckpointError, match="holds the parts of 1 of 2 ranks"):
        read_checkpoint(folder)

    def fail() -> None:
        assert COMMIT not in files_of(folder)
        raise OSError("killed between upload and commit")

    with pytest.raises(OSError, match="between upload and commit"):
        write_snapshot(first, folder, fail)
    with pytest.raises(PartialCheckpointError, match=r"has no commit\.json"):
        read_checkpoint(folder)
    assert write_snapshot(first, folder)
    assert read_checkpoint(folder).position.step == 2


@pytest.mark.parametrize("piece", [1, 8, 1 << 20])
@pytest.mark.parametrize("kept", [
    lambda content: content[:-1] + b"?",
    lambda content: b"?" + content[1:],
    lambda content: content[:-1],
    lambda content: content[:8],
    lambda content: b"",
    lambda content: content + b"?",
])  # fmt: skip
def test_what_cannot_be_read_back_is_not_committed(
    run: Location, monkeypatch: pytest.MonkeyPatch, kept: Callable[[bytes], bytes], piece: int
) -> None:
    """A disk that keeps other bytes than it was given: the rank leaves no index."""

    def keeps_others(place: Location, content: memoryview) -> str:
        place.write(kept(bytes(content)))
        return hashlib.sha256(content).hexdigest()

    monkeypatch.setattr(checkpoint_format, "_LOCAL_BYTES", piece)
    assert len(snapshots(2)[1].content) % 8 == 0  # the file ends where a piece does
    write_snapshot(snapshots(2)[1], run.child("kept as it was given"))
    monkeypatch.setattr(checkpoint_format, "_write_hashed", keeps_others)
    folder = run.child(folder_name(2))
    with pytest.raises(DamagedCheckpointError, match=r"00001-of-00002\.safetensors: its bytes"):
        write_snapshot(snapshots(2)[1], folder)
    assert list(files_of(folder)) == ["rank-00001-of-00002.safetensors", "uncommitted"]


def test_a_part_of_another_size_than_its_index_says_is_not_committed(run: Location) -> None:
    first, second = snapshots(2)
    folder = run.child(folder_name(2))
    write_snapshot(first, folder)
    path = Path(folder.path) / "rank-00000-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpointError, match="bytes that were written are there"):
        write_snapshot(second, folder)
    assert COMMIT not in files_of(folder)


def mutations(content: bytes, seed: int) -> list[bytes | None]:
    """None = the file is deleted."""
    rng = random.Random(seed)
    cuts = [content[: rng.randrange(len(content))] for _ in range(3)]
    flips = []
    for _ in range(12):
        at, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        flips.append(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
    return [None, b"", content + b" ", content[::-1], *cuts, *flips]


def is_accepted(folder: Location) -> bool:
    try:
        read_checkpoint(folder).verify()
    except (DamagedCheckpointError, PartialCheckpointError):
        return False
    return True


@pytest.mark.parametrize("name", [
    COMMIT, "rank-00000-of-00002.json", "rank-00000-of-00002.safetensors",
    "rank-00001-of-00002.json", "rank-00001-of-00002.safetensors",
])  # fmt: skip
def test_no_change_of_any_file_is_taken_for_what_was_written(run: Location, name: str) -> None:
    folder = write_checkpoint(run, 1)
    path = Path(folder.path) / name
    whole = path.read_bytes()
    for number, content in enumerate(mutations(whole, seed=len(name))):
        path.unlink() if content is None else path.write_bytes(content)
        assert not is_accepted(folder), f"mutation {number} of {name}"
        path.write_bytes(whole)
    read_checkpoint(folder).verify()


@pytest.mark.parametrize("stray", [
    "rank-00002-of-00003.json", "rank-00000-of-00004.safetensors", "rank-.json", "note.txt",
    "rank-00001-of-00002.json.1a2b3c4d.tmp", "rank-00001-of-00002 (copy).json",
])  # fmt: skip
def test_files_that_the_marker_does_not_list_do_not_count(run: Location, stray: str) -> None:
    folder = write_checkpoint(run, 1)
    (Path(folder.path) / stray).write_text("{}")
    checkpoint = read_checkpoint(folder)
    checkpoint.verify()
    assert torch.equal(checkpoint.weights()["b"], values(1)["b"])


@pytest.mark.parametrize(("key", "told"), [
    ("weight|a|6", "weight of a has an overlap at element 7"),
    ("weight|a|8", "weight of a has a gap at element 7"),
    ("weight|b|1", "weight of [ab] has "),
    ("weight|c|0", "no weights of a|weight of a has a gap|weight of c has an overlap"),
    ("weight|a", "is not what was written"),
    ("weight|a|x", "is not what was written"),
])  # fmt: skip
def test_parts_that_do_not_cover_a_parameter_once_are_refused(
    run: Location, key: str, told: str
) -> None:
    def rename(index: dict) -> None:
        index["tensors"][key] = index["tensors"].pop("weight|a|7")

    folder = write_checkpoint(run, 1)
    rewrite_index(folder, 1, rename)
    with pytest.raises(DamagedCheckpointError, match=told):
        read_checkpoint(folder)


def test_an_index_of_other_tensors_than_the_files_is_refused(run: Location) -> None:
    def swap(index: dict) -> None:
        index["tensors"] = {"weight|b|0": 5, "weight|a|7": 5, "extra|a|0": 12}

    folder = write_checkpoint(run, 1)
    rewrite_index(folder, 1, swap)
    with pytest.raises(DamagedCheckpointError, match="holds other tensors than its index says"):
        read_checkpoint(folder).weights()


@pytest.mark.parametrize("change", [
    lambda index: index.pop("position"),
    lambda index: index.update(position=[1]),
    lambda index: index["position"].pop("shapes"),
    lambda index: index["position"].update(unknown=1),
    lambda index: index.update(tensors=[]),
    lambda index: index.update(bytes="many"),
])  # fmt: skip
def test_an_index_of_another_form_is_damaged(run: Location, change: Callable[[dict], None]) -> None:
    folder = write_checkpoint(run, 1)
    rewrite_index(folder, 0, change)
    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(folder)


@pytest.mark.parametrize("version", [9, 1])
@pytest.mark.parametrize("name", [COMMIT, "rank-00000-of-00002.json"])
def test_another_format_is_refused_with_who_reads_it(
    run: Location, name: str, version: int
) -> None:
    """The first format had no marker, and a folder without one is otherwise half a checkpoint."""
    folder = write_checkpoint(run, 1)
    if name != COMMIT:
        folder.child(COMMIT).delete()
    path = Path(folder.path) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
    told = f"checkpoint {folder.path} has format {version}; this code reads format 3 only; use the"
    with pytest.raises(ValueError, match=told) as refused:
        read_checkpoint(folder)
    assert type(refused.value) is ValueError  # neither damaged nor half of one: nothing passes it


def test_a_disk_that_is_full_leaves_nothing_that_counts(
    run: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(run, 1)
    plain = checkpoint_format._write_hashed

    def full(self: Location, content: memoryview) -> str:
        if self.path.endswith("rank-00001-of-00002.safetensors"):
            raise OSError(28, "No space left on device")
        return plain(self, content)

    monkeypatch.setattr(checkpoint_format, "_write_hashed", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(run, 2)
    checkpoint = newest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.position.step == 1


def test_a_marker_that_leaves_out_a_file_is_damaged(run: Location) -> None:
    folder = write_checkpoint(run, 1)
    marker = json.loads(folder.child(COMMIT).read())["files"]
    del marker["rank-00001-of-00002.safetensors"]
    files = {name: (facts["bytes"], facts["sha256"]) for name, facts in marker.items()}
    folder.child(COMMIT).write(checkpoint_format._marker(files))
    with pytest.raises(DamagedCheckpointError, match="does not list rank-00001-of-00002"):
        read_checkpoint(folder)


@pytest.mark.parametrize("content", ["{}", '{"position": 3}', '{"position": {"shapes": 1}}'])
def test_a_position_that_is_no_good_is_damaged_when_it_is_to_be_committed(
    run: Location, content: str
) -> None:
    folder = write_checkpoint(run, 1)
    index = json.loads(folder.child(file_of_rank(0, 2)).read())
    del index["position"]
    index |= json.loads(content)
    folder.child(file_of_rank(0, 2)).write(json.dumps(index).encode())
    with pytest.raises(DamagedCheckpointError, match="has no position, or a damaged one"):
        checkpoint_format.commit(folder, 2, lambda: None)


def test_a_crafted_index_asks_for_no_more_memory_than_its_files_hold(run: Location) -> None:
    """Every checksum is right: it was made by somebody, and not damaged."""
    huge = 10**12
    folder = write_checkpoint(run, 3)
    files = {}
    for name in checkpoint_format.read_marker(folder):
        content = folder.child(name).read()
        if name.endswith(".json"):
            index = json.loads(content)
            index["tensors"] = {"weight|a|0": huge} if "00000-of" in name else {}
            if "position" in index:
                index["position"]["shapes"] = {"a": [huge]}
            content = json.dumps(index).encode()
            folder.child(name).write(content)
        files[name] = (len(content), checkpoint_format._sha256(content))
    folder.child(COMMIT).write(checkpoint_format._marker(files))
    with pytest.raises(DamagedCheckpointError, match=rf"bytes cannot hold {huge} elements"):
        read_checkpoint(folder).weights()


def test_a_digest_continues_with_the_same_recipe_and_data_only() -> None:
    recipe = recipe_with()
    written = Position(Progress(3, samples_digest="ab"), 3, 24, 8, {}, recipe.recorded(), "set")
    read = Position.from_json(json.loads(json.dumps(written.to_json())))
    assert read.resumed(recipe.recorded(), "set") == written.progress
    without = Progress(3)
    assert read.resumed(recipe.recorded(), "other") == without
    assert read.resumed(recipe.with_changes(seed=5).recorded(), "set") == without
