"""What a page says first: results with the interval by hand, and edges of a grid of rates."""

import json

import pytest
from mlflow.entities import Dataset, DatasetInput, InputTag
from scipy import stats

from tests.report.made_runs import archived, made
from vit_ray.report.gains import gain_sentences
from vit_ray.report.headline import best_sentences, headline
from vit_ray.report.sweeps import sweep_charts, sweep_sentences


def trial(rate, top1, **more):
    return made({"optim.learning_rate": rate}, kind="sweep_trial", sweep_stage="sweep_trial",
                metrics={"dev/top1": top1}, name=f"digits-lr{rate}", **more)  # fmt: skip


def with_test_set(run, images, use="evaluation"):
    """The run, with a test set of so many images."""
    profile = json.dumps({"num_images": images, "num_classes": 10})
    held = Dataset("d", "0", "vit_ray", "{}", profile=profile)
    run.run.inputs.dataset_inputs = [DatasetInput(held, [InputTag("mlflow.data.context", use)])]
    return run


def test_a_single_training_has_the_interval_of_its_test_set():
    run = with_test_set(made(kind="pretrain", metrics={"eval/top1": 0.9}, start=5), 300)
    known = stats.binomtest(270, 300).proportion_ci(method="wilson")
    (sentence,) = headline(None, archived([run]), [])
    low, high = (f"{100 * end:.2f}" for end in known)
    assert sentence == (
        f"ViT-B/32 on cifar10 reaches 90.00 % (95 %: {low} to {high}, 300 images) top-1 accuracy "
        "after 7 epochs in 0 s."
    )


def test_a_training_without_an_accuracy_says_so():
    run = made(kind="pretrain", status="RUNNING", metrics={"train/loss": 1.5})
    assert headline(None, archived([run]), []) == [
        "ViT-B/32 on cifar10 has no accuracy yet; its last training loss is 1.5."
    ]


def test_a_training_that_has_not_finished_has_the_accuracy_so_far():
    for status, told in (("RUNNING", "is running"), ("FAILED", "has failed")):
        for key, where in (("eval/top1", ""), ("dev/top1", " on held-out images")):
            run = made(kind="pretrain", status=status, metrics={"train/loss": 1.5, key: 0.5})
            assert headline(None, archived([run]), []) == [
                f"ViT-B/32 on cifar10 {told}; its top-1{where} is 50.00 %; its last training loss "
                "is 1.5."
            ]


def test_a_test_set_of_an_unfinished_run_is_not_denied():
    runs = [made(kind="pretrain", metrics={"dev/top1": 0.5})]
    assert headline(None, archived(runs), [])[0].endswith("; there is no test set.")
    runs.append(made(kind="pretrain", status="RUNNING", metrics={"eval/top1": 0.5}))
    (sentence,) = headline(None, archived(runs), [])
    assert "50.00 % top-1 on images held out" in sentence
    assert "test set" not in sentence


@pytest.mark.parametrize(
    ("tops", "advice"),
    [
        ((0.9, 0.8, 0.7), " 0.01 is the smallest rate tried: try 0.003."),
        ((0.7, 0.8, 0.7), ""),
        ((0.7, 0.8, 0.9), " 0.1 is the largest rate tried: try 0.3."),
    ],
)
def test_a_best_rate_at_the_edge_of_its_grid_is_said(tops, advice):
    trials = [trial(rate, top1) for rate, top1 in zip((0.01, 0.03, 0.1), tops, strict=True)]
    (sentence,) = sweep_sentences(trials)
    assert sentence.endswith(f"best of 3.{advice}")


