"""What the page of one training shows besides its curves: images, errors, time, events, data."""

import csv
import io
import json
import time
from collections.abc import Iterator, Sequence

from vit_ray.metric_names import EVAL_TOP1
from vit_ray.report.document import Gallery, Section
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.tables import Column, Table, Value, number, percent
from vit_ray.report.time_spent import time_section

LEAST_CLASSES = 5
"""With fewer classes, accuracy is enough."""
MOST_CLASSES = 20
"""Largest confusion matrix in classes; for more classes the most frequent errors are listed."""
MOST_EVENTS = 200
MOST_LETTERS = 40
"""Letters of a class name."""
_PICTURES = {
    "evaluation/examples": "How are {} images classified?",
    "evaluation/errors": "Which errors have the highest loss?",
    "images/training": "What do the training images look like to the model?",
}
"""Files of a run, see `evaluation/examples.py`, and titles."""


def training_sections(archive: Archive, run: RecordedRun) -> list[Section]:
    """Images with predictions, confusion, time, events, data, how to run it again."""
    tested = "held-out" if run.is_on_dev(EVAL_TOP1) else "test"
    pictures = {n: _gallery(archive, run, n, t.format(tested)) for n, t in _PICTURES.items()}
    shown = [one for name, one in pictures.items() if one and name.startswith("evaluation/")]
    seen = pictures["images/training"]
    again = []
    if command := run.tags.get("mlflow.source.name"):
        again = [
            f"Command: {command}",
            f"Git commit {run.short_commit}; the whole recipe is the file recipe.yaml of the run "
            f"in MLflow, run id {run.run_id}.",
        ]
    if card := archive.card(run):
        again.append(f"Model card: {card}")
    return [
        Section("Images and errors", galleries=shown, tables=[*_confusion(archive, run)]),
        time_section([run]),
        Section("Events", tables=[_events(archive, run)]),
        Section("Data", tables=[_data(run)], galleries=[seen] if seen else []),
        Section("How to run it again", again),
    ]


def _gallery(archive: Archive, run: RecordedRun, name: str, title: str) -> Gallery | None:
    """None if the run has no such files, or they have another format."""
    strip, about = archive.file(run, f"{name}.jpg"), archive.file(run, f"{name}.json")
    if strip is None or about is None:
        return None
    texts, wrong = [], []
    try:
        for one in json.loads(about):
            classes, predicted = list(map(str, one["classes"])), one["predicted"]
            is_wrong = predicted is not None and predicted not in classes
            truth = ", ".join(classes) or "no label"
            share = one["probability"]
            shown = "" if share is None else f" ({share:.1%})"
            texts.append(f"{predicted}{shown}, not {truth}" if is_wrong else f"{truth}{shown}")
            wrong.append(is_wrong)
    except (ValueError, TypeError, KeyError):
        return None
    if not texts:
        return None
    if name == "images/training":
        note = "Crops of the first batch, augmented as in training."
    elif name.endswith("errors"):
        note = "Wrong predictions, sorted by loss, highest first."
    else:
        note = f"The first {len(texts)} images; a cross marks a wrong prediction."
    if shown:
        note += " In brackets: the probability of the prediction."
    return Gallery(title, strip, texts, wrong, note)


def _confusion(archive: Archive, run: RecordedRun) -> Iterator[Table]:
    """The confusion matrix, in shares of each class's images; for many classes the worst pairs."""
    content = archive.file(run, "evaluation/confusion.csv")
    try:
        rows = list(csv.DictReader(io.StringIO((content or b"").decode())))
        found = (
            (_short(row["class"]), _short(row["predicted"]), int(row["images"])) for row in rows
        )
        counts = {(truth, guess): count for truth, guess, count in found if count > 0}
    except (ValueError, TypeError, KeyError):
        return
    images: dict[str, int] = {}
    for (truth, _), count in counts.items():
        images[truth] = images.get(truth, 0) + count
    names = sorted({name for pair in counts for name in pair})
    if len(names) < LEAST_CLASSES:
        return
    if len(names) <= MOST_CLASSES:
        heads = [Column("class"), Column("images", number)]
        heads += [Column(name, _share, is_bar=True) for name in names]
        parts: list[list[Value]] = [
            [truth, images[truth], *(counts.get((truth, n), 0) / images[truth] for n in names)]
            for truth in names
            if truth in images
        ]
        yield Table("Confusion matrix: % of each true class (rows)", heads, parts)
        return
    wrong = sorted((pair for pair in counts if pair[0] != pair[1]), key=lambda p: -counts[p])
    heads = [Column("class"), Column("taken for"), Column("images", number)]
    heads.append(Column("% of the class", percent, is_bar=True))
    yield Table(
        f"Most frequent errors: {min(len(wrong), MOST_CLASSES)} of {len(wrong):,} pairs of classes",
        heads,
        [[*pair, counts[pair], counts[pair] / images[pair[0]]] for pair in wrong[:MOST_CLASSES]],
    )


def _short(name: str) -> str:
    """Name of a class, shortened so that its column is no wider than others."""
    return name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…"


def _share(value: float) -> str:
    """In percent; zeros are left blank, so that errors are visible."""
    return f"{100 * value:.1f}" if value else ""


def _events(archive: Archive, run: RecordedRun) -> Table:
    """In their order; if there are very many, the last ones."""
    found: list[tuple[float, list[Value]]] = []
    for path in archive.paths(run, "history"):
        try:
            for one in json.loads(archive.file(run, path) or b"[]"):
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one["time_s"]))
                found.append((one["time_s"], [at, one["kind"], one["step"], one["text"]]))
        except (ValueError, TypeError, KeyError, OverflowError, OSError):
            continue
    found.sort(key=lambda pair: pair[0])
    heads = [Column("UTC"), Column("event"), Column("step", number), Column("what happened")]
    return Table("Events", heads, [row for _, row in found[-MOST_EVENTS:]])


def _data(run: RecordedRun) -> Table:
    heads = [Column("used for"), Column("name"), Column("images", number)]
    heads += [Column("classes", number), Column("fingerprint"), Column("from")]
    rows: list[Sequence[Value]] = []
    for one in run.data_sets:
        facts = one.facts
        rows.append([
            one.use, one.name, facts.get("num_images"), facts.get("num_classes"),
            one.digest, one.source,
        ])  # fmt: skip
    return Table("Data sets of the training", heads, rows).used()
