"""Means are of seeds and of nothing else: stores with known answers, checked cell by cell."""

import pytest

from tests.report.made_runs import archived, made, texts, tuned
from vit_ray.config import Recipe
from vit_ray.config.resume_compatibility import deciding_keys
from vit_ray.report import sweeps
from vit_ray.report.ablations import shapes
from vit_ray.report.figures import chart_list as figures
from vit_ray.report.headline import best_sentences
from vit_ray.report.paper_tables import paper_tables, table_6
from vit_ray.report.statistics.accuracies import cost_of
from vit_ray.report.statistics.groups import differences
from vit_ray.report.statistics.seeds import by_group, one_run_a_cell

CIFAR_100 = {"data.train": "/data/cifar100/train", "data.eval": "/data/cifar100/test"}


def cell(top1, changes=(), **more):
    metrics = {"eval/top1": top1, **more.pop("metrics", {})}
    return made(changes, metrics=metrics, **more)


def table(runs, number):
    found = {one.caption[:7]: texts(one) for one in paper_tables(archived(runs))}
    return found.get(f"Table {number}", [])


def top1_rows(runs):
    return [
        (row.get("differs in", ""), row["runs"], row["top-1 accuracy %"])
        for row in texts(table_6(archived(runs), []))
    ]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"optim.learning_rate": 0.003}, "optim.learning_rate"),
        ({"model.image_size": 384}, "model.image_size"),
        ({"train.precision": "fp32"}, "train.precision"),
        ({"optim.weight_decay": 0.3}, "optim.weight_decay"),
        ({"optim.name": "sgd"}, "optim.name"),
        ({"optim.warmup_steps": 10}, "optim.warmup_steps"),
        ({"train.averaging": 0.99}, "train.averaging"),
        ({"data.augment": {"kind": "resize"}}, "data.augment.kind"),
        ({"data.shuffle_window": 99}, "data.shuffle_window"),
        ({"evaluate.shots": (5,), "evaluate.few_shot_train": "/a", "evaluate.few_shot_test": "/b"},
         "few-shot training set"),
        ({"data.eval": "/data/others/test"}, "test set"),
        ({"data.train": "/data/others/train"}, "training set"),
        ({"data.fraction": 0.5}, "data.fraction"),
        ({"init_from": "/weights/a.npz"}, "first weights"),
    ],
)  # fmt: skip
def test_runs_that_differ_in_what_decides_are_rows_of_their_own(changes, key):
    runs = [cell(0.9), cell(0.94, {"seed": 1}), cell(0.5, changes)]
    rows = top1_rows(runs)
    assert [row[1:] for row in rows] == [("2", "92.00 +- 2.83"), ("1", "50.00")]
    assert all(key in row[0] for row in rows)


@pytest.mark.parametrize(
    "changes",
    [
        {"train.micro_batch_size": 2},
        {"train.zero_stage": 2},
        {"train.activation_checkpointing": 1},
        {"train.compile": False},
        {"workers.num_workers": 4},
        {"data.cpus_per_task": 2.0},
        {"evaluate.batch_size": 7},
        {"evaluate.every_steps": 7},
        {"checkpoint.every_steps": 7},
        {"optim.momentum": 0.5},
        {"tracking.experiment": "other"},
    ],
)
def test_runs_that_differ_in_speed_or_place_are_seeds_of_one_row(changes):
    assert top1_rows([cell(0.9), cell(0.94, {"seed": 1, **changes})]) == [
        ("", "2", "92.00 +- 2.83")
    ]


def test_another_cadence_of_evaluations_decides_where_they_can_end_a_run():
    stopping = {"train.early_stopping": 3, "evaluate.every_steps": 10}
    rows = top1_rows([cell(0.9, stopping), cell(0.5, {**stopping, "evaluate.every_steps": 20})])
    assert [row[0] for row in rows] == ["evaluate.every_steps 10", "evaluate.every_steps 20"]


def test_every_key_that_decides_but_seed_and_places_is_in_the_group():
    flat = Recipe(name="a").flat()
    keys = deciding_keys(flat)
    assert {"optim.learning_rate", "train.precision", "model.name", "data.fraction"} <= keys.keys()
    assert not {"seed", "init_from", "data.eval", "data.train", "train.zero_stage"} & keys.keys()


