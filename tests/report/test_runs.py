"""Which runs a report takes, and what it knows of them."""

import math

import pandas as pd
import pytest

from vit_ray.report.runs import Files, load_runs, trainings


def test_a_selected_run_comes_with_all_runs_below_it(store):
    study = store.put("study", kind="study")
    sweep = store.put("sweep", kind="sweep", parent=study)
    store.put("trial", {"dev/top1": 0.5}, kind="sweep_trial", parent=sweep)
    store.put("other", {"eval/top1": 0.5}, kind="pretrain")
    assert load_runs(store.uri, study)["name"].tolist() == ["study", "sweep", "trial"]
    assert len(load_runs(store.uri, "made")) == 4
    with pytest.raises(ValueError, match="no experiment 'made2'; give one of Default, made"):
        load_runs(store.uri, "made2")
    with pytest.raises(ValueError, match="no such file"):
        load_runs("sqlite:////nowhere/mlflow.db", "made")


def test_a_group_is_that_of_the_driver_with_the_pre_trainings_before_it(store):
    firsts = [
        store.put("first", kind="pretrain", group=group, seed=seed)
        for group, seed in (("a", 0), ("a", 1), ("b", 0))
    ]
    for first in firsts:
        tags = {"vit_ray.init_run": first, "init_from": f"/runs/{first}"}
        store.put("tuned", {"eval/top1": 0.9}, kind="finetune", group="t", tags=tags)
    store.put("alone", kind="")
    runs = load_runs(store.uri, "made")
    one, again, other = runs.loc[runs["name"] == "tuned", "group"]
    assert one == again != other
    assert runs.loc[runs["name"] == "tuned", "seed"].tolist() == ["0/0", "0/1", "0/0"]
    assert runs["origin"].dropna().tolist() == firsts
    assert runs["is_tuned"].sum() == 3


def test_of_two_records_of_a_training_the_newest_finished_one_counts(store):
    for group, name, status in (
        ("g", "killed", "KILLED"), ("g", "good", "FINISHED"), ("g", "again", None),
        ("h", "killed twice", "KILLED"), ("h", "newest", "KILLED"),
    ):  # fmt: skip
        store.put(name, {"eval/top1": 0.5}, kind="pretrain", group=group, status=status)
    assert trainings(load_runs(store.uri, "made"))["name"].tolist() == ["good", "newest"]


def test_a_result_is_the_best_or_the_averaged_one_where_the_run_has_it(store):
    store.put("best", {"eval/top1": 0.5, "eval/best_top1": 0.7, "result/evaluations": 3.0})
    store.put("averaged", {"eval/top1": 0.5, "eval/averaged_top1": 0.6})
    store.put("diverged", {"eval/top1": math.nan, "eval/loss": math.inf})
    runs = load_runs(store.uri, "made").set_index("name")
    assert runs["test"].fillna(-1).tolist() == [0.7, 0.6, -1]
    assert pd.isna(runs.loc["diverged"].get("eval/loss"))
    assert runs.loc["best", "best_of"] == 3


def test_a_curve_has_each_step_once_with_its_first_and_its_last(store):
    run_id = store.put("run")
    for step in range(50):
        store.client.log_metric(run_id, "train/loss", float(step), step=step)
    store.client.log_metric(run_id, "train/loss", 99.0, timestamp=9**13, step=49)
    found = Files(store.uri).curve(run_id, "train/loss", 10)
    assert (len(found), found.index[0], found.index[-1], found.iloc[-1]) == (10, 0, 49, 99.0)
    assert len(Files(store.uri).curve(run_id, "none", 10)) == 0
