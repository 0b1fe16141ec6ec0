"""Comparisons of runs and studies in a real MLflow store."""

import statistics

import pytest
from mlflow.tracking import MlflowClient
from scipy import stats

from tests.tracking.stored_runs import store_run
from vit_ray.config.branch_origin import TAG
from vit_ray.report.comparison import compare

# Top-1 of the two seeds of each row, in either study.
ROWS = {"ViT-S": ([0.70, 0.72], [0.73, 0.76]), "R50": ([0.60, 0.66], [0.61, 0.66])}


class Store:
    """Two experiments of a SQLite store, with runs of our kinds."""

    def __init__(self, uri, name):
        self.uri = uri
        self.client = MlflowClient(uri)
        self.here, self.there = f"{name}-here", f"{name}-there"
        self.experiments = {n: self.client.create_experiment(n) for n in (self.here, self.there)}

    def run(self, name, metrics=None, params=None, tags=None, *, is_there=False):
        place = self.experiments[self.there if is_there else self.here]
        return store_run(self.client, place, name, metrics, params, tags)

    def study(self, name, side, **changes):
        parent = self.run(name, tags={"vit_ray.kind": "study"})
        tags = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": parent}
        for label, values in ROWS.items():
            for seed, top1 in enumerate(values[side]):
                params = {"model.name": label, "seed": seed, "optim.weight_decay": 0.1, **changes}
                row = {**tags, "vit_ray.study_label": label}
                self.run(f"{name}-{label}-seed{seed}", {"eval/top1": top1}, params, row)
        return parent

    def id_of(self, name):
        wanted = f"attributes.run_name = '{name}'"
        (found,) = self.client.search_runs([self.experiments[self.here]], wanted)
        return found.info.run_id

    def compare(self, a, b):
        return compare(self.uri, self.here, (a, b))


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture
def store(uri, request):
    return Store(uri, request.node.name)


def test_two_runs_differ_in_keys_and_metrics(store):
    same = {"model.name": "ViT-S/16", "seed": 0}
    store.run("a", {"eval/top1": 0.5, "train/loss": 1.0, "only/here": 1.0}, {**same, "optim.lr": 1})
    store.run("b", {"eval/top1": 0.6, "train/loss": 0.7}, {**same, "optim.lr": 2, "train.mixup": 1})
    found = store.compare("a", "b")
    assert found.keys == {"optim.lr": ("1", "2"), "train.mixup": ("unset", "1")}
    means = {one.metric: one.mean for one in found.differences}
    assert means == {"eval/top1": pytest.approx(0.1), "train/loss": pytest.approx(-0.3)}
    assert [one.standard_error for one in found.differences] == [None, None]
    rows = {row[1]: row for row in found.difference_table().rows}
    assert rows["top-1 accuracy %"][2:5] == ["50.00", "60.00", "+10.00"]


def test_studies_are_compared_cell_by_cell_and_seed_by_seed(store):
    store.study("old", 0)
    store.study("new", 1, **{"optim.weight_decay": 0.3})
    found = store.compare("old", "new")
    assert [*found.keys.values()] == [("0.1", "0.3")]
    by_cell = {one.cell: one for one in found.differences}
    vit = by_cell["ViT-S"]
    assert vit.is_paired
    assert vit.mean == pytest.approx(0.035)
    # Of the differences 0.03 and 0.04 of the two seeds.
    assert vit.standard_error == pytest.approx(statistics.stdev([0.03, 0.04]) / 2**0.5)
    assert by_cell["R50"].standard_error == pytest.approx(0.005)


