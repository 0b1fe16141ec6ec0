"""Recipes of the field, and a small one for each feature: they load, are planned, and train.

Steps are taken by the worker's own parts in one process without Ray, on images of random pixels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tests.data.pictures import encoded
from tests.jobs.headers import commands, header, stated_cost
from tests.training.engine_runs import PLAIN_LINEAR
from tests.training.ranks import run_ranks
from tests.worker.fakes import FakeRun, write_now
from vit_ray.checkpoints.checkpoint import Progress, open_checkpoint
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter
from vit_ray.checkpoints.run_checkpoints import list_checkpoints, newest_checkpoint
from vit_ray.commands.plans.dry_run import describe_training
from vit_ray.commands.plans.plan import describe_plan, told_facts
from vit_ray.config import Recipe, load_recipe
from vit_ray.data.augment import augmentation_of
from vit_ray.data.crops import crop_of
from vit_ray.data.randaugment import RandAugment
from vit_ray.storage import locate
from vit_ray.training.engine.collectives import all_sum
from vit_ray.training.loop import RankContext
from vit_ray.worker.attempt import Attempt
from vit_ray.worker.evaluation import Evaluator
from vit_ray.worker.job import TrainJob
from vit_ray.worker.nonfinite import NonfinitePolicy
from vit_ray.worker.run_link import RunLink
from vit_ray.worker.saving import CheckpointSaver, gather_by_own_group
from vit_ray.worker.setup import build_engine, choose_micro_batch, initial_model, open_batches
from vit_ray.worker.watchdog import Watchdog

FIELD = ROOT / "jobs" / "recipes" / "field"
SMALL = sorted((Path(__file__).parent / "recipes").glob("*.yaml"))
NAMES = [path.stem for path in SMALL]
STEPS, BATCH, CLASSES, IMAGES = 6, 8, 5, 64
CPU = torch.device("cpu")
PIXELS = np.random.default_rng(0).integers(0, 256, (IMAGES, 12, 12, 3)).astype(np.uint8)


def shrunk_recipe(name: str, folder: str) -> Recipe:
    path = Path(__file__).parent / "recipes" / f"{name}.yaml"
    return load_recipe(path, [f"output={folder}"])


# The recipes of the field.


@pytest.mark.parametrize("path", sorted(FIELD.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_header_says_where_from_what_differs_and_what_it_costs(path: Path) -> None:
    text = header(path)
    assert re.search(r"Paper: arXiv:\d{4}\.\d{5}", text)
    assert "Left open: " in text
    assert "Differs: " in text
    facts = told_facts(load_recipe(path))
    exaflops, hours = stated_cost(path)
    assert exaflops == pytest.approx(facts.exaflops, rel=1e-3)
    assert hours == pytest.approx(facts.exaflops * 1e18 / (0.4 * 989e12) / 3600, rel=1e-3)
    assert commands(path)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("path", sorted(FIELD.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_of_the_field_is_planned_with_the_cost_of_its_header(path: Path) -> None:
    assert f"{stated_cost(path)[0]:g} exaFLOPs" in describe_plan(load_recipe(path))


def test_augreg_is_as_its_published_run_is_named() -> None:
    # B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1; aug_strong2 by big_vision's vit_i1k.
    recipe = load_recipe(FIELD / "augreg_b16_imagenet.yaml")
    assert recipe.model.name == "ViT-B/16"
    assert recipe.plan.num_images == 1_281_167
    assert told_facts(recipe).total_steps == round(300 * 1_281_167 / 4096)
    optim, model, train = recipe.optim, recipe.model, recipe.train
    assert (optim.learning_rate, optim.weight_decay, optim.clip_norm) == (1e-3, 0.1, 1.0)
    assert (optim.schedule, optim.warmup_steps) == ("cosine", 10_000)
    assert (model.dropout, model.stochastic_depth, model.representation) == (0.1, 0.1, True)
    assert (train.mixup, train.cutmix, train.loss, train.label_smoothing) == (0.8, 0, "sigmoid", 0)
    assert model.head_bias == -6.9
    augment = augmentation_of(recipe.model, recipe.data.augment)
    assert augment.randaugment == RandAugment(2, 20.0)
    assert augment.min_area == 0.05


def test_the_plain_baseline_is_as_its_authors_configuration() -> None:
    # google-research/big_vision, configs/vit_s16_i1k.py.
    recipe = load_recipe(FIELD / "vit_s16_imagenet.yaml")
    optim, model, train = recipe.optim, recipe.model, recipe.train
    assert told_facts(recipe).total_steps == round(90 * 1_281_167 / 1024)
    assert (model.name, model.pool, model.positions) == ("ViT-S/16", "gap", "sincos_2d")
    assert (model.representation, model.dropout, model.head_bias) == (True, 0.0, 0.0)
    assert (optim.name, optim.learning_rate, optim.clip_norm) == ("adamw", 1e-3, 1.0)
    assert optim.weight_decay * optim.learning_rate == pytest.approx(1e-4)
    assert (optim.schedule, optim.warmup_steps) == ("cosine", 10_000)
    assert (train.loss, train.label_smoothing, train.mixup) == ("softmax", 0.0, 0.2)
    augment = augmentation_of(model, recipe.data.augment)
    assert augment.randaugment == RandAugment(2, 10.0)
    assert (augment.kind, augment.min_area, augment.flip) == ("inception_crop", 0.05, True)
    assert augmentation_of(model, recipe.data.eval_augment).resize == 256


# One for each feature.


class Outcome(NamedTuple):
    """What a run came to."""

    losses: list[float]
    events: list[str]
    kept: list[int]
    """Steps of its checkpoints."""
    last_step: int


@pytest.mark.parametrize("name", NAMES)
def test_a_small_recipe_is_planned(name: str, tmp_path: Path) -> None:
    recipe = shrunk_recipe(name, str(tmp_path))
    text = describe_training(recipe)
    for count in recipe.group_sizes:
        assert f"with {count} worker" in text
    assert f"under ZeRO {recipe.train.zero_stage}" in text
    assert (Path(__file__).parent / "recipes" / f"{name}.yaml").read_text().startswith("# ")


def rows(recipe: Recipe, first: int, share: slice) -> Any:
    """Samples of a step's share."""
    return np.arange(first, first + BATCH)[share] % IMAGES


