"""What pre-training, a sweep and a study on the digits leave in MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.net.cluster import convert_digits, ray_head, run
from tests.net.store import curves, runs_of

VARIED = ("optim.learning_rate", "optim.steps", "optim.epochs", "data.fraction", "seed")


def record(folder: Path) -> dict[str, Any]:
    """Every run by name: parent, what varies, metrics by step."""
    common = [
        f"output={folder}/runs", f"tracking.uri=sqlite:///{folder}/mlflow.db",
        "tracking.system_metrics=false", f"data.train={folder}/train", f"data.eval={folder}/test",
        "workers.use_gpu=false", "workers.cpus_per_worker=0.5", "data.cpus_per_task=0.5",
        "workers.num_workers=1", "train.micro_batch_size=64", "train.log_every_steps=2",
        "optim.warmup_steps=2",
    ]  # fmt: skip
    commands = {
        "pretrain": ["digits", "optim.epochs=1"],
        "sweep": [
            "digits_sweep", f"init_from={folder}/runs/digits-vit", "optim.steps=6",
            "sweep.learning_rates=[0.03,1e-6]",
        ],
        "scaling_study": [
            "study_digits", "study.epochs=[1]", "study.data_fractions=[0.5]",
            f"evaluate.few_shot_train={folder}/train", f"evaluate.few_shot_test={folder}/test",
        ],
    }  # fmt: skip
    with ray_head() as own:
        convert_digits(own, folder)
        for name, words in commands.items():
            run(own, name, *words, *common, limit_s=600)
    return _recorded(folder)


def _recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    runs = runs_of(folder)
    names = {one.info.run_id: one.info.run_name for one in runs}
    for one in runs:
        parent, name = one.data.tags.get("mlflow.parentRunId"), one.info.run_name
        while name in found:
            name += " again"
        found[name] = {
            "parent": parent and names[parent],
            "status": one.info.status,
            "varied": {key: one.data.params.get(key) for key in VARIED},
            "metrics": curves(folder, one),
        }
    return found
