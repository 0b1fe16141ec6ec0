"""The paper's tables from runs: means over seeds by hand, and what nobody ran left open."""

import json
from types import SimpleNamespace

import pytest
from mlflow.entities import Dataset, DatasetInput, InputTag

from tests.report.made_runs import texts
from vit_ray.report import sweeps
from vit_ray.report.figures import chart_list as figures
from vit_ray.report.headline import best_sentences, totals
from vit_ray.report.paper_tables import (
    comparing,
    paper_tables,
    table_2,
    table_5,
    table_6,
    transfers,
)
from vit_ray.report.runs import RecordedRun, with_origins, with_tasks
from vit_ray.report.statistics import accuracies


def run(name, kind="study_cell", metrics=None, params=None, status="FINISHED", test=None, **tags):
    """`test`: numbers of images and classes of its test set."""
    known = {"vit_ray.kind": kind, "data.train": "s3://bucket/i21k/train", **tags}
    info = SimpleNamespace(run_id=name, run_name=name, status=status, start_time=0, end_time=1)
    data = SimpleNamespace(metrics=metrics or {}, params=params or {}, tags=known)
    profile = test and json.dumps(dict(zip(("num_images", "num_classes"), test, strict=True)))
    sets = [("training", '{"num_images": 50000, "num_classes": 10}'), ("evaluation", profile)]
    inputs = SimpleNamespace(
        dataset_inputs=[
            DatasetInput(
                Dataset("d", "0", "vit_ray", "{}", profile=text),
                [InputTag("mlflow.data.context", context)],
            )
            for context, text in sets
        ]
    )
    return RecordedRun(SimpleNamespace(info=info, data=data, inputs=inputs))


def cell(label, seed, epochs=7.0, test=None, **metrics):
    params = {"model.name": label, "optim.epochs": str(epochs), "optim.name": "adamw"}
    params["seed"] = str(seed)
    held = {"study/exaflops": 55.0, "study/train_images": 1e6, **metrics}
    name = f"{label}-{epochs}-{seed}".replace("/", "-")
    return run(name, metrics=held, params=params, test=test)


def finetune(name, origin, task, top1, test=None, **tags):
    places = {"init_from": f"/runs/{origin}/step-00000100", "data.train": f"data/{task}/train"}
    return run(name, "finetune", {"eval/top1": top1}, test=test, **{**places, **tags})


def test_a_studys_figures_have_its_cells_and_not_their_fine_tunings():
    cells = [cell("ViT-B/32", seed, **{"transfer/pets_top1": 0.9}) for seed in range(2)]
    cells[1].run.data.tags["vit_ray.branched_from"] = "long at step 80"
    tuned = finetune("t", cells[0].name, "pets", 0.9, **{"vit_ray.transfer_task": "pets"})
    trial = run("lr", "sweep_trial", {"dev/top1": 0.8}, **{"vit_ray.sweep_stage": "sweep_trial"})
    for one in (tuned, trial):
        one.run.data.metrics |= {"study/exaflops": 1.0, "study/train_images": 1e3}
    runs = [*cells, tuned, trial]
    drawn = [
        point
        for chart in figures.accuracy_against_compute(
            accuracies.studied(runs), "transfer/pets_top1"
        )
        for series in chart.series
        for point in series.points
    ]
    assert {(point.x, point.y) for point in drawn} == {(55.0, 0.9)}
    # Without a study a fine-tuned model is drawn at the compute of both.
    (chart,) = figures.accuracy_against_compute(with_origins([cells[0], tuned])[1:], "eval/top1")
    assert [(p.x, p.y) for one in chart.series for p in one.points] == [(56.0, 0.9)]
    rows = texts(figures.cells(runs))
    assert [row["branched from"] for row in rows] == ["-", "long at step 80", "-", "-"]
    assert [row["transfer to"] for row in rows] == ["-", "-", "pets", "-"]
    assert rows[0]["pets top-1 after fine-tuning %"] == "90.00"


