"""A run as users name it: the folder of its checkpoints, its id in MLflow, or its recipe.

What it was trained on follows from the recipe in its newest checkpoint, whatever a recipe file of
the same name says now. Nothing in the run is written.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vit_ray.addresses import require_store, with_texts
from vit_ray.checkpoints.checkpoint import Checkpoint
from vit_ray.checkpoints.run_checkpoints import list_checkpoints, newest_checkpoint
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.keys import EVALUATED_SETS, RUN_FOLDER, incompatible_changes
from vit_ray.config.loading import changed, mlflow_variables
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.config.schema import NAME, validated
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.launch.resolved_run import ResolvedRun, resolve_run
from vit_ray.outcomes import NOTE, step_of
from vit_ray.storage import Location, locate
from vit_ray.tracking.store_requests import limited_requests, redact_uri, safe_uri

_RUN_ID: Final = re.compile(r"[0-9a-f]{32}")
_DECIDES_BATCHES: Final = (
    "seed", "data.", "model.", "train.global_batch_size", "train.loss", "train.mixup",
    "train.cutmix",
)  # fmt: skip
"""Prefixes of the keys that decide what a step sees."""


@dataclass(frozen=True)
class NamedRun:
    """A run and its data, opened.

    Attributes:
        resolved: its streams, in the order that it started with.
        newest: its newest complete checkpoint; None before the first.
    """

    resolved: ResolvedRun
    newest: Checkpoint | None

    @property
    def recipe(self) -> Recipe:
        """The recipe as trained, or about to be trained, without its evaluation."""
        return self.resolved.recipe

    @property
    def total_steps(self) -> int:
        """Fewer than planned if the run was stopped early."""
        position = self.newest.position if self.newest else None
        return position.step if position and position.progress.ended else self.resolved.total_steps

    def checked_step(self, step: int) -> int:
        """The step, 0-based.

        Raises:
            ValueError: the run does not have it.
        """
        note = locate(self.recipe.run_folder).child(NOTE)
        origin = note.read().decode() if self.newest and note.exists() else ""
        if (forked := step_of(origin)) and step < forked:
            raise ValueError(
                f"step={step}: the run branches off {origin}, which trained this step; look at "
                "this step there"
            )
        total = self.total_steps
        if step >= total:
            raise ValueError(
                f"step={step}: the run has {total:,} steps; give one from 0 to {total - 1}"
            )
        return step


def find_run(source: str, overrides: Sequence[str] = ()) -> NamedRun:
    """Open a run and its data.

    Args:
        source: folder of the run's checkpoints, the run's id in MLflow, or a recipe by name or
            path; for a run that has not started, the recipe is enough.
        overrides: changes of the recipe, such as `data.train=` if the data set has moved, and
            `tracking.uri=` if `source` is an id.

    Raises:
        ValueError: there is no such run or recipe; the data set is not the run's; or the recipe
            differs from the recipe with which the run was trained.
    """
    source, folder = named_folder(source, overrides)
    is_file = folder.info().kind == "file"
    if not is_file and list_checkpoints(folder):
        newest = newest_checkpoint(folder)
        if newest is None:
            raise ValueError(
                f"{source}: none of its checkpoints is complete; give the run's recipe"
            )
        recorded = where_it_lies(newest.position.recipe, folder)
        recorded["output"], _, name = folder.uri.rpartition("/")
        if re.match(NAME, name):
            recorded["name"] = name
        recipe = recipe_from_dict(changed(recorded, overrides), f"the recipe of {source}")
    else:
        try:
            recipe = load_recipe(Path(source), overrides).with_absolute_paths()
        except ValueError as error:
            if folder.exists() and not is_file:
                raise ValueError(
                    f"{source} has no checkpoint; give the run's recipe, or wait for its first one"
                ) from None
            way = "" if is_file else "; to name a run by its folder, give a path such as runs/NAME"
            raise ValueError(f"{error}{way}") from None
        newest = newest_checkpoint(locate(recipe.run_folder))
    # Other sets are not needed here to show what is trained on.
    given, recipe = (
        recipe,
        recipe.with_changes(
            data={"eval": None}, evaluate={"few_shot_train": None, "few_shot_test": None}
        ),
    )
    if newest is None:
        return NamedRun(resolve_run(recipe), None)
    position = newest.position
    resolved = resolve_run(recipe, begun=position.recipe["data"]["shuffle_window"])
    if resolved.manifest.fingerprint != position.data_fingerprint:
        raise ValueError(
            f"{resolved.manifest.path} is not the data set of the run {recipe.name!r}: its "
            f"fingerprint is {resolved.manifest.fingerprint[:12]}, and the run's is "
            f"{position.data_fingerprint[:12]}; give the run's own data set as data.train=PATH"
        )
    before = recipe_from_dict(position.recipe, where=f"the recipe of run {recipe.name!r}")
    changes = incompatible_changes(before.flat(), given.flat(), without=EVALUATED_SETS)
    if shown := [change for change in changes if change.key.startswith(_DECIDES_BATCHES)]:
        raise ValueError(
            f"run {recipe.name!r} was trained with another recipe: {'; '.join(map(str, shown))}; "
            f"give the run's folder, {recipe.run_folder}, without changes, or another name"
        )
    return NamedRun(resolved, newest)


def where_it_lies(recipe: dict[str, Any], folder: Location) -> dict[str, Any]:
    """A recorded recipe with the places of a run folder that was copied or moved.

    Files that lay beside the run, and lie so beside the copy, are those of the copy.
    """
    old, new = Path(recipe.get("output", ""), recipe.get("name", "")), Path(folder.path)
    while old.name == new.name and old != new:
        old, new = old.parent, new.parent

    def moved(key: str, place: str) -> str:
        is_place = bool(key) and folder.is_local and old.is_absolute()
        if not (is_place and Path(place).is_relative_to(old)):
            return place
        beside = new / Path(place).relative_to(old)
        return str(beside) if beside.exists() else place

    return dict(with_texts(recipe, moved))


def named_folder(source: str, overrides: Sequence[str]) -> tuple[str, Location]:
    """The run folder that a name means, also as text; for an MLflow id the folder of its run.

    Raises:
        ValueError: MLflow has no such training.
    """
    if not _RUN_ID.fullmatch(source):
        return source, locate(source)
    from vit_ray.tracking.mlflow_client import open_client  # MLflow: seconds

    uri = changed({}, overrides).get("tracking", {}).get("uri")
    uri = uri or validated(TrackingConfig, mlflow_variables(), source).uri
    require_store(uri)
    try:
        with limited_requests():
            run = open_client(uri).get_run(source)
    except Exception as error:  # MLflow's own errors, and those of its store
        raise ValueError(
            f"MLflow at {safe_uri(uri)} does not have the run {source}: "
            f"{redact_uri(str(error), uri)}; give its store as tracking.uri=..."
        ) from None
    found = run.data.tags.get(RUN_FOLDER)
    if found is None:
        raise ValueError(f"run {source} of MLflow at {safe_uri(uri)} is not a training of vit_ray")
    return str(found), locate(str(found))