def crops(recipe: Recipe, samples: Any, epoch: int) -> Any:
    augment = augmentation_of(recipe.model, recipe.data.augment)
    made = [
        crop_of(encoded(PIXELS[s], "PNG"), augment, (recipe.seed, epoch, int(s))) for s in samples
    ]
    return np.stack(made)


def training_batches(recipe: Recipe, start: int, share: slice) -> Iterator[Any]:
    """As the stream gives them; every label is 0."""
    for step in range(start, STEPS):
        samples = rows(recipe, step * BATCH, share)
        labels = np.zeros((len(samples), 1), np.int32)
        images = crops(recipe, samples, step * BATCH // IMAGES)
        yield {"image": images, "labels": labels, "sample": samples}


def evaluation_batches(*_: Any) -> Iterator[Any]:
    """Labels that training never shows, so that the loss on them only grows."""
    yield {
        "image": PIXELS[:8, :8, :8],
        "labels": np.ones((8, 1), np.int32),
        "weight": np.ones(8, np.float32),
        "sample": np.arange(8),
    }


def run(rank: int, recipe: Recipe, steps: int, poison: int | None = None) -> Outcome:
    """Train from the newest checkpoint to step `steps` with the real parts of a worker."""
    torch.nn.functional.linear = PLAIN_LINEAR
    actor, world_size = FakeRun(), torch.distributed.get_world_size()
    job = TrainJob(
        recipe, "train", CLASSES, steps, "print", recipe.run_folder, "auto", 0, 0.0, actor, None,
        classes=tuple(map(str, range(CLASSES))),
    )  # fmt: skip
    folder = locate(recipe.run_folder)
    micro = choose_micro_batch(job, world_size, int)
    checkpoint = newest_checkpoint(folder)
    model, _ = initial_model(job, loads_weights=checkpoint is None)
    engine = build_engine(job, model, micro, world_size)
    progress = Progress()
    if checkpoint is not None:
        engine.restore(checkpoint)
        progress = checkpoint.position.progress
    link = RunLink(actor, rank)
    watchdog = Watchdog(progress.step, 600.0, link.beat, link.note_hang)
    writer = CheckpointWriter(
        folder, recipe.checkpoint, link.note_own, None, gather_by_own_group(), checkpoint
    )
    saver = CheckpointSaver(job, engine.state, writer, link, watchdog, write_now)
    nonfinite = NonfinitePolicy(recipe.train, link, lambda _: "told")
    evaluator = Evaluator(job, engine, evaluation_batches, link, watchdog)
    context = RankContext(steps, rank, world_size, micro, partial(all_sum, device=CPU))
    count = BATCH // world_size
    share = slice(rank * count, (rank + 1) * count)
    batches = open_batches(training_batches(recipe, progress.step, share), CPU)
    if poison is not None:
        poison_step(engine, poison)
    attempt = Attempt(
        job, context, link, engine, batches, evaluator, saver, nonfinite,
        watchdog, progress, lambda: None,
    )  # fmt: skip
    attempt.run()
    torch.distributed.barrier()  # rank 0 has committed the checkpoint
    attempt.close()
    losses = [metrics["train/loss"] for _, metrics in actor.logged if "train/loss" in metrics]
    kept = sorted(step for step, place in list_checkpoints(folder) if open_checkpoint(place))
    events = [f"{kind}: {text}" for kind, text, _ in actor.events]
    return Outcome(losses, events, kept, progress.step)


def poison_step(engine: Any, poisoned: int) -> None:
    """The loss of one step is infinite."""
    plain = engine._loss_function

    def loss(*arguments: Any) -> torch.Tensor:
        found: torch.Tensor = plain(*arguments)
        return found * float("inf") if arguments[-1] == poisoned else found

    engine._loss_function = loss


def run_all(rank: int, names: list[str], folder: str) -> dict[str, Outcome]:
    """Code generators take minutes: what they would compile is run as it is traced."""
    plain = torch.compile

    def without_inductor(*arguments: Any, **options: Any) -> Any:
        return plain(*arguments, **{**options, "backend": "aot_eager"})

    torch.compile = without_inductor  # type: ignore[assignment]
    found = {}
    for name in names:
        recipe = shrunk_recipe(name, f"{folder}/{name}")
        steps = 3 if name == "elastic" else STEPS
        found[name] = run(rank, recipe, steps, poison=3 if name == "skip" else None)
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = str(tmp_path_factory.mktemp("runs"))
    found = run_ranks(1, run_all, NAMES, folder)[0]
    grown = run_ranks(2, run_grown, f"{folder}/elastic")[0]
    return {**found, "elastic, grown": grown}


def run_grown(rank: int, folder: str) -> Outcome:
    return run(rank, shrunk_recipe("elastic", folder), STEPS)


ENDED_EARLY = ("early_stopping", "elastic", "skip")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ENDED_EARLY])
def test_a_small_recipe_trains(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.last_step == STEPS
    assert outcome.kept[-1] == STEPS
    assert outcome.losses[-1] < 0.9 * outcome.losses[0]
    assert not any("fail" in event for event in outcome.events)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile", "offload", "zero3"])
def test_how_it_is_computed_changes_no_loss(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].losses == pytest.approx(outcomes["base"].losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "gap",
        "axial",
        "recomputation",
        "field",
        *(n for n in NAMES if "positions" in n),
    ],
)
def test_what_is_computed_does(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].losses[1:] != pytest.approx(outcomes["base"].losses[1:], rel=1e-4)


@pytest.mark.slow
def test_an_elastic_run_goes_on_with_two_workers(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["elastic"].last_step == 3
    losses = outcomes["elastic"].losses + outcomes["elastic, grown"].losses
    assert losses == pytest.approx(outcomes["base"].losses, rel=1e-4)
    assert outcomes["elastic, grown"].kept[-1] == STEPS


@pytest.mark.slow
def test_the_best_checkpoint_outlives_newer_ones(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["keep_best"].kept == [2, STEPS]


@pytest.mark.slow
def test_a_run_stops_when_nothing_becomes_better(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["early_stopping"]
    assert outcome.last_step == 3  # the first is the best of all, and two are not better
    assert any("no better validation loss in 2 evaluations" in event for event in outcome.events)


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["skip"]
    assert outcome.last_step == STEPS
    assert any("step 3 is not finite" in event for event in outcome.events), outcome.events
    assert np.isinf(outcome.losses[3]) or np.isnan(outcome.losses[3])
    assert np.isfinite(outcome.losses[4:]).all()