def test_a_sweep_says_whether_its_winner_leads_by_more_than_noise():
    """Newcombe's example (1998, method 10): 56 of 70 less 48 of 80, from 0.0524 to 0.3339."""
    trials = [trial(0.001, 0.1), with_test_set(trial(0.01, 0.6), 80)]
    trials.append(with_test_set(trial(0.1, 0.8), 70))
    (sentence,) = sweep_sentences(trials)
    assert "best of 3, by 20.00 points over learning rate 0.01" in sentence
    assert (
        ": more than noise (95 %: 5.24 to 33.39, one seed). 0.1 is the largest rate tried"
        in sentence
    )
    near = [with_test_set(trial(*pair), 299) for pair in ((0.01, 0.8896), (0.1, 0.9064))]
    (sentence,) = sweep_sentences(near)
    assert "by 1.68 points over learning rate 0.01: within noise (95 %: -" in sentence


def unfinished(rate, status, metrics=None):
    return made({"optim.learning_rate": rate}, kind="sweep_trial", sweep_stage="sweep_trial",
                status=status, metrics=metrics, name=f"digits-lr{rate}")  # fmt: skip


def test_a_rate_that_diverged_was_tried_and_is_not_advised():
    trials = [trial(0.01, 0.7), trial(0.03, 0.8)]
    (sentence,) = sweep_sentences([*trials, unfinished(0.1, "FAILED")])
    assert sentence == "Learning rate 0.03 wins on the dev split (80.00 %), best of 2."
    (sentence,) = sweep_sentences([trials[0], unfinished(0.1, "FAILED")])
    assert sentence.startswith(
        "The only finished trial (learning rate 0.01) wins on the dev split (70.00 %), best of 1. "
        "0.01 is the smallest rate tried: try 0.001."
    )
    cells = [of_rate("ViT-B/32", rate, top1) for rate, top1 in ((1e-3, 0.8), (3e-3, 0.9))]
    cells.append(of_rate("ViT-B/32", 1e-2, None, status="FAILED"))
    assert sweep_sentences(archived(cells)) == [
        "Learning rate 0.003 wins on the dev split (90.00 %), best of 2."
    ]


def test_while_trials_run_the_best_only_leads():
    trials = [trial(0.01, 0.7), trial(0.03, 0.8), unfinished(0.1, "RUNNING", {"dev/top1": 0.9})]
    (sentence,) = sweep_sentences(trials)
    assert sentence == "Learning rate 0.03 leads so far on the dev split (80.00 %), best of 2."


def test_of_equal_points_the_retrained_one_won():
    trials = [with_test_set(trial(rate, 0.8), 300) for rate in (0.01, 0.03, 0.1)]
    final = made({"optim.learning_rate": 0.03}, kind="finetune", sweep_stage="finetune",
                 metrics={"eval/top1": 0.8}, name="digits-final-lr0.03-seed0")  # fmt: skip
    won, tested = sweep_sentences([*trials, final])
    assert won.startswith("Learning rate 0.03 wins on the dev split (80.00 %), best of 3, by 0.00")
    assert tested.endswith("learning rate 0.03 (digits-final-lr0.03-seed0).")
    assert sweep_sentences(trials)[0].startswith("Learning rate 0.01 wins")


def test_held_out_images_are_counted_and_no_others():
    alone = with_test_set(made(metrics={"dev/top1": 0.5}), 299)
    assert (alone.num_tested("dev/top1"), alone.num_tested("dev/loss")) == (299, None)
    both = {"dev/top1": 0.5, "eval/top1": 0.5}
    assert with_test_set(made(metrics=both), 300).num_tested("dev/top1") is None
    held_out = with_test_set(made(metrics=both), 299, "held-out evaluation")
    assert (held_out.num_tested("dev/top1"), held_out.num_tested("eval/top1")) == (299, None)


