"""Tables of runs, by pandas: trainings, and the paper's tables with our results beside its own.

Accuracies are in percent, means over seeds `mean +- standard deviation`; a value that was not
measured is missing, never 0.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import pandas as pd

from vit_ray import paper
from vit_ray.config.recipe import EVALUATED_SETS, is_trained
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
# Images and classes of the paper's test sets.
_PUBLISHED: Final = {
    key: (test_set.num_images, test_set.num_classes) for key, test_set in paper.TEST_SETS.items()
}
_CELL: Final = ["label", "images", "steps", "epochs"]
_PAPER_PREFIX: Final = "the paper's"
SOURCE: Final = f"the paper's columns are {paper.SOURCE}"


def percent(value: float) -> str:
    """A fraction as percent with two decimals, as the paper prints accuracy."""
    return f"{100 * value:.2f}"


def number(value: float) -> str:
    """Up to four digits; whole numbers from 1,000 to 10^9 have all digits."""
    return f"{value:,.0f}" if value == int(value) and 1e3 <= abs(value) < 1e9 else f"{value:.4g}"


def mean_text(values: "pd.Series[float]") -> str:
    """`mean +- standard deviation` in percent; of a single seed only the mean."""
    spread = f" +- {percent(values.std())}" if len(values) > 1 else ""
    return percent(values.mean()) + spread


def trainings_table(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each training, the most accurate first; columns without a value are left out."""
    order = runs.assign(top1=runs["test"].fillna(runs["dev"])).sort_values(
        "top1", ascending=False, kind="stable"
    )
    table = order[[*_COLUMNS]].rename(columns=_COLUMNS)
    for key in transfer_keys(runs):
        table[f"{TRANSFER.fullmatch(key)[1]} %"] = order[key]  # type: ignore[index]
    accuracies = [column for column in table.columns if column.endswith("%")]
    table[accuracies] = table[accuracies].map(percent, na_action="ignore")
    return _without_empty_columns(table.set_index("run"))


def _without_empty_columns(table: pd.DataFrame) -> pd.DataFrame:
    return table.loc[:, [not table[name].replace("", None).isna().all() for name in table]]


def transfer_keys(runs: pd.DataFrame) -> list[str]:
    """Columns of accuracies on single tasks after fine-tuning."""
    keys = (key for key in runs.columns if TRANSFER.fullmatch(str(key)))
    return sorted(key for key in keys if key != TRANSFER_MEAN_TOP1)


def differences(runs: pd.DataFrame) -> dict[str, str]:
    """The values in which the groups of these runs differ, as a text by group.

    They are keys of the recipes, the names of the data sets, and the commit of the code.
    """
    firsts = runs.drop_duplicates("group").set_index("group")
    paths = {"seed", "init_from", "data.train", *EVALUATED_SETS}
    keys = sorted({key for keys in firsts["keys"] for key in keys if is_trained(key)} - paths)
    values = firsts[[*keys, "data", "tested_on", "commit"]].fillna("unset").astype(str)
    varied = [key for key in values if values[key].nunique() > 1]
    texts = {
        str(group): ", ".join(f"{key} {row[key][:40]}" for key in varied)
        for group, row in values.iterrows()
    }
    # Data sets of one name may have different contents.
    is_clear = len(firsts) == 1 or len({*texts.values()}) == len(texts)
    return texts if is_clear else {key: f"{text} ({key[:8]})" for key, text in texts.items()}


