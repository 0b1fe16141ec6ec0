"""What the page of one training shows besides its curves: images, errors, events, data."""

import io
import json

import pandas as pd

from vit_ray.report.page import Gallery, Section
from vit_ray.report.runs import Files
from vit_ray.report.tables import percent

LEAST_CLASSES = 5
"""With fewer classes, accuracy is enough."""
MOST_CLASSES = 20
"""Largest confusion matrix in classes."""


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
    tables = {} if counts is None else confusion(counts)
    return Section("Images and errors", tables=tables, galleries=[one for one in found if one])


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
    wide = shares.map(lambda share: percent(share) if share else "")
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
