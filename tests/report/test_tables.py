"""Runs, tables and figures of stores with known answers and with what must not count."""

import math
import statistics
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex

from tests.report.made_store import (
    EPOCHS,
    GMACS,
    IMAGES,
    SEEDS,
    Store,
    accuracy,
    exaflops_of,
    write_sweep,
)
from vit_ray import paper
from vit_ray.report.figures import COLORS, fig_compute, fig_rates
from vit_ray.report.headline import sweeps_of
from vit_ray.report.page import Written
from vit_ray.report.runs import load_runs, trainings
from vit_ray.report.tables import cells_of, comparable, paper_tables, trainings_table


def table_of(written: Written, start: str) -> pd.DataFrame:
    (table,) = (table for name, table in written.tables.items() if name.startswith(start))
    return table


def tables_of(store: Store) -> dict[str, pd.DataFrame]:
    everything = load_runs(store.uri, "made")
    found = paper_tables(trainings(everything), everything)
    return {name.partition(":")[0]: table for name, table in found.items()}


def text_of(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.2f} +- {100 * statistics.stdev(values):.2f}"


@pytest.mark.parametrize("model", GMACS)
@pytest.mark.parametrize("epochs", EPOCHS)
def test_a_cell_of_table_6_is_the_mean_of_its_five_seeds(model, epochs, study_page):
    rows = table_of(study_page, "Table 6").reset_index()
    mine = rows[(rows["model"] == model) & (rows["epochs"] == epochs) & (rows["runs"] == 5)]
    (row,) = mine.to_dict("records")
    compute = exaflops_of(model, epochs)
    assert row["test top-1 %"] == text_of([accuracy(model, compute, seed) for seed in SEEDS])
    assert row["exaFLOPs"] == pytest.approx(compute)
    assert row["images"] == IMAGES
    printed = {"ViT-B/16": 224.0, "R50x1": 50.0, "R101x1": 96.0} if epochs == 7 else {}
    theirs = row["the paper's exaFLOPs"]
    assert (None if pd.isna(theirs) else theirs) == printed.get(model)


def test_other_data_and_another_commit_are_rows_that_say_so(study_page):
    rows = table_of(study_page, "Table 6").reset_index()
    apart = rows[(rows["model"] == "ViT-S/16") & (rows["epochs"] == 7)]
    found = dict(zip(apart["test top-1 %"], apart["differs in"], strict=True))
    assert len(apart) == 3
    assert found["10.00"] == "data pets, tested_on pets, commit c0ffee"
    assert found["20.00"] == "data cifar10, tested_on cifar10, commit beef"
    assert not {"30.00", "40.00"} & {*found}  # a run that goes on, and an earlier record


def test_the_table_of_trainings_has_each_once(study_page):
    table, cells = table_of(study_page, "Trainings"), len(GMACS) * len(EPOCHS) * len(SEEDS)
    counts = table["status"].value_counts().to_dict()
    assert counts == {"finished": cells + 2, "failed": 1, "running": 1}
    best = max(accuracy(model, exaflops_of(model, 28.0), 0) for model in GMACS)
    assert table["test top-1 %"].iloc[0] == f"{100 * best:.2f}"


def pretrained(store: Store, model: str, optimizer: str = "adamw", seed: int = 0) -> str:
    params = {"model.name": model, "optim.name": optimizer, "optim.epochs": 7.0}
    return store.put(
        "first", {"eval/top1": 0.5, "study/exaflops": 3.0, "study/train_images": 100.0}, params,
        kind="pretrain", group=f"{model} {optimizer}", seed=seed, data="imagenet21k",
    )  # fmt: skip


def tuned(store: Store, first: str, top1: float, **more: Any) -> None:
    store.put(
        f"tuned-{first[:4]}-{top1}", {"eval/top1": top1, "study/exaflops": 1.0},
        {"optim.learning_rate": 0.01, "init_from": "/runs/first"}, kind="finetune", group="tuned",
        tags={"vit_ray.init_run": first}, **more,
    )  # fmt: skip


def test_tables_2_and_5_stand_beside_the_papers_on_its_test_set(store):
    for seed, top1 in enumerate((0.98, 0.99, 0.97)):
        tuned(store, pretrained(store, "ViT-B/16", seed=seed), top1, data="cifar10")
    tuned(store, pretrained(store, "ViT-B/32"), 0.9, test=(7, 10), data="pets")
    found = tables_of(store)
    two, five = found["Table 2"], found["Table 5"]
    mean = text_of([0.98, 0.99, 0.97])
    assert two.loc["cifar10", "ViT-B/16, imagenet21k"] == mean
    (huge,) = (name for name in two if str(name).startswith("the paper's ViT-H/14 (JFT-300M"))
    assert two.loc["cifar10", huge] == "99.50"
    assert pd.isna(two.loc["pets", huge])  # 7 images are not the paper's
    assert "2,500 core-days" in huge
    row = five.loc[("imagenet21k", "cifar10")]
    assert row["ViT-B/16"] == mean
    assert row["the paper's ViT-B/16 (ImageNet-21k)"] == "98.95"
    assert row["the paper's ViT-B/16 (JFT-300M)"] == "99.00"
    assert five.loc[("imagenet21k", "pets"), "ViT-B/32"] == "90.00"
    tuned(store, "0" * 32, 0.55)
    runs = trainings(load_runs(store.uri, "made")).set_index("test")
    assert runs.loc[0.98, "exaflops"] == 4.0  # the compute of both trainings
    assert pd.isna(runs.loc[0.55, "exaflops"])  # one is not among the runs


