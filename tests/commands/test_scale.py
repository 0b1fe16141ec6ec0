"""`vit-ray plan --scale`: each limit by hand, ranges, records, and what cannot be."""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.commands.command_line import run_cli
from tests.recipes import SMALL
from vit_ray.commands.plans import plan, scale
from vit_ray.commands.plans.plan import told_facts
from vit_ray.commands.plans.scale import (
    ScalePoint,
    gpu_counts,
    print_scale,
    scale_figure,
    scale_points,
    scale_table,
)
from vit_ray.config import Recipe, load_recipe
from vit_ray.report.figures.charts import svg

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
B16 = ROOT / "jobs" / "recipes" / "paper" / "vit_b16_jft.yaml"
GB = 1e9


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(B16, ["train.micro_batch_size=128", "plan.device=H100", *overrides])


@pytest.fixture
def measured() -> None:
    """Asked for where memory is measured."""


@pytest.fixture(autouse=True)
def memory_is_not_measured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes seconds for each micro-batch, and `test_plan.py` has it; every one fits here."""
    if "measured" not in request.fixturenames:
        monkeypatch.setattr(plan, "largest_micro_batch", lambda *_: 4096)
        monkeypatch.setattr(plan, "estimate_memory", lambda *_: None)


def points_of(*overrides: str) -> dict[int, ScalePoint]:
    recipe = recipe_of(*overrides)
    return {one.num_gpus: one for one in scale_points(recipe, told_facts(recipe))}


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (4096, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (1000, [1, 2, 4, 8, 10, 25, 50, 125, 250, 500, 1000]),
        (7, [1, 7]),
        (10**9, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]),
    ],
)
def test_counts_are_the_largest_that_divide_the_batch(batch: int, counts: list[int]) -> None:
    assert gpu_counts(recipe_of(f"train.global_batch_size={batch}")) == counts


def test_where_images_are_mixed_each_gpu_has_pairs() -> None:
    mixed = recipe_of("train.global_batch_size=24", "train.mixup=0.2")
    assert gpu_counts(mixed) == [1, 2, 4, 6, 12]


def test_cores_bytes_and_requests_are_counted_as_they_were_measured() -> None:
    slow = ("plan.cpus_per_server=4", "plan.storage_gb_per_server=1")
    points = points_of(*slow, "plan.storage_gb_per_s=2", "plan.storage_gb_per_server=1")
    for num_gpus, one in points.items():
        images_per_s, servers = 4096 / one.step.most_s, math.ceil(num_gpus / 8)
        cores = 4 * servers * min(1, num_gpus / 8)
        # 0.88 ms to read an image, and 1.7 ms to serve 128.
        assert one.loads["data CPUs"] == pytest.approx(
            images_per_s * (0.88 + 1.7 / 128) / 1000 / cores
        )
        # A window of 8,192 images, of which a server has a stretch and a task up to 1,024.
        again = 1 + 63 / min(1024, 8192 / servers)
        read = images_per_s * again * 110_631
        assert one.loads["bytes into hosts"] == pytest.approx(read / (servers * GB))
        assert one.loads["store bandwidth"] == pytest.approx(read / (min(servers, 2) * GB))
        assert one.loads["store requests"] == pytest.approx(again * images_per_s / 64 / 5500)
        beats = num_gpus if num_gpus <= 128 else 1 + (num_gpus - 1) / math.ceil(num_gpus / 128)
        assert one.loads["record"] == pytest.approx(beats * 1.422e-3)
        assert one.images_per_s <= 1.001 * min(
            cores / 0.00089328125, servers * GB / 110_631, 2 * GB / 110_631, 5500 * 64
        )
    # A GPU of 40 % of 989 TFLOP/s takes 4,043 images/s by the table of `data_cores.py`, which 3.6
    # cores decode; half a core here.
    assert points[1].loads["data CPUs"] == pytest.approx(3.6 / 0.5, rel=0.1)
    assert points[1].limit == "data CPUs"


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "limit"),
    [
        ((), 1, "compute"),
        (("plan.mfu=0.9", "train.global_batch_size=256"), 32, "kernel starts"),
        (("plan.network_gb_per_s=5",), 64, "network"),
        (("plan.link_gb_per_s=2",), 8, "links in a server"),
        (("plan.cpus_per_server=4",), 8, "data CPUs"),
        (("plan.storage_gb_per_server=0.5",), 64, "bytes into hosts"),
        (("plan.storage_gb_per_s=0.5",), 1024, "store bandwidth"),
        (("plan.server_days_per_preemption=0.01", "plan.restart_s=600"), 8, "failures"),
        (("checkpoint.every_steps=1",), 8, "checkpoints"),
    ],
)
def test_each_limit_is_named_where_it_binds(
    overrides: tuple[str, ...], num_gpus: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit == "checkpoints":
        monkeypatch.setattr(scale, "SAVE_S", 0.01)
        monkeypatch.setattr(scale, "STALL_S", 5.0)
    assert points_of(*overrides)[num_gpus].limit == limit


def test_requests_bind_where_row_groups_are_small() -> None:
    recipe = recipe_of("plan.cpus_per_server=1000", "plan.storage_gb_per_server=1000")
    facts = told_facts(recipe)
    facts = type(facts)(**{**vars(facts), "group_images": 4.0})
    point = scale_points(recipe, facts)[-1]
    assert point.limit == "store requests"
    most = 4 * 5500 / (1 + 3 / (8192 / 128))  # two ends of a stretch of 64 images
    assert point.images_per_s == pytest.approx(most)
    # At the low end of the range, too, however much communication is hidden.
    assert point.days is not None
    assert point.days[1] * 86_400 >= facts.total_steps * 4096 / most


def test_the_window_of_the_data_set_is_counted_where_it_is_known() -> None:
    """A run without one has only a server's part of a batch side by side."""
    recipe = recipe_of("plan.storage_gb_per_server=1")
    facts = told_facts(recipe)
    known = type(facts)(**{**vars(facts), "window": 0})
    loads = [scale_points(recipe, one)[-1].loads["bytes into hosts"] for one in (facts, known)]
    assert loads[1] / loads[0] == pytest.approx((1 + 63 / 32) / (1 + 63 / 64))


