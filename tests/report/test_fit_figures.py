"""Power laws of a study's runs as the page shows them."""

from types import SimpleNamespace

import numpy as np
import pytest

from vit_ray.report.fit_figures import fit_charts, fit_sentences, fit_tables, laws_of
from vit_ray.report.runs import RecordedRun

COMPUTE = np.geomspace(1, 200, 6)
MODELS = {"ViT": "ViT-S/16", "ResNet": "R50x1"}


def recorded(
    family, compute, top1, *, images=1000.0, status="FINISHED", tags=None, key="eval/top1"
):
    metrics = {"study/exaflops": compute, "study/train_images": images, key: top1}
    info = SimpleNamespace(run_id=f"{family}{compute}{images}", run_name=family, status=status)
    data = SimpleNamespace(
        metrics=metrics, params={"model.name": MODELS[family]}, tags=dict(tags or {})
    )
    return RecordedRun(SimpleNamespace(info=info, data=data))


def family_of(family, dearer=1.0, seed=0, count=6):
    noise = np.random.default_rng(seed).normal(0, 0.003, len(COMPUTE))
    accuracy = 1 - (0.5 * (COMPUTE / dearer) ** -0.4 + 0.05) - noise
    return [
        recorded(family, float(c), float(a))
        for c, a in list(zip(COMPUTE, accuracy, strict=True))[:count]
    ]


@pytest.fixture
def runs():
    return [*family_of("ViT"), *family_of("ResNet", 3.0, 1)]


def test_each_family_has_its_points_and_its_law_with_a_band(runs):
    curves, ratios = fit_charts(laws_of(runs))
    assert [one.name for one in curves.series] == [
        "ViT", "ViT, fitted", "ResNet", "ResNet, fitted",
    ]  # fmt: skip
    for points, line in ((curves.series[i], curves.series[i + 1]) for i in (0, 2)):
        assert len(points.points) == 6
        assert all(point.low <= point.y <= point.high for point in line.points)
        assert line.points[-1].x > points.points[-1].x  # on to what is not measured
    (ratio,) = ratios.series
    assert ratio.name == "ResNet"
    assert all(2 < point.y < 4.5 for point in ratio.points)
    assert all(point.low < point.y < point.high for point in ratio.points)


def test_the_compute_at_equal_accuracy_is_a_sentence(runs):
    (sentence,) = fit_sentences(laws_of(runs))
    assert sentence.startswith("Top-1 accuracy: for the same accuracy ResNet needs ")
    assert float(sentence.split("needs ")[1].split()[0]) == pytest.approx(3, rel=0.2)


def test_the_table_has_exponents_intervals_and_the_held_out_point(runs):
    vit = rows_of(fit_tables(laws_of(runs))[0])["ViT"]
    assert vit["points"] == 6
    assert vit["b from"] < vit["exponent b"] < float(vit["b to"])
    assert vit["exponent b"] == pytest.approx(0.4, abs=0.1)
    assert vit["held out: error %"] == 1 - runs[5].metrics["eval/top1"]
    assert vit["predicted from %"] < vit["predicted %"] < vit["predicted to %"]


def rows_of(table):
    """By family."""
    heads = [column.title for column in table.columns]
    return {row[1]: dict(zip(heads, row, strict=True)) for row in table.rows}


def test_the_compute_at_equal_accuracy_is_a_table_with_its_interval(runs):
    _, table = fit_tables(laws_of(runs))
    (row,) = rows_of(table).values()
    assert row["family"] == "ResNet"
    assert row["compute / compute of ViT"] == pytest.approx(3, rel=0.2)
    assert float(row["from"]) < row["compute / compute of ViT"] < float(row["to"])
    assert row["over accuracies from %"] < row["over accuracies to %"]
    assert "not known because" not in row


def test_what_is_not_known_of_a_law_is_told_in_the_tables():
    few = [*family_of("ViT", count=4), *family_of("ResNet", 3.0, 1, count=3)]
    laws, ratios = map(rows_of, fit_tables(laws_of(few)))
    assert [laws[family]["points"] for family in ("ViT", "ResNet")] == [4, 3]
    assert laws["ViT"]["exponent b"] > 0
    assert laws["ViT"]["not known because"].startswith("4 points are too few to hold one out")
    assert laws["ResNet"]["exponent b"] is None
    assert laws["ResNet"]["not known because"].startswith("too few points for a power law")
    assert ratios["ResNet"]["not known because"] == "ResNet has no law"


def test_families_of_no_common_accuracy_are_told_so():
    far = [
        recorded(family, float(c), top - 0.1 * float(c) ** -0.5)
        for family, top in (("ViT", 0.4), ("ResNet", 0.8))
        for c in COMPUTE
    ]
    laws = laws_of(far)
    why = "no accuracy lies in the range of both families' points"
    assert rows_of(fit_tables(laws)[1])["ResNet"]["not known because"] == why
    assert fit_sentences(laws) == [f"Top-1 accuracy, ResNet against ViT: {why}."]


def test_without_the_baseline_there_is_no_table_of_ratios():
    (table,) = fit_tables(laws_of(family_of("ResNet")))
    assert [*rows_of(table)] == ["ResNet"]


def test_a_family_of_too_few_points_is_told_and_shown_without_a_law():
    runs = [*family_of("ViT"), *family_of("ResNet", 3.0, 1, count=3)]
    laws = laws_of(runs)
    (curves,) = fit_charts(laws)
    assert "ResNet, fitted" not in [one.name for one in curves.series]
    (sentence,) = fit_sentences(laws)
    assert sentence.startswith("Top-1 accuracy, ResNet: too few points for a power law")


def test_what_is_no_result_of_the_largest_data_set_is_left_out(runs):
    others = [
        recorded("ViT", 500.0, 0.2, images=100.0),
        recorded("ViT", 600.0, 0.2, status="FAILED"),
        recorded("ViT", 700.0, 0.2, tags={"vit_ray.sweep_stage": "sweep_trial"}),
        recorded("ViT", 800.0, 0.2, key="dev/top1"),
    ]
    with_others, without = (fit_tables(laws_of(some)) for some in ([*runs, *others], runs))
    assert [table.rows for table in with_others] == [table.rows for table in without]


def test_runs_of_one_amount_of_compute_are_told_nothing():
    laws = laws_of([recorded("ViT", 5.0, 0.2 + i / 10, images=1000.0 + i) for i in range(4)])
    assert laws == []


def test_runs_without_compute_or_accuracy_have_no_laws():
    assert fit_charts(laws_of([])) == []
    assert fit_sentences(laws_of([])) == []
    assert fit_tables(laws_of([])) == []
