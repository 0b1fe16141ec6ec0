"""Power laws of a study's runs as the page shows them."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.report.made_runs import made
from vit_ray.report.figures.fit_figures import fit_charts, fit_sentences, fit_tables, laws_of
from vit_ray.report.runs import RecordedRun
from vit_ray.report.statistics.fits import predict_held_out

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
        assert all(point.low >= 0 and point.high <= 1 for point in line.points)
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
    _, table, levels = fit_tables(laws_of(runs))
    drawn = [(p.x, p.y, p.low, p.high) for p in fit_charts(laws_of(runs))[1].series[0].points]
    assert len(levels.rows) == 5
    for _, family, *shown in levels.rows:  # a row is a point of the figure
        assert family == "ResNet"
        assert any(np.allclose(np.array(shown, float), point, rtol=0.01) for point in drawn), shown
    (row,) = rows_of(table).values()
    assert row["family"] == "ResNet"
    assert row["compute / compute of ViT"] == pytest.approx(3, rel=0.2)
    assert float(row["from"]) < row["compute / compute of ViT"] < float(row["to"])
    assert row["over accuracies from %"] < row["over accuracies to %"]
    assert "unknown because" not in row


def test_what_is_not_known_of_a_law_is_told_in_the_tables():
    few = [*family_of("ViT", count=4), *family_of("ResNet", 3.0, 1, count=3)]
    laws, ratios = map(rows_of, fit_tables(laws_of(few)))
    assert [laws[family]["points"] for family in ("ViT", "ResNet")] == [4, 3]
    assert laws["ViT"]["exponent b"] > 0
    assert laws["ViT"]["unknown because"].startswith("4 points are too few to hold one out")
    assert laws["ResNet"]["exponent b"] is None
    assert laws["ResNet"]["unknown because"].startswith("too few points for a power law")
    assert ratios["ResNet"]["unknown because"] == "ResNet has no law"


def test_families_of_no_common_accuracy_are_told_so():
    far = [
        recorded(family, float(c), top - 0.1 * float(c) ** -0.5)
        for family, top in (("ViT", 0.4), ("ResNet", 0.8))
        for c in COMPUTE
    ]
    laws = laws_of(far)
    why = "no accuracy lies in the range of both families' points"
    assert rows_of(fit_tables(laws)[1])["ResNet"]["unknown because"] == why
    assert fit_sentences(laws) == [f"Top-1 accuracy, ResNet against ViT: {why}."]


def test_without_the_baseline_there_is_no_table_of_ratios():
    (table,) = fit_tables(laws_of(family_of("ResNet")))
    assert [*rows_of(table)] == ["ResNet"]


def test_a_family_of_too_few_points_is_told_and_shown_without_a_law():
    runs = [*family_of("ViT"), *family_of("ResNet", 3.0, 1, count=3)]
    laws = laws_of(runs)
    (curves,) = fit_charts(laws)
    assert "ResNet, fitted" not in [one.name for one in curves.series]
    assert fit_sentences(laws) == []
    (why,) = laws[0].unfitted.values()
    assert why.startswith("too few points for a power law")


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


LAWS = {"cifar10": (0.5, 0.4, 0.05), "cifar100": (0.7, 0.3, 0.2)}
"""Scale, exponent and floor of the error on each set."""


def error(compute, scale=0.5, exponent=0.4, floor=0.05):
    return scale * compute**-exponent + floor


def studied(of=(), compute=COMPUTE, changes=(), name="ViT-B/32", **more):
    """A finished cell of each compute, on the law of these parameters."""
    return [
        made(
            {"model.name": name, "optim.epochs": float(c), **dict(changes)},
            metrics={"study/exaflops": float(c), "eval/top1": 1 - error(float(c), *of)},
            **more,
        )
        for c in compute
    ]


def found(runs):
    """Of each law: its set, its name, number of points, exponent and floor."""
    return {
        (one.whose, law): (len(one.points[law].compute), *(
            (round(one.fits[law].exponent.value, 3), round(one.fits[law].floor.value, 3))
            if law in one.fits else ()
        ))
        for one in laws_of(runs)
        for law in one.runs
    }  # fmt: skip


def test_a_law_goes_through_one_data_set():
    runs = [
        run
        for data, of in LAWS.items()
        for run in studied(
            of, changes={"data.train": f"/{data}/train", "data.eval": f"/{data}/test"}
        )
    ]
    assert found(runs) == {
        (", test set cifar10, training set cifar10", "ViT"): (6, 0.4, 0.05),
        (", test set cifar100, training set cifar100", "ViT"): (6, 0.3, 0.2),
    }
    for one, of in zip(laws_of(runs), LAWS.values(), strict=True):
        held = predict_held_out(*one.points["ViT"])
        assert held.predicted.value == pytest.approx(error(COMPUTE[-1], *of), rel=0.01)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optim.name", ("adamw", "sgd")),
        ("optim.weight_decay", (0.1, 0.3)),
        ("optim.learning_rate", (0.001, 0.01)),  # of the same sizes and lengths
        ("model.image_size", (224, 384)),
        ("model.positions", ("none", "learned_2d")),
        ("train.precision", ("bf16", "fp32")),
    ],
)
def test_a_law_is_no_average_over_what_differs_in_more_than_size_and_length(key, values):
    runs = [
        run
        for of, value in zip(LAWS.values(), values, strict=True)
        for run in studied(of, changes={key: value, "data.eval": "/one/test"})
    ]
    laws = {
        law.partition(f"{key} ")[2].partition(",")[0]: fit for (_, law), fit in found(runs).items()
    }
    assert laws == {str(values[0]): (6, 0.4, 0.05), str(values[1]): (6, 0.3, 0.2)}


def test_sizes_and_lengths_with_rates_of_their_own_are_on_one_law():
    runs = [
        *studied(compute=COMPUTE[:3], name="ViT-B/32", changes={"optim.learning_rate": 8e-4}),
        *studied(compute=COMPUTE[3:], name="ViT-L/32", changes={"optim.learning_rate": 6e-4}),
    ]
    assert found(runs) == {("", "ViT"): (6, 0.4, 0.05)}


def test_seeds_are_one_point_of_a_law_however_many_there_are():
    runs = [*studied(), *studied((0.5, 0.4, 0.07), COMPUTE[:1], {"seed": 1})]
    (one,) = laws_of(runs)
    assert len(one.points["ViT"].compute) == 6
    assert one.points["ViT"].accuracy[0] == pytest.approx(1 - error(COMPUTE[0]) - 0.01)


def test_seeds_that_were_stopped_early_at_different_steps_are_one_point():
    early = {"train.early_stopping": 3, "optim.epochs": 99.0}
    runs = studied(changes={"train.early_stopping": 3})
    runs += [
        *studied(compute=[1000.0], changes=early),
        *studied(compute=[2000.0], changes={**early, "seed": 1}),
    ]
    (one,) = laws_of(runs)
    assert one.points["ViT"].compute[-1] == 1500.0


def test_nearly_equal_amounts_of_compute_are_no_points_of_their_own():
    near = 10.0 * np.array([1, 1.015, 1.03, 1.045, 1.06, 1.075])
    runs = [*studied(compute=near), *studied(compute=[100.0, 1000.0])]
    rows = rows_of(fit_tables(laws_of(runs))[0])
    assert rows["ViT"]["points"] == 3
    assert rows["ViT"]["unknown because"].startswith("too few points for a power law")
    assert laws_of(studied(compute=near)) == []


def test_what_no_law_goes_through_is_said():
    runs = [
        *studied(),
        *studied(compute=COMPUTE[:2], changes={"data.fraction": 0.1}, images=5000),
        *studied(compute=COMPUTE[:1], changes={"seed": 1}, status="KILLED"),
    ]
    sentences = fit_sentences(laws_of(runs))
    assert sentences == [
        "Top-1 accuracy: trainings left out of the laws: 2 trained on fewer than 50k images, "
        "1 not finished."
    ]
    assert fit_sentences(laws_of(studied())) == []


def test_a_family_is_compared_with_the_one_law_of_the_baseline():
    resnets = studied((0.5 * 3**0.4, 0.4, 0.05), name="R50x1")
    one = laws_of([*studied(), *resnets])[0]
    assert one.compared["ResNet"].typical.value == pytest.approx(3, rel=1e-3)
    two = laws_of([*studied(), *studied(changes={"optim.weight_decay": 0.5}), *resnets])[0]
    assert two.compared["ResNet"] == "ViT has 2 laws"
