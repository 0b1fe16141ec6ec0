"""The command line: words in any order, true help, and numbers that any terminal can show."""

import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from scipy.stats import binomtest

from tests.commands.command_line import run_cli
from tests.data.pictures import jpeg
from vit_ray import own_parts
from vit_ray.commands import cli, trainings
from vit_ray.commands.job_list import COMMANDS
from vit_ray.commands.trainings import print_metrics, print_result, print_sweep
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.recipe import KEYS, keys_below
from vit_ray.experiments.search_space import RATE
from vit_ray.experiments.sweep import Row, SweepResult
from vit_ray.experiments.trials import Outcome
from vit_ray.launch import run
from vit_ray.launch.run import RunResult
from vit_ray.outcomes import RunStoppedError

ROOT = Path(__file__).parents[2]


def test_a_module_is_trusted_by_an_option(monkeypatch, capsys):
    monkeypatch.setattr(own_parts, "_TRUSTED", set())
    with pytest.raises(SystemExit) as ended:
        cli.vit_ray.main(["export", "--module", "tests.parts", "digits", "--dry-run"])
    assert ended.value.code == 0
    assert {"tests.parts"} == own_parts._TRUSTED
    assert "name: digits-vit" in capsys.readouterr().out


def test_a_dry_run_without_a_plan_shows_the_recipe_without_secrets():
    words = ("verify", "digits", "--dry-run", "verify.path=https://me:secret-pw@host/x")
    done = run_cli(*words)
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["verify"] == {"path": "https://host/x"}
    assert "convert" not in yaml.safe_load(done.stdout)


def test_overrides_stand_anywhere():
    recipe = yaml.safe_load(run_cli("export", "--dry-run", "model.depth=3", "digits").stdout)
    assert recipe["model"]["depth"] == 3
    words = ("evaluate", "tracking.tags.my-tag=x", "digits", "data={eval: s3://b/set}")
    recipe = yaml.safe_load(run_cli(*words, "--dry-run").stdout)
    assert (recipe["tracking"]["tags"], recipe["data"]["eval"]) == ({"my-tag": "x"}, "s3://b/set")


def test_a_reader_that_has_seen_enough_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-u", "-m", "vit_ray", "export", "digits", "--dry-run"],
        stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda c: c.name)
def test_a_command_is_found_and_its_example_loads_with_keys_that_exist(command):
    for reference in filter(None, (command.main, command.plan)):
        parameters = inspect.signature(pkgutil.resolve_name(reference)).parameters.values()
        assert [p.annotation for p in parameters if p.kind is not p.KEYWORD_ONLY] == [Recipe]
    words = tuple(word for word in command.example.split() if word != "--dry-run")
    load_recipe(*cli.split_words(words))
    assert all(keys_below(prefix) for prefix in command.reads)
    if command.name in ("pretrain", "finetune", "sweep"):
        assert {*command.reads} <= {*COMMANDS["plan"].reads}  # plan takes their lines
    read = {key.name for key in keys_below(*command.reads)}
    for prefix in (*command.needs, *command.opens):
        assert {key.name for key in keys_below(prefix)} <= read
    listed = run_cli("keys", "--of", command.name).stdout.splitlines()
    assert {line.split("=")[0].strip() for line in listed if re.match(r"  \S", line)} == read
    assert command.example in run_cli(command.name, "--help").stdout


def test_the_commands_are_those_of_the_design_and_submitted_ones_have_a_thin_job():
    names = (
        "init recipes keys convert verify subset deduplicate pretrain finetune evaluate sweep "
        "scaling_study vtab predict export inspect_model batch fork replay report plan doctor ui "
        "start quickstart"
    )
    assert {*cli.vit_ray.commands} == {*names.split()}
    submitted = "convert pretrain finetune evaluate sweep scaling_study vtab"
    jobs = {file.stem: file.read_text() for file in (ROOT / "jobs").glob("*.py")}
    assert {*jobs} == {*submitted.split()}
    assert all(text.endswith(f'    run_job("{name}")\n') for name, text in jobs.items())


def test_keys_are_shown_by_section_and_are_few():
    shown = run_cli("keys", "optim").stdout
    assert "  optim.clip_norm=1.0  (number >= 0) [on resume: resume=changed]\n" in shown
    assert "train.loss" not in shown
    # A row of a study has keys of the study and of a model again.
    assert len([key for key in KEYS if not key.name.startswith("study.models.")]) <= 192
    assert all(len(key.meaning) >= 8 for key in KEYS)
    assert "study.models" in run_cli("keys", "--of=scaling_study").stdout
    assert "study" in run_cli("scaling-study", "--help").stdout