def test_means_are_over_seeds_with_their_deviation():
    cells = [cell("ViT-B/32", seed) for seed in range(3)]
    tuned = [
        finetune(f"t{seed}", cells[seed].name, "pets", top1, (3669, 37))
        for seed, top1 in enumerate((0.90, 0.92, 0.94))
    ]
    found = transfers(with_origins([*cells, *tuned]))
    assert {one.pretrained_on for one in found} == {"i21k"}
    row = texts(table_5(found))[0]
    assert row == {"pre-trained on": "i21k", "task": "pets", "ViT-B/32": "92.00 +- 2.00"}
    first = texts(table_2(found, [*cells, *tuned]))[0]
    assert first["ViT-B/32 (i21k)"] == "92.00 +- 2.00"
    assert first["the paper's ViT-H/14 (JFT-300M)"] == "97.56"


@pytest.mark.parametrize(
    ("task", "test", "printed"),
    [
        ("CIFAR-10", (10_000, 10), "99.50"),
        ("cifar10", (300, 10), None),
        ("cifar10", (10_000, 2), None),
        ("cifar10", None, None),
        ("digits", (10_000, 10), None),
    ],
)
def test_the_papers_numbers_stand_beside_its_own_test_sets_alone(task, test, printed):
    tuned = finetune("t", "elsewhere", task, 0.9, test)
    pets = finetune("p", "elsewhere", "pets", 0.8, (3669, 37))
    table = texts(table_2(transfers([tuned, pets]), [tuned, pets]))
    assert [row["the paper's ViT-H/14 (JFT-300M)"] for row in table] == [
        printed or "-", "97.56", "2500",
    ]  # fmt: skip
    heads = [column.title for column in table_2(transfers([tuned]), [tuned]).columns]
    assert ("the paper's ViT-H/14 (JFT-300M)" in heads) is bool(printed)


def test_the_test_set_of_a_cells_own_transfer_is_that_of_its_fine_tunings():
    one = cell("ViT-B/32", 0, **{"transfer/cifar10_top1": 0.9})
    of_cell = {"vit_ray.study_cell": one.name, "vit_ray.transfer_task": "cifar10"}
    for size, printed in ((10_000, "99.50"), (300, None)):
        child = finetune("child", one.name, "elsewhere/cifar", 0.9, (size, 10), **of_cell)
        first = texts(table_2(transfers([one, child]), [one, child]))[0]
        assert first["data set"] == "cifar10"
        assert first.get("the paper's ViT-H/14 (JFT-300M)") == printed


@pytest.mark.parametrize(
    ("recorded", "name"),
    [
        ("s3://bucket/i21k/train", "i21k"),
        ("data/faces", "faces"),
        ("", "unknown data"),
    ],
)  # fmt: skip
def test_data_is_called_by_the_name_of_its_set(recorded, name):
    assert run("one", **{"data.train": recorded}).training_name == name


@pytest.mark.parametrize(
    ("init_from", "is_known"),
    [
        ("/runs/digits", True),
        ("/runs/digits/", True),
        ("s3://b/runs/digits/step-00000100", True),
        ("/mnt/digits/weights.npz", False),
        ("/digits/other/step-00000100", False),
        ("/runs/benchmark", False),
        ("", False),
    ],
)
def test_weights_are_of_the_pre_training_whose_folder_they_were_in(init_from, is_known):
    runs = [run("digits"), run("benchmark", "evaluate")]
    tuned = finetune("t", "", "pets", 0.9, init_from=init_from)
    (found,) = transfers(with_origins([*runs, tuned]))
    assert (found.pretrained_on == "i21k") is is_known


def held_out(one):
    """The same training, whose accuracy is of a part of its training set."""
    metrics = one.run.data.metrics
    metrics["dev/top1"] = metrics.pop("eval/top1")
    return one


def test_an_accuracy_on_held_out_images_is_no_result():
    tested, other = (cell("ViT-B/32", seed, **{"eval/top1": 0.5 + seed / 4}) for seed in (0, 1))
    runs = [tested, held_out(other)]
    assert other.metrics["eval/top1"] == 0.75
    assert texts(table_6(runs, []))[0]["top-1 accuracy %"] == "50.00"
    assert best_sentences(runs) == ["Best top-1 accuracy: 50.00 %, by ViT-B/32."]
    (sentence,) = best_sentences([other])
    assert "75.00 % top-1 on images held out of the training set" in sentence
    assert [row["measured on"] for row in texts(figures.cells(runs))] == ["test set", "dev split"]
    tuned = held_out(finetune("t", "elsewhere", "pets", 0.9))
    assert transfers([tuned]) == []
    (chart,) = figures.accuracy_against_compute(runs, "eval/top1")
    told = [p.details.get("measured on") for p in chart.series[0].points]
    assert told == ["test set", "dev split"]


