"""Tables of runs, by pandas: trainings, what means differ in, and the paper's beside ours.

Accuracies are in percent, means over seeds `mean +- standard deviation`; a value that was not run
is missing, and never 0.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import pandas as pd

from vit_ray import paper
from vit_ray.config.keys import EVALUATED_SETS, is_trained
from vit_ray.metric_names import (
    TRANSFER_GROUP,
    TRANSFER_MEAN_TOP1,
    VTAB_GROUP,
)

TRANSFER: Final = re.compile(rf"{TRANSFER_GROUP}(.+)_top1")
_COLUMNS: Final = {
    "name": "run", "label": "model", "fraction": "data fraction", "images": "images",
    "steps": "steps", "epochs": "epochs", "seed": "seed", "rate": "rate", "exaflops": "exaFLOPs",
    "dev": "dev top-1 %", "test": "test top-1 %", "few_shot": "few-shot %",
    "images_per_s": "images/s", "core_days": "core-days", "status": "status",
}  # fmt: skip
_PUBLISHED: Final = {key: (one.num_images, one.num_classes) for key, one in paper.TEST_SETS.items()}
_CELL: Final = ["label", "images", "steps", "epochs"]
THEIRS: Final = "the paper's"
SOURCE: Final = f"the paper's columns are {paper.SOURCE}"


def percent(value: float) -> str:
    """A share as percent with two digits, as the paper prints accuracy."""
    return f"{100 * value:.2f}"


def number(value: float) -> str:
    """Up to four digits, without an exponent where that is short."""
    return f"{value:,.0f}" if value == int(value) and 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def mean_text(values: "pd.Series[float]") -> str:
    """`mean +- standard deviation` in percent; the mean alone of a single seed."""
    spread = f" +- {percent(values.std())}" if len(values) > 1 else ""
    return percent(values.mean()) + spread


def trainings_table(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each training, the most accurate first; columns without a value are left out."""
    order = runs.assign(top1=runs["test"].fillna(runs["dev"])).sort_values(
        "top1", ascending=False, kind="stable"
    )
    shown = order[[*_COLUMNS]].rename(columns=_COLUMNS)
    for key in transfer_keys(runs):
        shown[f"{TRANSFER.fullmatch(key)[1]} %"] = order[key]  # type: ignore[index]
    shares = [column for column in shown.columns if column.endswith("%")]
    shown[shares] = shown[shares].map(percent, na_action="ignore")
    return _used(shown.set_index("run"))


def _used(table: pd.DataFrame) -> pd.DataFrame:
    """Without the columns that no row has a value for."""
    return table.loc[:, [not table[name].replace("", None).isna().all() for name in table]]


def transfer_keys(runs: pd.DataFrame) -> list[str]:
    """Columns of accuracies on single tasks after fine-tuning."""
    found = (key for key in runs.columns if TRANSFER.fullmatch(str(key)))
    return sorted(key for key in found if key != TRANSFER_MEAN_TOP1)


def differences(runs: pd.DataFrame) -> dict[str, str]:
    """By group the values of the keys in which the groups of these runs differ.

    Where the recipes are equal, the data or the code differ, whose names say how.
    """
    firsts = runs.drop_duplicates("group").set_index("group")
    paths = {"seed", "init_from", "data.train", *EVALUATED_SETS}
    keys = sorted({key for keys in firsts["keys"] for key in keys if is_trained(key)} - paths)
    shown = firsts[[*keys, "data", "tested_on", "commit"]].fillna("unset").astype(str)
    varied = [key for key in shown if shown[key].nunique() > 1]
    texts = {str(g): ", ".join(f"{k} {one[k][:40]}" for k in varied) for g, one in shown.iterrows()}
    # Names may be equal where contents are not.
    is_clear = len(firsts) == 1 or len({*texts.values()}) == len(texts)
    return texts if is_clear else {g: f"{text} ({g[:8]})" for g, text in texts.items()}