def test_cells_are_compared_and_not_their_fine_tunings_nor_failed_attempts(store):
    for name, tasks in (("old", {"pets": 0.9, "svhn": 0.2}), ("new", {"pets": 0.8, "svhn": 0.4})):
        parent = store.run(name, tags={"vit_ray.kind": "study"})
        tags = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": parent}
        params = {"model.name": "ViT-S", "seed": 0}
        cell = {"eval/top1": 0.5, **{f"transfer/{task}_top1": v for task, v in tasks.items()}}
        store.run(f"{name}-cell", cell, params, tags)
        again = store.run(f"{name}-cell", {"eval/top1": 0.1}, params, tags)
        store.client.set_terminated(again, "FAILED")
        other = store.run(
            f"{name}-other", {"eval/top1": 0.1}, {**params, "model.name": "R50"}, tags
        )
        store.client.set_terminated(other, "FAILED")
        for task, top1 in tasks.items():
            store.run(
                f"{name}-{task}", {"eval/top1": top1}, params, {**tags, "vit_ray.kind": "finetune"}
            )
    found = store.compare("old", "new")
    assert {one.metric: (one.cell, one.a, one.b) for one in found.differences} == {
        "eval/top1": ("ViT-S", (0.5,), (0.5,)),
        "transfer/pets_top1": ("ViT-S", (0.9,), (0.8,)),
        "transfer/svhn_top1": ("ViT-S", (0.2,), (0.4,)),
        "transfer/mean_top1": ("ViT-S", (pytest.approx(0.55),), (pytest.approx(0.6),)),
    }
    rows = {row[1]: row[2:5] for row in found.difference_table().rows}
    assert rows["pets top-1 after fine-tuning %"] == ["90.00", "80.00", "-10.00"]
    assert not found.only_a


def test_an_accuracy_on_held_out_images_is_compared_with_its_like_alone(store):
    store.run("a", {"dev/top1": 0.5, "train/loss": 1.0})
    store.run("b", {"dev/top1": 0.6, "train/loss": 1.0})
    store.run("tested", {"eval/top1": 0.9, "train/loss": 1.0})
    rows = {row[1] for row in store.compare("a", "b").difference_table().rows}
    assert rows == {"top-1 accuracy, dev split %", "training loss"}
    assert {one.metric for one in store.compare("a", "tested").differences} == {"train/loss"}


def test_other_seeds_are_compared_by_their_means(store):
    store.study("old", 0)
    parent = store.run("new", tags={"vit_ray.kind": "study"})
    tags = {"mlflow.parentRunId": parent, "vit_ray.study_label": "ViT-S"}
    for seed, top1 in ((7, 0.80), (8, 0.84), (9, 0.82)):
        store.run(f"new-{seed}", {"eval/top1": top1}, {"seed": seed}, tags)
    found = store.compare("old", "new")
    (one,) = found.differences
    assert not one.is_paired
    expected = (statistics.variance(one.a) / 2 + statistics.variance(one.b) / 3) ** 0.5
    assert one.standard_error == pytest.approx(expected)
    assert found.only_a == ["R50"]
    assert found.difference_table().rows[0][-1] == "2 and 3"


def test_cells_are_told_apart_by_what_either_study_varies(store):
    for name, fractions in (("wide", (0.1, 1.0)), ("narrow", (1.0,))):
        parent = store.run(name, tags={"vit_ray.kind": "study"})
        tags = {"mlflow.parentRunId": parent, "vit_ray.study_label": "ViT-S"}
        for fraction in fractions:
            metrics = {"eval/top1": 0.5 + 0.1 * fraction}
            store.run(f"{name}-{fraction}", metrics, {"data.fraction": fraction, "seed": 0}, tags)
    found = store.compare("wide", "narrow")
    assert [(one.cell, one.mean) for one in found.differences] == [
        ("ViT-S, data.fraction 1.0", pytest.approx(0.0))
    ]
    assert found.only_a == ["ViT-S, data.fraction 0.1"]


def test_a_run_is_found_by_its_id_in_any_experiment(store):
    a = store.run("same", {"eval/top1": 0.5})
    b = store.run("same", {"eval/top1": 0.7}, is_there=True)
    assert store.compare(a, b).differences[0].mean == pytest.approx(0.2)


def test_what_cannot_be_compared_is_told(store):
    store.run("digits", {"eval/top1": 0.5})
    store.run("twice", {"eval/top1": 0.5})
    second = store.run("twice", {"eval/top1": 0.6})
    store.run("elsewhere", {"eval/top1": 0.5}, is_there=True)
    store.run("silent", {"mine": 1.0})
    store.study("study", 0)
    store.run("empty", tags={"vit_ray.kind": "study"})
    other = store.run("other", tags={"vit_ray.kind": "study"})
    row = {"mlflow.parentRunId": other, "vit_ray.study_label": "unheard of"}
    store.run("other-cell", {"eval/top1": 0.5}, tags=row)
    for words, told in (
        (("digits", "digist"), "-here' has no run 'digist'; similar: digits"),
        (("digits", "0" * 32), "MLflow has no run 0000"),
        (("digits", "twice"), rf"2 runs are named 'twice': {second} \(finished\); .*give an id"),
        (
            ("digits", "elsewhere"),
            rf"{store.there}' has one: give tracking.experiment={store.there} or",
        ),
        (("digits", "silent"), "no metric in common: eval/top1 here, mine there"),
        (("digits", "study"), "'digits' is a single run and 'study' a study of 4 trainings"),
        (("study", "empty"), "study 'empty' has no finished trainings to compare yet"),
        (
            ("study", "other"),
            r"no cell of 'study' \(ViT-S; R50\) is a cell of 'other' \(unheard of\)",
        ),
        (("digits", 'it\'s "quoted"'), "has no run"),
    ):
        with pytest.raises(ValueError, match=told):
            store.compare(*words)
    with pytest.raises(ValueError, match=r"tracking.experiment=nowhere: .* it has Default, test"):
        compare(store.uri, "nowhere", ("digits", "twice"))
    with pytest.raises(ValueError, match="no such file"):
        compare(f"{store.uri}x", store.here, ("digits", "twice"))


