"""One HTML page that tells what a study, a sweep or an experiment came to.

Everything comes from MLflow; the page asks nothing of the network and needs no script, so it can
be mailed, kept with the run, and opened years later. A CSV of its main table lies beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

from vit_ray.report import figures
from vit_ray.report.paper import SOURCE
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.style import STYLE
from vit_ray.report.svg import number
from vit_ray.report.tables import percent

FACTS = {
    "vit_ray.git_commit": "git commit",
    "vit_ray.data_fingerprint": "data fingerprint",
    "vit_ray.cluster": "cluster",
    "vit_ray.ray_version": "Ray",
    "vit_ray.resumed_at_steps": "resumed at steps",
    "vit_ray.changed_params": "changed on restart",
}


def build_report(uri: str, experiment_or_parent_run_id: str, output_path: str | Path) -> Path:
    """Write the page, and the table of trainings beside it as CSV.

    Args:
        uri: MLflow tracking server or SQLite address; it is only read.
        experiment_or_parent_run_id: name of an experiment, or id of a run whose children count.
        output_path: the `.html` file; its folder is made.

    Returns:
        The absolute path of the page.

    Raises:
        ValueError: there is no such store, experiment or run, or it holds nothing yet.
    """
    archive = Archive(uri, experiment_or_parent_run_id)
    page = Path(output_path).resolve()
    page.parent.mkdir(parents=True, exist_ok=True)
    runs = figures.trainings(archive.runs)
    page.write_text(_html(archive, runs), encoding="utf-8")
    page.with_suffix(".csv").write_text(figures.cells(runs).csv(), encoding="utf-8")
    return page


def _html(archive: Archive, runs: Sequence[RecordedRun]) -> str:
    title = archive.parent.name if archive.parent else archive.experiment
    sections = [
        _section("Accuracy against compute", _compute(runs)),
        _section("Sweep", _sweep(runs)),
        _section("Trainings", figures.cells(runs).html() if runs else ""),
        _section("Learning curves", _columns(figures.learning_curves(archive, runs))),
        _section("How each run was made", "".join(_facts(run) for run in archive.runs)),
        _section("The paper's own figures", _paper()),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} - vit_ray report</title><style>{STYLE}</style></head><body>"
        f"<header><h1>{escape(title)}</h1>{_origin(archive)}</header>"
        f"<main>{_proxy_notice(runs)}{_tiles(runs)}{''.join(sections)}</main></body></html>\n"
    )


def _origin(archive: Archive) -> str:
    what = f"MLflow experiment {escape(archive.experiment)}"
    if archive.parent:
        what += f", run {archive.parent.run_id} and the runs below it"
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"<p>Made from {what}, {now}.</p>"


def _proxy_notice(runs: Sequence[RecordedRun]) -> str:
    data = {_short_path(run.params["data.train"]) for run in runs if "data.train" in run.params}
    names = ", ".join(escape(path) for path in sorted(data)) or "other data"
    return (
        '<p class="notice"><strong>These results are a proxy.</strong> The paper pre-trains on '
        f"JFT-300M, which is private. The runs here were trained on {names}, so their accuracies "
        "can be compared with each other, not with the paper's.</p>"
    )


def _short_path(path: str) -> str:
    """The end of a local path, which is what a reader knows the data by."""
    return path if "://" in path else "/".join(Path(path).parts[-3:])


def _tiles(runs: Sequence[RecordedRun]) -> str:
    finished = sum(run.status == "FINISHED" for run in runs)
    tiles = {"trainings": str(len(runs)), "finished": str(finished)}
    tested = [run for run in runs if figures.is_tested(run)]
    for key in figures.accuracies_of(tested):
        best = max((run for run in tested if key in run.metrics), key=lambda run: run.metrics[key])
        tiles[f"best {figures.ACCURACIES[key]}: {best.label}"] = f"{percent(best.metrics[key])} %"
    for key, name in (
        ("study/exaflops", "exaFLOPs in all"),
        ("cost/core_days", "core-days in all"),
    ):
        values = [run.metrics[key] for run in runs if key in run.metrics]
        if values:
            tiles[name] = number(sum(values))
    items = (f"<div><dd>{escape(v)}</dd><dt>{escape(k)}</dt></div>" for k, v in tiles.items())
    return f'<dl class="tiles">{"".join(items)}</dl>'


def _compute(runs: Sequence[RecordedRun]) -> str:
    charts = []
    for key in figures.accuracies_of(runs):
        if any("study/exaflops" in run.metrics for run in runs):
            charts.append(_figure(figures.accuracy_against_compute(runs, key), key, "compute"))
        by_data = figures.accuracy_against_data(runs, key)
        if by_data:
            charts.append(_figure(by_data, key, "data"))
    if not charts:
        return ""
    return (
        "<p>exaFLOPs = 6 x multiply-adds of a forward pass x images seen / 10<sup>18</sup>, the "
        "convention that reproduces the paper's Table 6. All points are proxy results on the "
        "data named above.</p>" + _columns(charts)
    )


def _figure(svg: str, key: str, against: str) -> str:
    name = figures.ACCURACIES[key]
    caption = f"{name[0].upper()}{name[1:]} against {against} (proxy data)"
    return f"<figure><figcaption>{caption}</figcaption>{svg}</figure>"


def _sweep(runs: Sequence[RecordedRun]) -> str:
    table = figures.sweep_table(runs)
    summary = "".join(f"<p>{sentence}</p>" for sentence in figures.sweep_summary(runs))
    return summary + table.html() if table.rows else ""


def _facts(run: RecordedRun) -> str:
    facts = {name: run.tags[key] for key, name in FACTS.items() if key in run.tags}
    facts |= {"MLflow run": run.run_id, "status": run.status.lower()}
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    recipe = "\n".join(f"{key} = {value}" for key, value in sorted(run.params.items()))
    shown = f"<pre>{escape(recipe)}</pre>" if recipe else ""
    kind = f" <small>{escape(run.kind)}</small>" if run.kind else ""
    return (
        f"<details><summary>{escape(run.name)}{kind}</summary>"
        f'<dl class="facts">{listed}</dl>{shown}</details>'
    )


def _paper() -> str:
    return (
        f"<details><summary>The paper's results, not ours</summary><p>{SOURCE}: models pre-trained "
        "on JFT-300M and fine-tuned on ImageNet. Shown for the shape of the curves only.</p>"
        f"<figure>{figures.paper_figure()}</figure></details>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def _columns(parts: Sequence[str]) -> str:
    return f'<div class="columns">{"".join(parts)}</div>' if parts else ""