@pytest.mark.parametrize(
    ("kind", "metrics", "said"),
    [
        ("pretrain", {"eval/loss": 1.0}, "test set"),
        ("pretrain", {"eval/loss": 1.0, "dev/loss": 1.0, "dev/top1": 0.5}, "dev split"),
        ("pretrain", {"dev/loss": 1.0}, "dev split"),
        ("pretrain", {"dev/mean_average_precision": 0.5}, "dev split"),
        ("sweep_trial", {"dev/top1": 0.5}, "dev split"),
        ("sweep_trial", {}, None),  # not evaluated
        ("pretrain", {"train/loss": 1.0}, None),
    ],
)
def test_an_evaluated_run_says_what_it_was_measured_on(kind, metrics, said):
    one = run("r", kind, metrics, **{"vit_ray.sweep_stage": kind})
    (row,) = texts(figures.cells([one]))
    assert row.get("measured on") == said


def test_where_all_average_their_weights_these_are_compared():
    last = {"eval/top1": 0.5, "few_shot/5_shot_top1": 0.3}
    theirs = {"eval/averaged_top1": 0.6, "few_shot/averaged_5_shot_top1": 0.4}
    runs = [cell("ViT-B/32", seed, **last, **theirs) for seed in (0, 1)]
    assert accuracies.accuracies_of(runs) == ["few_shot/averaged_5_shot_top1", "eval/averaged_top1"]
    (row,) = texts(table_6(runs, []))
    assert row["top-1 accuracy of averaged weights %"].startswith("60.00")
    assert row["5-shot linear accuracy of averaged weights %"].startswith("40.00")
    assert best_sentences(runs)[-1].startswith("Best top-1 accuracy of averaged weights: 60.00")
    # Beside one that does not average, or has not, the last weights of all are.
    runs.append(cell("ViT-B/16", 0, **last))
    assert accuracies.accuracies_of(runs) == ["few_shot/5_shot_top1", "eval/top1"]
    assert [accuracies.decided_top1(run) for run in runs] == [0.6, 0.6, 0.5]


def test_an_accuracy_of_averaged_weights_on_held_out_images_is_none_on_the_test_set():
    metrics = {"dev/top1": 0.9, "dev/averaged_top1": 0.95, "eval/top1": 0.5}
    assert accuracies.decided_top1(run("both", metrics=metrics)) == 0.5
    assert (
        accuracies.decided_top1(run("dev", metrics={"dev/top1": 0.9, "dev/averaged_top1": 0.95}))
        == 0.95
    )


def test_of_both_accuracies_that_of_the_test_set_counts():
    both = run("both", metrics={"eval/top1": 0.5, "dev/top1": 0.9})
    other_order = run("both", metrics={"dev/top1": 0.9, "eval/top1": 0.5})
    assert [one.metrics["eval/top1"] for one in (both, other_order)] == [0.5, 0.5]
    assert not both.is_on_dev("eval/top1")


def test_accuracy_against_data_has_a_line_for_each_length_and_means_over_seeds(lengths):
    (chart,) = figures.accuracy_against_data(lengths, "transfer/pets_top1")
    drawn = {one.name: [(p.x, p.y, p.low, p.high) for p in one.points] for one in chart.series}
    about = pytest.approx
    assert drawn == {
        "ViT-B/32, 7 epochs": [(1e6, about(0.81), about(0.7958579), about(0.8241421))],
        "ViT-B/32, 14 epochs": [
            (1e5, about(0.41), about(0.3958579), about(0.4241421)),
            (1e6, about(0.92), about(0.8917157), about(0.9482843)),
        ],
    }
    (one_seed,) = figures.accuracy_against_data(lengths[1::2], "transfer/pets_top1")
    assert [p.low for one in one_seed.series for p in one.points] == [None] * 3


