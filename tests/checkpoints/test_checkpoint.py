"""Checkpoints on disk: whole by their marker, and nothing else in their place."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoints.written import (
    REST_0,
    SHAPES,
    WEIGHTS_0,
    WEIGHTS_1,
    flip,
    position,
    read_names,
    snapshots,
    values,
    write_checkpoint,
    write_snapshots,
)
from tests.recipes import recipe_with
from vit_ray.checkpoints.checkpoint import (
    PROGRESS,
    Position,
    Progress,
    add_digests,
    copy_checkpoint,
    folder_name,
    open_checkpoint,
    read_checkpoint,
    samples_digest,
    write_note,
)
from vit_ray.checkpoints.checkpoint_format import (
    COMMIT,
    DamagedCheckpointError,
    PartialCheckpointError,
    is_committed,
    sealed,
)
from vit_ray.storage import Location

FILES = [COMMIT, WEIGHTS_0, REST_0, WEIGHTS_1]


def test_what_was_written_is_read_back_whole(run):
    checkpoint = read_checkpoint(write_checkpoint(run, 3))
    assert checkpoint.position == position(3)
    checkpoint.verify()
    weights = checkpoint.weights()
    assert torch.equal(weights["a"], values(3)["a"].view(3, 4))
    assert torch.equal(weights["b"], values(3)["b"])
    assert not checkpoint.has_average()
    target = torch.zeros(6)  # of any cut
    checkpoint.fill([("weight", "a", 4, target)])
    assert target.tolist() == [7, 8, 9, 10, 11, 12]
    wanted = [("exp_avg", "a", 0, torch.zeros(12)), ("exp_avg", "b", 0, torch.zeros(5))]
    with pytest.raises(DamagedCheckpointError, match="5 elements of exp_avg"):
        checkpoint.fill(wanted)


def test_weights_alone_are_read_for_weights_and_the_files_alone_that_have_a_fragment(
    run, monkeypatch
):
    checkpoint = read_checkpoint(write_checkpoint(run, 3))
    names = read_names(monkeypatch)
    checkpoint.weights()
    assert names == [WEIGHTS_0, WEIGHTS_1]
    names.clear()
    checkpoint.fill([("weight", "b", 0, torch.zeros(5)), ("exp_avg", "a", 3, torch.zeros(2))])
    assert sorted(names) == [REST_0, WEIGHTS_1]


def test_it_is_no_checkpoint_until_it_is_committed(run):
    folder = write_checkpoint(run, 2)
    folder.child(COMMIT).delete()
    with pytest.raises(PartialCheckpointError, match=r"has no commit\.json"):
        read_checkpoint(folder)


def is_read(folder: Location) -> bool:
    moment = ("exp_avg", "a", 0, torch.zeros(12))
    weights = [("weight", name, 0, values(1)[name].clone()) for name in SHAPES]
    try:
        read_checkpoint(folder).fill([moment, *weights])
    except DamagedCheckpointError:
        return False
    return True


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("every", [37, 5])
def test_no_flip_of_a_bit_of_any_file_is_unnoticed_when_it_is_read(run, every):
    folder, count = write_checkpoint(run, 1), 0
    for name in FILES:
        path = Path(folder.path) / name
        whole = path.read_bytes()
        for bit in range(0, 8 * len(whole), every):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            path.write_bytes(content)
            assert not is_read(folder), f"bit {bit} of {name}"
            count += 1
        path.write_bytes(whole)
    assert is_read(folder)
    assert count > 11_640 // every


def rewrite_marker(folder: Location, change: Callable[[dict], object]) -> None:
    """Change the marker, and its checksum as if it had been committed so."""
    body = json.loads(folder.child(COMMIT).read())
    del body["sha256"]
    change(body)
    folder.child(COMMIT).write(sealed(body))


@pytest.mark.parametrize(("key", "new_key", "named"), [
    ("weight|a|7", "weight|a|6", "an overlap at element 7"),
    ("weight|a|7", "weight|a|8", "a gap at element 7"),
    ("weight|b|0", "exp_avg|b|0", "no weights of b"),
    ("weight|b|0", "weight|c|0", "no weights of b"),
])  # fmt: skip
def test_parts_that_do_not_cover_each_parameter_once_are_not_committed(run, key, new_key, named):
    folder = run.child(folder_name(1))
    first, second = snapshots(1)
    tensors = second.tensors["weights"]
    tensors[new_key] = tensors.pop(key)
    with pytest.raises(DamagedCheckpointError, match=named):
        write_snapshots(folder, first, second)
    assert not is_committed(folder)


def test_another_format_is_refused_with_who_reads_it(run):
    folder = write_checkpoint(run, 1)
    rewrite_marker(folder, lambda body: body.update(format_version=9))
    with pytest.raises(ValueError, match=f"{folder.path} has format 9; .* format 6") as refused:
        open_checkpoint(folder)
    assert type(refused.value) is ValueError  # neither damaged nor half of one: nothing passes it


def test_an_evaluation_after_a_checkpoint_is_known_of_that_checkpoint_alone(run):
    folder = write_checkpoint(run, 1)
    after = Progress(1, num_evals=1, metrics={"eval/loss": 0.5})
    write_note(folder, checkpoint=read_checkpoint(folder).sha256, progress=asdict(after))
    found = read_checkpoint(folder)
    assert found.position == replace(position(1), progress=after)
    found.verify()
    # A note that was changed costs the evaluation alone.
    content = folder.child(PROGRESS).read()
    for number in range(0, len(content), 9):
        changed = bytearray(content)
        changed[number] ^= 1
        folder.child(PROGRESS).write(changed)
        assert read_checkpoint(folder).position == position(1)
    folder.child(PROGRESS).write(content)
    # Another checkpoint of the step was not evaluated.
    rewrite_marker(folder, lambda body: body["position"]["progress"].update(train_seconds=2.0))
    assert read_checkpoint(folder).position.progress == Progress(1, train_seconds=2.0)


def renamed(it: Position) -> Position:
    return replace(it, recipe={"name": "short"}, tracking_run_id="2")


def test_a_copy_has_every_tensor_and_the_position_that_it_is_given_unless_it_is_damaged(run):
    source, other = write_checkpoint(run, 3), run.child("other")
    target = other.child(folder_name(3))
    copy_checkpoint(source, other, renamed)
    found = read_checkpoint(target)
    found.verify()
    assert found.position == renamed(position(3))
    weights = found.weights()
    assert all(torch.equal(weights[k], values(3)[k].view(SHAPES[k])) for k in SHAPES)
    target.delete()
    flip(source, WEIGHTS_1)
    with pytest.raises(DamagedCheckpointError):
        copy_checkpoint(source, other, renamed)
    assert not is_committed(target)


def test_a_digest_continues_with_the_same_recipe_and_data_only():
    recipe = recipe_with()
    written = Position(Progress(3, samples_digest=171), 3, 24, 8, {}, recipe.recorded(), "set")
    read = Position.from_json(json.loads(json.dumps(asdict(written))))
    assert read.resumed(recipe.recorded(), "set") == written.progress
    without = Progress(3)
    assert read.resumed(recipe.recorded(), "other") == without
    assert read.resumed(recipe.with_changes(seed=5).recorded(), "set") == without


BATCH, STEPS = 24, 7
SAMPLES = np.random.default_rng(0).permutation(BATCH * STEPS).astype(np.int64)


@pytest.mark.parametrize("world_size", [1, 3, 24])
def test_ranks_and_steps_add_up_to_the_digest_of_all(world_size):
    share = BATCH // world_size
    ranks = []
    for rank in range(world_size):
        mine = 0
        for step in range(STEPS):
            first = step * BATCH + rank * share
            mine = add_digests(mine, samples_digest(first, SAMPLES[first : first + share]))
        ranks.append(float(mine))
    summed = add_digests(int(np.sum(ranks)))
    assert summed == samples_digest(0, SAMPLES)


def test_digests_of_many_ranks_are_summed_exactly():
    digests = [samples_digest(n, SAMPLES[:1]) for n in range(8192)]
    assert add_digests(int(np.sum(np.float64(digests)))) == add_digests(*digests)


def test_a_swap_a_repetition_and_a_shift_change_it():
    wanted = samples_digest(0, SAMPLES)
    swapped, repeated = SAMPLES.copy(), SAMPLES.copy()
    swapped[[3, 90]] = swapped[[90, 3]]
    repeated[5] = repeated[6]
    found = [samples_digest(0, one) for one in (swapped, repeated)] + [samples_digest(1, SAMPLES)]
    assert wanted not in found
    assert len(set(found)) == 3
