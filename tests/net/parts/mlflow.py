"""What pre-training, a sweep and a study on the digits leave in MLflow."""

from pathlib import Path
from typing import Any

from tests.net.cluster import Command, ray_head
from tests.net.sets import convert_digits
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
    init = f"init_from={folder}/runs/digits-vit"
    cells = ["study.epochs=[1]", "study.data_fractions=[0.5]"]
    few_shot = [f"evaluate.few_shot_{name}={folder}/{name}" for name in ("train", "test")]
    commands = {
        "pretrain": ["digits", "optim.epochs=1"],
        "sweep": ["digits_sweep", init, "optim.steps=6", "sweep.learning_rates=[0.03,1e-6]"],
        "scaling_study": ["study_digits", *cells, *few_shot],
    }
    with ray_head() as own:
        convert_digits(folder, own)
        for name, words in commands.items():
            Command(own, name, *words, *common).must_end()
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