def transfers(runs: pd.DataFrame) -> pd.DataFrame:
    """Accuracies on tasks after fine-tuning: those that cells record, and other fine-tunings.

    Columns: task, top1, group, seed, num_test, num_classes; and of the pre-training label,
    pretrained_on, optimizer, images, epochs and origin_group.
    """
    finished = runs[runs["status"] == "finished"]
    is_single = finished["task"].isna() & finished["test"].notna()
    single = finished[(finished["kind"] == "finetune") & is_single]
    parts = [single.assign(task=single["data"], top1=single["test"], first=single["origin"])]
    for key in transfer_keys(runs):
        cells = finished[(finished["kind"] == "study_cell") & finished[key].notna()]
        task = TRANSFER.fullmatch(key)[1]  # type: ignore[index]
        tuned = finished[finished["task"] == task].drop_duplicates("origin").set_index("origin")
        sizes = {name: cells["run_id"].map(tuned[name]) for name in ("num_test", "num_classes")}
        parts.append(cells.assign(task=task, top1=cells[key], first=cells["run_id"], **sizes))
    accuracies = pd.concat(parts)
    pretrained = runs.reindex(accuracies["first"]).set_index(accuracies.index)
    return accuracies.assign(
        label=pretrained["label"].fillna(accuracies["label"]), images=pretrained["images"],
        pretrained_on=pretrained["data"].fillna("not among these runs"),
        epochs=pretrained["epochs"], optimizer=pretrained.get("optim.name", ""),
        origin_group=pretrained["group"],
    )  # fmt: skip