def test_table_7_compares_adam_and_sgd_where_there_is_a_study(store):
    for optimizer, top1 in (("adamw", 0.9), ("sgd", 0.8)):
        tuned(store, pretrained(store, "R50x1", optimizer), top1)
    pretrained(store, "R152x2")
    assert "Table 7" not in tables_of(store)
    store.put("cell", {"eval/top1": 0.1, "study/exaflops": 1.0}, group="cell")
    table = tables_of(store)["Table 7"]
    assert table.loc["cifar10"].to_dict() == {"R50x1, adamw": "90.00", "R50x1, sgd": "80.00"}


def test_table_8_has_positions_by_the_place_where_they_are_added(store):
    for kind, place, top1 in (("none", None, 0.3), ("learned_1d", None, 0.5),
                              ("learned_1d", "every_layer", 0.6)):  # fmt: skip
        params = {"model.positions": kind} | ({"model.positions_at": place} if place else {})
        store.put(
            f"{kind}-{place}", {"few_shot/5_shot_top1": top1, "study/exaflops": 1.0}, params,
            group=f"{kind} {place}",
        )  # fmt: skip
    table = tables_of(store)["Table 8"]
    assert table.loc["learned_1d", "stem"] == "50.00"
    assert table.loc["learned_1d", "every_layer"] == "60.00"
    assert table.loc["none", "the paper's stem"] == "61.38"
    assert table.loc["learned_1d", "the paper's every layer shared"] == "64.29"


def test_tasks_of_vtab_and_of_a_cells_transfers_are_columns(store):
    store.put("mine", {"vtab/pets_top1": 0.9, "vtab/mean_top1": 0.8}, kind="vtab")
    both = {"transfer/pets_top1": 0.8, "transfer/flowers_top1": 0.6}
    store.put("a", {"study/exaflops": 1.0, **both}, group="a")
    store.put("b", {"study/exaflops": 2.0, "transfer/pets_top1": 0.9}, group="b")
    tables = tables_of(store)
    nine, name = tables["Table 9"], "the paper's ViT-H/14 (JFT)"
    assert nine.loc["mine"].dropna().to_dict() == {"pets": "90.00", "mean": "80.00"}
    huge = dict(zip(paper.VTAB_TASKS, paper.TABLE_9["ViT-H/14 (JFT)"], strict=True))
    assert nine.loc[name, "pets"] == f"{huge['pets']:.2f}"
    assert nine.loc[name, "mean"] == f"{statistics.fmean(huge.values()):.2f}"
    table = trainings_table(trainings(load_runs(store.uri, "made")))
    assert table.loc["a", ["pets %", "flowers %"]].tolist() == ["80.00", "60.00"]
    assert pd.isna(table.loc["b", "flowers %"])
    assert tables["Table 6"]["pets %"].tolist() == ["80.00", "90.00"]


def test_a_line_of_a_figure_is_a_model_and_a_point_a_mean_over_seeds(study):
    made, selection = study
    cells = comparable(cells_of(trainings(load_runs(made.uri, selection))))
    (axes,) = fig_compute(cells).axes
    ends = {text.xy: text.get_text() for text in axes.texts}
    lines = [container[0].get_xydata() for container in axes.containers]
    drawn = {ends[tuple(map(float, points[-1]))]: points for points in lines}
    assert {*drawn} == {*GMACS}
    for model, points in drawn.items():
        computes = [exaflops_of(model, epochs) for epochs in EPOCHS]
        means = [100 * np.mean([accuracy(model, c, seed) for seed in SEEDS]) for c in computes]
        assert np.asarray(points) == pytest.approx(np.column_stack([computes, means]))
    assert axes.get_xscale() == "log"
    colors = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    assert colors["ViT-B/16"] == COLORS["ViT"] != colors["R50x1"] == COLORS["ResNet"]
    # A training that has not finished is a cross with its state.
    assert "running" in [text.get_text() for text in axes.get_legend().get_texts()]
    crosses = [one for one in axes.collections if isinstance(one, PathCollection)]
    assert 30.0 in [point[1] for one in crosses for point in one.get_offsets().tolist()]
    # By another key, as in Figures 8, 9 and 13.
    (axes,) = fig_compute(cells, color="epochs").axes
    colors = {text.get_text(): to_hex(text.get_color()) for text in axes.texts}
    assert {name.partition(", ")[2] for name in colors} == {"7.0", "14.0", "28.0"}
    assert len({*colors.values()}) == 3


def test_rates_are_hollow_on_the_dev_split_and_filled_on_the_test_set(store):
    write_sweep(store)
    ((_, tried, finals),) = sweeps_of(trainings(load_runs(store.uri, "made")))
    (axes,) = fig_rates(tried, finals).axes
    drawn = {one.get_label(): one[0] for one in axes.containers}
    faces = {name: to_hex(line.get_markerfacecolor()) for name, line in drawn.items()}
    assert faces == {
        "dev split": "#ffffff", "dev split, stopped early": "#ffffff", "test": COLORS["ViT"]
    }  # fmt: skip
    points = {name: line.get_xydata().tolist() for name, line in drawn.items()}
    assert points["dev split"] == [[0.01, 88.0], [0.03, 90.0], [0.1, 89.0]]
    assert points["test"] == [[0.03, pytest.approx(90.0)]]
    assert axes.get_xscale() == "log"


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
        tags, start = {"vit_ray.init_run": first}, {"init_from": f"/runs/{first}"}
        store.put("tuned", {"eval/top1": 0.9}, start, kind="finetune", group="t", tags=tags)
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