def test_a_study_of_two_data_sets_is_never_averaged_over_them():
    """The mean over both would be 84.50 +- 14.85."""
    runs = [
        cell(top1, {**changes, "seed": seed})
        for changes, top1s in (({}, (0.94, 0.96)), (CIFAR_100, (0.73, 0.75)))
        for seed, top1 in enumerate(top1s)
    ]
    assert top1_rows(runs) == [
        ("test set cifar10, training set cifar10", "2", "95.00 +- 1.41"),
        ("test set cifar100, training set cifar100", "2", "74.00 +- 1.41"),
    ]
    charts = figures.accuracy_against_compute(archived(runs), "eval/top1")
    assert [chart.title.partition("?, ")[2] for chart in charts] == [
        "test set cifar10, training set cifar10",
        "test set cifar100, training set cifar100",
    ]
    points = [[p for one in chart.series[:5] for p in one.points] for chart in charts]
    assert [[round(p.y, 9) for p in some] for some in points] == [[0.95], [0.74]]
    drawn = [{value for p in some for value in p.seeds.values()} for some in points]
    assert drawn == [{0.94, 0.96}, {0.73, 0.75}]
    assert best_sentences(archived(runs)) == [
        f"Best top-1 accuracy, test set {name}, training set {name}: {mean}, 2 seeds), by ViT-B/32."
        for name, mean in (
            ("cifar10", "95.00 % (95 %: 82.29 to 100.00"),
            ("cifar100", "74.00 % (95 %: 61.29 to 86.71"),
        )
    ]


def test_the_best_is_a_mean_over_seeds_and_never_the_best_seed():
    lucky = [cell(top1, {"seed": seed}) for seed, top1 in enumerate((0.99, 0.51))]
    steady = [
        cell(top1, {"seed": seed, "model.name": "R50x1"}) for seed, top1 in enumerate((0.8, 0.84))
    ]
    assert best_sentences([*lucky, *steady]) == [
        "Best top-1 accuracy: 82.00 % (95 %: 56.59 to 100.00, 2 seeds), by R50x1, the best of 2 on "
        "the test set."
    ]


def test_sets_are_told_apart_by_fingerprints_and_not_by_folders():
    moved = {"data.train": "/elsewhere/train", "data.eval": "/elsewhere/test"}
    sets = {"train": "a" * 32, "eval": "b" * 32}
    runs = [cell(0.9, sets=sets), cell(0.94, {"seed": 1, **moved}, sets=sets)]
    assert top1_rows(runs) == [("", "2", "92.00 +- 2.83")]
    runs.append(cell(0.5, sets={**sets, "eval": "c" * 32}))
    assert [row[0] for row in top1_rows(runs)] == [
        "test set cifar10 bbbbbbbb", "test set cifar10 cccccccc",
    ]  # fmt: skip


def test_best_and_last_evaluations_are_not_averaged():
    best = {"eval/best_top1": 0.9, "result/step": 5.0, "result/evaluations": 7.0}
    runs = [cell(0.5), cell(0.5, {"seed": 1}, metrics=best)]
    assert top1_rows(runs) == [
        ("result unset", "1", "50.00"),
        ("result best evaluation", "1", "90.00"),
    ]


def test_runs_of_other_commits_are_not_averaged():
    runs = [cell(0.9), cell(0.94, {"seed": 1}), cell(0.5, {"seed": 2}, git_commit="decaf")]
    assert top1_rows(runs) == [
        ("git commit c0ffee", "2", "92.00 +- 2.83"),
        ("git commit decaf", "1", "50.00"),
    ]


def test_lengths_that_round_to_equal_epochs_are_told_apart():
    lengths = [
        cell(top1, {"optim.epochs": None, "optim.steps": steps},
             metrics={"study/images_seen": steps * 4096.0})
        for steps, top1 in ((100_000, 0.8), (100_001, 0.9))
    ]  # fmt: skip
    assert top1_rows(lengths) == [
        ("optim.steps 100000", "1", "80.00"),
        ("optim.steps 100001", "1", "90.00"),
    ]


