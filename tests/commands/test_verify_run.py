"""`verify` of a run: what its ranks received is compared with the order of its recipe."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.checkpoints.written import WEIGHTS_0, flip
from tests.commands.test_batch import recipe
from tests.data.damage import damage
from tests.launch.test_seen_batch import sets
from tests.models.small import small_model
from tests.trained_runs import write_run
from vit_ray.checkpoints.checkpoint import Progress, add_digests, folder_name, samples_digest
from vit_ray.commands.cli import vit_ray
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.launch.dataset import SeenBatches, training_batches
from vit_ray.launch.resolved_run import resolve_run
from vit_ray.storage import locate

__all__ = ["recipe", "sets"]


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


def said(run: str, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(vit_ray, ["verify", "digits", f"verify.path={run}", *words])
    return result.exit_code, result.output


def test_a_run_that_had_the_samples_of_its_order_is_whole(recipe):
    code, text = said(begin(recipe, received(recipe, 4, 7)))
    assert (code, text) == (
        0,
        "step 7: files whole; samples of steps 4 to 6 in the planned order\n",
    )


def test_other_samples_are_named_by_their_steps(recipe):
    code, text = said(begin(recipe, received(recipe, 3, 6)))
    assert code == 1
    assert "step 7: the samples of steps 4 to 6 differ from the planned order" in text


@pytest.fixture
def bad(recipe: Recipe) -> int:
    """A sample of step 5."""
    return int(SeenBatches(resolve_run(recipe)).planned(5)[3])


@pytest.fixture
def damaged(recipe: Recipe, bad: int, sets: Path, tmp_path: Path) -> Recipe:
    """The recipe on a copy of its set in which that sample cannot be decoded."""
    shutil.copytree(sets / "large", tmp_path / "set")
    damage(open_dataset(str(tmp_path / "set")), group=bad // 8, rows=[bad % 8])
    data = {"train": str(tmp_path / "set"), "max_bad_fraction": 0.1}
    return recipe.with_changes(data=data)


def test_a_neighbour_of_an_image_that_cannot_be_decoded_is_no_other_sample(damaged, bad):
    recipe = damaged
    assert bad not in training_batches(recipe)[5]["sample"]
    code, text = said(begin(recipe, received(recipe, 4, 7)))
    assert (code, "planned order, with neighbours for undecodable" in text) == (0, True), text
    assert said(begin(recipe.with_changes(name="other"), received(recipe, 3, 6)))[0] == 1


def test_a_file_that_has_changed_is_named(recipe):
    run = begin(recipe, "")
    flip(locate(run).child(folder_name(7)))
    code, text = said(run)
    assert code == 1
    assert WEIGHTS_0 in text


def test_a_folder_that_is_named_after_another_step_is_told(recipe):
    """A resume passes it over."""
    run = begin(recipe, "")
    folder = Path(locate(run).child(folder_name(7)).path)
    shutil.copytree(folder, folder.parent / folder_name(9))
    code, text = said(run)
    assert code == 1
    assert "step 7: files whole" in text
    assert "step 9: checkpoint" in text
    assert "is of step 7, unlike its name" in text