def transfers(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracies on tasks after fine-tuning: those that cells record, and other fine-tunings.

    Columns: task, top1, group, seed, num_test, num_classes; and of the pre-training label,
    pretrained_on, optimizer, images, epochs and origin_group.
    """
    done = runs[runs["status"] == "finished"]
    is_own = (done["kind"] == "finetune") & done["task"].isna() & done["test"].notna()
    own = done[is_own]
    parts = [own.assign(task=own["data"], top1=own["test"], first=own["origin"])]
    for key in transfer_keys(runs):
        cells = done[(done["kind"] == "study_cell") & done[key].notna()]
        task = TRANSFER.fullmatch(key)[1]  # type: ignore[index]
        tested = done[done["task"] == task].drop_duplicates("origin").set_index("origin")
        sizes = {name: cells["run_id"].map(tested[name]) for name in ("num_test", "num_classes")}
        parts.append(cells.assign(task=task, top1=cells[key], first=cells["run_id"], **sizes))
    found = pd.concat(parts)
    first = runs.reindex(found["first"]).set_index(found.index)
    return found.assign(
        label=first["label"].fillna(found["label"]), images=first["images"],
        pretrained_on=first["data"].fillna("not among these runs"), epochs=first["epochs"],
        optimizer=first.get("optim.name", ""), origin_group=first["group"],
    )  # fmt: skip


def paper_tables(runs: pd.DataFrame, others: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables 2, 5, 6, 7, 8 and 9 as far as these runs fill them; outside a study only those with
    numbers of the paper.

    Args:
        runs: trainings, each group and seed once.
        others: all runs, among which are those of VTAB.
    """
    found = transfers(runs)
    tables: dict[str, pd.DataFrame] = {}
    if len(found):  # tables without columns for size and length have the longest on most images
        size = ["images", "epochs"]
        known = found.assign(**found[size].fillna(0.0)).sort_values(size, kind="stable")
        last = known.groupby(["label", "pretrained_on", "optimizer"], dropna=False)[size]
        longest = known[(known[size] == last.transform("last")).all(axis=1)]
        tables |= {**table_2(longest), **table_5(longest), **table_7(longest)}
    tables |= {**table_6(runs, found), **table_8(runs), **table_9(others)}
    if (runs["kind"] == "study_cell").any():
        return tables
    papers = {name: [*table.columns, *table.index] for name, table in tables.items()}
    return {name: tables[name] for name, titles in papers.items() if THEIRS in str(titles)}


def _pivot(found: pd.DataFrame, index: list[str], columns: list[str]) -> pd.DataFrame:
    """Means over seeds; runs of one place that differ in more than their seed are rows apart."""
    places = found.groupby([*index, *columns], sort=False)["group"]
    is_apart = places.transform("nunique") > 1
    apart = found["group"].where(is_apart, "").str[:8]
    wide = found.assign(differs=apart).pivot_table(
        "top1", [*index, "differs"], columns, aggfunc=mean_text, sort=False
    )
    wide.columns = [", ".join(map(str, one if isinstance(one, tuple) else (one,)))
                    for one in wide.columns]  # fmt: skip
    return _used(wide.reset_index(level="differs").rename(columns={"differs": "group"}))


def _paper_task(found: pd.DataFrame, task: str) -> str | None:
    """The paper's name of a task whose test set is the paper's by images and classes."""
    key = task.lower().replace("-", "")
    sizes = {*found.loc[found["task"] == task, ["num_test", "num_classes"]].itertuples(index=False)}
    return key if {tuple(one) for one in sizes} == {_PUBLISHED.get(key)} else None


def _beside(table: pd.DataFrame, title: str, value: Callable[[Any], float | None]) -> None:
    """Add a column of the paper's numbers, by row, if it has any."""
    found = [value(row) for row in table.index]
    if any(one is not None for one in found):
        table[title] = [None if one is None else percent(one) for one in found]


def table_2(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Comparison: a row for each data set, a column for each of our models and of the paper's."""
    table = _pivot(found, ["task"], ["label", "pretrained_on"])
    tasks = {task: _paper_task(found, task) for task in table.index}
    for (model, data), days in zip(paper.TABLE_2, paper.TABLE_2_CORE_DAYS, strict=True):
        title = f"the paper's {model} ({paper.PRETRAINING[data]}, {days:,} core-days)"
        both = {task: paper.table_2(model, data, key or "") for task, key in tasks.items()}
        of_paper = {task: one and one[0] for task, one in both.items()}
        _beside(table, title, of_paper.get)
    return {f"Table 2: accuracy after fine-tuning, %; {SOURCE}": table}


def table_5(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Transfer: a row for each pre-training data set and task, a column for each model."""
    table = _pivot(found, ["pretrained_on", "task"], ["label"])
    tasks = {task: _paper_task(found, task) for task in found["task"].unique()}
    for model in found["label"].unique():
        for data, name in paper.PRETRAINING.items():
            known = {t: paper.table_5(model, data, key or "") for t, key in tasks.items()}
            of_paper = {row: known[row[1]] for row in table.index}
            _beside(table, f"the paper's {model} ({name})", of_paper.get)
    return {f"Table 5: top-1 after fine-tuning, %; {SOURCE}": table}


def table_6(runs: pd.DataFrame, found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Scaling: a row for each model, data size and length, with its accuracies and exaFLOPs.

    The paper's accuracy stands beside models that were tested on as many images and classes.
    """
    cells = cells_of(runs).dropna(subset=["exaflops"])
    cells = cells[cells["status"] == "finished"]
    if not len(cells):
        return {}
    theirs = {(row.name, float(row.epochs)): row for row in paper.TABLE_6}
    rows = []
    for _, alike in cells.groupby(["label", "images", "epochs"], dropna=False, sort=False):
        names = differences(alike)
        for group, mine in alike.groupby("group", sort=False):
            first = mine.iloc[0]
            row = theirs.get((first["model"], first["epochs"] or 0.0))
            is_papers = (first["num_test"], first["num_classes"]) == _PUBLISHED["imagenet"]
            rows.append({
                "model": first["label"], "images": first["images"], "epochs": first["epochs"],
                "steps": first["steps"], "differs in": names[str(group)], "runs": len(mine),
                "few-shot %": _mean(mine, "few_shot"), "test top-1 %": _mean(mine, "test"),
                **_of_tasks(found, str(group)), "exaFLOPs": mine["exaflops"].mean(),
                "the paper's ImageNet %": percent(row.imagenet) if row and is_papers else None,
                "the paper's exaFLOPs": row.exaflops if row else None,
            })  # fmt: skip
    table = pd.DataFrame(rows)
    return {f"Table 6: scaling; {SOURCE}, on JFT-300M": _used(table.set_index("model"))}


def _of_tasks(found: pd.DataFrame, group: str) -> dict[str, str]:
    """Means of the transfers of a pre-training's group, by task."""
    if not len(found):
        return {}
    mine = found[found["origin_group"] == group]
    return {
        f"{task} %": "; ".join(mean_text(one["top1"]) for _, one in some.groupby("group"))
        for task, some in mine.groupby("task", sort=False)
    }


def _mean(runs: pd.DataFrame, key: str) -> str | None:
    values = runs[key].dropna()
    return mean_text(values) if len(values) else None


def table_7(found: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Adam and SGD: a row for each task and a column for each model and optimizer."""
    both = found.groupby("label")["optimizer"].transform(lambda one: {"adamw", "sgd"} <= {*one})
    if not both.any():
        return {}
    theirs = "; ".join(f"{name} {adam} and {sgd}" for name, adam, sgd in paper.TABLE_7)
    caption = f"Table 7: Adam and SGD, %; {paper.SOURCE} has means of {theirs}"
    return {caption: _pivot(found[both], ["task"], ["label", "optimizer"])}


def table_8(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Positions: a row for each kind, a column for each place, and the paper's."""
    cells = cells_of(runs)
    cells = cells[cells["status"] == "finished"]
    key = "few_shot" if cells["few_shot"].notna().any() else "test"
    if "model.positions" not in cells or cells["model.positions"].nunique() < 2:
        return {}
    places = cells.get("model.positions_at", pd.Series("stem", cells.index)).fillna("stem")
    known = cells.assign(task=cells["model.positions"], place=places, top1=cells[key])
    table = _pivot(known.dropna(subset=["top1"]), ["task"], ["place"])
    for at, place in enumerate(paper.POSITION_PLACES):
        of_paper = {kind: values[at] for kind, values in paper.TABLE_8.items()}
        _beside(table, f"the paper's {place.replace('_', ' ')}", of_paper.get)
    name = accuracy_name(cells, key)
    return {f"Table 8: {name} by positions, %; {SOURCE}": table.rename_axis("positions")}


def table_9(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """VTAB: a row for each of our models and the paper's, a column for each task."""
    columns = {f"{VTAB_GROUP}{task}_top1": task for task in (*paper.VTAB_TASKS, "mean")}
    held = [key for key in columns if key in runs]
    ours = runs.loc[runs["kind"] == "vtab"] if held else runs.iloc[:0]
    if not len(ours) or ours[held].isna().all(axis=None):
        return {}
    table = ours.set_index("name")[held].rename(columns=columns)
    theirs = pd.DataFrame(paper.TABLE_9, index=[*paper.VTAB_TASKS]).T / 100
    theirs["mean"] = theirs.mean(axis=1)
    both = pd.concat([table, theirs.rename(lambda name: f"the paper's {name}")])
    both = both[[task for task in columns.values() if task in both]]
    return {f"Table 9: VTAB-1k, top-1 %; {paper.SOURCE}": both.map(percent, na_action="ignore")}


def cells_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Trainings that may share a figure: a study's cells, or else all that no sweep tried.

    Fine-tunings of cells have other test sets.
    """
    cells = runs[runs["kind"] == "study_cell"]
    if not len(cells):
        return runs[runs["kind"] != "sweep_trial"]
    tasks = transfer_keys(runs)
    mean = {TRANSFER_MEAN_TOP1: cells[tasks].mean(axis=1, skipna=False)} if len(tasks) > 1 else {}
    return cells.assign(**mean)


def comparable(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that may share a figure or a law: on the data that most of them have, and of
    several groups of one model, size and length the one with the most seeds.
    """
    sets = cells["train_set"] + " " + cells["test_set"]  # folders of one name may differ
    alike = cells[sets == sets.mode().iloc[0]]
    counted = alike.assign(count=alike.groupby("group")["group"].transform("size"))
    last = counted.sort_values(["count", "start"]).drop_duplicates(_CELL, keep="last")
    return alike[alike["group"].isin(last["group"])]


def accuracy_name(runs: pd.DataFrame, key: str) -> str:
    """Name of an accuracy's column for readers."""
    if key == "few_shot":
        shots = re.findall(r"\d+", "".join(runs["few_shot_key"].dropna()))
        return f"{shots[0]}-shot linear accuracy" if shots else "few-shot accuracy"
    if key == TRANSFER_MEAN_TOP1:
        return "mean top-1 over the tasks after fine-tuning"
    task = TRANSFER.fullmatch(key)
    return f"{task[1]} top-1 after fine-tuning" if task else "top-1 accuracy"