def paper_tables(runs: pd.DataFrame, all_runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Tables 2, 5, 6, 7, 8 and 9 as far as these runs fill them; outside a study only those with
    numbers of the paper.

    Args:
        runs: trainings, each group and seed once.
        all_runs: with the runs of VTAB.
    """
    transferred = transfers(runs)
    tables: dict[str, pd.DataFrame] = {}
    if len(transferred):
        # Tables without columns for size and length have the longest training on most images.
        size = ["images", "epochs"]
        known = transferred.assign(**transferred[size].fillna(0.0)).sort_values(size, kind="stable")
        last = known.groupby(["label", "pretrained_on", "optimizer"], dropna=False)[size]
        longest = known[(known[size] == last.transform("last")).all(axis=1)]
        tables |= {**table_2(longest), **table_5(longest), **table_7(longest)}
    tables |= {**table_6(runs, transferred), **table_8(runs), **table_9(all_runs)}
    if (runs["kind"] == "study_cell").any():
        return tables
    return {name: table for name, table in tables.items() if has_paper_values(table)}


def has_paper_values(table: pd.DataFrame) -> bool:
    """Whether a column or row of the table has the paper's numbers."""
    titles = [*table.columns, *table.index]
    return any(str(title).startswith(_PAPER_PREFIX) for title in titles)


def _pivot(accuracies: pd.DataFrame, index: list[str], columns: list[str]) -> pd.DataFrame:
    """Means over seeds; groups of runs that would share a cell are separate rows."""
    groups = accuracies.groupby([*index, *columns], sort=False)["group"]
    separate = accuracies["group"].where(groups.transform("nunique") > 1, "").str[:8]
    wide = accuracies.assign(differs=separate).pivot_table(
        "top1", [*index, "differs"], columns, aggfunc=mean_text, sort=False
    )
    wide.columns = [
        ", ".join(map(str, title if isinstance(title, tuple) else (title,)))
        for title in wide.columns
    ]
    wide = wide.reset_index(level="differs").rename(columns={"differs": "group"})
    return _without_empty_columns(wide)


def _paper_task(accuracies: pd.DataFrame, task: str) -> str | None:
    """The paper's name of a task whose test set has as many images and classes; else None."""
    key = task.lower().replace("-", "")
    rows = accuracies.loc[accuracies["task"] == task, ["num_test", "num_classes"]]
    sizes = {tuple(row) for row in rows.itertuples(index=False)}
    return key if sizes == {_PUBLISHED.get(key)} else None


def _add_paper_column(
    table: pd.DataFrame, title: str, value_of: Callable[[Any], float | None]
) -> None:
    # By row, if the paper has a value for any row.
    values = [value_of(row) for row in table.index]
    if any(value is not None for value in values):
        table[title] = [None if value is None else percent(value) for value in values]


def table_2(accuracies: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Comparison: a row for each data set, a column for each of our models and of the paper's."""
    table = _pivot(accuracies, ["task"], ["label", "pretrained_on"])
    tasks = {task: _paper_task(accuracies, task) for task in table.index}
    for (model, data), days in zip(paper.TABLE_2, paper.TABLE_2_CORE_DAYS, strict=True):
        title = f"the paper's {model} ({paper.PRETRAINING[data]}, {days:,} core-days)"
        entries = {task: paper.table_2(model, data, key or "") for task, key in tasks.items()}
        means = {task: entry and entry[0] for task, entry in entries.items()}
        _add_paper_column(table, title, means.get)
    return {f"Table 2: accuracy after fine-tuning, %; {SOURCE}": table}


def table_5(accuracies: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Transfer: a row for each pre-training data set and task, a column for each model."""
    table = _pivot(accuracies, ["pretrained_on", "task"], ["label"])
    tasks = {task: _paper_task(accuracies, task) for task in accuracies["task"].unique()}
    for model in accuracies["label"].unique():
        for data, name in paper.PRETRAINING.items():
            by_task = {task: paper.table_5(model, data, key or "") for task, key in tasks.items()}
            by_row = {row: by_task[row[1]] for row in table.index}
            _add_paper_column(table, f"the paper's {model} ({name})", by_row.get)
    return {f"Table 5: top-1 after fine-tuning, %; {SOURCE}": table}


def table_6(runs: pd.DataFrame, transferred: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Scaling: a row for each model, data size and length, with its accuracies and exaFLOPs.

    The paper's accuracy stands beside models that were tested on as many images and classes.
    """
    cells = cells_of(runs).dropna(subset=["exaflops"])
    cells = cells[cells["status"] == "finished"]
    if not len(cells):
        return {}
    paper_rows = {(row.name, float(row.epochs)): row for row in paper.TABLE_6}
    rows = []
    for _, alike in cells.groupby(["label", "images", "epochs"], dropna=False, sort=False):
        names = differences(alike)
        for group, seeds in alike.groupby("group", sort=False):
            first = seeds.iloc[0]
            paper_row = paper_rows.get((first["model"], first["epochs"] or 0.0))
            tasks = transferred[transferred["origin_group"] == group].groupby("task", sort=False)
            on_tasks = {
                f"{task} %": "; ".join(
                    mean_text(part["top1"]) for _, part in tuned.groupby("group")
                )
                for task, tuned in tasks
            }
            is_imagenet = (first["num_test"], first["num_classes"]) == _PUBLISHED["imagenet"]
            imagenet = percent(paper_row.imagenet) if paper_row and is_imagenet else None
            rows.append({
                "model": first["label"], "images": first["images"], "epochs": first["epochs"],
                "steps": first["steps"], "differs in": names[str(group)], "runs": len(seeds),
                "few-shot %": _mean(seeds, "few_shot"), "test top-1 %": _mean(seeds, "test"),
                **on_tasks, "exaFLOPs": seeds["exaflops"].mean(),
                "the paper's ImageNet %": imagenet,
                "the paper's exaFLOPs": paper_row.exaflops if paper_row else None,
            })  # fmt: skip
    table = _without_empty_columns(pd.DataFrame(rows).set_index("model"))
    return {f"Table 6: scaling; {SOURCE}, on JFT-300M": table}


def _mean(runs: pd.DataFrame, key: str) -> str | None:
    values = runs[key].dropna()
    return mean_text(values) if len(values) else None


def table_7(accuracies: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Adam and SGD: a row for each task and a column for each model and optimizer."""
    optimizers = accuracies.groupby("label")["optimizer"]
    has_both = optimizers.transform(lambda names: {"adamw", "sgd"} <= {*names})
    if not has_both.any():
        return {}
    means = "; ".join(f"{name} {adam} and {sgd}" for name, adam, sgd in paper.TABLE_7)
    caption = f"Table 7: Adam and SGD, %; {paper.SOURCE} has means of {means}"
    return {caption: _pivot(accuracies[has_both], ["task"], ["label", "optimizer"])}


def table_8(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Positions: a row for each kind, a column for where they are added, and the paper's."""
    cells = cells_of(runs)
    cells = cells[cells["status"] == "finished"]
    key = "few_shot" if cells["few_shot"].notna().any() else "test"
    if "model.positions" not in cells or cells["model.positions"].nunique() < 2:
        return {}
    added_at = cells.get("model.positions_at", pd.Series("stem", cells.index)).fillna("stem")
    accuracies = cells.assign(task=cells["model.positions"], added_at=added_at, top1=cells[key])
    table = _pivot(accuracies.dropna(subset=["top1"]), ["task"], ["added_at"])
    for column, place in enumerate(paper.POSITION_PLACES):
        by_kind = {kind: values[column] for kind, values in paper.TABLE_8.items()}
        _add_paper_column(table, f"the paper's {place.replace('_', ' ')}", by_kind.get)
    name = accuracy_name(cells, key)
    return {f"Table 8: {name} by positions, %; {SOURCE}": table.rename_axis("positions")}


def table_9(all_runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """VTAB: a row for each of our models and the paper's, a column for each task."""
    columns = {f"{VTAB_GROUP}{task}_top1": task for task in (*paper.VTAB_TASKS, "mean")}
    recorded = [key for key in columns if key in all_runs]
    ours = all_runs.loc[all_runs["kind"] == "vtab"] if recorded else all_runs.iloc[:0]
    if not len(ours) or ours[recorded].isna().all(axis=None):
        return {}
    table = ours.set_index("name")[recorded].rename(columns=columns)
    published = pd.DataFrame(paper.TABLE_9, index=[*paper.VTAB_TASKS]).T / 100
    published["mean"] = published.mean(axis=1)
    both = pd.concat([table, published.rename(lambda name: f"the paper's {name}")])
    both = both[[task for task in columns.values() if task in both]]
    return {f"Table 9: VTAB-1k, top-1 %; {paper.SOURCE}": both.map(percent, na_action="ignore")}


def cells_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Trainings that may share a figure: the cells of a study without their fine-tunings, whose
    test sets differ; or else all trainings except the trials of sweeps.
    """
    cells = runs[runs["kind"] == "study_cell"]
    if not len(cells):
        return runs[runs["kind"] != "sweep_trial"]
    tasks = transfer_keys(runs)
    mean = {TRANSFER_MEAN_TOP1: cells[tasks].mean(axis=1, skipna=False)} if len(tasks) > 1 else {}
    return cells.assign(**mean)


def comparable(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells that may share a figure or a law: those on the most frequent data sets, and of
    several groups of one model, size and length the one with the most seeds.
    """
    sets = cells["train_set"] + " " + cells["test_set"]  # by fingerprint: folders may share a name
    alike = cells[sets == sets.mode().iloc[0]]
    counted = alike.assign(count=alike.groupby("group")["group"].transform("size"))
    last = counted.sort_values(["count", "start"]).drop_duplicates(_CELL, keep="last")
    return alike[alike["group"].isin(last["group"])]


def accuracy_name(runs: pd.DataFrame, key: str) -> str:
    """The name of an accuracy for readers, from its column's key."""
    if key == "few_shot":
        shots = re.findall(r"\d+", "".join(runs["few_shot_key"].dropna()))
        return f"{shots[0]}-shot linear accuracy" if shots else "few-shot accuracy"
    if key == TRANSFER_MEAN_TOP1:
        return "mean top-1 over the tasks after fine-tuning"
    task = TRANSFER.fullmatch(key)
    return f"{task[1]} top-1 after fine-tuning" if task else "top-1 accuracy"