def test_a_run_that_earlier_code_recorded_is_of_the_group_of_its_recipe():
    changes = {"optim.learning_rate": 0.002, "train.averaging": 0.99}
    early = made(changes, is_early=True)
    assert early.group == made({**changes, "seed": 5}).group
    assert early.group != made().group
    before = made({"optim.learning_rate": 0.1})
    before.run.data.tags["vit_ray.changed_params"] = '{"optim.learning_rate": "0.2"}'
    assert before.group == made({"optim.learning_rate": 0.2}).group


def test_a_study_that_is_recorded_twice_counts_once():
    runs = []
    for parent in ("first", "again"):
        for seed, top1 in enumerate((0.90, 0.94)):
            tags = {"mlflow.parentRunId": parent}
            runs.append(cell(top1, {"seed": seed}, name=f"{parent}-{seed}", **tags))
    shown, aside = one_run_a_cell(archived(runs))
    assert [run.name for run in shown] == ["again-0", "again-1"]
    assert [run.name for run in aside] == ["first-0", "first-1"]
    assert top1_rows(runs) == [("", "2", "92.00 +- 2.83")]
    (held,) = by_group(runs).values()
    assert [run.metrics["eval/top1"] for run in held] == [0.90, 0.94]


def test_of_two_records_of_a_training_the_one_that_finished_counts():
    runs = [cell(0.9), cell(0.1, status="FAILED"), cell(0.2, status="RUNNING")]
    shown, aside = one_run_a_cell(runs)
    assert [run.metrics["eval/top1"] for run in shown] == [0.9]
    assert len(aside) == 2


def test_a_study_keeps_its_cells_where_a_training_of_its_own_is_the_same():
    runs = [cell(0.9), cell(0.94, {"seed": 1}), cell(0.9, kind="pretrain")]
    shown, aside = one_run_a_cell(runs)
    assert ([run.kind for run in shown], [run.kind for run in aside]) == (
        ["study_cell"] * 2, ["pretrain"],
    )  # fmt: skip
    assert top1_rows(runs) == [("", "2", "92.00 +- 2.83")]


def test_an_evaluation_of_a_training_is_not_another_record_of_it():
    runs = [cell(0.9), made(kind="evaluate")]
    assert one_run_a_cell(runs) == (runs, [])


def test_failed_seeds_are_in_no_mean():
    runs = [cell(0.9), cell(0.94, {"seed": 1}), cell(0.1, {"seed": 2}, status="FAILED")]
    assert top1_rows(runs) == [("", "2", "92.00 +- 2.83")]
    by_size = [
        cell(top1, {"seed": seed, "data.fraction": part}, images=50_000 * part, status=status)
        for part in (0.5, 1.0)
        for seed, (top1, status) in enumerate(((part, "FINISHED"), (0.1, "KILLED")))
    ]
    (chart,) = figures.accuracy_against_data(by_size, "eval/top1")
    assert [(p.x, p.y) for p in chart.series[0].points] == [(25_000, 0.5), (50_000, 1.0)]


RATES = {0.001: 0.3, 0.003: 0.5, 0.01: 1.0}
"""Whose mean and deviation would be 60.00 +- 36.06."""


def test_fine_tunings_at_three_rates_are_three_rows():
    origin = made(kind="pretrain", name="origin")
    runs = [
        tuned(origin, "pets", top1, {"optim.learning_rate": rate}) for rate, top1 in RATES.items()
    ]
    runs.append(tuned(origin, "pets", 0.96, {"optim.learning_rate": 0.01, "seed": 1}))
    means = [("0.001", "30.00"), ("0.003", "50.00"), ("0.01", "98.00 +- 2.83")]
    for number, column in ((2, "ViT-B/32 (cifar10)"), (5, "ViT-B/32")):
        rows = table([origin, *runs], number)
        assert [(row["differs in"], row[column]) for row in rows] == [
            (f"optim.learning_rate {rate}", mean) for rate, mean in means
        ]


