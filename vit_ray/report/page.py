"""One HTML page with the results of a study, a sweep, a training or an experiment.

All contents come from MLflow. The page is one file that loads nothing from the network: it can be
mailed, kept with the run, and opened years later. Its security policy forbids scripts, so that no
text can become code.
"""

import base64
import contextlib
import io
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient

from vit_ray.addresses import absolute_uri, redact
from vit_ray.config import Recipe
from vit_ray.measure.phases import describe_phases
from vit_ray.metric_names import (
    DEV_TOP1,
    EVAL_TOP1,
    RUN_GROUP,
    STUDY_FORWARD_GMACS,
    TRAIN_LOSS,
    TRANSFER_MEAN_TOP1,
)
from vit_ray.report import figures, tables
from vit_ray.report.headline import (
    BASELINE,
    headline,
    laws_of,
    sweeps_of,
    what_is_missing,
)
from vit_ray.report.runs import curve, file_of, load_runs, trainings
from vit_ray.report.statistics import CANNOT_SAY, FamilyLaw, Interval, student
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.tracking.mlflow_client import page_hint

DOTS_PER_INCH: Final = 150
# Names, labels and values come from recipes and folders of any origin: all are escaped.
_TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)


@dataclass(frozen=True)
class Gallery:
    """Small images with a text below each.

    Attributes:
        strip: a JPEG of the images: squares of one size in a row.
        labels: the text of each image, and whether it is crossed out.
    """

    title: str
    strip: bytes
    labels: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class Section:
    """A heading with sentences, figures, tables and images; titles say how to read them."""

    title: str
    texts: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    galleries: Sequence[Gallery] = ()


def html(table: pd.DataFrame) -> Markup:
    """The table, escaped by pandas; numbers are short, missing values are a dash."""
    table = table.rename_axis(columns=None)  # pandas would add a column with this name
    if not isinstance(table.index, pd.RangeIndex):
        names = [name or "name" for name in table.index.names]
        table = table.rename_axis(names).reset_index(allow_duplicates=True)
    has_texts = table.iloc[:, 1:].map(lambda value: len(str(value)) > 16).any(axis=None)
    cells = table.astype(object).where(table.notna(), "-")
    cells = cells.map(
        lambda value: tables.number(value) if isinstance(value, (int, float)) else value
    )
    return Markup(cells.to_html(border=0, classes=["texts"] if has_texts else None, index=False))


# More curves in one figure cannot be told apart.
MAX_CURVES = 40
_COMPUTE = (
    "exaFLOPs = 6 x multiply-adds of a forward pass x images seen / 10^18, the convention that "
    "reproduces the paper's Table 6. A point is a mean over seeds; its bar is the wider 95 % "
    "interval of the test set and of the seeds."
)


@dataclass(frozen=True)
class Written:
    """A page, and its parts that are kept with its run; `is_empty` if there are no runs yet."""

    page: Path
    missing: list[str]
    is_empty: bool
    lead: list[str] = field(default_factory=list)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)