def test_measured_figures_are_those_of_their_files() -> None:
    def text(name: str) -> str:
        return (RESULTS / name).read_text()

    def cell(name: str, row: str, column: int) -> float:
        (line,) = [one for one in text(name).splitlines() if one.startswith(row)]
        return float(line.split("|")[column].replace(",", ""))

    stream = text("data_stream_decode_cpu_2026-11-22.md")
    heads = next(one for one in stream.splitlines() if "CPU ms an image" in one).split("|")
    place = [one.strip() for one in heads].index("CPU ms an image")
    (line,) = [one for one in stream.splitlines() if one.startswith("| vit_ray stream |")][:1]
    assert pytest.approx(float(line.split("|")[place]), abs=0.006) == scale.CPU_MS_PER_IMAGE
    served = cell("stream_scale_cpu_2026-11-24.md", "| 64 | 2 |", 3)
    assert pytest.approx(served / 128) == scale.SERVER_MS_PER_IMAGE
    ranks = text("many_ranks_cpu_2026-11-24.md")
    saves, beats = (
        [one.split("|") for one in ranks.splitlines() if one.startswith(row)]
        for row in ("| 512 | 1 |", "| 64 | 64 |")
    )
    assert float(saves[0][4]) == scale.SAVE_S
    assert float(beats[0][3]) * 1e-6 == pytest.approx(scale.HEARTBEAT_S)
    stall = text("checkpoint_stall_training_cpu_2026-11-27.md")
    assert f"per GiB of a worker's part: {scale.STALL_S_PER_GIB} s" in stall
    alone_ms = float(re.findall(r"^\| vit_ray \| (\d+)", stall, re.MULTILINE)[0])
    whole = float(re.findall(r"^- stall: ([\d.]+) s", stall, re.MULTILINE)[0])
    assert pytest.approx(whole - alone_ms / 1000, abs=0.005) == scale.STALL_S
    assert f"{scale.IMAGE_BYTES:,}" in text("data_shrink_to_cpu_2026-11-22.md")