def test_a_cell_holds_seeds_and_nothing_else(store):
    """Two rates under one label are two cells, and a difference over both is none."""
    for name, rates in (("old", {0.01: 0.9, 0.001: 0.1}), ("new", {0.01: 0.8, 0.1: 0.3})):
        parent = store.run(name, tags={"vit_ray.kind": "study"})
        tags = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": parent}
        for rate, top1 in rates.items():
            params = {"model.name": "ViT-S/16", "optim.learning_rate": rate, "seed": 0}
            store.run(f"{name}-{rate}", {"eval/top1": top1}, params, tags)
    found = store.compare("old", "new")
    cell = "ViT-S/16, optim.learning_rate 0.01"
    assert [(one.cell, one.a, one.b) for one in found.differences] == [(cell, (0.9,), (0.8,))]
    assert found.only_a == ["ViT-S/16, optim.learning_rate 0.001"]
    assert found.only_b == ["ViT-S/16, optim.learning_rate 0.1"]


def test_test_sets_and_commits_that_differ_are_told(store):
    for name, commit, test in (("a", "c0ffee", "/data/pets"), ("b", "decaf", "/data/cars")):
        tags = {"vit_ray.kind": "pretrain", "vit_ray.git_commit": commit, "data.eval": test}
        store.run(name, {"eval/top1": 0.5}, {"model.name": "ViT-S/16", "seed": 0}, tags)
    told = store.compare("a", "b").keys
    assert told == {
        "data.eval": ("/data/pets", "/data/cars"),
        "git commit": ("c0ffee", "decaf"),
        "test set": ("/data/pets", "/data/cars"),
    }


def test_a_study_that_is_recorded_twice_is_compared_once(store):
    store.study("old", 0)
    store.study("new", 1)
    whole = store.compare("old", "new").differences
    for seed, top1 in enumerate(ROWS["ViT-S"][1]):  # under names of their own
        tags = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": store.id_of("new")}
        params = {"model.name": "ViT-S", "seed": seed, "optim.weight_decay": 0.1}
        tags["vit_ray.study_label"] = "ViT-S"
        store.run(f"again-{seed}", {"eval/top1": top1}, params, tags)
    assert store.compare("old", "new").differences == whole


def test_differences_have_intervals_over_seeds_and_over_cells(store):
    store.study("old", 0)
    store.study("new", 1)
    found = store.compare("old", "new")
    by_cell, by_seed = found.pooled()
    # Means of ViT-S and R50: 0.71 and 0.63 before; of seeds 0 and 1 0.65 and 0.69.
    assert (by_cell.a, by_cell.b) == (pytest.approx((0.71, 0.63)), pytest.approx((0.745, 0.635)))
    assert (by_seed.a, by_seed.b) == (pytest.approx((0.65, 0.69)), pytest.approx((0.67, 0.71)))
    known = stats.ttest_rel(by_cell.b, by_cell.a)
    assert by_cell.tested.p == pytest.approx(known.pvalue)
    rows = {row[0]: row for row in found.difference_table().rows}
    assert rows["ViT-S"][6:9] == ["-2.85", "9.85", "0.09"]
    assert [*rows][2:] == ["mean over 2 cells, by cell", "mean over 2 cells, by seed"]
    (sentence,) = found.headline()
    assert sentence.startswith("new is 2.00 points better than old in top-1 accuracy (mean over 2")
    assert sentence.endswith("no recorded key of the recipe differs.")


