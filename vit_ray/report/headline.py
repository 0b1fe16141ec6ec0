"""The first sentences of a page: the result with its interval, and what is missing."""

import itertools
from collections.abc import Iterator

import pandas as pd

from vit_ray.config.keys import is_trained
from vit_ray.metric_names import COST_GPU_HOURS
from vit_ray.report.figures import means_of
from vit_ray.report.runs import TRAININGS
from vit_ray.report.statistics import (
    CANNOT_SAY,
    EqualAccuracy,
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
LONGEST_LIST = 12


def headline(runs: pd.DataFrame) -> list[str]:
    """Sentences with the results of trainings, the most important first."""
    if (runs["kind"] == "study_cell").any():
        every = cells_of(runs)
        cells = comparable(every)
        count = f"{(every['status'] == 'finished').sum()} of {len(every)} cells have finished"
        left = f"; {len(every) - len(cells)} of other data or recipes are in tables alone"
        said = [*equal_sentences(cells), *gain_sentences(cells)]
        found = [
            *_leads(cells),
            *sorted(said, key=lambda text: CANNOT_SAY in text),  # what is not known last
            count + left * (len(cells) < len(every)) + ".",
        ]
    else:
        found = [*_against_scratch(runs), *sweep_sentences(runs)] or [*_best(runs)]
    return [*found, _cost(runs)]


def _result(members: pd.DataFrame, key: str, images: str) -> str:
    """`91.2 % (95 %: 88 to 94, 300 test images)`, or with the deviation and interval of seeds."""
    values, count = members[key].dropna(), members[images].iloc[0]
    mean, interval = float(values.mean()), student(values.tolist())
    text, whose = f"{100 * mean:.1f} %", f"{len(values)} seeds"
    if len(values) > 1:
        text = f"{100 * mean:.1f} +- {100 * values.std():.1f} %"
    elif (count or 0) > 0:
        interval, whose = wilson(mean, count), f"{count:,.0f} {images.removeprefix('num_')} images"
    if interval is None:
        return f"{text} ({whose})" if len(values) > 1 else text
    digits = 0 if interval.high - interval.low > 0.02 else 1
    ends = (f"{100 * end:.{digits}f}" for end in interval[1:])
    return f"{text} (95 %: {' to '.join(ends)}, {whose})"


def _best_group(runs: pd.DataFrame, key: str) -> pd.DataFrame:
    means = runs.groupby("group", sort=False)[key].mean()
    return runs[runs["group"] == means.idxmax()]


def _against_scratch(runs: pd.DataFrame) -> Iterator[str]:
    """The best fine-tuned model, against the same test set's best model from random weights."""
    done = runs[(runs["status"] == "finished") & runs["test"].notna()]
    tuned = done[done["is_tuned"]]
    scratch = done[~done["is_tuned"] & ~done["run_id"].isin(runs["origin"])]
    best = _best_group(tuned, "test") if len(tuned) else tuned
    rivals = scratch[scratch["test_set"].isin(best["test_set"])]
    if len(rivals):
        other = 100 * _best_group(rivals, "test")["test"].mean()
        yield f"Fine-tuned {_result(best, 'test', 'num_test')} against {other:.1f} % from scratch."


def _best(runs: pd.DataFrame) -> Iterator[str]:
    """The most accurate training of each training and test set; without one, the newest's state."""
    done = runs[runs["status"] == "finished"]
    key, images = ("test", "num_test") if done["test"].notna().any() else ("dev", "num_dev")
    measured = done.dropna(subset=[key])
    for _, some in measured.groupby(["train_set", "test_set"], sort=False):
        best, count = _best_group(some, key), some["group"].nunique()
        run, more = best.iloc[0], f", the best of {count}" if count > 1 else ""
        length = f" after {run['epochs']:g} epochs" if pd.notna(run["epochs"]) else ""
        held = " on images held out of the training set" if key == "dev" else ""
        yield (
            f"{run['label']} on {run['data']} reaches {_result(best, key, images)} top-1"
            f"{held}{more}{length}."
        )
    if not len(measured):
        run = runs.iloc[-1]
        top1 = run["test"] if pd.notna(run["test"]) else run["dev"]
        so_far = f"its top-1 is {percent(top1)} %" if pd.notna(top1) else "has no accuracy yet"
        yield f"{run['label']} on {run['data']}: {run['status']}; {so_far}."


def sweep_sentences(runs: pd.DataFrame) -> Iterator[str]:
    """Which point of each sweep won on the dev split, whether by more than noise, its test result,
    and which rate to try if the best is the smallest or largest tried.
    """
    for name, tried, finals in sweeps_of(runs):
        done = tried[(tried["status"] == "finished") & tried["dev"].notna()]
        if len(done):
            best = _best_group(done, "dev")
            rest = done[~done["run_id"].isin(best["run_id"])]
            verb = "leads so far" if (tried["status"] == "running").any() else "wins"
            text = (
                f"{name}{_point(best.iloc[0], tried)} {verb} on the dev split "
                f"({percent(best['dev'].mean())} %)"
            )
            if len(rest):
                second = _best_group(rest, "dev")
                a, b = (one.set_index("seed")["dev"].to_dict() for one in (second, best))
                lead = difference(a, b, best["num_dev"].iloc[0])
                text += f", by {percent(lead.value)} points over {_point(second.iloc[0], tried)}: "
                text += lead.verdict
            yield f"{text}.{_edge(best['rate'].iloc[0], tried['rate'])}"
        tested = finals[(finals["status"] == "finished") & finals["test"].notna()]
        for _, seeds in tested.groupby("group", sort=False):
            result = _result(seeds, "test", "num_test")
            yield f"{name}{_point(seeds.iloc[0], tried)} reaches {result} on the test set."


def sweeps_of(runs: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Of each sweep its name with a colon, if there are several, its trials and its retrainings.

    A sweep is what its parent run began: also if its trials differ in keys that nobody varied. Its
    name has the first letters of the parent's id where another sweep has the same name.
    """
    staged = runs.dropna(subset=["stage"]).fillna({"parent": ""})
    sweeps = staged.groupby(["parent", "task"], dropna=False, sort=False)
    names = sweeps["parent_name"].first().fillna("").tolist()  # empty where MLflow lacks the parent
    for name, ((parent, _), its) in zip(names, sweeps, strict=True):
        short = parent[:6] if names.count(name) > 1 else ""
        prefix = f"{name} {short}".strip() + ": " if len(sweeps) > 1 and name + short else ""
        is_trial = its["stage"] == "sweep_trial"
        yield prefix, its[is_trial], its[~is_trial]


def _point(run: pd.Series, tried: pd.DataFrame) -> str:
    """A point of a sweep: its rate, and the other values that its trials vary."""
    varied = [k for k in run["keys"] if is_trained(k) and tried[k].nunique() > 1]
    others = [f"{key} {run[key]}" for key in varied if key != "optim.learning_rate"]
    return ", ".join([f"Learning rate {run['rate']:g}", *others])


def _edge(best: float, tried: "pd.Series[float]") -> str:
    """Which rate to try if the best is the lowest or highest of those tried."""
    known = sorted({*tried.dropna()})
    if len(known) < 2 or best not in (known[0], known[-1]):
        return ""
    word, other = ("smallest", known[1]) if best == known[0] else ("largest", known[-2])
    return f" {best:g} is the {word} rate tried: try {best * best / other:.1g}."


def _leads(cells: pd.DataFrame) -> Iterator[str]:
    """The most accurate model, and whether its family leads: no other one was trained with less."""
    done = cells[(cells["status"] == "finished") & cells["exaflops"].notna()]
    key = "test" if done["test"].notna().any() else "few_shot"
    means = means_of(done, key)
    if not len(means):
        return
    best = means.loc[means["mean"].idxmax()]
    others, lead, than = means[means["family"] != best["family"]], "", ""
    if len(others):
        is_ahead = best["low"] > others["high"].max()
        is_ahead &= best["exaflops"] <= others["exaflops"].max()
        lead = f"{best['family']}s lead at this scale: " if is_ahead else ""
        is_base = others["family"] == BASELINE
        second = others.loc[(others[is_base] if is_base.any() else others)["mean"].idxmax()]
        than = f"; the best {second['family']} is {_reached(second)}"
    yield f"{lead}{_reached(best)}{than} ({accuracy_name(cells, key)}, {best['data']})."


def _reached(mean: pd.Series) -> str:
    cost = number(mean["exaflops"])
    return f"{mean['label']} with {100 * mean['mean']:.1f} % after {cost} exaFLOPs"


def laws_of(cells: pd.DataFrame, key: str = "test") -> dict[str, FamilyLaw]:
    """By family, of the finished trainings on the largest number of images."""
    done = cells[(cells["status"] == "finished") & cells["exaflops"].notna() & cells[key].notna()]
    done = done[done["images"].isna() | (done["images"] == done["images"].max())]
    return {str(family): law_of(some, key) for family, some in done.groupby("family", sort=False)}


def compared(laws: dict[str, FamilyLaw]) -> dict[str, EqualAccuracy]:
    """Compute at equal accuracy of each other family over that of `BASELINE`, if there is any."""
    base = laws.get(BASELINE, FamilyLaw(None, {}, 0))
    found = {name: equal_accuracy(base, law) for name, law in laws.items() if name != BASELINE}
    return {name: one for name, one in found.items() if one is not None}


def equal_sentences(cells: pd.DataFrame) -> Iterator[str]:
    """Compute at equal accuracy where the points determine it, else that they do not."""
    laws = laws_of(cells)
    found = compared(laws)
    for family in laws if BASELINE in laws else ():
        if family not in (BASELINE, *found):
            yield (
                f"How much compute {family}s need at the accuracy of {BASELINE}s {CANNOT_SAY}: no "
                "power law of each fits these points at a common accuracy."
            )
    for family, one in found.items():
        over = f"from {percent(one.low)} to {percent(one.high)} % top-1"
        if one.interval is not None:
            yield (
                f"At equal accuracy {family}s need {one.ratio:.2g} times the compute of "
                f"{BASELINE}s (95 % over seeds: {one.interval.low:.2g} to {one.interval.high:.2g}) "
                f"{over}."
            )
        else:
            yield (
                f"How much compute {family}s need at the accuracy of {BASELINE}s {CANNOT_SAY} from "
                f"these seeds; the fitted laws give {one.ratio:.2g} times, {over}."
            )


def gain_sentences(cells: pd.DataFrame) -> Iterator[str]:
    """Whether more images help a ViT more than another family's model of the same length."""
    done = cells[cells["status"] == "finished"].dropna(subset=["test", "steps", "images"])
    wide = done.pivot_table("test", ["steps", "family", "label", "seed"], "images")
    if len(wide.columns) < 2:
        return
    few, most = wide.columns[0], wide.columns[-1]
    for steps, gains in (wide[most] - wide[few]).dropna().groupby("steps"):
        models = gains.groupby(["family", "label"])
        seeds = {name: one.droplevel([0, 1, 2]).to_dict() for name, one in models if len(one) > 1}
        for (family, one), (rival, other) in itertools.permutations(seeds, 2):
            if family == BASELINE != rival:
                gain = difference(
                    seeds[rival, other], seeds[family, one], done["num_test"].iloc[0],
                    level=done.loc[done["steps"] == steps, "test"].mean(), is_paired=False,
                )  # fmt: skip
                values = [
                    percent(models.get_group(name).mean())
                    for name in ((family, one), (rival, other))
                ]
                yield (
                    f"From {few:,.0f} to {most:,.0f} images, {steps:,.0f} steps: {one} gains "
                    f"{values[0]} points and {other} {values[1]}; a difference of "
                    f"{percent(gain.value)}: {gain.verdict}."
                )


def _cost(runs: pd.DataFrame) -> str:
    """Of all trainings, failed and stopped ones too; of a branch its own part."""
    own = runs[["own_exaflops", "core_days"]].astype(float).mul(runs["own_share"], axis=0).sum()
    found = {"exaFLOPs": own["own_exaflops"], "core-days": own["core_days"]}
    if COST_GPU_HOURS in runs:
        found["GPU-days with start-up and stalls"] = runs[COST_GPU_HOURS].sum() / 24
    spent = ", ".join(f"{number(value)} {name}" for name, value in found.items() if value)
    return f"Total cost of {len(runs)} training{'s' * (len(runs) > 1)}: {spent or 'not known'}."


def what_is_missing(everything: pd.DataFrame, shown: pd.DataFrame) -> list[str]:
    """One sentence for each kind of gap; empty if the report is complete."""
    if not len(everything):
        where = everything.attrs["experiment"]
        return [f"{where!r} holds no runs yet; this page is empty until one begins"]
    done = shown[shown["status"] == "finished"]
    trained = everything[everything["kind"].isin(TRAININGS)]
    named = {
        "failed": shown[shown["status"] == "failed"],
        "stopped before the end": shown[shown["status"] == "stopped"],
        "not finished, shown as far as recorded": shown[shown["status"] == "running"],
        "finished without an accuracy": done[done[["test", "dev", "few_shot"]].isna().all(axis=1)],
        "fine-tuned from weights whose pre-training is not among these runs, and so in no figure "
        "over compute": done[done["is_tuned"] & done["exaflops"].isna()],
        "with an accuracy that is the best of several evaluations on the test set": done[
            done["best_of"].notna()
        ],
        "another record of a training that is shown by a newer or finished one": trained[
            ~trained["run_id"].isin(shown["run_id"])
        ],
    }
    found = [f"{len(some)} {what}: {_names(some)}" for what, some in named.items() if len(some)]
    for _, study in everything[everything["cells"].notna()].iterrows():
        begun = everything[(everything["parent"] == study["run_id"])]
        lack = study["cells"] - begun.loc[begun["kind"] == "study_cell", "name"].nunique()
        if lack > 0:
            found.append(
                f"{lack:.0f} of {study['cells']:.0f} cells of {study['name']} have not begun"
            )
    return found


def _names(runs: pd.DataFrame) -> str:
    more = f" and {len(runs) - LONGEST_LIST} more" if len(runs) > LONGEST_LIST else ""
    return ", ".join(runs["name"][:LONGEST_LIST]) + more