def test_the_fitted_optimum_is_the_top_of_a_parabola():
    rates = (0.001, 0.003, 0.01, 0.03, 0.1)
    tops = [0.9 - 0.1 * (i - 2.5) ** 2 / 4 for i in range(5)]
    trials = [with_test_set(trial(*pair), 300) for pair in zip(rates, tops, strict=True)]
    (chart,) = sweep_charts(trials)
    line, fitted = chart.series
    best = max(fitted.points, key=lambda point: point.y)
    assert 0.015 < best.x < 0.02  # between the third and the fourth
    assert best.y == pytest.approx(0.9, abs=0.005)
    assert len(line.points) == 5
    assert f"has its top at {best.x:.2g}." in chart.note
    assert len(sweep_charts(trials[:3])[0].series) == 1
    # Nor does one that has not finished.
    part = with_test_set(unfinished(0.3, "RUNNING", {"dev/top1": 0.5}), 300)
    assert sweep_charts([*trials, part])[0].series[1].points == fitted.points
    # A diverged trial of ten classes, at 15 %, does not bend it.
    (chart,) = sweep_charts([*trials, with_test_set(trial(1.0, 0.15), 300)])
    assert chart.series[1].points == fitted.points


@pytest.mark.parametrize(
    "tops",
    [
        (0.7726, 0.8896, 0.9064, 0.1505),  # three trials that learned
        (0.7726, 0.8896, 0.9064, 0.4),  # 95 % at 0.01, which measured 85 to 92 %
    ],
)
def test_a_parabola_that_misses_what_was_measured_is_not_drawn(tops):
    rates = (0.001, 0.01, 0.1, 1.0)
    trials = [trial(*pair) for pair in zip(rates, tops, strict=True)]
    for some in (trials, [with_test_set(one, 299) for one in trials]):
        (chart,) = sweep_charts(some)
        assert len(chart.series) == 1
        assert "parabola" not in chart.note


def of_rate(name, rate, top1, seed=0, **more):
    params = {"model.name": name, "optim.learning_rate": rate, "seed": seed}
    metrics = {} if top1 is None else {"dev/top1": top1}
    return made(params, kind="study_cell", metrics=metrics, **more)


def test_a_study_of_rates_says_which_is_best_for_each_model_and_which_to_try():
    cells = [of_rate("ViT-B/32", rate, top1) for rate, top1 in ((1e-3, 0.8), (3e-3, 0.7))]
    cells += [of_rate("R50x1", rate, 0.5 + rate) for rate in (1e-3, 3e-3, 1e-2)]
    cells.append(of_rate("ViT-L/16", 1e-3, 0.9))  # of one rate there is nothing to choose
    assert sweep_sentences(archived(cells)) == [
        "ViT-B/32: learning rate 0.001 wins on the dev split (80.00 %), best of 2. 0.001 is the "
        "smallest rate tried: try 0.0003.",
        "R50x1: learning rate 0.01 wins on the dev split (51.00 %), best of 3. 0.01 is the largest "
        "rate tried: try 0.03.",
    ]
    (chart,) = sweep_charts(archived(cells))
    assert [series.name for series in chart.series] == ["ViT-B/32, dev split", "R50x1, dev split"]
    assert "1 of 1" not in headline(None, archived(cells), [])[0]


def test_the_best_of_several_evaluations_on_the_test_set_is_said():
    one = made(metrics={"eval/top1": 0.5, "eval/best_top1": 0.75, "result/step": 20,
                        "result/evaluations": 3})  # fmt: skip
    (sentence,) = best_sentences(archived([one]))
    assert (
        " top-1 accuracy, the best of 3 evaluations on the test set (the last: 50.00 %), after"
        in sentence
    )


def test_a_study_counts_its_cells_and_names_its_best():
    cells = [made({"seed": seed}, metrics={"eval/top1": 0.8 + seed / 50}) for seed in range(2)]
    cells.append(made({"model.name": "R50x1"}, metrics={"eval/top1": 0.99}, status="FAILED"))
    assert headline(None, archived(cells), []) == [
        "Best top-1 accuracy: 81.00 % (95 %: 68.29 to 93.71, 2 seeds), by ViT-B/32. "
        "2 of 3 cells have finished."
    ]