def write_report(
    uri: str, experiment_or_parent_run_id: str, output_path: str | Path, opening: str = ""
) -> Written:
    """Write the page.

    Args:
        uri: MLflow tracking server or SQLite address; it is only read.
        experiment_or_parent_run_id: name of an experiment, or id of a run: it and its children.
        output_path: the `.html` file; its folder is created.
        opening: a sentence on how to open the runs in MLflow.

    Raises:
        ValueError: there is no such store, experiment or run.
    """
    all_runs = load_runs(uri, experiment_or_parent_run_id)
    parent, experiment = all_runs.attrs["parent"], all_runs.attrs["experiment"]
    runs, page = trainings(all_runs), Path(output_path).resolve()
    missing = what_is_missing(all_runs, runs)
    sections = _sections(runs, all_runs, MlflowClient(uri)) if len(runs) else []
    lead = headline(runs) if len(runs) else []
    page_figures = {
        name: figure for section in sections for name, figure in section.figures.items()
    }
    page_tables = {
        name: table for section in sections for name, table in section.tables.items() if len(table)
    }
    if any(map(tables.has_paper_values, page_tables.values())):
        lead.append(
            f"These results are a proxy: trained on {', '.join(sorted({*runs['data']}))}, and not "
            "on the paper's JFT-300M, which is private."
        )
    below = f", run {parent} and the runs below it" if parent else ""
    text = _TEMPLATES.get_template("page.html").render(
        title=all_runs.loc[parent, "name"] if parent else experiment,
        sections=sections,
        lead=lead,
        missing=missing,
        origin=f"Made from MLflow experiment {experiment}{below} at {redact(uri)}",
        opening=opening,
        base64=lambda content: base64.b64encode(content).decode(),
        svg=figures.svg,
        html=html,
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    locate(str(page)).write(text.encode())  # in one step: a reader sees the old file or the new
    return Written(page, missing, not len(all_runs), lead, page_figures, page_tables)


def write_page(recipe: Recipe, run_id: str | None) -> Written:
    """The page of a run with its children; without `run_id`, of the experiment.

    Raises:
        ValueError: MLflow has no such runs.
    """
    uri = absolute_uri(recipe.tracking.uri)
    page = metrics_log_path(recipe.run_folder).with_name("report.html")
    opening = f"Recipe, events and files of each run are in MLflow: {page_hint(uri)}"
    return write_report(uri, run_id or recipe.tracking.experiment, page, opening)


def keep_page(client: MlflowClient, run_id: str, written: Written) -> None:
    """Store a page with a run in MLflow: the file, the figures as PNG, the tables as JSON."""
    client.log_artifact(run_id, str(written.page))
    uri = str(client.get_run(run_id).info.artifact_uri)
    artifacts = get_artifact_repository(uri, client.tracking_uri)
    for caption, figure in written.figures.items():
        path = f"figures/{_file_name(caption)}.png"
        client.log_figure(run_id, figure, path, save_kwargs={"dpi": DOTS_PER_INCH})
    for caption, table in written.tables.items():
        path = f"tables/{_file_name(caption)}.json"
        # `log_table` would append rows to an earlier table.
        with contextlib.suppress(Exception):  # there is none yet, or the store cannot delete
            artifacts.delete_artifacts(path)  # type: ignore[no-untyped-call]
        client.log_table(run_id, table.reset_index(), path)


def _file_name(caption: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", re.split("[?:;,]( |$)", caption.lower())[0]).strip("_")


def _sections(runs: pd.DataFrame, all_runs: pd.DataFrame, client: MlflowClient) -> list[Section]:
    is_study = (runs["kind"] == "study_cell").any()
    cells, best_run = tables.cells_of(runs), _best_run(runs)
    cells = tables.comparable(cells) if is_study else cells
    phases = describe_phases(runs.filter(like=RUN_GROUP).sum().to_dict())
    rates = {
        f"{name}Which learning rate is best? Rates are selected on the dev split (hollow); bars "
        "are 95 % intervals.": figures.fig_rates(trials, finals)
        for name, trials, finals in sweeps_of(runs)
        if trials["dev"].notna().any() and trials["rate"].nunique() > 1
    }
    sweep = Section("Accuracy against the learning rate", figures=rates)
    compute = _compute(cells, runs)
    accuracy = [
        compute,
        Section("Accuracy against data", figures=_data(cells)),
        *([] if best_run is None else [images_section(client, best_run)]),
    ]
    return [
        # The first figure belongs to the first sentence.
        *([*accuracy, sweep] if compute.figures else [sweep, *accuracy]),
        Section("Learning curves", figures=_curves(cells if is_study else runs, client)),
        Section("Tables of the paper", tables=tables.paper_tables(runs, all_runs)),
        Section(
            "Trainings",
            tables={"Trainings, the most accurate first": tables.trainings_table(runs)},
        ),
        Section("Speed", figures=_speed(cells)),
        Section(
            "Where the time went",
            [phases] if phases else [],
            tables={"Events": events(client, runs.iloc[0])} if len(runs) == 1 else {},
        ),
        *([data_section(client, runs.iloc[0])] if len(runs) == 1 else []),
    ]


def _best_run(runs: pd.DataFrame) -> pd.Series | None:
    # The most accurate training outside a study.
    finished = runs[(runs["kind"] != "study_cell") & (runs["status"] == "finished")]
    top1 = finished["test" if finished["test"].notna().any() else "dev"].dropna()
    return None if top1.empty else finished.loc[top1.astype(float).idxmax()]


def _compute(cells: pd.DataFrame, runs: pd.DataFrame) -> Section:
    """A figure for each accuracy that varies with compute, and the laws of the families."""
    drawn, law_tables = {}, {}
    is_study = (cells["kind"] == "study_cell").any()
    if not is_study:  # a point for each training, by its name
        cells = cells.assign(label=cells["name"])
    tasks = [TRANSFER_MEAN_TOP1] if TRANSFER_MEAN_TOP1 in cells else tables.transfer_keys(cells)
    for key in ("test", "few_shot", *tasks):
        points = _with_tuning(cells, runs, key).dropna(subset=[key, "exaflops"])
        if points["exaflops"].nunique() < 2:
            continue
        largest = points[points["images"].isna() | (points["images"] == points["images"].max())]
        laws = laws_of(points, key) if is_study else {}
        lines = {family: of_family.law for family, of_family in laws.items() if of_family.law}
        name = tables.accuracy_name(cells, key)
        caption = f"How does {name} grow with compute?"
        if lines:
            caption += " Dotted: a power law for each family."
            law_tables[f"Power laws of {name}: error = a C^-b + c"] = _laws(laws)
        drawn[caption] = figures.fig_compute(
            largest if is_study else points, key, laws=lines, axis=f"{name}, %"
        )
    return Section("Accuracy against compute", [_COMPUTE] if drawn else [], drawn, law_tables)


def _with_tuning(cells: pd.DataFrame, runs: pd.DataFrame, key: str) -> pd.DataFrame:
    # For the accuracy on a task, compute is that of pre-training and fine-tuning.
    if (task := tables.TRANSFER.fullmatch(key)) is None:
        return cells
    tuned = runs[(runs["kind"] == "finetune") & runs["origin"].notna() & (runs["task"] == task[1])]
    exaflops = tuned.groupby("origin")["own_exaflops"].mean()
    return cells.assign(exaflops=cells["exaflops"] + cells["run_id"].map(exaflops).fillna(0.0))


def _laws(laws: Mapping[str, FamilyLaw]) -> pd.DataFrame:
    """Exponent and floor of each family's law, and its compute over that of `BASELINE`."""
    rows = {}
    for family, of_family in laws.items():
        law, equal = of_family.law, of_family.equal
        exponents = [seed_law.exponent for seed_law in of_family.by_seed.values()]
        rows[family] = {
            "points": of_family.num_points,
            "exponent b": law and tables.number(law.exponent),
            "95 % over seeds": _ends(student(exponents)),
            "floor c, %": law and 100 * round(law.floor, 4),
            f"compute over that of {BASELINE}s": equal and equal.ratio,
            "its 95 %": equal and _ends(equal.interval),
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _ends(interval: Interval | None) -> str:
    if interval is None:
        return CANNOT_SAY
    return f"{tables.number(interval.low)} to {tables.number(interval.high)}"


def _data(cells: pd.DataFrame) -> dict[str, Figure]:
    finished, drawn = cells[cells["status"] == "finished"], {}
    for key in ("test", "few_shot"):
        points = finished.dropna(subset=[key, "images"])
        length = "steps" if points["steps"].notna().any() else "epochs"
        if (points.groupby(["label", length])["images"].nunique() > 1).any():
            name = tables.accuracy_name(cells, key)
            caption = f"How does {name} grow with the number of training images?"
            drawn[caption] = figures.fig_data(points, key, f"{name}, %")
    return drawn


def _curves(runs: pd.DataFrame, client: MlflowClient) -> dict[str, Figure]:
    """Loss and accuracy by step; the retrainings of a sweep are bold."""
    short = runs["run_id"].str[:6].where(runs["name"].duplicated(keep=False), "")
    names = (runs["name"] + " " + short).str.strip()
    families = dict(zip(names, runs["family"], strict=True))
    bold, drawn = names[runs["stage"] == "finetune"].tolist(), {}
    for title, keys, scale in (
        ("training loss", [TRAIN_LOSS], 1),
        (figures.TOP1, [EVAL_TOP1, DEV_TOP1], 100),
    ):
        curves: dict[str, pd.Series[float]] = {}
        for run_id, name in names.items() if len(names) <= MAX_CURVES else ():
            recorded = [key for key in keys if pd.notna(runs.loc[run_id].get(key))]
            values = curve(client, str(run_id), recorded[0], 100) if recorded else pd.Series()
            curves |= {name: scale * values} if len(values) > 1 else {}
        if curves:
            caption = f"How does the {title.partition(',')[0]} change in training?"
            drawn[caption] = figures.fig_curves(curves, families, title, bold)
    return drawn


def _speed(cells: pd.DataFrame) -> dict[str, Figure]:
    if STUDY_FORWARD_GMACS not in cells or cells["label"].nunique() < 2:
        return {}
    measured = cells.dropna(subset=["images_per_s", STUDY_FORWARD_GMACS])
    return {"How fast does each model train, on this hardware?": figures.fig_speed(measured)}


# Classes of a confusion matrix: with fewer, accuracy is enough; a page has no space for more.
MIN_CLASSES, MAX_CLASSES = 5, 20


def images_section(client: MlflowClient, run: pd.Series) -> Section:
    """Test images with predictions, the worst errors, and the confusion matrix."""
    split = "test" if pd.notna(run["test"]) else "held-out"
    titles = {
        "evaluation/examples": f"How are {split} images classified? A cross marks a wrong "
        "prediction; in brackets is its probability.",
        "evaluation/errors": "Which errors have the highest loss?",
    }
    counts = file_of(client, run, "evaluation/confusion.csv")
    return Section(
        "Images and errors",
        tables={} if counts is None else confusion(counts),
        galleries=[shown for name in titles for shown in gallery(client, run, name, titles[name])],
    )


def gallery(client: MlflowClient, run: pd.Series, name: str, title: str) -> list[Gallery]:
    """The images of `name.jpg` with the texts of `name.json`; none if the run has no such files."""
    strip, rows = (file_of(client, run, f"{name}.{ending}") for ending in ("jpg", "json"))
    if strip is None or rows is None:
        return []
    labels = []
    for row in json.loads(rows):
        classes, predicted = list(map(str, row["classes"])), row["predicted"]
        is_wrong = predicted is not None and predicted not in classes
        truth = ", ".join(classes) or "no label"
        note = "" if row["probability"] is None else f" ({row['probability']:.1%})"
        text = f"{predicted}{note}, not {truth}" if is_wrong else f"{truth}{note}"
        labels.append((text, is_wrong))
    return [Gallery(title, strip, labels)]


def confusion(content: bytes) -> dict[str, pd.DataFrame]:
    """The confusion matrix in % of each true class; none for too few or too many classes."""
    rows = pd.read_csv(io.BytesIO(content), dtype={"class": str, "predicted": str}, na_filter=False)
    counts = rows[rows["images"] > 0].groupby(["class", "predicted"])["images"].sum()
    names = sorted({name for pair in counts.index for name in pair})
    if not MIN_CLASSES <= len(names) <= MAX_CLASSES:
        return {}
    totals = counts.groupby("class").sum()
    shares = counts.div(totals, level="class").unstack(fill_value=0.0)
    matrix = shares.map(lambda share: tables.percent(share) if share else "")
    matrix.insert(0, "images", totals, allow_duplicates=True)  # a class may have this name
    return {"Confusion matrix: % of each true class (rows)": matrix}


def events(client: MlflowClient, run: pd.Series) -> pd.DataFrame:
    """The last 200 events of a run by time."""
    rows: list[tuple[str, ...]] = []
    with contextlib.suppress(Exception):  # the files cannot be listed: as in `file_of`
        for file in client.list_artifacts(run["run_id"], "history"):
            for event in json.loads(file_of(client, run, file.path) or b"[]"):
                time_text = str(pd.Timestamp(int(event["time_s"]), unit="s"))
                rows.append((time_text, event["kind"], str(event["step"]), event["text"]))
    return pd.DataFrame(sorted(rows)[-200:], columns=["UTC", "event", "step", "what happened"])


def data_section(client: MlflowClient, run: pd.Series) -> Section:
    """Data sets with fingerprints, crops of the first batch, and how to repeat the run."""
    again = f"Command: {run['command']}. " if run["command"] else ""
    again += (
        f"Git commit {run['commit']}; the recipe is recipe.yaml of run {run['run_id']} in MLflow."
    )
    return Section(
        "Data, and how to run it again", [again],
        tables={"Data sets of the training": pd.DataFrame(run["sets"])},
        galleries=gallery(
            client, run, "images/training", "What do the training images look like?"
        ),
    )  # fmt: skip