def test_the_headline_of_two_studies_is_about_the_first_accuracy(store):
    for name, top1 in (("old", 0.5), ("new", 0.6)):
        parent = store.run(name, tags={"vit_ray.kind": "study"})
        for label in ROWS:
            tags = {"vit_ray.kind": "study_cell", "mlflow.parentRunId": parent}
            tags["vit_ray.study_label"] = label
            metrics = {"eval/top1": top1, "eval/averaged_top1": 1 - top1}
            store.run(f"{name}-{label}", metrics, {"model.name": label, "seed": 0}, tags)
    (sentence,) = store.compare("old", "new").headline()
    assert sentence.startswith("new is 10.00 points better than old in top-1 accuracy (mean over 2")


def test_the_headline_says_which_side_is_better_and_in_which_keys_they_differ(store):
    store.run("a", {"eval/top1": 0.6}, {"optim.lr": 1})
    store.run("b", {"eval/top1": 0.5}, {"optim.lr": 2})
    assert store.compare("a", "b").headline() == [
        "b is 10.00 points worse than a in top-1 accuracy, B - A: -10.00, one seed on a side; they "
        "differ in optim.lr."
    ]


def test_equal_sides_are_neither_better_nor_worse(store):
    for name in "ab":
        store.run(name, {"eval/top1": 0.5}, {"optim.lr": 1})
    (sentence,) = store.compare("a", "b").headline()
    assert sentence.startswith("b is equal to a in top-1 accuracy, B - A: 0.00, one seed on a side")


def test_a_sentence_and_its_table_have_one_direction(store):
    store.study("old", 1)
    store.study("new", 0)
    found = store.compare("old", "new")
    (sentence,) = found.headline()
    row = found.difference_table().rows[-1]
    assert sentence.startswith("new is 2.00 points worse than old in top-1 accuracy (mean over 2")
    assert f"B - A: {row[4]} (95 %: {row[6]} to {row[7]}; p = {row[8]});" in sentence


def test_initial_weights_are_one_row_and_a_loss_says_what_it_is_on(store):
    for name, weights in (("a", "None"), ("b", "/runs/pre")):
        tags = {"vit_ray.kind": "finetune", "init_from": weights}
        metrics = {"eval/loss": 1.0, "dev/loss": 2.0}
        store.run(name, metrics, {"model.name": "ViT-S/16", "seed": 0}, tags)
    found = store.compare("a", "b")
    assert found.keys == {"init_from": ("None", "/runs/pre")}
    rows = [row[1] for row in found.difference_table().rows]
    assert rows == ["loss on the test set", "loss, dev split"]


def test_a_sweep_is_compared_by_its_retraining(store):
    base = {"model.name": "ViT-S/16", "seed": 0}
    store.run("scratch", {"eval/top1": 0.6}, {**base, "optim.learning_rate": 0.3})
    sweep = store.run("rates", {"eval/top1": 0.9}, tags={"vit_ray.kind": "sweep"})
    below = {"mlflow.parentRunId": sweep}
    for rate, top1 in ((0.1, 0.99), (0.2, 0.98)):
        tags = {**below, "vit_ray.kind": "sweep_trial", "vit_ray.sweep_stage": "sweep_trial"}
        params = {**base, "optim.learning_rate": rate}
        store.run(f"rates-lr{rate}", {"dev/top1": top1}, params, tags)
    tags = {**below, "vit_ray.kind": "finetune", "vit_ray.sweep_stage": "finetune"}
    params = {**base, "optim.learning_rate": 0.1}
    store.run("rates-final", {"eval/top1": 0.9}, params, tags)
    for words, mean in ((("scratch", "rates"), 0.3), (("rates", "scratch"), -0.3)):
        found = store.compare(*words)
        (one,) = found.differences
        assert (one.cell, one.mean) == ("ViT-S/16", pytest.approx(mean))
        assert {*found.keys["optim.learning_rate"]} == {"0.1", "0.3"}
        kinds = [row[2] for row in found.sections()[0].tables[0].rows]
        assert "a sweep, compared by its retraining rates-final" in kinds


def sweep(store, name, model, rates, first):
    """A sweep, and finished retrainings of each rate with two seeds."""
    below = {"mlflow.parentRunId": store.run(name, tags={"vit_ray.kind": "sweep"})}
    tags = {**below, "vit_ray.kind": "finetune", "vit_ray.sweep_stage": "finetune"}
    for number, rate in enumerate(rates):
        for seed in (0, 1):
            params = {"model.name": model, "seed": seed, "optim.learning_rate": rate}
            values = {"eval/top1": first + 0.1 * number + 0.01 * seed}
            commit = {"vit_ray.git_commit": "ab"[seed]}  # interrupted between the seeds
            store.run(f"{name}-final-lr{rate}-seed{seed}", values, params, {**tags, **commit})


