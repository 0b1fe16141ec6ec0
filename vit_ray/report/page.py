"""One HTML page with the results of a study, a sweep or an experiment.

Everything comes from MLflow; the page is self-contained and needs no script, so it can
be mailed, kept with the run, and opened years later. A CSV of its main table lies beside it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vit_ray.report import figures
from vit_ray.report.figures import Figure
from vit_ray.report.paper import SOURCE
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.style import STYLE
from vit_ray.report.svg import alone, number
from vit_ray.report.tables import percent

# Names, labels and values come from recipes and folders of any origin: all are escaped.
_TEMPLATES: Final = Environment(
    loader=PackageLoader("vit_ray.report"), autoescape=True, undefined=StrictUndefined
)
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
    compute, curves = _compute(runs), figures.learning_curves(archive, runs)
    page.write_text(_html(archive, runs, compute, curves), encoding="utf-8")
    _write_figures(_figures_folder(page), [*compute, *curves])
    page.with_suffix(".csv").write_text(figures.cells(runs).csv(), encoding="utf-8")
    return page


def parts_of(page: Path) -> list[tuple[Path, str]]:
    """What `build_report` wrote, each with the folder of a run's artifacts where it is kept."""
    parts = [(page, ""), (page.with_suffix(".csv"), "")]
    folder = _figures_folder(page)
    return [*parts, (folder, "figures")] if folder.is_dir() else parts


def _figures_folder(page: Path) -> Path:
    return page.with_name(f"{page.stem}-figures")


def _write_figures(folder: Path, drawn: Sequence[Figure]) -> None:
    for figure in drawn:
        name = re.sub(r"[^a-z0-9]+", "_", figure.caption.lower()).strip("_")
        if drawing := alone(figure.svg):
            folder.mkdir(exist_ok=True)
            (folder / f"{name}.svg").write_text(drawing, encoding="utf-8")


def _html(
    archive: Archive,
    runs: Sequence[RecordedRun],
    compute: Sequence[Figure],
    curves: Sequence[Figure],
) -> str:
    text: str = _TEMPLATES.get_template("page.html").render(
        title=archive.parent.name if archive.parent else archive.experiment,
        style=Markup(STYLE),
        experiment=archive.experiment,
        parent_id=archive.parent.run_id if archive.parent else None,
        now=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        data=_data_names(runs),
        tiles=_tiles(runs),
        compute=compute,
        sweep=figures.sweep_table(runs),
        sweep_summary=figures.sweep_summary(runs),
        cells=figures.cells(runs),
        curves=curves,
        runs=[_described(run) for run in archive.runs],
        source=SOURCE,
        paper_figure=figures.paper_figure(),
    )
    return text


def _data_names(runs: Sequence[RecordedRun]) -> str:
    recorded = (run.params["data.train"] for run in runs if "data.train" in run.params)
    data = {_short_path(path) for text in recorded for path in _training_sets(text)}
    return ", ".join(sorted(data))


def _training_sets(recorded: str) -> list[str]:
    """Paths in `data.train` as it is recorded: one, or a list of `{path, weight}`."""
    return [one["path"] for one in json.loads(recorded)] if recorded.startswith("[") else [recorded]


def _short_path(path: str) -> str:
    """The end of a local path, which is what a reader knows the data by."""
    return path if "://" in path else "/".join(Path(path).parts[-3:])


def _tiles(runs: Sequence[RecordedRun]) -> dict[str, str]:
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
    return tiles


def _compute(runs: Sequence[RecordedRun]) -> list[Figure]:
    charts = []
    for key in figures.accuracies_of(runs):
        if any("study/exaflops" in run.metrics for run in runs):
            charts.append(_figure(figures.accuracy_against_compute(runs, key), key, "compute"))
        by_data = figures.accuracy_against_data(runs, key)
        if by_data is not None:
            charts.append(_figure(by_data, key, "data"))
    return charts


def _figure(svg: Markup, key: str, against: str) -> Figure:
    name = figures.ACCURACIES[key]
    return Figure(f"{name[0].upper()}{name[1:]} against {against} (proxy data)", svg)


def _described(run: RecordedRun) -> dict[str, Any]:
    facts = {name: run.tags[key] for key, name in FACTS.items() if key in run.tags}
    facts |= {"MLflow run": run.run_id, "status": run.status.lower()}
    recipe = "\n".join(f"{key} = {value}" for key, value in sorted(run.params.items()))
    return {"name": run.name, "kind": run.kind, "facts": facts, "recipe": recipe}
