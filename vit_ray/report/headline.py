"""The first sentences of a page: the result with its interval, and what was run."""

from collections.abc import Sequence

from vit_ray.metric_names import (
    COST_CORE_DAYS,
    COST_GPU_HOURS,
    EVAL_LAST_TOP1,
    EVAL_TOP1,
    STUDY_EXAFLOPS,
    TRAIN_LOSS,
)
from vit_ray.report.figures.chart_list import interval_of, length_of, own_share
from vit_ray.report.figures.fit_figures import FamilyLaws, fit_sentences
from vit_ray.report.gains import gain_sentences
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.statistics.accuracies import (
    accuracies_of,
    accuracy_name,
    by_sets,
    decided_key,
    studied,
)
from vit_ray.report.statistics.intervals import of_mean
from vit_ray.report.statistics.seeds import Mean, by_group, mean_of
from vit_ray.report.sweeps import sweep_sentences
from vit_ray.report.tables import duration, number, percent
from vit_ray.report.time_spent import goodput_of

MOST_SENTENCES = 3
"""Number of laws, and of gains, at the top of a page; all are in their sections."""


def headline(
    archive: Archive, runs: Sequence[RecordedRun], laws: Sequence[FamilyLaws]
) -> list[str]:
    """For a study its laws, the gain from more data, and its best result; for a sweep the selected
    point; otherwise the best result.

    Args:
        runs: the trainings of the report.
    """
    if any(run.kind == "study_cell" for run in runs):
        cells = studied(runs)
        finished = sum(run.status == "FINISHED" for run in cells)
        ratios = [text for text in fit_sentences(laws) if "the same accuracy" in text]
        best = best_sentences(cells)[:MOST_SENTENCES]
        count = f"{finished} of {len(cells)} cells have finished."
        gains = gain_sentences(cells)
        first = [*ratios[:MOST_SENTENCES], *gains[:MOST_SENTENCES], *sweep_sentences(cells)]
        return [*first, " ".join([*best, count])]
    others = [run for run in runs if "vit_ray.sweep_stage" not in run.tags]
    among = " of the runs outside sweeps" if len(others) < len(runs) else ""
    found = [*sweep_sentences(runs), *best_sentences(others, among)]
    if runs and not found:
        run, loss = runs[-1], runs[-1].metrics.get(TRAIN_LOSS)
        last = "" if loss is None else f"; its last training loss is {number(loss)}"
        state, key = "has no accuracy yet", decided_key([run], EVAL_TOP1)
        if key in run.metrics:
            where = "" if run.is_tested(key) else " on held-out images"
            is_ended = {"FAILED": "has failed", "KILLED": "was stopped"}.get(run.status)
            state = f"{is_ended or 'is running'}; its top-1{where} is {percent(run.metrics[key])} %"
        found.append(f"{run.label} on {run.training_name} {state}{last}.")
    return found


def best_sentences(runs: Sequence[RecordedRun], among: str = "") -> list[str]:
    """The best mean over seeds of each accuracy on each pair of a training and a test set.

    For a single training also its length and its time.

    Args:
        among: which runs of the page these are, if there are others.
    """
    found = []
    for key in accuracies_of(runs):
        for whose, members in by_sets(runs, key):
            tested = [one for one in members if one.is_tested(key) and one.status == "FINISHED"]
            means = [
                (seeds, mean)
                for seeds in by_group(tested).values()
                if (mean := mean_of([one.metrics[key] for one in seeds]))
            ]
            if not means:
                continue
            best_seeds, best = max(means, key=lambda pair: pair[1].value)
            run = best_seeds[0]
            name, result = f"{accuracy_name(key)}{whose}", described(run, best, key)
            of_tests = ""
            if key == EVAL_TOP1 and run.best_of_tests:
                last = run.recorded.get(EVAL_LAST_TOP1)
                note = "" if last is None else f" (the last: {percent(last)} %)"
                of_tests = f", the best of {run.best_of_tests} evaluations on the test set{note}"
            if len(runs) == 1:
                where = f"{run.label} on {run.training_name} reaches {result} {name}"
                found.append(f"{where}{of_tests and of_tests + ','} {_made(run)}.")
                continue
            chosen = f", the best of {len(means)} on the test set" if len(means) > 1 else ""
            by = run.label
            if [seeds[0].label for seeds, _ in means].count(by) > 1:
                by += f" ({', '.join(one.name for one in best_seeds)})"
            found.append(f"Best {name}{among}: {result}, by {by}{chosen}{of_tests}.")
    held_out = [r for r in runs if r.is_on_dev(EVAL_TOP1) and r.status == "FINISHED"]
    if not found and held_out:
        run = max(held_out, key=lambda one: one.metrics[EVAL_TOP1])
        text = described(run, Mean(run.metrics[EVAL_TOP1], None, 1), EVAL_TOP1)
        found.append(
            f"{run.label} on {run.training_name} reaches {text} top-1 on images held out of the "
            f"training set {_made(run)}"
            f"{'' if any(EVAL_TOP1 in one.recorded for one in runs) else '; there is no test set'}."
        )
    return found


def described(run: RecordedRun, mean: Mean, key: str) -> str:
    """A value in percent with its deviation over seeds, or the interval of a single one."""
    if mean.deviation is not None:
        of_seeds = of_mean(mean.value, mean.deviation, mean.count)
        ends = f"{percent(max(0.0, of_seeds.low))} to {percent(min(1.0, of_seeds.high))}"
        return f"{percent(mean.value)} % (95 %: {ends}, {mean.count} seeds)"
    if (interval := interval_of(run, key)) is None:
        return f"{mean} %"
    low, high = percent(interval.low), percent(interval.high)
    return f"{mean} % (95 %: {low} to {high}, {run.num_tested(key):,} images)"


def totals(runs: Sequence[RecordedRun]) -> list[str]:
    """Cost of all trainings, including failed and stopped ones; for a branch its own part."""
    found = []
    for key, name in ((STUDY_EXAFLOPS, "exaFLOPs"), (COST_CORE_DAYS, "core-days")):
        values = [run.metrics[key] * own_share(run) for run in runs if key in run.metrics]
        found += [f"{number(sum(values))} {name}"] if values else []
        if key == COST_CORE_DAYS and values and sum(values) < 1:
            found[-1] += f" ({duration(86_400 * sum(values))} of one worker)"
    if hours := [run.metrics[COST_GPU_HOURS] for run in runs if COST_GPU_HOURS in run.metrics]:
        found.append(f"{number(sum(hours) / 24)} GPU-days with start-up and stalls")
    count = f" of {len(runs)} trainings" if len(runs) > 1 else ""
    return [f"Total cost{count}: {', '.join(found)}."] if found else []


def _made(run: RecordedRun) -> str:
    """How long it was trained, and on what."""
    parts = [f"after {length_of(run)}"]
    if (seconds := run.elapsed_s) is not None:
        parts.append(f"in {duration(seconds)}")
    if cluster := run.tags.get("vit_ray.cluster"):
        parts.append(f"on {cluster}")
    return ", ".join(filter(None, (" ".join(parts), goodput_of([run]))))