def test_two_sweeps_of_different_models_are_compared_by_their_retrainings(store):
    sweep(store, "small", "ViT-S/16", [0.1], 0.6)
    sweep(store, "large", "ViT-B/16", [0.3], 0.7)
    found = store.compare("small", "large")
    (one,) = found.differences
    assert (one.a, one.b, one.is_paired) == ((0.6, 0.61), (0.7, 0.71), True)
    store.study("study", 0)
    with pytest.raises(ValueError, match=r"'small' is a sweep, .* and 'study' a study of 4"):
        store.compare("small", "study")


def test_a_sweep_that_was_continued_is_compared_by_its_last_retraining(store):
    sweep(store, "rates", "ViT-S/16", [0.1, 0.3], 0.6)
    store.run("scratch", {"eval/top1": 0.5}, {"model.name": "ViT-S/16", "seed": 0})
    found = store.compare("scratch", "rates")
    (one,) = found.differences
    assert one.b == (0.7, 0.71)
    assert found.keys["optim.learning_rate"] == ("unset", "0.3")


def test_the_cost_of_a_fine_tuning_is_also_given_with_its_pre_training(store):
    costs = {"study/exaflops": 8.0, "cost/core_days": 2.0}
    tags = {"vit_ray.kind": "pretrain", "vit_ray.run_folder": "/runs/pre"}
    store.run("pre", costs, {"model.name": "ViT-S/16", "seed": 0}, tags)
    tags = {"vit_ray.kind": "finetune", "init_from": "/runs/pre/step-00000007"}
    own = {"eval/top1": 0.9, "study/exaflops": 1.0, "cost/core_days": 0.5}
    store.run("tuned", own, {"model.name": "ViT-S/16", "seed": 0}, tags)
    scratch = {"eval/top1": 0.6, "study/exaflops": 1.0, "cost/core_days": 0.25}
    store.run("scratch", scratch, {"model.name": "ViT-S/16", "seed": 0})
    rows = {row[1]: row[2:5] for row in store.compare("tuned", "scratch").difference_table().rows}
    assert rows["exaFLOPs"] == ["1", "1", "0"]
    assert rows["exaFLOPs with pre-training"] == ["9", "1", "-8"]
    assert rows["core-days with pre-training"] == ["2.5", "0.25", "-2.25"]
    assert store.compare("tuned", "scratch").keys == {
        "init_from": ("/runs/pre/step-00000007", "unset")
    }
    alone = store.compare("scratch", "pre").difference_table().rows
    assert not [row for row in alone if "pre-training" in str(row[1])]


def test_a_comparison_says_what_interrupted_either_side(store):
    store.run("calm", {"eval/top1": 0.6}, tags={"mlflow.vit_ray.events.first_step": "1"})
    events = {f"mlflow.vit_ray.events.{kind}": "1" for kind in ("worker_failed", "resumed")}
    lost = {"run/lost_s": 40.0, "run/repeated_s": 30.0}
    store.run("shaken", {"eval/top1": 0.7, **lost}, tags=events)
    assert (
        "interruptions: calm: none recorded; shaken: worker failed, resumed (1:10 min of work "
        "repeated or lost)" in store.compare("calm", "shaken").sections()[2].texts
    )


def test_a_fork_names_its_parent_and_its_curve_begins_where_they_part(store):
    ids = [store.run("parent"), store.run("fork", tags={TAG: "parent at step 4"})]
    for run_id, first in zip(ids, (1, 5), strict=True):
        for step in range(first, 9):
            store.client.log_metric(run_id, "train/loss", 9 / step, step=step)
    sides, *_, curves = store.compare("parent", "fork").sections()
    (table,) = sides.tables
    at = [column.title for column in table.columns].index("branched from")
    assert [row[at] for row in table.rows] == [None, "parent at step 4"]
    (chart,) = curves.charts
    assert [one.points[0].x for one in chart.series] == [1, 5]
    plain = store.compare("parent", "parent").sections()[0].tables[0]
    assert "branched from" not in [column.title for column in plain.columns]
