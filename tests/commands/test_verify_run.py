"""`verify` of a run: what its ranks received is compared with the order of its recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.checkpoints.written import flip
from tests.data.damage import damage
from tests.launch.inputs.test_seen_batch import recipe_on, sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import Progress, folder_name
from vit_ray.checkpoints.sample_digest import add_digests, samples_digest
from vit_ray.commands.cli import vit_ray
from vit_ray.commands.trained.verify_run import _Order
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.launch.inputs.rank_batches import training_batches
from vit_ray.launch.inputs.seen_batch import SeenBatches
from vit_ray.launch.inputs.streams import resolve_run
from vit_ray.launch.named_run import find_run
from vit_ray.storage import locate

__all__ = ["sets"]


@pytest.fixture
def recipe(sets: Path, tmp_path: Path) -> Recipe:
    return recipe_on(sets, output=str(tmp_path / "runs"), data={"shuffle_window": 32})


def received(recipe: Recipe, first: int, last: int) -> str:
    """The digest of what two ranks get in these steps."""
    digest, share = 0, recipe.train.global_batch_size // 2
    for rank in range(2):
        batches = training_batches(recipe, rank, 2)
        for step in range(first, last):
            place = step * 2 * share + rank * share
            digest = add_digests(digest, samples_digest(place, batches[step]["sample"]))
    return f"{digest:016x}"


def begin(recipe: Recipe, digest: str) -> str:
    """A run with a checkpoint of step 7, whose digest is of steps 4 to 6."""
    facts = {
        "progress": Progress(step=7, samples_digest=digest, digest_from=4),
        "recipe": recipe.recorded(),
        "data_fingerprint": open_dataset(str(recipe.data.train)).fingerprint,
    }
    return write_run(Path(recipe.run_folder), small_model("ViT"), facts=facts)


def said(run: str) -> tuple[int, str]:
    result = CliRunner().invoke(vit_ray, ["verify", "digits", f"verify.path={run}"])
    return result.exit_code, result.output


def test_a_run_that_had_the_samples_of_its_order_is_whole(recipe: Recipe) -> None:
    code, text = said(begin(recipe, received(recipe, 4, 7)))
    assert (code, text) == (0, "step 7: files whole; samples of steps 4 to 6 in order\n")


def test_other_samples_are_named_by_their_steps(recipe: Recipe) -> None:
    code, text = said(begin(recipe, received(recipe, 3, 6)))
    assert code == 1
    assert "step 7: steps 4 to 6 were fed other samples than the order has" in text


def test_a_neighbour_of_an_image_that_cannot_be_decoded_is_no_other_sample(
    recipe: Recipe, sets: Path, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    for file in (sets / "large").iterdir():
        (tmp_path / "set" / file.name).write_bytes(file.read_bytes())
    planned = SeenBatches(resolve_run(recipe)).planned(5)
    bad = int(planned[3])
    damage(open_dataset(str(tmp_path / "set")), group=bad // 8, rows=[bad % 8])
    data = {"train": str(tmp_path / "set"), "max_bad_fraction": 0.1}
    recipe = recipe.with_changes(data=data)
    assert bad not in training_batches(recipe)[5]["sample"]
    code, text = said(begin(recipe, received(recipe, 4, 7)))
    assert (code, "in order, with neighbours of images that cannot" in text) == (0, True), text
    assert said(begin(recipe.with_changes(name="other"), received(recipe, 3, 6)))[0] == 1


def test_a_run_on_one_batch_had_it_in_each_step(recipe: Recipe) -> None:
    first = training_batches(recipe)[0]["sample"]
    places = range(4 * len(first), 7 * len(first), len(first))
    digest = add_digests(*(samples_digest(place, first) for place in places))
    one_batch = recipe.with_changes(train={"overfit_one_batch": True})
    assert said(begin(one_batch, f"{digest:016x}"))[0] == 0


def test_digests_of_two_checkpoints_are_of_the_same_order(recipe: Recipe) -> None:
    batches = SeenBatches(find_run(begin(recipe, "")).resolved)
    order = _Order(batches.planned, recipe.train.global_batch_size)
    for first, end in ((4, 6), (0, 6), (4, 9), (4, 9)):
        assert f"{order.digest(first, end):016x}" == received(recipe, first, end)


def test_a_checkpoint_of_an_older_version_has_no_digest(recipe: Recipe) -> None:
    assert said(begin(recipe, "")) == (0, "step 7: files whole; it has no digest of samples\n")


def test_a_file_that_has_changed_is_named(recipe: Recipe) -> None:
    run = begin(recipe, "")
    flip(locate(run).child(folder_name(7)))
    code, text = said(run)
    assert code == 1
    assert "rank-00000-of-00002.safetensors" in text