def test_amounts_of_data_are_joined_where_the_length_is_in_images(lengths):
    for one in lengths:
        del one.run.data.params["optim.epochs"]
        one.run.data.params["optim.images"] = "2121000000"
    (chart,) = figures.accuracy_against_data(lengths, "transfer/pets_top1")
    assert [(one.name, [p.x for p in one.points]) for one in chart.series] == [
        ("ViT-B/32", [1e5, 1e6])
    ]


def test_a_mean_over_seeds_is_of_finished_and_tested_runs_where_there_are_any(lengths):
    (chart,) = figures.accuracy_against_data(lengths, "transfer/pets_top1")
    whole = {(one.name, p.x): p.y for one in chart.series for p in one.points}
    cut, key = lengths[0], "transfer/pets_top1"
    cut.run.info.status = "RUNNING"
    (chart,) = figures.accuracy_against_data(lengths, key)
    now = {(one.name, p.x): p.y for one in chart.series for p in one.points}
    assert cut.metrics[key] not in now.values()
    assert len([at for at in whole if whole[at] != now[at]]) == 1


def test_what_a_branch_shares_with_its_trunk_is_counted_once():
    sizes = {"study/images_seen": 100 * 32.0, "cost/core_days": 2.0}
    trunk, branch, unknown = (
        cell("ViT-B/32", seed, **{**sizes, "study/exaflops": 10.0}) for seed in range(3)
    )
    for one in (branch, unknown):
        one.run.data.tags["vit_ray.branched_from"] = f"{trunk.name} at step 80"
    branch.run.data.params["train.global_batch_size"] = "32"
    # The last fifth of the branch.
    assert totals([trunk, branch, unknown]) == [
        "Total cost of 3 trainings: 12 exaFLOPs, 2.4 core-days."
    ]


def test_the_cost_is_what_is_known_in_units_that_people_read():
    one = cell("ViT-B/32", 0, **{"cost/core_days": 0.003, "cost/gpu_hours": 36.0})
    del one.run.data.metrics["study/exaflops"]
    assert totals([one]) == [
        "Total cost: 0.003 core-days (4:19 min of one worker), 1.5 GPU-days with start-up and "
        "stalls."
    ]


def test_a_cells_own_transfers_are_rows_and_its_fine_tunings_are_not_counted_twice():
    one = cell("ViT-B/32", 0, **{"transfer/pets_top1": 0.9, "transfer/cars_top1": 0.7})
    child = finetune("child", one.name, "pets", 0.1, **{"vit_ray.study_cell": one.name})
    found = transfers([one, child])
    assert sorted((o.task, o.top1) for o in found) == [("cars", 0.7), ("pets", 0.9)]


def test_sweeps_of_a_vtab_are_told_apart_and_are_rows_of_table_9_alone():
    parent = run("mine", "vtab", {"vtab/svhn_top1": 0.9, "vtab/dmlab_top1": 0.4})
    finals = []
    for task, values, rate in (("svhn", (0.89, 0.91), "0.001"), ("dmlab", (0.39, 0.41), "0.01")):
        for seed, top1 in enumerate(values):
            tags = {"mlflow.parentRunId": "mine", "vit_ray.sweep_stage": "finetune"}
            one = finetune(f"mine-{task}-lr{rate}-seed{seed}", "elsewhere", task, top1, **tags)
            one.run.data.params |= {"optim.learning_rate": rate, "seed": str(seed)}
            finals.append(one)
    assert sweeps.sweep_sentences([parent, *finals]) == [
        "mine-svhn: test top-1 90.00 +- 1.41 % over 2 seeds, learning rate 0.001.",
        "mine-dmlab: test top-1 40.00 +- 1.41 % over 2 seeds, learning rate 0.01.",
    ]
    assert [table.caption[:7] for table in paper_tables([parent, *finals])] == ["Table 9"]


