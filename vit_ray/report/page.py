"""One HTML page with the results of a study, a sweep or an experiment.

Everything comes from MLflow; the page is one file that asks nothing of the network, so it can be
mailed, kept with the run, and opened years later. A CSV of its main table lies beside it, and its
figures as SVG and PNG.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vit_ray.report import figures
from vit_ray.report.ablations import ablation_charts
from vit_ray.report.charts import Chart
from vit_ray.report.document import named_apart, render, replace_file, write_figures
from vit_ray.report.fit_figures import fit_charts, fit_sentences, fit_tables, laws_of
from vit_ray.report.missing import what_is_missing
from vit_ray.report.paper_tables import paper_tables
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.seeds import one_run_a_cell
from vit_ray.report.tables import number

_RELOAD = re.compile(r'<meta http-equiv="refresh" content="([^"]+)">')


@dataclass(frozen=True)
class Written:
    """A page and what there is to say of it."""

    page: Path
    """Absolute."""
    missing: list[str]
    """A sentence for each gap."""
    is_empty: bool
    """There are no runs yet."""
    is_live: bool
    """A run goes on: the page will have more to show."""


def build_report(uri: str, experiment_or_parent_run_id: str, output_path: str | Path) -> Path:
    """As `write_report`; returns the absolute path of the page."""
    return write_report(uri, experiment_or_parent_run_id, output_path).page


def write_report(
    uri: str,
    experiment_or_parent_run_id: str,
    output_path: str | Path,
    *,
    watch_s: float | None = None,
) -> Written:
    """Write the page, the table of trainings beside it as CSV, and its figures as SVG and PNG.

    Args:
        uri: MLflow tracking server or SQLite address; it is only read.
        experiment_or_parent_run_id: name of an experiment, or id of a run whose children count.
        output_path: the `.html` file; its folder is made.
        watch_s: while a run goes on, the page in a browser reloads itself so often.

    Raises:
        ValueError: there is no such store, experiment or run.
    """
    archive = Archive(uri, experiment_or_parent_run_id)
    page = Path(output_path).resolve()
    page.parent.mkdir(parents=True, exist_ok=True)
    counted, aside = one_run_a_cell(archive.runs)
    runs = figures.trainings(counted)
    compared = figures.studied(runs)
    laws = laws_of(compared)
    parts: dict[str, Sequence[Chart]] = {
        "fits": fit_charts(laws),
        "compute": figures.against_compute(compared),
        "sweep_charts": figures.sweep_charts(runs),
        "cost": figures.cost_and_speed(compared),
        "ablations": ablation_charts(archive, compared),
        "curves": figures.learning_curves(archive, compared),
    }
    drawn = named_apart(parts)
    charts = [chart for part in drawn.values() for chart in part]
    missing = what_is_missing(archive, runs, aside)
    is_live = any(run.status == "RUNNING" for run in archive.runs)
    paths = {path for run in runs for path in run.training_sets}
    # The end of a local path is what a reader knows the data by.
    short = {path if "://" in path else "/".join(Path(path).parts[-3:]) for path in paths}
    text = render(
        "page.html",
        charts,
        refresh_s=watch_s if is_live else None,
        **drawn,
        title=archive.parent.name if archive.parent else archive.experiment,
        opening=archive.opening,
        experiment=archive.experiment,
        parent_id=archive.parent.run_id if archive.parent else None,
        data=", ".join(sorted(short)),
        tiles=_tiles(runs),
        paper_tables=paper_tables(counted),
        sweep=figures.sweep_table(runs),
        sweep_summary=figures.sweep_summary(runs),
        cells=figures.cells(runs, archive),
        fit_tables=fit_tables(laws),
        fit_sentences=fit_sentences(laws),
        missing=missing,
    )
    replace_file(page, text.encode())
    write_figures(_figures_folder(page), charts)
    replace_file(page.with_suffix(".csv"), figures.cells(runs, archive).csv().encode())
    return Written(page, missing, not archive.runs, is_live)


def reload_s(page: Path) -> float | None:
    """Seconds after which a written page reloads itself; None if it does not, or is not there."""
    if not page.is_file():
        return None
    found = _RELOAD.search(page.read_text(encoding="utf-8").partition("<title>")[0])
    return float(found[1]) if found else None


def parts_of(page: Path) -> list[tuple[Path, str]]:
    """What `build_report` wrote, each with the folder of a run's artifacts where it is kept."""
    parts = [(page, ""), (page.with_suffix(".csv"), "")]
    folder = _figures_folder(page)
    return [*parts, (folder, "figures")] if folder.is_dir() else parts


def _figures_folder(page: Path) -> Path:
    return page.with_name(f"{page.stem}-figures")


def _tiles(runs: Sequence[RecordedRun]) -> dict[str, str]:
    finished = sum(run.status == "FINISHED" for run in runs)
    tiles = {"trainings": str(len(runs)), "finished": str(finished)}
    compared = figures.studied(runs)
    for key in figures.accuracies_of(compared):
        for whose, members in figures.by_sets(compared, key):
            if best := figures.best_of(members, key):
                run, mean = best
                seeds = f" ({mean.count} seeds)" if mean.count > 1 else ""
                name = f"best {figures.accuracy_name(key)}{whose}: {run.label}"
                tiles[name] = f"{mean} %{seeds}"
    for key, name in (
        ("study/exaflops", "exaFLOPs in all"),
        ("cost/core_days", "core-days in all"),
    ):
        values = [run.metrics[key] * figures.own_share(run) for run in runs if key in run.metrics]
        if values:
            tiles[name] = number(sum(values))
    return tiles