def test_defaults_are_those_that_a_recipe_gets_in_every_environment(monkeypatch):
    defaults = {key.name: key.default for key in KEYS}
    values = Recipe(name="x").model_dump(mode="json")
    for name in defaults.keys() - {"name"}:
        node = values
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is not None:
            assert defaults[name] == (node if isinstance(node, str) else json.dumps(node)), name
    assert defaults["data.eval_augment.kind"] == "center_crop"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@mlflow:5000")
    assert "  tracking.uri=sqlite:///mlflow.db  (" in run_cli("keys", "tracking").stdout


def test_text_is_shown_in_a_locale_without_its_letters(tmp_path):
    (tmp_path / "caf\xe9.yaml").write_text("base: digits\nname: mine\n", encoding="utf-8")
    for label in ("caf\xe9", "\u732b"):
        (tmp_path / "images" / label).mkdir(parents=True)
        (tmp_path / "images" / label / f"{label}.jpg").write_bytes(jpeg(1))
    environment = {key: text for key, text in os.environ.items() if not key.startswith("LC_")}
    environment["PYTHONPATH"] = str(ROOT)
    for locale in ({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
        export = "export caf\xe9.yaml data.train=caf\xe9 --dry-run"
        for words in (export, f"init images --out={len(locale)}.yaml"):
            command = [sys.executable, "-m", "vit_ray", *words.split()]
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, env=environment | locale
            )
            assert done.returncode == 0, done.stderr


def test_several_seeds_have_a_spread_and_one_has_none(capsys):
    rows = [
        Row({RATE: 0.01}, Outcome(top1=0.9)),
        Row({RATE: 0.1}, Outcome(error="a worker died")),
    ]

    def shown(*accuracies: float) -> str:
        finals = [Outcome(top1=top1) for top1 in accuracies]
        print_sweep(SweepResult(rows, {RATE: 0.01}, finals))
        return capsys.readouterr().out

    # The sample deviation of 0.96 and 0.98 is sqrt(2) / 100.
    assert "97.00% +- 1.41% (2 runs)" in shown(0.96, 0.98)
    single = shown(0.97)
    assert "97.00% (1 run of sweep.seeds)" in single
    assert "+-" not in single
    assert re.search(r"learning_rate=0\.1 +.*failed: a worker died", single)


def test_only_a_table_with_a_row_of_the_paper_is_shown(monkeypatch, capsys):
    result = RunResult(None, "a", 1, 1, {"eval/top1": 0.9}, "", True)
    monkeypatch.setattr(run, "evaluate", lambda _: result)
    rows, best = [{"row": "ours"}, {"row": "paper"}], Outcome(top1=0.9)
    for table, is_shown in ((None, False), (rows[:1], False), (rows, True)):
        monkeypatch.setattr(trainings, "training_table", lambda *_, table=table: table)
        trainings.evaluate(Recipe(name="a").with_changes(data={"eval": "x"}))
        assert ("the paper's" in capsys.readouterr().out) is is_shown
        swept = SweepResult([Row({RATE: 0.1}, best)], {RATE: 0.1}, [best])
        print_sweep(replace(swept, beside_paper=table))
        assert ("the paper's" in capsys.readouterr().out) is is_shown


def test_an_accuracy_has_its_images_and_their_interval_whole_in_a_pipe(capsys):
    low, high = binomtest(38, 90).proportion_ci(method="wilson")
    expected = f"42.22% ({low:.1%} to {high:.1%} at 95 %, 90 images)"
    metrics = {"eval/top1": 38 / 90, "eval/loss": 1.5, "eval/" + "x" * 3000: 0.25}
    print_metrics("Evaluation", metrics, metrics, 90)
    text = capsys.readouterr().out
    assert [text.count(one) for one in (expected, "1.5000", "x" * 3000)] == [1, 1, 1]
    assert print_result(RunResult(None, "pets", 5, 5, metrics, "", True, num_eval_images=90)) == 0
    assert expected in " ".join(capsys.readouterr().out.split())
    # Of a run that was stopped before its first step.
    assert print_result(RunResult(None, "pets", 0, 5, {}, "", False)) == 3
    assert capsys.readouterr().out.splitlines() == ["pets: step 0 of 5", "checkpoint: none"]


def test_a_stop_on_request_has_its_own_exit_code_and_its_reason_comes_last(capsys):
    def stopped() -> None:
        print("what is finished")
        raise RunStoppedError("stopped on request")

    assert cli._ended(stopped) == 3
    assert capsys.readouterr() == ("what is finished\n", "stopped on request\n")
