"""Features and accuracy of a set that several ranks share, against one rank that has it all."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from sklearn.metrics import confusion_matrix, log_loss, top_k_accuracy_score

from tests.recipes import recipe_with
from tests.training.engine_runs import build_engine
from tests.training.ranks import run_ranks
from tests.worker.fakes import TOTAL, FakeEngine, FakeRun, Worker, make_job
from vit_ray import trust_modules
from vit_ray.config.training_sections import EvalConfig, TrainConfig
from vit_ray.evaluation.few_shot import FewShot
from vit_ray.evaluation.ground_truth import Answers
from vit_ray.models import build_model
from vit_ray.models.weights import save_weights
from vit_ray.training.loop import EvaluationCutError
from vit_ray.training.objective import normalize
from vit_ray.worker import evaluation, worker
from vit_ray.worker.evaluation import _predictions, measure_accuracy, measure_few_shot
from vit_ray.worker.run_link import RunLink

NUM_IMAGES, BATCH = 19, 4


def share(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Whole batches of this rank, equally many on all; the last of the set are padding."""
    rng = np.random.default_rng(0)
    passes = -(-NUM_IMAGES // (BATCH * world_size))
    rows = passes * BATCH * world_size
    images = rng.integers(0, 256, (rows, 8, 8, 3), np.uint8)
    samples = np.where(np.arange(rows) < NUM_IMAGES, np.arange(rows), -1)
    labels = np.where(samples[:, None] < 0, -1, np.arange(rows)[:, None] % 5).astype(np.int32)
    weights = (samples >= 0).astype(np.float32)
    columns = {"image": images, "labels": labels, "sample": samples, "weight": weights}
    starts = range(rank * BATCH, rows, world_size * BATCH)
    return [{key: one[start : start + BATCH] for key, one in columns.items()} for start in starts]


def evaluated(rank: int) -> dict[int, Any]:
    """By ZeRO stage: accuracy, few-shot accuracy, logits."""
    trust_modules("tests.parts")
    world_size = torch.distributed.get_world_size()
    batches = share(rank, world_size)
    found = {}
    for stage in (0, 3):
        train = TrainConfig(zero_stage=stage, precision="fp32")
        metrics = {"metrics": ["tests.parts.top3", "tests.parts.largest"]}
        recipe = recipe_with(train=train.model_dump(), evaluate=metrics)
        engine = build_engine(train, world_size, 1)
        config = EvalConfig(shots=(1, 3), few_shot_seeds=2)
        labels = np.arange(NUM_IMAGES) % 5
        few_shot = FewShot(labels, 5, shots=config.shots, seeds=config.few_shot_seeds)
        found[stage] = (
            measure_accuracy(engine, batches, recipe),
            measure_few_shot(engine, batches, batches, config, few_shot),
            np.concatenate([one[b["weight"] > 0] for b, _, one in _predictions(engine, batches)]),
        )
        engine.close()
    return found


def test_figures_of_two_ranks_are_those_of_all_images_at_once():
    """19 images in 6 batches of 4: rank 0 has 11, and of rank 1's 3 batches one is padding."""
    ((alone,), ranks) = (run_ranks(count, evaluated) for count in (1, 2))
    alone_accuracy, alone_few_shot, logits = alone[0]
    top3 = top_k_accuracy_score(np.arange(NUM_IMAGES) % 5, logits, k=3)
    assert 0 < top3 < 1
    for stage, rank in itertools.product((0, 3), ranks):
        accuracy, few_shot, _ = rank[stage]
        assert accuracy == pytest.approx(alone_accuracy, rel=1e-5)
        assert few_shot == pytest.approx(alone_few_shot)
        assert accuracy["top3"] == pytest.approx(top3)
        # Of a row that pads the last batch it is not 0.
        assert accuracy["largest"] == pytest.approx(logits.max(1).mean(), rel=1e-5)


def cut_short(rank: int, folder: str) -> tuple[list[int], bool | None]:
    """Rank 1 is asked to stop while the second of three batches is computed."""
    world_size, passed = torch.distributed.get_world_size(), []

    class Engine(FakeEngine):
        def predict(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            passed.append(len(images))
            if rank == 1 and len(passed) == 2:
                worker.link.stop_reason = "SIGTERM"
            return images.flatten(1), torch.zeros(len(images), 5)

    job = make_job(Path(folder), data={"eval": "somewhere"}, train={"loss": "softmax"})
    batches = share(rank, world_size)
    worker = Worker(job, Engine(), FakeRun(), lambda name: batches, rank=rank)
    try:
        worker.hooks.evaluate(4)
    except EvaluationCutError as cut:
        return passed, cut.is_stopping
    return passed, None


def test_a_stop_is_heard_between_two_batches_on_all_ranks(tmp_path):
    assert run_ranks(2, cut_short, str(tmp_path)) == [([BATCH, BATCH], True)] * 2


@pytest.mark.parametrize("error", [EvaluationCutError(is_stopping=True), RuntimeError("a rank's")])
def test_masters_are_put_back_after_what_all_ranks_raise_and_not_after_one_ranks_error(
    error, tmp_path, monkeypatch
):
    """Putting them back is a collective operation, in which the others would not take part."""
    worker = Worker(make_job(tmp_path), FakeEngine(average=object()))

    def measure(prefix: str) -> dict[str, float]:
        if prefix:
            raise error
        return {"eval/top1": 1.0}

    monkeypatch.setattr(worker.hooks.evaluator, "_measure", measure)
    with pytest.raises(type(error)):
        worker.hooks.evaluator.evaluate(1)
    assert worker.engine.is_averaged is not isinstance(error, EvaluationCutError)


KEPT = {"confusion.csv", "examples.jpg", "examples.json", "errors.jpg", "errors.json"}


@pytest.mark.parametrize(("averages", "keeps_best"), [(True, False), (False, True)])
def test_a_training_keeps_images_and_tables_of_the_evaluation_that_is_its_result(
    tmp_path, monkeypatch, keeps_best, averages
):
    """The last one, or each that is the best so far; of averaged weights where there are any."""

    class Engine(FakeEngine):
        def predict(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            predicted = 3 if self.is_averaged else 0
            return images.flatten(1), torch.eye(10)[predicted].expand(len(images), 10)

    monkeypatch.setattr(evaluation, "all_sum", lambda values, device: list(map(float, values)))
    monkeypatch.setattr(evaluation, "all_rows", lambda rows, device: rows)
    job = make_job(tmp_path, data={"eval": "somewhere"}, checkpoint={"keep_best": keeps_best})
    engine, actor = Engine(average=object() if averages else None), FakeRun()
    hooks = Worker(job, engine, actor, lambda name: share(0, 1)).hooks
    hooks.evaluate(1)
    hooks.log(1, {"eval/top1": 0.5, "result/step": 0.0})
    assert not actor.files
    if keeps_best:
        hooks.log(1, {"result/step": 1.0})
        assert {*actor.files} == KEPT
        actor.files.clear()
    hooks.evaluate(TOTAL)
    assert {*actor.files} == (set() if keeps_best else KEPT)
    if averages:
        shown = json.loads(actor.files["examples.json"])
        assert {one["predicted"] for one in shown} == {"class 3"}
        assert [one["sample"] for one in shown] == [*range(12)]


SIZES: dict[str, Any] = {
    "image_size": 8, "depth": 1, "width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 4,
}  # fmt: skip


def evaluate_alone(rank: int, folder: str) -> Any:
    """What an evaluation's own run logs and keeps, and the batch sizes it asks for."""
    world_size = torch.distributed.get_world_size()
    job = make_job(
        Path(folder), "evaluate", data={"eval": "somewhere"}, model={"name": "ViT", **SIZES},
        init_from=f"{folder}/weights.safetensors", train={"precision": "fp32"},
    )  # fmt: skip
    answers = Answers(tuple("abcde"), 5)
    job = replace(job, num_classes=5, num_evaluated={"eval": NUM_IMAGES}, answers=answers)
    sizes_asked: list[int] = []

    def batches(name: str, size: int) -> Any:
        sizes_asked.append(size)
        return iter(share(rank, world_size))

    run, streams = FakeRun(), SimpleNamespace(evaluation_batches=batches)
    link = RunLink(run, rank, world_size)
    worker.evaluate_alone(job, link, streams, torch.device("cpu"))  # type: ignore[arg-type]
    return run.logged, run.files, sizes_asked


def test_an_evaluations_own_run_measures_the_weights_that_it_is_given(tmp_path):
    model: Any = build_model("ViT", 5, **SIZES)
    torch.nn.init.normal_(model.head.weight, std=0.2)
    save_weights(model, tmp_path / "weights.safetensors", "vit_ray")
    (logged, files, asked), (*nothing, _) = run_ranks(2, evaluate_alone, str(tmp_path))
    assert asked == [10]  # of 19 images on two ranks
    assert nothing == [[], {}]
    ((step, metrics),) = logged
    images = np.concatenate([batch["image"] for batch in share(0, 1)])[:NUM_IMAGES]
    with torch.no_grad():
        logits = model.eval()(normalize(torch.from_numpy(images), torch.float32)).numpy()
    labels = np.arange(NUM_IMAGES) % 5
    assert step == 0
    assert metrics["eval/top1"] == pytest.approx(np.mean(logits.argmax(1) == labels))
    loss = log_loss(labels, softmax(logits, axis=1))
    assert metrics["eval/loss"] == pytest.approx(loss, rel=1e-5)
    counts = confusion_matrix(labels, logits.argmax(1))
    rows = [row.split(",") for row in files["confusion.csv"].decode().splitlines()[1:]]
    found = {("abcde".index(row[0]), "abcde".index(row[1])): int(row[2]) for row in rows}
    assert found == {pair: count for pair, count in np.ndenumerate(counts) if count}