def test_days_price_and_goodput_follow_from_steps_failures_and_checkpoints() -> None:
    spot = ("plan.server_days_per_preemption=2", "checkpoint.every_minutes=auto")
    recipe = recipe_of(*spot, "plan.price_per_gpu_hour=2.5")
    points = scale_points(recipe, told_facts(recipe))
    rows = list(csv.DictReader(io.StringIO(scale_table(recipe, points).csv())))
    for one, row in zip(points, rows, strict=True):
        found = {key: float(value) for key, value in row.items() if key != "limited by"}
        # A failure of each GPU in 2,100 days and of each server in 2.
        a_week = 7 * (one.num_gpus / 2100 + math.ceil(one.num_gpus / 8) / 2)
        assert found["failures a week"] == pytest.approx(a_week)
        assert found["save every min"] == found["best every min"]
        start_days = one.met.restart_s / 86_400
        training_days = one.total_steps * one.step.most_s / 86_400
        assert found["days"] - start_days == pytest.approx(training_days / found["goodput"])
        assert found["days, low"] <= found["days"] <= found["days, high"]
        for end in ("", ", low", ", high"):
            hours = 24 * found[f"days{end}"] * one.num_gpus
            assert found[f"price{end}"] == pytest.approx(2.5 * hours)
    # Weights and two moments in fp32; a rank's part stops training for 0.113 s a GiB.
    state_gib = 3 * 4 * sum_of_parameters(recipe) / 2**30
    assert points[0].met.stall_s == pytest.approx(0.03 + 0.113 * state_gib, rel=0.01)
    assert points[3].met.stall_s == pytest.approx(0.03 + 0.113 * state_gib / 8, rel=0.01)


def sum_of_parameters(recipe: Recipe) -> int:
    # The paper's B/16 has 86 M; with 18,291 classes and the tanh layer 100.5 M.
    return 85_798_656 + 768 * 768 + 768 + 769 * 18_291


def test_without_failures_only_stalls_are_lost() -> None:
    rare = points_of("plan.gpu_days_per_failure=1e12", "checkpoint.every_minutes=10")[8]
    assert rare.goodput == pytest.approx(600 / (600 + rare.met.stall_s), rel=1e-6)
    assert rare.days is not None
    assert rare.days[2] == pytest.approx(rare.days[0], rel=1e-3)


def test_checkpoints_come_by_steps_as_fast_as_the_data() -> None:
    by_steps = ("checkpoint.every_steps=100", "checkpoint.every_minutes=null")
    slow = points_of("plan.cpus_per_server=8", *by_steps)[64]
    assert slow.loads["data CPUs"] > 2
    assert slow.interval_s == pytest.approx(100 * slow.step.most_s * slow.loads["data CPUs"])


def test_auto_saves_each_hour_at_least() -> None:
    rare = points_of("plan.gpu_days_per_failure=1e6", "checkpoint.every_minutes=auto")[8]
    assert rare.met.best_interval_s > 7200
    assert rare.interval_s == 3600


def test_a_run_that_would_not_end_has_no_days() -> None:
    recipe = recipe_of("plan.gpu_days_per_failure=0.001", "plan.restart_s=3600")
    points = scale_points(recipe, told_facts(recipe))
    assert points[-1].days is None
    row = scale_table(recipe, points).rows[-1]
    assert row[-1] == math.inf
    failing = next(one for one in scale_figure(recipe, points).series if "failures" in one.name)
    assert len(failing.points) == sum(one.days is not None for one in points)
    assert svg(scale_figure(recipe, points))


def test_many_failures_are_not_simulated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    often = ("plan.gpu_days_per_failure=0.3", "checkpoint.every_minutes=auto", "plan.restart_s=10")
    played = points_of(*often)[64]
    monkeypatch.setattr(scale, "MOST_SIMULATED", 0)
    counted = points_of(*often)[64]
    assert played.days is not None
    assert counted.days is not None
    assert played.days == pytest.approx(counted.days, rel=0.03)


def test_a_pass_has_no_more_images_than_a_share() -> None:
    points = points_of("train.micro_batch_size=512")
    assert {n: one.micro_batch for n, one in points.items() if n >= 8} == {
        8: 512, 16: 256, 32: 128, 64: 64, 128: 32, 256: 16, 512: 8, 1024: 4,
    }  # fmt: skip


def test_what_no_gpu_holds_is_limited_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "largest_micro_batch", lambda *_: None)
    recipe = recipe_of("train.global_batch_size=8")
    table = scale_table(recipe, scale_points(recipe, told_facts(recipe)))
    place = [column.title for column in table.columns].index("limited by")
    assert {row[place] for row in table.rows} == {"memory"}


