"""Trainings with parts of a user's own, on two workers."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.end_to_end.runs import (
    Finished,
    constant_recipe,
    curve,
    runs_of,
    same_weights,
    submit,
    weights_of,
)
from tests.newcomer.follow import blocks
from vit_ray import trust_modules
from vit_ray.config import load_recipe
from vit_ray.launch.run import train


@pytest.mark.slow
def test_our_model_in_a_module_of_the_users_trains_as_ours_through_a_stop(straight, digits, folder):
    """To the last bit, with a loss and a metric of the user's; its callbacks meddle and fail."""
    trust_modules("tests.parts")

    def of_length(steps: int) -> Finished:
        recipe = constant_recipe(
            "wrapped", digits, folder,
            model={"name": "tests.parts.Wrapped"},
            optim={"steps": steps},
            train={
                "loss": "tests.parts.cross_entropy",
                "callbacks": ["tests.parts.fail", "tests.parts.meddle"],
            },
            evaluate={"metrics": ["tests.parts.top3"]},
            tracking={"experiment": "wrapped"},
        )  # fmt: skip
        return recipe, train(recipe)

    of_length(16)
    recipe, result = of_length(24)
    assert result.run_id is not None
    assert straight[1].run_id is not None
    ours = dict(curve(*straight[:1], straight[1].run_id))
    own = dict(curve(recipe, result.run_id))
    assert own.keys() >= ours.keys() - {1}
    assert {step: own[step] for step in ours} == ours
    found = {name.replace("vit.", ""): w for name, w in weights_of(recipe).items()}
    assert same_weights(found, weights_of(straight[0]))
    top1, top3, top5 = (result.metrics[f"eval/top{n}"] for n in (1, 3, 5))
    assert top1 < top3 < top5
    assert result.metrics["eval/top1"] == straight[1].metrics["eval/top1"]


@pytest.mark.slow
def test_the_pages_example_trains_and_resumes_where_it_is_and_as_a_job(
    ray_head, digits, tmp_path, working_dir
):
    """A driver in the folder, then a job that continues the run with a copy of the folder."""
    page = tmp_path
    for block in blocks(ROOT / "docs" / "python.md"):
        for name in block.told("file"):
            (page / name).write_text(block.text)
    changes = (
        f"data.train={digits.train}", f"data.eval={digits.test}", f"output={page / 'runs'}",
        f"tracking.uri=sqlite:///{page / 'mlflow.db'}", "workers.cpus_per_worker=0.5",
        "optim.epochs=null", "optim.schedule=constant", "optim.warmup_steps=0",
    )  # fmt: skip
    for file in ("myparts.py", "own.yaml"):
        (working_dir / file).write_bytes((page / file).read_bytes())
    words = ("-m", "vit_ray", "pretrain", "own.yaml", *changes)
    environment = {**os.environ, "RAY_ADDRESS": ray_head.address, "PYTHONPATH": str(ROOT)}

    def run(*more: str) -> str:
        done = subprocess.run(
            [sys.executable, *words, *more],
            cwd=page, env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    assert "GMAC per image" in run("optim.steps=40", "--dry-run")
    run("optim.steps=20")
    code, output = submit(ray_head, working_dir, "python", *words, "optim.steps=40")
    assert code == 0, output[-5000:]
    run("optim.steps=40", "name=straight")
    trust_modules("myparts")
    sys.path.append(str(page))
    recipe = load_recipe(page / "own.yaml", list(changes))
    resumed, straight = (weights_of(recipe.with_changes(name=n)) for n in ("own", "straight"))
    assert same_weights(resumed, straight)
    assert any(name.startswith("vit.embedding.convs.") for name in resumed)
    (run_of_both,) = [one for one in runs_of(recipe) if one.info.run_name == "own"]
    assert "eval/top3" in run_of_both.data.metrics
    assert run_of_both.data.params["model.name"] == "myparts.ConvStem"
