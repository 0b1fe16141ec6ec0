"""The parts that need a Ray cluster, as functions that pytest runs with the suite's fixtures.

`python -m tests.net` starts them; no name here is one that a run of the whole suite collects.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from pathlib import Path
from typing import Any

from PIL import Image

from tests.conftest import ROOT, Digits, Head
from tests.data.converting import convert
from tests.data.pictures import picture
from tests.end_to_end.runs import Driver, write_recipe
from tests.faults.runs import STEPS, long_recipe, start, worker_pids
from tests.net.__main__ import write_part
from tests.net.store import dump, plain
from tests.recipes import small_recipe
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config import Recipe
from vit_ray.launch.run import train
from vit_ray.storage import locate

FOLDER = Path(os.environ.get("VIT_RAY_NET_FOLDER", "."))
# The only checkpoint before the end, so that a run that is cut short behind it resumes from there.
HALF = {"checkpoint": {"every_steps": STEPS // 2, "every_minutes": None}}


def test_mlflow(ray_cluster: Head, digits: Digits, tmp_path: Path) -> None:
    """What commands on the shipped recipes of the digits leave in MLflow, and a killed worker's."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for part, data in {"train": digits.train, "test": digits.test}.items():
        shutil.copytree(data, tmp_path / "vtab" / "pets" / part)
    common = [
        f"output={tmp_path}/runs", f"tracking.uri={uri}", "tracking.system_metrics=false",
        f"data.train={digits.train}", f"data.eval={digits.test}", "workers.use_gpu=false",
        "workers.cpus_per_worker=0.5", "data.cpus_per_task=0.5", "workers.num_workers=1",
        "train.micro_batch_size=64", "train.log_every_steps=2", "optim.warmup_steps=2",
    ]  # fmt: skip
    weights = f"init_from={tmp_path}/runs/digits-vit"
    groups = {"pets": "natural", "svhn": "natural", "eurosat": "specialized"}
    tasks = ", ".join(f"{{name: {name}, group: {group}}}" for name, group in groups.items())
    commands = {
        "pretrain": ["digits", "optim.epochs=2", "workers.num_workers=2"],
        "sweep": ["digits_sweep", weights, "optim.steps=6", "sweep.learning_rates=[0.03,1e-6]"],
        "scaling_study": [
            "study_digits", "study.epochs=[1]", "study.data_fractions=[0.5]",
            f"evaluate.few_shot_train={digits.train}", f"evaluate.few_shot_test={digits.test}",
        ],
        "vtab": [
            "digits_sweep", "name=digits-vtab", weights, "optim.steps=6", "sweep=null",
            f"vtab.data={tmp_path}/vtab", f"vtab.tasks=[{tasks}]",
        ],
    }  # fmt: skip
    codes = {}
    for job, (recipe, *words) in commands.items():
        codes[job], output = Driver(ray_cluster, job, recipe, *common, *words).wait(600)
        assert codes[job] == (1 if job == "vtab" else 0), output  # two of its tasks have no data
    killed = _long_recipe("killed", digits, tmp_path)
    driver = start(killed, ray_cluster, tmp_path)
    os.kill(worker_pids(ray_cluster)[-1], signal.SIGKILL)
    codes["killed"] = driver.wait(600)[0]
    assert newest_checkpoint(locate(killed.run_folder)) is not None
    found = dump(uri, _places(digits, tmp_path))
    write_part(FOLDER, "mlflow", {"exit codes": codes, "runs": found})


def _long_recipe(name: str, digits: Digits, folder: Path, **sections: Any) -> Recipe:
    return long_recipe(name, digits, folder, **HALF).with_changes(**sections)


def _places(digits: Digits, folder: Path) -> dict[str, str]:
    return {str(folder): "FOLDER", str(digits.images.parent): "DIGITS", str(ROOT): "ROOT"}