def test_fine_tunings_of_two_test_sets_are_two_rows():
    origin = made(kind="pretrain", name="origin")
    runs = [
        tuned(origin, "pets", 0.9),
        tuned(origin, "pets", 0.94, {"seed": 1}),
        tuned(origin, "pets", 0.5, {"data.eval": "/data/pets-hard/test"}),
    ]
    assert [(row["differs in"], row["ViT-B/32"]) for row in table([origin, *runs], 5)] == [
        ("test set pets", "92.00 +- 2.83"),
        ("test set pets-hard", "50.00"),
    ]


def test_fine_tunings_of_pre_trainings_that_differ_are_rows_of_their_own():
    """One seed each of a pre-training and its fine-tuning are a mean; another rate is none."""
    pre = [
        made(
            {"seed": seed, "optim.learning_rate": rate}, kind="pretrain", name=f"pre-{rate}-{seed}"
        )
        for seed, rate in ((0, 0.001), (1, 0.001), (0, 0.002))
    ]
    runs = [tuned(one, "pets", top1) for one, top1 in zip(pre, (0.8, 0.9, 0.3), strict=True)]
    assert [(row["differs in"], row["ViT-B/32"]) for row in table([*pre, *runs], 5)] == [
        ("pre-training optim.learning_rate 0.001", "85.00 +- 7.07"),
        ("pre-training optim.learning_rate 0.002", "30.00"),
    ]


def test_a_fine_tuning_that_is_recorded_twice_is_one_seed():
    origin = made(kind="pretrain", name="origin")
    runs = [
        tuned(origin, "pets", 0.9),
        tuned(origin, "pets", 0.9),
        tuned(origin, "pets", 0.8, {"seed": 1}),
    ]
    assert [row["ViT-B/32"] for row in table([origin, *runs], 5)] == ["85.00 +- 7.07"]


@pytest.mark.parametrize("is_swept", [True, False])
def test_a_cells_transfer_is_a_mean_over_seeds_whatever_rate_each_sweep_chose(is_swept):
    cells, children = [], []
    for seed, (rate, top1) in enumerate(((0.003, 0.9), (0.01, 0.8))):
        metrics = {"transfer/pets_top1": top1}
        cells.append(made({"seed": seed}, metrics=metrics, name=f"cell-{seed}"))
        tags = {"study_cell": cells[-1].name, "transfer_task": "pets"}
        if is_swept:
            tags |= {"mlflow.parentRunId": f"sweep-{seed}", "sweep_stage": "finetune"}
            for tried in (0.003, 0.01):
                trial = tuned(cells[-1], "pets", 0.5, {"optim.learning_rate": tried},
                              **{**tags, "sweep_stage": "sweep_trial"})  # fmt: skip
                children.append(trial)
        children.append(tuned(cells[-1], "pets", top1, {"optim.learning_rate": rate}, **tags))
    rows = [row.get("ViT-B/32") for row in table([*cells, *children], 5)]
    assert rows == (["85.00 +- 7.07"] if is_swept else ["90.00", "80.00"])


def two_of_one_name():
    """Pre-trainings on two sets, whose folders share their last name."""
    return [
        made({"output": output, "data.train": data}, kind="pretrain", name="vit-b16")
        for output, data in (("/outA", "/data/i21k/train"), ("/outB", "/data/jft/train"))
    ]


def test_a_fine_tuning_is_of_the_pre_training_in_whose_folder_its_weights_were():
    pre = two_of_one_name()
    runs = [tuned(one, "pets", top1) for one, top1 in zip(pre, (0.9, 0.3), strict=True)]
    for order in ([*pre, *runs], [*runs, *pre][::-1]):
        rows = {row["pre-trained on"]: row["ViT-B/32"] for row in table(order, 5)}
        assert rows == {"i21k": "90.00", "jft": "30.00"}


def test_a_fine_tuning_is_of_the_run_that_its_checkpoint_names():
    """The folder has been used again since."""
    first = made({"data.train": "/data/i21k/train"}, kind="pretrain", name="pre")
    again = made({"data.train": "/data/jft/train"}, kind="pretrain", name="pre")
    run = tuned(again, "pets", 0.9, init_run=first.run_id)
    assert [row["pre-trained on"] for row in table([first, again, run], 5)] == ["i21k"]
    gone = tuned(again, "pets", 0.9, init_run="0" * 31 + "f")
    assert table([first, again, gone], 5) == []


