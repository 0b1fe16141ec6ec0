"""The first sentences of a page: the result with its interval, and what is missing."""

from collections.abc import Iterator

import pandas as pd

from vit_ray.config.recipe import is_trained
from vit_ray.metric_names import COST_GPU_HOURS
from vit_ray.report.figures import means_of
from vit_ray.report.runs import TRAININGS
from vit_ray.report.statistics import (
    CANNOT_SAY,
    FamilyLaw,
    difference,
    equal_accuracy,
    law_of,
    student,
    wilson,
)
from vit_ray.report.tables import accuracy_name, cells_of, comparable, number, percent

# The family that others are compared with, as in the paper.
BASELINE = "ViT"
# Names in one sentence.
MAX_LISTED = 12


def headline(runs: pd.DataFrame) -> list[str]:
    """Sentences with the results of trainings, the most important first."""
    if (runs["kind"] == "study_cell").any():
        all_cells = cells_of(runs)
        cells = comparable(all_cells)
        count = (
            f"{(all_cells['status'] == 'finished').sum()} of {len(all_cells)} cells have finished"
        )
        if len(cells) < len(all_cells):
            count += f"; {len(all_cells) - len(cells)} of other data or recipes are in tables alone"
        comparisons = sorted(equal_sentences(cells), key=lambda text: CANNOT_SAY in text)
        sentences = [*_leader(cells), *comparisons, f"{count}."]
    else:
        sentences = [*_against_scratch(runs), *sweep_sentences(runs)] or [*_best(runs)]
    return [*sentences, _cost(runs)]


def _result(seeds: pd.DataFrame, key: str, images: str) -> str:
    """`91.2 % (95 %: 88 to 94, 300 test images)`; of several seeds, with deviation and interval."""
    values, count = seeds[key].dropna(), seeds[images].iloc[0]
    mean, interval = float(values.mean()), student(values.tolist())
    text, basis = f"{100 * mean:.1f} %", f"{len(values)} seeds"
    if len(values) > 1:
        text = f"{100 * mean:.1f} +- {100 * values.std():.1f} %"
    elif (count or 0) > 0:
        interval, basis = wilson(mean, count), f"{count:,.0f} {images.removeprefix('num_')} images"
    if interval is None:
        return f"{text} ({basis})" if len(values) > 1 else text
    digits = 0 if interval.high - interval.low > 0.02 else 1
    ends = (f"{100 * end:.{digits}f}" for end in interval[1:])
    return f"{text} (95 %: {' to '.join(ends)}, {basis})"


def _best_group(runs: pd.DataFrame, key: str) -> pd.DataFrame:
    means = runs.groupby("group", sort=False)[key].mean()
    return runs[runs["group"] == means.idxmax()]


def _against_scratch(runs: pd.DataFrame) -> Iterator[str]:
    """The best fine-tuned model against the best from random weights on the same test set."""
    tested = runs[(runs["status"] == "finished") & runs["test"].notna()]
    tuned = tested[tested["is_tuned"]]
    scratch = tested[~tested["is_tuned"] & ~tested["run_id"].isin(runs["origin"])]
    best = _best_group(tuned, "test") if len(tuned) else tuned
    scratch = scratch[scratch["test_set"].isin(best["test_set"])]
    if len(scratch):
        top1 = 100 * _best_group(scratch, "test")["test"].mean()
        yield f"Fine-tuned {_result(best, 'test', 'num_test')} against {top1:.1f} % from scratch."


def _best(runs: pd.DataFrame) -> Iterator[str]:
    """The most accurate training of each training and test set; else the state of the newest."""
    finished = runs[runs["status"] == "finished"]
    key, images = ("test", "num_test") if finished["test"].notna().any() else ("dev", "num_dev")
    measured = finished.dropna(subset=[key])
    for _, rivals in measured.groupby(["train_set", "test_set"], sort=False):
        best, count = _best_group(rivals, key), rivals["group"].nunique()
        run, rank = best.iloc[0], f", the best of {count}" if count > 1 else ""
        length = f" after {run['epochs']:g} epochs" if pd.notna(run["epochs"]) else ""
        split = " on images held out of the training set" if key == "dev" else ""
        yield (
            f"{run['label']} on {run['data']} reaches {_result(best, key, images)} top-1"
            f"{split}{rank}{length}."
        )
    if not len(measured):
        run = runs.iloc[-1]
        top1 = run["test"] if pd.notna(run["test"]) else run["dev"]
        state = f"its top-1 is {percent(top1)} %" if pd.notna(top1) else "has no accuracy yet"
        yield f"{run['label']} on {run['data']}: {run['status']}; {state}."