def test_faults(ray_cluster: Head, digits: Digits, tmp_path: Path) -> None:
    """What a run ends with, and what its driver prints of it, by fault."""
    told: dict[str, Any] = {}

    def note(fault: str, recipe: Recipe, driver: Driver) -> None:
        code, output = driver.wait(600)
        newest = newest_checkpoint(locate(recipe.run_folder))
        lines = re.findall(rf"^(?:{recipe.name}|error): .*", output, re.MULTILINE)
        said = [plain(line, _places(digits, tmp_path)) for line in lines if "ETA" not in line]
        for pattern, name in {
            recipe.name: "RUN",
            # Which step it was at, and which worker notices first that one died, is chance.
            r"\d+(, \d+)*": "#",
            r"(worker failed): .*": r"\1",
        }.items():
            said = [re.sub(pattern, name, line) for line in said]
        told[fault] = {
            "exit code": code,
            "is at its end": newest is not None and newest.position.step == recipe.optim.steps,
            "said": said,
        }

    def command(recipe: Recipe) -> Driver:
        return Driver(ray_cluster, "pretrain", str(write_recipe(recipe, tmp_path)))

    stopped = _long_recipe("told-to-end", digits, tmp_path)
    driver = start(stopped, ray_cluster, tmp_path)
    driver.process.send_signal(signal.SIGTERM)
    note("SIGTERM", stopped, driver)
    note("the same command after SIGTERM", stopped, command(stopped))
    note("the same command after the end", stopped, command(stopped))
    other = stopped.with_changes(optim={"learning_rate": 0.02})
    note("another rate after the end", other, command(other))

    cut = _long_recipe("driver-killed", digits, tmp_path)
    driver = start(cut, ray_cluster, tmp_path)
    driver.process.kill()
    driver.wait()
    note("the same command after its driver was killed", cut, command(cut))

    frozen = _long_recipe("frozen", digits, tmp_path, train={"step_timeout_s": 8.0})
    driver = start(frozen, ray_cluster, tmp_path)
    pid = worker_pids(ray_cluster)[0]
    os.kill(pid, signal.SIGSTOP)
    note("a worker hangs", frozen, driver)

    diverges = small_recipe("diverges", digits, tmp_path, train={"nonfinite": "rollback"})
    diverges = diverges.with_changes(
        optim={"learning_rate": 1e30, "warmup_steps": 0, "schedule": "constant"},
        checkpoint={"every_steps": 1},
    )
    note("a loss is not finite", diverges, command(diverges))

    no_room = small_recipe("no-room", digits, tmp_path)
    Path(no_room.run_folder).mkdir(parents=True)
    (Path(no_room.run_folder) / "step-00000008").write_text("a file where the folder should be")
    note("a checkpoint cannot be written", no_room, command(no_room))
    shard = next((Path(no_room.run_folder) / "step-00000024").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    note("the newest checkpoint is damaged", no_room, command(no_room))

    with socket.socket() as held:  # nothing listens there
        held.bind(("127.0.0.1", 0))
        away = {"uri": f"http://127.0.0.1:{held.getsockname()[1]}"}
        untracked = small_recipe("untracked", digits, tmp_path, tracking=away)
        note("MLflow is away", untracked, command(untracked))
    absent = small_recipe("without-data", digits, tmp_path, data={"train": f"{tmp_path}/absent"})
    note("there is no data set", absent, command(absent))
    write_part(FOLDER, "faults", told)


def test_keep(ray_cluster: Head) -> None:
    """Renew `kept/`: a set of 12 small pictures, and a run of 4 steps on them."""
    place = Path("/tmp/vit-ray-kept")  # what a checkpoint keeps of paths is of no machine
    shutil.rmtree(place, ignore_errors=True)
    for number in range(12):
        file = place / "images" / f"class_{number % 3}" / f"{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(number, 10, 12)).save(file)
    convert(str(place / "images"), str(place / "set"), rows_per_row_group=4, seed=3)
    data = Digits(place / "images", str(place / "set"), str(place / "set"))
    recipe = small_recipe(
        "run", data, place,
        model={"image_size": 8, "width": 8, "mlp_dim": 16},
        optim={"steps": 4},
        train={"global_batch_size": 8, "micro_batch_size": 4},
        checkpoint={"every_steps": None, "keep_last": 1},
        evaluate={"batch_size": 4},
    )  # fmt: skip
    assert train(recipe).is_complete
    kept = FOLDER
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(place / "set", kept / "set")
    newest = newest_checkpoint(locate(recipe.run_folder))
    assert newest is not None
    shutil.copytree(newest.folder.path, kept / "run" / Path(newest.folder.path).name)
    shutil.rmtree(place)