def test_a_mean_over_tasks_is_over_all_that_the_study_has():
    parent = {"mlflow.parentRunId": "study"}
    held = [{"pets": 0.9, "cars": 0.7, "svhn": 0.3}, {"pets": 0.9, "cars": 0.9}, {}]
    runs = [
        run(f"{k}", metrics={f"transfer/{task}_top1": top1 for task, top1 in one.items()}, **parent)
        for k, one in enumerate(held)
    ]
    other = run("other", metrics={f"transfer/{task}_top1": 0.5 for task in ("pets", "cars")})
    means = [one.metrics.get("transfer/mean_top1") for one in with_tasks([*runs, other])]
    assert means == [pytest.approx(1.9 / 3), None, None, 0.5]


def test_a_fine_tuning_of_unknown_weights_is_in_table_2_alone():
    tuned = finetune("t", "elsewhere", "cifar10", 0.9)
    found = transfers([tuned])
    assert not table_5(found).rows
    assert "not among these runs" in table_2(found, []).columns[1].title


@pytest.mark.parametrize("status", ["FAILED", "RUNNING"])
def test_what_did_not_finish_counts_nowhere(status):
    tuned = finetune("t", "elsewhere", "cifar10", 0.9)
    tuned.run.info.status = status
    assert transfers([tuned]) == []


@pytest.mark.parametrize("status", ["FAILED", "KILLED", "RUNNING"])
def test_a_pre_training_that_did_not_finish_is_in_no_table(status):
    whole, cut = cell("ViT-B/32", 0), cell("ViT-B/32", 1)
    for one, top1, exaflops in ((whole, 0.8, 55.0), (cut, 0.1, 3.0)):
        held = {"few_shot/5_shot_top1": top1, "transfer/pets_top1": top1}
        one.run.data.metrics.update(held, **{"study/exaflops": exaflops, "cost/core_days": top1})
    cut.run.info.status = status
    assert [texts(one) for one in paper_tables([whole, cut])] == [
        texts(one) for one in paper_tables([whole])
    ]
    assert {row["runs"] for row in texts(table_6([whole, cut], []))} == {"1"}


def test_table_6_has_a_row_for_each_model_size_and_length_beside_the_papers():
    cells = [cell("ViT-B/32", seed, **{"eval/top1": 0.5 + seed / 10}) for seed in (0, 1)]
    cells += [cell("ViT-L/16", 0, 14.0), cell("mine", 0)]
    table = table_6(cells, transfers(cells))
    assert "; the paper's columns, on JFT-300M, are Dosovitskiy et al." in table.caption
    rows = texts(table)
    assert [(row["model"], row["epochs"], row["runs"]) for row in rows] == [
        ("ViT-B/32", "7", "2"),
        ("ViT-L/16", "14", "1"),
        ("mine", "7", "1"),
    ]
    assert rows[0]["top-1 accuracy %"] == "55.00 +- 7.07"
    assert "the paper's ImageNet %" not in rows[0]  # of other images
    assert [row["the paper's exaFLOPs"] for row in rows] == ["55", "1567", "-"]


def test_the_papers_accuracy_stands_beside_its_own_test_set_alone():
    theirs = cell("ViT-B/32", 0, test=(50_000, 1000), **{"eval/top1": 0.8})
    others = cell("ViT-L/16", 0, 14.0, test=(10_000, 10), **{"eval/top1": 0.9})
    rows = texts(table_6([theirs, others], []))
    assert [row["the paper's ImageNet %"] for row in rows] == ["80.73", "-"]
    assert not comparing([table_6([others], [])], [others])  # one row compares nothing


@pytest.mark.parametrize(("test", "count"), [((300, 10), 0), ((10_000, 10), 1)])
def test_table_6_is_left_out_where_no_run_is_of_the_papers_data(test, count):
    runs = [cell(name, 0, test=test, **{"eval/top1": 0.5}) for name in ("ViT-B/32", "mine")]
    assert len(comparing([table_6(runs, [])], runs)) == count


LENGTHS = {(7.0, 1e6): (0.80, 0.82), (14.0, 1e6): (0.90, 0.94), (14.0, 1e5): (0.40, 0.42)}