def sweep_sentences(runs: pd.DataFrame) -> Iterator[str]:
    """The point of each sweep that won on the dev split, whether by more than noise, its test
    result, and which rate to try if the best is the smallest or largest tried.
    """
    for name, trials, retrainings in sweeps_of(runs):
        finished = trials[(trials["status"] == "finished") & trials["dev"].notna()]
        if len(finished):
            best = _best_group(finished, "dev")
            rest = finished[~finished["run_id"].isin(best["run_id"])]
            verb = "leads so far" if (trials["status"] == "running").any() else "wins"
            text = (
                f"{name}Learning rate {_point(best.iloc[0], trials)} {verb} on the dev split "
                f"({percent(best['dev'].mean())} %)"
            )
            if len(rest):
                second = _best_group(rest, "dev")
                a, b = (point.set_index("seed")["dev"].to_dict() for point in (second, best))
                lead = difference(a, b, best["num_dev"].iloc[0])
                rival = _point(second.iloc[0], trials)
                text += f", by {percent(lead.value)} points over {rival}: {lead.verdict}"
            rate, rates = best["rate"].iloc[0], sorted({*trials["rate"].dropna()})
            advice = ""
            if len(rates) > 1 and rate in (rates[0], rates[-1]):
                is_min = rate == rates[0]
                word, next_rate = ("smallest", rates[1]) if is_min else ("largest", rates[-2])
                advice = f" {rate:g} is the {word} rate tried: try {rate * rate / next_rate:.1g}."
            yield f"{text}.{advice}"
        tested = retrainings[(retrainings["status"] == "finished") & retrainings["test"].notna()]
        for _, seeds in tested.groupby("group", sort=False):
            result = _result(seeds, "test", "num_test")
            point = _point(seeds.iloc[0], trials)
            yield f"{name}Learning rate {point} reaches {result} on the test set."