def test_a_best_beside_a_sweep_says_that_it_is_outside_and_which_run_of_one_model_it_is():
    swept = made({"optim.learning_rate": 0.1}, kind="finetune", sweep_stage="finetune",
                 metrics={"eval/top1": 0.92}, name="sweep-final-lr0.1-seed0")  # fmt: skip
    vit = made(kind="pretrain", metrics={"eval/top1": 0.9}, name="digits-vit")
    scratch = made({"optim.learning_rate": 0.3}, kind="pretrain", metrics={"eval/top1": 0.6})
    assert headline(None, archived([swept, vit, scratch]), [])[-1] == (
        "Best top-1 accuracy of the runs outside sweeps: 90.00 %, by ViT-B/32 (digits-vit), the "
        "best of 2 on the test set."
    )
    (sentence,) = headline(None, archived([vit, scratch]), [])
    assert sentence.startswith("Best top-1 accuracy: 90.00 %, by ViT-B/32 (digits-vit), the best")


def gained(label, family, fraction, tops, steps=1000, more=()):
    changes = {"model.name": family, "data.fraction": fraction, "optim.epochs": None,
               "optim.steps": steps, **dict(more)}  # fmt: skip
    return [
        made({**changes, "seed": seed}, study_label=label, metrics={
            "eval/top1": top1, "study/train_images": 50_000 * fraction,
        })
        for seed, top1 in enumerate(tops)
    ]  # fmt: skip


def test_a_study_says_to_which_family_more_images_are_worth_more():
    small, large = [0.46, 0.49, 0.48], [0.52, 0.53, 0.56]
    theirs = [0.63, 0.64, 0.62], [0.66, 0.67, 0.66]
    cells = [
        *gained("V", "ViT-B/32", 0.1, small), *gained("V", "ViT-B/32", 1.0, large),
        *gained("R", "R50x1", 0.1, theirs[0]), *gained("R", "R50x1", 1.0, theirs[1]),
        *gained("V", "ViT-B/32", 1.0, [0.6, 0.7], steps=400),  # nothing to compare it with
        *gained("one seed", "R50x1", 0.1, [0.1], steps=400),
    ]  # fmt: skip
    gains = [[b - a for a, b in zip(*ends, strict=True)] for ends in ((small, large), theirs)]
    known = stats.ttest_ind(*gains, equal_var=False).confidence_interval()
    (sentence,) = gain_sentences(cells)
    assert sentence == (
        "Top-1 accuracy, 1000 steps, from 5,000 to 50,000 training images: V gains 6.00 points "
        "and R 3.33, a difference of 2.67 "
        f"(95 %: {100 * known.low:.2f} to {100 * known.high:.2f}, 3 and 3 seeds)."
    )
    assert sentence in headline(None, archived(cells), [])
    (fewer,) = gain_sentences([run for run in cells if run.seed != ("2",)])
    assert "V gains 5.00 points and R 3.00" in fewer
    assert fewer.endswith("2 and 2 seeds).")
    assert gain_sentences([run for run in cells if run.label == "V"]) == []


def test_gains_say_what_tells_models_of_one_label_apart_and_compare_none_of_other_batches():
    cells = [
        run
        for label, family, more in (
            ("V", "ViT-B/32", {}), ("V", "ViT-B/32", {"optim.learning_rate": 0.1}),
            ("R", "R50x1", {}), ("R", "R50x1", {"train.global_batch_size": 8}),
        )
        for fraction, tops in ((0.1, [0.4, 0.5]), (1.0, [0.5, 0.7]))
        for run in gained(label, family, fraction, tops, more=more)
    ]  # fmt: skip
    found = gain_sentences(cells)
    assert len(found) == 2
    assert sum("V (optim.learning_rate 0.1) gains" in text for text in found) == 1
    of_epochs = [
        run
        for label, family in (("V", "ViT-B/32"), ("R", "R50x1"))
        for fraction, tops in ((0.1, [0.4, 0.5]), (1.0, [0.5, 0.7]))
        for run in gained(label, family, fraction, tops, steps=None, more={"optim.epochs": 7.0})
    ]
    assert gain_sentences(of_epochs) == []
