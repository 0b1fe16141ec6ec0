"""Sweeps over learning rates: rate against accuracy, the selected rate, and its test result."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vit_ray.metric_names import EVAL_TOP1
from vit_ray.report.figures.chart_list import SWEEP_STAGES, Line, interval_of, line_of_means
from vit_ray.report.figures.charts import Axis, Chart, Point, Series
from vit_ray.report.runs import DEV, RecordedRun
from vit_ray.report.statistics.accuracies import decided_key, decided_top1
from vit_ray.report.statistics.groups import Group, differences
from vit_ray.report.statistics.intervals import of_difference
from vit_ray.report.statistics.seeds import by_group, mean_of
from vit_ray.report.tables import percent

RATE = "optim.learning_rate"
CELL = "study_cell"
MIN_RATES = 4
"""From this many points on a parabola is informative."""
DIVERGED = 0.1
"""Trials with less than this share of the best trial's gain over chance are in no parabola."""


def sweep_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Rate against accuracy: a line for runs that differ only in it, and the fitted optimum."""
    lines: dict[tuple[str, str], dict[Group, Line]] = {}
    measured = [run for run in runs if _stage(run) and decided_top1(run) is not None]
    for group, members in by_group(measured).items():
        if (rate := members[0].number(RATE)) is not None:
            alike = lines.setdefault((_sweep_name(members[0]), _stage(members[0])), {})
            alike.setdefault(group.without(RATE), []).append((rate, members))
    series, optima = [], []
    for (name, stage), alike in lines.items():
        for group, rest in differences([*alike]).items():
            is_cell = alike[group][0][1][0].kind == CELL
            if is_cell and len({rate for rate, _ in alike[group]}) < 2:
                continue
            key = decided_key([run for _, some in alike[group] for run in some], EVAL_TOP1)
            title = f"{name}, {stage}" + (f", differs in {rest}" if rest else "")
            line = line_of_means(title, alike[group], key)
            series.append(line)
            chance = next((1 / n for _, n in alike[group][0][1][0].test_sets), 0.0)
            if stage == DEV and (fitted := _parabola(line, chance)):
                top = max(fitted, key=lambda point: point.y)
                series.append(
                    replace(line, name=f"{title}, fitted", points=fitted, has_markers=False, dash=1)
                )
                optima.append(f"the parabola of {title} has its top at {top.x:.2g}")
    note = "Rates are selected on the dev split, hollow; filled marks are the test set"
    accuracy = Axis("top-1 accuracy", is_percent=True)
    rate_axis = Axis("learning rate (log scale)", is_log=True)
    title, notes = "Which learning rate is best?", "; ".join([note, *optima])
    return [Chart(title, rate_axis, accuracy, series, f"{notes}.")] if series else []


def _parabola(line: Series, chance: float) -> list[Point]:
    """Parabola of accuracy over the log of the rate, of finished trials that have not diverged.

    Empty if its top is outside the rates, or it misses the interval of a point.

    Args:
        chance: accuracy of a guess.
    """
    finished = [point for point in line.points if point.state == DEV]
    most = max((point.y for point in finished), default=chance)
    used = [point for point in finished if point.y > chance + DIVERGED * (most - chance)]
    rates = np.log([point.x for point in used])
    if len({*rates}) < MIN_RATES:
        return []
    a, b, c = np.polyfit(rates, [point.y for point in used], 2)
    if a >= 0 or not rates[0] < -b / (2 * a) < rates[-1]:
        return []
    for point, y in zip(used, np.polyval((a, b, c), rates), strict=True):
        if point.low is None or point.high is None or not point.low <= y <= point.high:
            return []
    at = np.sort([*np.linspace(rates[0], rates[-1], 40), -b / (2 * a)])
    return [Point(float(np.exp(x)), float(a * x * x + b * x + c)) for x in at]


def sweep_sentences(runs: Sequence[RecordedRun]) -> list[str]:
    """For each sweep what won on the dev split, whether its lead is more than noise, and if that is
    the lowest or highest rate, which to try next.

    While trials run, it only leads so far. Of equal points the one that was retrained won.

    Also mean and deviation over seeds of the finished runs with the selected rate.
    """
    finished = [r for r in runs if r.status == "FINISHED" and decided_top1(r) is not None]
    trials: dict[tuple[str, Group | None], list[RecordedRun]] = {}
    for run in finished:
        if run.is_trial:
            trials.setdefault((_sweep_name(run), None), []).append(run)
        elif run.kind == CELL and _stage(run):  # of a study of rates
            trials.setdefault((_sweep_name(run), run.group.without(RATE)), []).append(run)
    sentences = []
    for (name, rest), members in trials.items():
        key, groups = decided_key(members, EVAL_TOP1), by_group(members)
        if rest is not None and len(groups) < 2:
            continue
        means = {
            group: mean
            for group, some in groups.items()
            if (mean := mean_of([run.metrics[key] for run in some if key in run.metrics]))
        }
        rates = {group: groups[group][0].number(RATE) for group in means}
        chosen = {
            run.number(RATE)
            for run in runs
            if not run.is_trial and _sweep_name(run) == f"{name}-final"
        }
        best = max(means, key=lambda group: (means[group].value, rates[group] in chosen))
        names = {
            group: text.replace(RATE, "learning rate")
            or f"the only finished trial (learning rate {groups[group][0].params.get(RATE, '?')})"
            for group, text in differences([*means]).items()
        }
        tried = [run for run in runs if _is_tried_with(run, members[0])]
        is_over = all(run.status not in ("RUNNING", "SCHEDULED") for run in tried)
        verb = "wins" if is_over else "leads so far"
        text = f"{names[best]} {verb} on the dev split ({means[best]} %)"
        text = f"{name}: {text}" if len(trials) > 1 else text[0].upper() + text[1:]
        lead = ""
        if rest_of := [group for group in means if group is not best]:
            second = max(rest_of, key=lambda group: means[group].value)
            lead = _lead(groups[best], groups[second], key, names[second])
        sentences.append(f"{text}, best of {len(means)}{lead}.{_edge(rates[best], tried)}")
    return sentences + _test_sentences(finished)


def _lead(best: Sequence[RecordedRun], second: Sequence[RecordedRun], key: str, name: str) -> str:
    """The difference of two points of a sweep, and whether its 95 % interval excludes 0."""
    by_seed = [
        {run.seed: run.metrics[key] for run in one if key in run.metrics} for one in (second, best)
    ]
    a, b = ([one[seed] for seed in sorted(one)] for one in by_seed)
    counts = second[0].num_tested(key), best[0].num_tested(key)
    is_paired = by_seed[0].keys() == by_seed[1].keys()
    if (tested := of_difference(a, b, is_paired=is_paired, counts=counts)) is None:
        return ""
    found = tested.estimate
    word = "more than noise" if found.low > 0 else "within noise"
    ends = f"{percent(found.low)} to {percent(found.high)}"
    ends += ", one seed" if tested.error is None else ""
    return f", by {percent(found.value)} points over {name}: {word} (95 %: {ends})"


def _is_tried_with(run: RecordedRun, trial: RecordedRun) -> bool:
    """Whether it is of the sweep of a trial, or for a study of rates of its recipe, however it
    ended.
    """
    if run.kind != trial.kind or run.is_trial != trial.is_trial:
        return False
    recipes = [one.group.only(lambda key: "." in key and key != RATE) for one in (run, trial)]
    is_alike = trial.is_trial or recipes[0] == recipes[1]
    return is_alike and _sweep_name(run) == _sweep_name(trial)


def _edge(best: float | None, tried: Sequence[RecordedRun]) -> str:
    """Which rate to try if the best is the lowest or highest of those tried."""
    known = sorted({rate for run in tried if (rate := run.number(RATE)) is not None and rate > 0})
    if len(known) < 2 or best not in (known[0], known[-1]):
        return ""
    word, own, other = ("smallest", *known[:2])
    if best == known[-1]:
        word, own, other = "largest", known[-1], known[-2]
    return f" {own:g} is the {word} rate tried: try {own * own / other:.1g}."


def _test_sentences(finished: Sequence[RecordedRun]) -> list[str]:
    tuned = (run for run in finished if _stage(run) and not run.is_trial and run.kind != CELL)
    sweeps, alike = by_group(tuned), dict[str, list[Group]]()
    for group, (run, *_) in sweeps.items():
        alike.setdefault(_sweep_name(run), []).append(group.without(RATE))
    others = {name: differences(groups) for name, groups in alike.items()}
    sentences = []
    for group, chosen in sweeps.items():
        mean = mean_of([value for run in chosen if (value := decided_top1(run)) is not None])
        name = _sweep_name(chosen[0])
        rest = others[name][group.without(RATE)]
        seeds = f"{len(chosen)} seeds" if len(chosen) > 1 else "one seed"
        key = decided_key(chosen[:1], EVAL_TOP1)
        interval = interval_of(chosen[0], key) if len(chosen) == 1 else None
        if interval is not None:
            low, high = percent(interval.low), percent(interval.high)
            seeds += f" (95 %: {low} to {high}, {chosen[0].num_tested(key):,} test images)"
        whose = f"{name}: test" if len(sweeps) > 1 else "Test"
        rate = f"learning rate {chosen[0].params.get(RATE, '?')}"
        differs = f", differs in {rest}" if rest else ""
        names = f" ({', '.join(run.name for run in chosen)})" if len(sweeps) == 1 else ""
        sentences.append(f"{whose} top-1 {mean} % over {seeds}, {rate}{differs}{names}.")
    return sentences


def _stage(run: RecordedRun) -> str:
    """What a run of a sweep, or of a study of rates, was measured on; empty for others."""
    if run.kind == CELL:
        return DEV if run.is_on_dev(EVAL_TOP1) else ""
    return SWEEP_STAGES.get(run.tags.get("vit_ray.sweep_stage", ""), "")


def _sweep_name(run: RecordedRun) -> str:
    """Equal for the trials of a sweep, whatever it varies, and for its retrainings, where it ends
    in `-final`; for a cell of a study of rates the model.
    """
    if run.kind == CELL:
        return run.label
    # A run over tasks is the parent of the trials of each task.
    sweep = "-".join(filter(None, (run.parent_name, run.tags.get("vit_ray.vtab_task"))))
    if not run.parent_name or not run.name.startswith(f"{sweep}-"):
        return re.sub(r"-(lr|seed)[\w.-]*$", "", run.name)  # its parent is not recorded
    return sweep if run.is_trial else f"{sweep}-final"
