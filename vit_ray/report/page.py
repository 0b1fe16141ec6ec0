"""One HTML page with the results of a study, a sweep, a training or an experiment.

Everything comes from MLflow; the page is one file that loads nothing from the network, so it can be
mailed, kept with the run, and opened years later. Its security policy lets the browser run nothing,
so no text becomes code.
"""

import base64
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from vit_ray.addresses import redact
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
    compared,
    headline,
    laws_of,
    sweeps_of,
    what_is_missing,
)
from vit_ray.report.runs import Files, load_runs, trainings
from vit_ray.report.statistics import CANNOT_SAY, FamilyLaw, Interval, student
from vit_ray.storage import locate

# Names, labels and values come from recipes and folders of any origin: all are escaped.
_TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)


@dataclass(frozen=True)
class Gallery:
    """Small images with a text below each, and which of them are crossed out; the strip is a JPEG
    of squares of one size in a row.
    """

    title: str
    strip: bytes
    texts: Sequence[str]
    wrong: Sequence[bool]


@dataclass(frozen=True)
class Section:
    """A heading with sentences, figures, tables and images; titles say how to read them."""

    title: str
    texts: Sequence[str] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    galleries: Sequence[Gallery] = ()


def html(table: pd.DataFrame) -> Markup:
    """Escaped by pandas; numbers in short, missing values as a dash."""
    table = table.rename_axis(columns=None)  # pandas would write it as one more column
    if not isinstance(table.index, pd.RangeIndex):
        names = [name or "name" for name in table.index.names]
        table = table.rename_axis(names).reset_index(allow_duplicates=True)
    texts = table.iloc[:, 1:].map(lambda value: len(str(value)) > 16).any(axis=None)
    shown = table.astype(object).where(table.notna(), "-")
    shown = shown.map(
        lambda value: tables.number(value) if isinstance(value, (int, float)) else value
    )
    return Markup(shown.to_html(border=0, classes=["texts"] if texts else None, index=False))


# With more runs a figure of curves shows nothing.
MOST_CURVES = 40
_COMPUTE = (
    "exaFLOPs = 6 x multiply-adds of a forward pass x images seen / 10^18, the convention that "
    "reproduces the paper's Table 6. A point is a mean over seeds; its bar is the wider 95 % "
    "interval of the test set and of the seeds."
)