def test_a_fine_tuning_is_of_no_run_that_began_after_it():
    run_before = made({"data.train": "/data/i21k/train"}, kind="pretrain", name="pre", start=10)
    after = made({"data.train": "/data/jft/train"}, kind="pretrain", name="pre", start=30)
    run = tuned(after, "pets", 0.9, start=20)
    assert [row["pre-trained on"] for row in table([run_before, after, run], 5)] == ["i21k"]


def test_runs_that_recorded_no_folder_are_found_by_a_name_that_is_theirs_alone():
    pre = two_of_one_name()
    for one in pre:
        del one.run.data.tags["vit_ray.run_folder"]
    changes = {"init_from": "/outB/vit-b16", "data.train": "/data/pets/train"}
    run = made(changes, kind="finetune", metrics={"eval/top1": 0.9})
    assert [row["pre-trained on"] for row in table([pre[1], run], 5)] == ["jft"]
    assert table([*pre, run], 5) == []
    elsewhere = made(changes, kind="finetune", metrics={"eval/top1": 0.9})
    known = two_of_one_name()[0]  # whose folder is another
    assert table([known, elsewhere], 5) == []


def test_data_sets_are_not_called_by_a_version_alone():
    origin = made({"data.train": "/data/i21k/v2/train"}, kind="pretrain", name="origin")
    runs = [tuned(origin, f"{task}/v2", 0.9) for task in ("pets", "cars")]
    assert [(row["pre-trained on"], row["task"]) for row in table([origin, *runs], 5)] == [
        ("i21k/v2", "pets/v2"), ("i21k/v2", "cars/v2"),
    ]  # fmt: skip


def test_of_two_sets_of_one_name_each_has_its_largest_pre_training():
    pre = [
        made({"data.train": f"/{place}/i21k/train"}, kind="pretrain", images=images, name=place)
        for place, images in (("a", 1e6), ("b", 9e6))
    ]
    runs = [tuned(one, "pets", top1) for one, top1 in zip(pre, (0.3, 0.9), strict=True)]
    assert [row["ViT-B/32"] for row in table([*pre, *runs], 5)] == ["30.00", "90.00"]


def test_a_fine_tuned_model_stands_at_the_compute_of_pre_training_and_fine_tuning():
    origin = made(kind="pretrain", name="origin")
    runs = archived([origin, tuned(origin, "pets", 0.9), tuned(made(name="gone"), "pets", 0.8)])
    (chart,) = figures.accuracy_against_compute(runs, "eval/top1")
    assert [(p.x, p.y) for one in chart.series[:5] for p in one.points] == [(11.0, 0.9)]


def test_the_accuracy_of_a_transfer_stands_at_the_compute_of_both():
    metrics = {"transfer/pets_top1": 0.9, "transfer/cars_top1": 0.7}
    one = made(metrics=metrics, name="cell")
    children = [
        tuned(one, task, top1, transfer_task=task, study_cell="cell",
              metrics={"eval/top1": top1, "study/exaflops": exaflops})
        for task, top1, exaflops in (("pets", 0.9, 1.0), ("cars", 0.7, 4.0))
    ]  # fmt: skip
    own, *_ = archived([one, *children])
    assert cost_of(own, "transfer/pets_top1") == 11.0
    assert cost_of(own, "transfer/mean_top1") == 12.5
    assert cost_of(own, "eval/top1") == 10.0