def test_the_figure_has_a_line_for_each_limit() -> None:
    recipe = recipe_of()
    chart = scale_figure(recipe, scale_points(recipe, told_facts(recipe)))
    drawn = svg(chart)
    for name in ("with communication", "with failures", "data CPUs", "store requests"):
        assert name in drawn
    rates = {one.name: [point.y for point in one.points] for one in chart.series}
    for least, most in (
        ("with failures", "with communication"), ("with communication", "no communication"),
    ):  # fmt: skip
        assert all(a <= b for a, b in zip(rates[least], rates[most], strict=True))


def test_rows_text_and_figure_are_in_mlflow(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    recipe = recipe_of(f"tracking.uri={uri}", "train.global_batch_size=64", "name=big")
    assert print_scale(recipe, is_dry=True) == 0
    dry = capsys.readouterr().out
    assert not (tmp_path / "mlflow.db").exists()
    assert print_scale(recipe, is_dry=False) == 0
    out = capsys.readouterr().out
    assert out.startswith(dry)
    assert "MLflow page: " in out
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("big-scale", "FINISHED")
    assert run.data.params["plan.device"] == "H100"
    points = scale_points(recipe, told_facts(recipe))
    for metric, wanted in (
        ("plan/images_per_s", [one.images_per_s for one in points]),
        ("plan/goodput", [one.goodput for one in points]),
        ("plan/step_ms", [1e3 * one.step.most_s for one in points]),
        ("plan/data_cpus", [one.loads["data CPUs"] for one in points]),
        ("plan/days_high", [one.days[2] for one in points if one.days]),
    ):
        held = sorted((p.step, p.value) for p in client.get_metric_history(run.info.run_id, metric))
        assert [step for step, _ in held] == gpu_counts(recipe)
        assert [value for _, value in held] == pytest.approx(wanted)
    names = {one.path for one in client.list_artifacts(run.info.run_id)}
    assert {"scale.csv", "scale.svg", "scale.txt"} <= names


def test_assumptions_are_named_with_their_values(measured: None) -> None:
    words = ("plan", "--scale", str(B16), "train.global_batch_size=8", *SMALL)
    done = run_cli(*words, "--dry-run")
    assert done.exit_code == 0, done.stderr
    for said in (
        "assumed   40 % MFU", "assumed   96 cores and 12.5 GB/s", "a failure each 2,100 GPU-days",
        "30 s until the workers", "110,631 bytes an image (ImageNet photographs; assumed)",
        "measured  on CPUs: 0.88 ms", "the largest count up to it that divides the batch of 8",
    ):  # fmt: skip
        assert said in done.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        "plan.price_per_gpu_hour=0", "plan.price_per_gpu_hour=-2.5", "plan.price_per_gpu_hour=.nan",
        "plan.price_per_gpu_hour=.inf", "plan.price_per_gpu_hour=cheap",
        "plan.gpu_days_per_failure=0", "plan.gpu_days_per_failure=-1",
        "plan.gpu_days_per_failure=1e-9", "plan.gpu_days_per_failure=.nan",
        "plan.server_days_per_preemption=0", "plan.restart_s=0", "plan.restart_s=-3",
        "plan.cpus_per_server=0", "plan.cpus_per_server=1.5", "plan.storage_gb_per_server=0",
        "plan.storage_gb_per_s=-1", "checkpoint.every_minutes=often", "checkpoint.every_minutes=0",
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key(wrong: str) -> None:
    done = run_cli("plan", "--scale", str(B16), wrong)
    assert done.exit_code == 2
    assert wrong.partition("=")[0] in done.stderr
    assert len(done.stderr.splitlines()) <= 2


@pytest.mark.parametrize("flag", ["--large", "--scale"])
def test_an_option_of_a_command_skips_none_of_its_checks(flag: str, tmp_path: Path) -> None:
    """With the option the command runs another function."""
    name, key = {"--large": ("verify", "verify.path"), "--scale": ("plan", "tracking.uri")}[flag]
    place = str(tmp_path / "none") if flag == "--large" else f"sqlite:///{tmp_path}"
    words = (str(B16), f"{key}={place}")
    plain, optional = run_cli(name, *words), run_cli(name, flag, *words)
    assert (plain.exit_code, plain.stderr) == (2, optional.stderr)
    assert str(tmp_path) in plain.stderr


def test_a_billion_gpus_are_refused_at_once() -> None:
    done = run_cli("plan", str(B16), "plan.num_gpus=1000000000")
    assert done.exit_code == 2
    assert "does not divide train.global_batch_size=4096; use 4096" in done.stderr
