"""Final weights and curves of six real runs on the digits."""

from pathlib import Path
from typing import Any

import vit_ray
from tests.net.cluster import Command, ray_head, two_hosts
from tests.net.sets import convert_digits, digest, write_recipe
from tests.net.store import curves, runs_of
from tests.net.strikes import HOLD, kill_driver, strike


def record(folder: Path) -> dict[str, Any]:
    names = ["one-worker", "two-workers", "elastic", "killed", "fine-tuned"]
    with ray_head(NET_HOLD=str(folder)) as own:
        convert_digits(folder, own)
        one = {"workers": {"num_workers": 1}, "train": {"zero_stage": 0}}
        fits_once = {"num_workers": [1, 2], "cpus_per_worker": 3}
        for name, changes in zip(names, (one, {}, {"workers": fits_once}), strict=False):
            Command(own, "pretrain", str(write_recipe(folder, name, **changes))).must_end()

        held = write_recipe(folder, "killed", train=HOLD)
        strike(own, folder, held, kill_driver)
        other = ["workers.num_workers=1", "train.zero_stage=1"]
        Command(own, "pretrain", str(held), *other).must_end()

        tuned = write_recipe(
            folder, "fine-tuned", model={"image_size": 32, "representation": False},
            optim={"name": "sgd", "learning_rate": 0.03, "weight_decay": 0.0, "steps": 12},
            train={"averaging": 0.0, "zero_stage": 3},
        )  # fmt: skip
        start = f"init_from={folder}/runs/two-workers"
        Command(own, "finetune", str(tuned), start).must_end()
    with two_hosts() as hosts:
        if hosts is not None:
            own, prefix = hosts
            far = write_recipe(folder, "two-hosts", workers={"cpus_per_worker": 1.5})
            Command(own, "pretrain", str(far), prefix=prefix).must_end()
            names.append("two-hosts")
    return {"two-hosts": "no namespaces", **{name: _recorded(folder, name) for name in names}}


def _recorded(folder: Path, name: str) -> dict[str, Any]:
    weights = vit_ray.load(f"{folder}/runs/{name}").model.state_dict()
    digests = [f"{tuple(w.shape)} {digest(w.numpy().tobytes())}" for w in weights.values()]
    (run,) = runs_of(folder, name)
    return {"weights": sorted(digests), "curves": curves(folder, run)}