def test_a_sweep_of_rates_is_no_mean_and_joins_no_dev_split_to_a_test_set():
    """As the quickstart's: three rates on the dev split, the best again on all images."""
    trials = [
        made({"optim.learning_rate": rate, "data.held_out_fraction": 0.02, "data.eval": None},
             kind="sweep_trial", images=49_000, name=f"digits-lr{rate}",
             metrics={"dev/top1": top1}, sweep_stage="sweep_trial")
        for rate, top1 in RATES.items()
    ]  # fmt: skip
    finals = [
        made({"optim.learning_rate": 0.01, "seed": seed}, kind="finetune",
             name=f"digits-final-lr0.01-seed{seed}", metrics={"eval/top1": top1},
             sweep_stage="finetune")
        for seed, top1 in enumerate((0.8, 0.9))
    ]  # fmt: skip
    runs = archived([*trials, *finals])
    assert figures.accuracy_against_data(runs, "eval/top1") == []
    (chart,) = sweeps.sweep_charts(runs)
    drawn = {
        one.name: [(p.x, p.y, p.details.get("mean of")) for p in one.points] for one in chart.series
    }
    assert drawn == {
        "digits, dev split": [(0.001, 0.3, None), (0.003, 0.5, None), (0.01, 1.0, None)],
        "digits-final, test set": [(0.01, pytest.approx(0.85), "2 seeds")],
    }
    assert sweeps.sweep_sentences(runs) == [
        "Learning rate 0.01 wins on the dev split (100.00 %), best of 3. 0.01 is the largest rate "
        "tried: try 0.03.",
        "Test top-1 85.00 +- 7.07 % over 2 seeds, learning rate 0.01 (digits-final-lr0.01-seed0, "
        "digits-final-lr0.01-seed1).",
    ]


def test_lines_over_data_are_of_what_differs_in_data_alone():
    runs = [
        cell(part * scale + seed / 50, {"data.fraction": part, "seed": seed, **changes},
             images=50_000 * part)
        for changes, scale in (({}, 0.8), ({"optim.learning_rate": 0.003}, 0.4))
        for part in (0.5, 1.0)
        for seed in (0, 1)
    ]  # fmt: skip
    (chart,) = figures.accuracy_against_data(runs, "eval/top1")
    rate = made().params["optim.learning_rate"]
    assert {one.name: [(p.x, p.y) for p in one.points] for one in chart.series} == {
        f"ViT-B/32, differs in optim.learning_rate {rate}":
            [(25_000, pytest.approx(0.41)), (50_000, pytest.approx(0.81))],
        "ViT-B/32, differs in optim.learning_rate 0.003":
            [(25_000, pytest.approx(0.21)), (50_000, pytest.approx(0.41))],
    }  # fmt: skip


SHAPE = {"name": "ViT", "depth": 8, "width": 64, "mlp_dim": 128, "num_heads": 1, "patch_size": 32}


def shaped(top1, compute, part=1.0, seed=0, **changes):
    model = {f"model.{key}": value for key, value in {**SHAPE, **changes}.items()}
    metrics = {"study/exaflops": compute}
    return cell(top1, {**model, "data.fraction": part, "seed": seed}, images=50_000 * part,
                metrics=metrics)  # fmt: skip


def test_figure_8_is_of_means_over_seeds_of_one_amount_of_data():
    runs = [
        shaped(top1 * part + seed / 50, compute * part, part, seed, **changes)
        for part in (0.5, 1.0)
        for seed in (0, 1)
        for changes, compute, top1 in (
            ({}, 10.0, 0.5),
            ({"depth": 16}, 20.0, 0.6),
            ({"width": 128, "num_heads": 2}, 30.0, 0.7),
        )
    ]  # fmt: skip
    charts = shapes(runs, "eval/top1")
    about = pytest.approx
    drawn = [
        {one.name: [(p.x, p.y) for p in one.points] for one in chart.series} for chart in charts
    ]
    assert drawn == [
        {"depth": [(1.0, about(0.26)), (2.0, about(0.31))],
         "width": [(1.0, about(0.26)), (3.0, about(0.36))]},
        {"depth": [(1.0, about(0.51)), (2.0, about(0.61))],
         "width": [(1.0, about(0.51)), (3.0, about(0.71))]},
    ]  # fmt: skip
    assert [chart.title.rpartition("data.fraction ")[2] for chart in charts] == [
        "0.5, training images 25000", "1.0, training images 50000",
    ]  # fmt: skip