def sweeps_of(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """The prefix, trials and retrainings of each sweep.

    The prefix is the sweep's name with a colon; empty if there is one sweep. Of sweeps of the same
    name, it has the first letters of the parent run's id. The runs of one task below one
    parent are one sweep, also if they differ in keys that the sweep does not vary.
    """
    members = runs.dropna(subset=["stage"]).fillna({"parent": ""})
    sweeps = members.groupby(["parent", "task"], dropna=False, sort=False)
    names = sweeps["parent_name"].first().fillna("").tolist()  # empty where MLflow lacks the parent
    for name, ((parent, _), sweep) in zip(names, sweeps, strict=True):
        short_id = parent[:6] if names.count(name) > 1 else ""
        prefix = f"{name} {short_id}".strip() + ": " if len(sweeps) > 1 and name + short_id else ""
        is_trial = sweep["stage"] == "sweep_trial"
        yield prefix, sweep[is_trial], sweep[~is_trial]


def _point(run: pd.Series, trials: pd.DataFrame) -> str:
    # The rate, and the other values that the sweep varies.
    varied = [key for key in run["keys"] if is_trained(key) and trials[key].nunique() > 1]
    texts = [f"{key} {run[key]}" for key in varied if key != "optim.learning_rate"]
    return ", ".join([f"{run['rate']:g}", *texts])


def _leader(cells: pd.DataFrame) -> Iterator[str]:
    """The most accurate model, and the best one of `BASELINE`, or else of any other family.

    A family leads if the best model's interval is above all others, and its compute is not.
    """
    finished = cells[(cells["status"] == "finished") & cells["exaflops"].notna()]
    key = "test" if finished["test"].notna().any() else "few_shot"
    means = means_of(finished, key)
    if not len(means):
        return
    best = means.loc[means["mean"].idxmax()]
    rivals, lead, comparison = means[means["family"] != best["family"]], "", ""
    if len(rivals):
        is_ahead = best["low"] > rivals["high"].max()
        is_ahead &= best["exaflops"] <= rivals["exaflops"].max()
        lead = f"{best['family']}s lead at this scale: " if is_ahead else ""
        is_baseline = rivals["family"] == BASELINE
        second = rivals.loc[(rivals[is_baseline] if is_baseline.any() else rivals)["mean"].idxmax()]
        comparison = f"; the best {second['family']} is {_reached(second)}"
    yield f"{lead}{_reached(best)}{comparison} ({accuracy_name(cells, key)}, {best['data']})."


def _reached(mean: pd.Series) -> str:
    cost = number(mean["exaflops"])
    return f"{mean['label']} with {100 * mean['mean']:.1f} % after {cost} exaFLOPs"


def laws_of(cells: pd.DataFrame, key: str = "test") -> dict[str, FamilyLaw]:
    """The law of each family, from the finished trainings on the largest number of images, and its
    compute over that of `BASELINE` at equal accuracy, where the laws allow it.
    """
    points = cells[(cells["status"] == "finished") & cells["exaflops"].notna() & cells[key].notna()]
    points = points[points["images"].isna() | (points["images"] == points["images"].max())]
    families = points.groupby("family", sort=False)
    laws = {str(family): law_of(members, key) for family, members in families}
    if baseline := laws.get(BASELINE):
        for family in {*laws} - {BASELINE}:
            laws[family] = laws[family]._replace(equal=equal_accuracy(baseline, laws[family]))
    return laws


def equal_sentences(cells: pd.DataFrame) -> Iterator[str]:
    """Compute at equal accuracy where the points determine it, else that they do not."""
    laws = laws_of(cells)
    rivals = {family: law.equal for family, law in laws.items() if family != BASELINE}
    for family, equal in rivals.items() if BASELINE in laws else ():
        if equal is None or equal.interval is None:
            yield (
                f"How much compute {family}s need at the accuracy of {BASELINE}s {CANNOT_SAY}: "
                "these points do not determine it, with an interval over seeds."
            )
        else:
            low, high = equal.interval[1:]
            yield (
                f"At equal accuracy {family}s need {equal.ratio:.2g} times the compute of "
                f"{BASELINE}s (95 % over seeds: {low:.2g} to {high:.2g}) from "
                f"{percent(equal.low)} to {percent(equal.high)} % top-1."
            )


def _cost(runs: pd.DataFrame) -> str:
    # Of all trainings, also failed and stopped ones; a branch counts without its shared steps.
    own = runs[["own_exaflops", "core_days"]].astype(float).mul(runs["own_share"], axis=0).sum()
    costs = {"exaFLOPs": own["own_exaflops"], "core-days": own["core_days"]}
    if COST_GPU_HOURS in runs:
        costs["GPU-days with start-up and stalls"] = runs[COST_GPU_HOURS].sum() / 24
    text = ", ".join(f"{number(value)} {name}" for name, value in costs.items() if value)
    return f"Total cost of {len(runs)} training{'s' * (len(runs) > 1)}: {text or 'not known'}."


def what_is_missing(all_runs: pd.DataFrame, runs: pd.DataFrame) -> list[str]:
    """One sentence for each kind of gap; empty if the report is complete.

    Args:
        runs: the trainings that the page shows.
    """
    if not len(all_runs):
        experiment = all_runs.attrs["experiment"]
        return [f"{experiment!r} holds no runs yet; this page is empty until one begins"]
    finished = runs[runs["status"] == "finished"]
    trained = all_runs[all_runs["kind"].isin(TRAININGS)]
    gaps = {
        "failed": runs[runs["status"] == "failed"],
        "stopped before the end": runs[runs["status"] == "stopped"],
        "not finished, shown as far as recorded": runs[runs["status"] == "running"],
        "finished without an accuracy": finished[
            finished[["test", "dev", "few_shot"]].isna().all(axis=1)
        ],
        "fine-tuned from weights whose pre-training is not among these runs, and so in no figure "
        "over compute": finished[finished["is_tuned"] & finished["exaflops"].isna()],
        "with an accuracy that is the best of several evaluations on the test set": finished[
            finished["best_of"].notna()
        ],
        "another record of a training that is shown by a newer or finished one": trained[
            ~trained["run_id"].isin(runs["run_id"])
        ],
    }
    lines = [f"{len(rows)} {gap}: {_names(rows)}" for gap, rows in gaps.items() if len(rows)]
    for _, study in all_runs[all_runs["cells"].notna()].iterrows():
        children = all_runs[all_runs["parent"] == study["run_id"]]
        num_begun = children.loc[children["kind"] == "study_cell", "name"].nunique()
        if num_begun < study["cells"]:
            lines.append(
                f"{study['cells'] - num_begun:.0f} of {study['cells']:.0f} cells of "
                f"{study['name']} have not begun"
            )
    return lines


def _names(runs: pd.DataFrame) -> str:
    more = f" and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
    return ", ".join(runs["name"][:MAX_LISTED]) + more
