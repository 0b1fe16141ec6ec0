"""Evaluation by the weights alone: the numbers of the engine that trains, without its memory."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.engine_runs import IMAGES, build_engine, small_model
from tests.training.ranks import run_ranks
from tests.worker.fakes import FakeRun, make_job
from vit_ray.config.training_sections import TrainConfig
from vit_ray.training.engine import Predictor
from vit_ray.worker.run_link import RunLink, Watchdog
from vit_ray.worker.worker import set_up_evaluation

CPU = torch.device("cpu")


def predictions(rank: int, train: dict[str, Any]) -> tuple[Any, Any]:
    config = TrainConfig(**train)
    engine = build_engine(config, 1, 2)
    images = IMAGES.to(engine.dtype)
    found = engine.predict(images), Predictor(small_model(), config, CPU).predict(images)
    engine.close()
    return found


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("precision", "stage"), [("bf16", 1), ("fp32", 0), ("bf16", 3)])
def test_features_and_logits_are_those_of_the_engine_bit_by_bit(precision, stage):
    train = {"precision": precision, "zero_stage": stage}
    (of_engine, alone), *_ = run_ranks(1, predictions, train)
    for expected, found in zip(of_engine, alone, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(expected, found)


def held_bytes() -> int:
    gc.collect()
    tensors = (one for one in gc.get_objects() if isinstance(one, torch.Tensor))
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def set_up(rank: int, folder: str) -> tuple[int, int]:
    """Bytes that an evaluation's own run holds, and bytes of its weights."""
    sizes = {"depth": 2, "width": 256, "mlp_dim": 512, "num_heads": 4, "patch_size": 8}
    sections = {"model": {"name": "ViT", "image_size": 16, **sizes}, "optim": {"name": "adamw"}}
    train = {"averaging": 0.9, "precision": "bf16", "zero_stage": 1}
    job = make_job(Path(folder), "evaluate", data={"eval": "somewhere"}, train=train, **sections)
    before, run, streams = held_bytes(), FakeRun(), Any
    link: Any = RunLink(run, 0)  # type: ignore[arg-type]
    dog = Watchdog(60.0, link.beat, link.note_hang)
    evaluator = set_up_evaluation(job, link, streams, CPU, dog)  # type: ignore[arg-type]
    held = held_bytes() - before
    weights = sum(p.numel() * 2 for p in evaluator._engine._model.parameters())
    return held, weights


def test_an_evaluations_own_run_holds_the_weights_once_in_bf16(tmp_path):
    ((held, weights),) = run_ranks(1, set_up, str(tmp_path))
    assert weights > 2**21
    assert held < 1.05 * weights