def test_table_8_is_not_over_sizes_of_models():
    runs = [
        made({"model.name": name, "model.positions": kind},
             metrics={"few_shot/5_shot_top1": top1})
        for name, kind, top1 in (
            ("ViT-B/16", "none", 0.5), ("ViT-B/16", "learned_1d", 0.6),
            ("ViT-S/16", "none", 0.1), ("ViT-S/16", "learned_1d", 0.2),
        )
    ]  # fmt: skip
    assert [(row["positions"], row["differs in"], row["stem"]) for row in table(runs, 8)] == [
        ("none", "model.name ViT-B/16", "50.00"),
        ("learned_1d", "model.name ViT-B/16", "60.00"),
        ("none", "model.name ViT-S/16", "10.00"),
        ("learned_1d", "model.name ViT-S/16", "20.00"),
    ]


def test_optimizers_of_table_7_are_means_over_seeds_of_one_rate():
    runs = [
        made({"model.name": "R50x1", "optim.name": name, "optim.learning_rate": rate, "seed": seed},
             metrics={"transfer/pets_top1": top1})
        for name, rate, seed, top1 in (
            ("adamw", 0.001, 0, 0.9), ("adamw", 0.001, 1, 0.8), ("adamw", 0.01, 0, 0.2),
            ("sgd", 0.1, 0, 0.7),
        )
    ]  # fmt: skip
    rows = table(runs, 7)
    assert [(row["R50x1, adamw"], row["R50x1, sgd"]) for row in rows] == [
        ("85.00 +- 7.07", "-"), ("20.00", "-"), ("-", "70.00"),
    ]  # fmt: skip


def test_runs_of_other_programs_are_never_averaged():
    runs = [made(kind="") for _ in range(2)]
    for run, rate in zip(runs, ("1", "2"), strict=True):
        run.run.data.params = {"lr": rate, "seed": "0"}
    assert runs[0].group != runs[1].group
    bare = [made(kind="") for _ in range(2)]
    for run in bare:
        run.run.data.params, run.run.data.tags = {}, {}
    assert bare[0].group != bare[1].group


def test_what_differs_is_told_with_its_values():
    groups = [made(changes).group for changes in ({}, {"model.dropout": 0.1})]
    assert [*differences(groups).values()] == [
        "model.dropout unset",
        "model.dropout 0.1",
    ]
    assert [*differences(groups[:1]).values()] == [""]


def test_each_figure_of_means_has_the_seeds_that_they_are_of():
    """Two of three seeds have finished; the other model has one, and a seed recorded twice."""
    runs = [
        cell(0.5, {"seed": 1}, metrics={"cost/core_days": 2.0, "train/images_per_s": 8.0}),
        cell(0.7, {"seed": 2}, metrics={"cost/core_days": 4.0, "train/images_per_s": 10.0}),
        cell(0.1, {"seed": 3}, status="FAILED"),
        cell(0.8, {"model.name": "ViT-L/32"}, metrics={"study/exaflops": 99.0}),
        cell(0.8, {"model.name": "ViT-L/32"}, metrics={"study/exaflops": 99.0}),
    ]
    (chart,) = figures.accuracy_against_compute(archived(runs), "eval/top1")
    shown = [(p.y, p.state, dict(p.seeds)) for p in chart.series[0].points]
    assert sorted(shown) == [
        (0.1, "failed", {}), (pytest.approx(0.6), "", {"1": 0.5, "2": 0.7}), (0.8, "", {}),
    ]  # fmt: skip
    heads = [column.title for column in chart.values.columns]
    seed, y = heads.index("seed"), heads.index("top-1 accuracy %")
    assert sorted((row[y], row[seed] or "") for row in chart.values.rows) == [
        (0.1, "3"), (0.5, "1"), (pytest.approx(0.6), ""), (0.7, "2"), (0.8, "0"),
    ]  # fmt: skip
    assert [row["y"] for row in chart.rows if "seed" in row] == [0.5, 0.7]
    cost, speed = figures.cost_and_speed(archived(runs))[:2]
    assert [(p.x, p.seeds) for p in cost.series[0].points] == [(3.0, {"1": 0.5, "2": 0.7})]
    assert not speed.rows  # the size of the models is not recorded