@dataclass(frozen=True)
class Written:
    """A page, and what the run that it is about keeps with it; empty if there are no runs yet."""

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
        experiment_or_parent_run_id: name of an experiment, or id of a run whose children count.
        output_path: the `.html` file; its folder is created.
        opening: how a reader opens the runs in MLflow.

    Raises:
        ValueError: there is no such store, experiment or run.
    """
    everything = load_runs(uri, experiment_or_parent_run_id)
    parent, experiment = everything.attrs["parent"], everything.attrs["experiment"]
    runs, files, page = trainings(everything), Files(uri), Path(output_path).resolve()
    missing = what_is_missing(everything, runs)
    sections = _sections(runs, everything, files) if len(runs) else []
    lead = headline(runs) if len(runs) else []
    axes = [axis for one in sections for table in one.tables.values() for axis in table.axes]
    if any(str(title).startswith(tables.THEIRS) for axis in axes for title in axis):
        lead.append(
            f"These results are a proxy: trained on {', '.join(sorted({*runs['data']}))}, and not "
            "on the paper's JFT-300M, which is private."
        )
    whose = f", run {parent} and the runs below it" if parent else ""
    text = _TEMPLATES.get_template("page.html").render(
        title=everything.loc[parent, "name"] if parent else experiment,
        sections=sections,
        lead=lead,
        missing=missing,
        origin=f"Made from MLflow experiment {experiment}{whose} at {redact(uri)}",
        opening=opening,
        base64=lambda content: base64.b64encode(content).decode(),
        svg=figures.svg,
        html=html,
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    locate(str(page)).write(text.encode())  # in one step: a reader sees the old file or the new
    drawn = {name: figure for one in sections for name, figure in one.figures.items()}
    held = {name: table for one in sections for name, table in one.tables.items() if len(table)}
    return Written(page, missing, not len(everything), lead, drawn, held)


def _sections(runs: pd.DataFrame, everything: pd.DataFrame, files: Files) -> list[Section]:
    is_study = (runs["kind"] == "study_cell").any()
    cells, shown = tables.cells_of(runs), _shown_run(runs)
    cells = tables.comparable(cells) if is_study else cells
    spent = describe_phases(runs.filter(like=RUN_GROUP).sum().to_dict())
    listed = {"Trainings, the most accurate first": tables.trainings_table(runs)}
    last, happened = list[Section](), dict[str, pd.DataFrame]()
    if len(runs) == 1:
        happened = {"Events": events(files, runs.iloc[0])}
        last = [data_section(files, runs.iloc[0])]
    rates = {
        f"{name}Which learning rate is best? Rates are selected on the dev split (hollow); bars "
        "are 95 % intervals.": figures.fig_rates(trials, finals)
        for name, trials, finals in sweeps_of(runs)
        if trials["dev"].notna().any() and trials["rate"].nunique() > 1
    }
    swept = Section("Accuracy against the learning rate", figures=rates)
    compute = _compute(cells, runs)
    first = [
        compute,
        Section("Accuracy against data", figures=_data(cells)),
        *([] if shown is None else [images_section(files, shown)]),
    ]
    return [
        # The figure of the first sentence is the first one.
        *([*first, swept] if compute.figures else [swept, *first]),
        Section("Learning curves", figures=_curves(cells if is_study else runs, files)),
        Section("Tables of the paper", tables=tables.paper_tables(runs, everything)),
        Section("Trainings", tables=listed),
        Section("Speed", figures=_speed(cells)),
        Section("Where the time went", [spent] if spent else [], tables=happened),
        *last,
    ]


def _shown_run(runs: pd.DataFrame) -> pd.Series | None:
    """The most accurate training outside a study, whose images are shown."""
    known = runs[(runs["kind"] != "study_cell") & (runs["status"] == "finished")]
    top1 = known["test" if known["test"].notna().any() else "dev"].dropna()
    return None if top1.empty else known.loc[top1.astype(float).idxmax()]


def _compute(cells: pd.DataFrame, runs: pd.DataFrame) -> Section:
    """A figure for each accuracy that varies with compute, and the laws of the families."""
    drawn, held = {}, {}
    is_study = (cells["kind"] == "study_cell").any()
    if not is_study:  # a point for each training, by its name
        cells = cells.assign(label=cells["name"])
    tasks = [TRANSFER_MEAN_TOP1] if TRANSFER_MEAN_TOP1 in cells else tables.transfer_keys(cells)
    for key in ("test", "few_shot", *tasks):
        known = _at_cost(cells, runs, key).dropna(subset=[key, "exaflops"])
        if known["exaflops"].nunique() < 2:
            continue
        most = known[known["images"].isna() | (known["images"] == known["images"].max())]
        laws = laws_of(known, key) if is_study else {}
        lines = {family: one.law for family, one in laws.items() if one.law}
        name = tables.accuracy_name(cells, key)
        caption = f"How does {name} grow with compute? Dotted: a power law for each family."
        drawn[caption if lines else caption.partition(" Dotted")[0]] = figures.fig_compute(
            most if is_study else known, key, laws=lines, axis=f"{name}, %"
        )
        if lines:
            held[f"Power laws of {name}: error = a C^-b + c"] = _laws(laws)
    return Section("Accuracy against compute", [_COMPUTE] if drawn else [], drawn, held)


def _at_cost(cells: pd.DataFrame, runs: pd.DataFrame, key: str) -> pd.DataFrame:
    """Fine-tuned models at the compute of their pre-training and their fine-tuning together."""
    if (task := tables.TRANSFER.fullmatch(key)) is None:
        return cells
    tuned = runs[(runs["kind"] == "finetune") & runs["origin"].notna() & (runs["task"] == task[1])]
    spent = tuned.groupby("origin")["own_exaflops"].mean()
    return cells.assign(exaflops=cells["exaflops"] + cells["run_id"].map(spent).fillna(0.0))


def _laws(laws: Mapping[str, FamilyLaw]) -> pd.DataFrame:
    """Exponent and floor of each family's law, and its compute over that of `BASELINE`."""
    equal, rows = compared(dict(laws)), {}
    for family, one in laws.items():
        exponents = [law.exponent for law in one.by_seed.values()]
        rows[family] = {
            "points": one.num_points,
            "exponent b": one.law and tables.number(one.law.exponent),
            "95 % over seeds": _ends(student(exponents)),
            "floor c, %": one.law and 100 * round(one.law.floor, 4),
            f"compute over that of {BASELINE}s": equal[family].ratio if family in equal else None,
            "its 95 %": _ends(equal[family].interval) if family in equal else None,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


def _ends(interval: Interval | None) -> str:
    if interval is None:
        return CANNOT_SAY
    return f"{tables.number(interval.low)} to {tables.number(interval.high)}"


def _data(cells: pd.DataFrame) -> dict[str, Figure]:
    done = cells[cells["status"] == "finished"]
    found = {}
    for key in ("test", "few_shot"):
        known = done.dropna(subset=[key, "images"])
        length = "steps" if known["steps"].notna().any() else "epochs"
        lines = known.groupby(["label", length])["images"].nunique()
        if (lines > 1).any():
            name = tables.accuracy_name(cells, key)
            caption = f"How does {name} grow with the number of training images?"
            found[caption] = figures.fig_data(known, key, f"{name}, %")
    return found


def _curves(runs: pd.DataFrame, files: Files) -> dict[str, Figure]:
    """Loss and accuracy by step; in a sweep the chosen training is bold."""
    short = runs["run_id"].str[:6].where(runs["name"].duplicated(keep=False), "")
    names = (runs["name"] + " " + short).str.strip()
    families = dict(zip(names, runs["family"], strict=True))
    bold, drawn = names[runs["stage"] == "finetune"].tolist(), {}
    for title, keys, scale in (
        ("training loss", [TRAIN_LOSS], 1),
        (figures.TOP1, [EVAL_TOP1, DEV_TOP1], 100),
    ):
        curves: dict[str, pd.Series[float]] = {}
        for run_id, name in names.items() if len(names) <= MOST_CURVES else ():
            held = [key for key in keys if pd.notna(runs.loc[run_id].get(key))]
            curve = files.curve(str(run_id), held[0], 100) if held else pd.Series()
            curves |= {name: scale * curve} if len(curve) > 1 else {}
        if curves:
            caption = f"How does the {title.partition(',')[0]} change in training?"
            drawn[caption] = figures.fig_curves(curves, families, title, bold)
    return drawn


def _speed(cells: pd.DataFrame) -> dict[str, Figure]:
    if STUDY_FORWARD_GMACS not in cells or cells["label"].nunique() < 2:
        return {}
    known = cells.dropna(subset=["images_per_s", STUDY_FORWARD_GMACS])
    return {"How fast does each model train, on this hardware?": figures.fig_speed(known)}


# With fewer classes, accuracy is enough.
LEAST_CLASSES = 5
# Largest confusion matrix in classes.
MOST_CLASSES = 20


def images_section(files: Files, run: pd.Series) -> Section:
    """Test images with predictions, the worst errors, and which class is taken for which."""
    tested = "test" if pd.notna(run["test"]) else "held-out"
    named = {
        "evaluation/examples": f"How are {tested} images classified? A cross marks a wrong "
        "prediction; in brackets is its probability.",
        "evaluation/errors": "Which errors have the highest loss?",
    }
    found = [gallery(files, run, name, title) for name, title in named.items()]
    counts = files.read(run, "evaluation/confusion.csv")
    shown = {} if counts is None else confusion(counts)
    return Section("Images and errors", tables=shown, galleries=[one for one in found if one])


def gallery(files: Files, run: pd.Series, name: str, title: str) -> Gallery | None:
    """None if the run has no such files."""
    strip, about = files.read(run, f"{name}.jpg"), files.read(run, f"{name}.json")
    if strip is None or about is None:
        return None
    texts, wrong = [], []
    for one in json.loads(about):
        classes, predicted = list(map(str, one["classes"])), one["predicted"]
        is_wrong = predicted is not None and predicted not in classes
        truth = ", ".join(classes) or "no label"
        share = "" if one["probability"] is None else f" ({one['probability']:.1%})"
        texts.append(f"{predicted}{share}, not {truth}" if is_wrong else f"{truth}{share}")
        wrong.append(is_wrong)
    return Gallery(title, strip, texts, wrong) if texts else None


def confusion(content: bytes) -> dict[str, pd.DataFrame]:
    """The confusion matrix in % of each true class; none for more classes than a page can show."""
    rows = pd.read_csv(io.BytesIO(content), dtype={"class": str, "predicted": str}, na_filter=False)
    counts = rows[rows["images"] > 0].groupby(["class", "predicted"])["images"].sum()
    names = sorted({name for pair in counts.index for name in pair})
    if not LEAST_CLASSES <= len(names) <= MOST_CLASSES:
        return {}
    totals = counts.groupby("class").sum()
    shares = counts.div(totals, level="class").unstack(fill_value=0.0)
    wide = shares.map(lambda share: tables.percent(share) if share else "")
    wide.insert(0, "images", totals, allow_duplicates=True)  # a class may have this name
    return {"Confusion matrix: % of each true class (rows)": wide}


def events(files: Files, run: pd.Series) -> pd.DataFrame:
    """In their order; if there are very many, the last ones."""
    rows: list[tuple[str, ...]] = []
    for path in files.names(run, "history"):
        for one in json.loads(files.read(run, path) or b"[]"):
            when = str(pd.Timestamp(int(one["time_s"]), unit="s"))
            rows.append((when, one["kind"], str(one["step"]), one["text"]))
    return pd.DataFrame(sorted(rows)[-200:], columns=["UTC", "event", "step", "what happened"])


def data_section(files: Files, run: pd.Series) -> Section:
    """Data sets with fingerprints, and crops of the first batch; how to run it again."""
    seen = gallery(files, run, "images/training", "What do the training images look like?")
    again = f"Command: {run['command']}. " if run["command"] else ""
    again += (
        f"Git commit {run['commit']}; the recipe is recipe.yaml of run {run['run_id']} in MLflow."
    )
    sets = pd.DataFrame(run["sets"])
    return Section(
        "Data, and how to run it again", [again],
        tables={"Data sets of the training": sets}, galleries=[seen] if seen else [],
    )  # fmt: skip