@pytest.fixture
def lengths():
    """Two lengths and two data sizes of one row, two seeds of each."""
    cells = []
    for (epochs, images), values in LENGTHS.items():
        for seed, top1 in enumerate(values):
            held = {"transfer/pets_top1": top1, "study/train_images": images}
            cells.append(cell("ViT-B/32", seed, epochs, **held, **{"cost/core_days": epochs}))
            cells[-1].run.info.run_name += f"-{images}"
            cells[-1].run.info.run_id += f"-{images}"
    return cells


def test_transfers_stand_in_the_row_of_their_cell(lengths):
    rows = texts(table_6(lengths, transfers(lengths)))
    assert [(row["epochs"], row["images"], row["pets %"]) for row in rows] == [
        ("7", "1M", "81.00 +- 1.41"),
        ("14", "1M", "92.00 +- 2.83"),
        ("14", "100k", "41.00 +- 1.41"),
    ]


def test_lengths_in_steps_are_told_apart():
    cells = [cell("ViT-B/32", 0, **{"study/images_seen": seen}) for seen in (7e6, 14e6, 14.001e6)]
    for one, steps in zip(cells, ("7000", "14000", "14001"), strict=True):
        del one.run.data.params["optim.epochs"]
        one.run.data.params["optim.steps"] = steps
    rows = [(row["epochs"], row["differs in"]) for row in texts(table_6(cells, []))]
    assert rows == [("7", ""), ("14", "optim.steps 14000"), ("14", "optim.steps 14001")]


def test_tables_without_lengths_are_of_the_longest_pre_training_on_most_images(lengths):
    tuned = finetune("t", lengths[2].name, "cars", 0.5)
    runs = with_origins([*lengths, tuned])
    tables = {table.caption[:7]: texts(table) for table in paper_tables(runs)}
    assert [row["ViT-B/32"] for row in tables["Table 5"]] == ["92.00 +- 2.83", "50.00"]
    assert [row["ViT-B/32 (i21k)"] for row in tables["Table 2"]] == ["92.00 +- 2.83", "50.00", "14"]


def test_table_7_is_there_for_a_model_that_both_optimizers_trained():
    pairs = []
    for label, optimizer, top1 in (("R50 Adam", "adamw", 0.9), ("R50 SGD", "sgd", 0.8)):
        params = {"model.name": "R50x1", "optim.name": optimizer}
        pairs.append(run(label, metrics={"transfer/pets_top1": top1}, params=params,
                         **{"vit_ray.study_label": label}))  # fmt: skip
    tables = {table.caption[:7]: table for table in paper_tables(pairs)}
    assert texts(tables["Table 7"]) == [
        {"task": "pets", "R50x1, adamw": "90.00", "R50x1, sgd": "80.00"}
    ]
    assert "Table 7" not in {table.caption[:7] for table in paper_tables(pairs[:1])}


def test_table_8_has_kinds_of_positions_by_place():
    def positions(kind, place, top1):
        params = {"model.name": "ViT-B/16", "model.positions": kind, "model.positions_at": place}
        return run(f"{kind}-{place}", metrics={"few_shot/5_shot_top1": top1}, params=params)

    runs = [
        positions("none", "None", 0.5),
        positions("learned_1d", "None", 0.6),
        positions("learned_1d", "every_layer", 0.7),
    ]
    rows = texts(next(t for t in paper_tables(runs) if t.caption.startswith("Table 8")))
    assert [(r["positions"], r["stem"], r["every layer"]) for r in rows] == [
        ("none", "50.00", "-"),
        ("learned_1d", "60.00", "70.00"),
    ]
    assert rows[1]["the paper's every layer"] == "63.96"


def test_table_9_has_our_tasks_above_the_papers():
    parent = run("mine", "vtab", {"vtab/caltech101_top1": 0.5, "vtab/mean_top1": 0.4})
    rows = texts(next(t for t in paper_tables([parent]) if t.caption.startswith("Table 9")))
    assert [rows[0][key] for key in ("model", "caltech101", "cifar100", "mean")] == [
        "mine", "50.00", "-", "40.00",
    ]  # fmt: skip
    assert rows[1]["mean"] == "77.63"  # as the paper prints it
    assert len(rows) == 4


def test_no_table_is_made_of_nothing():
    assert paper_tables([run("one", "pretrain")]) == []
