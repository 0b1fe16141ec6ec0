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

from vit_ray.report import document, figures, sweeps
from vit_ray.report.ablations import ablation_charts
from vit_ray.report.accuracies import (
    accuracies_of,
    accuracy_name,
    best_of,
    by_sets,
    studied,
    trainings,
)
from vit_ray.report.document import Section
from vit_ray.report.fit_figures import fit_charts, fit_sentences, fit_tables, laws_of
from vit_ray.report.missing import what_is_missing
from vit_ray.report.paper_tables import paper_tables
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.seeds import one_run_a_cell
from vit_ray.report.tables import number

_RELOAD = re.compile(r'<meta http-equiv="refresh" content="([^"]+)">')
_COMPUTE = (
    "exaFLOPs = 6 x multiply-adds of a forward pass x images seen / 10^18, the convention that "
    "reproduces the paper's Table 6. All filled points are proxy results on the data named above; "
    "hollow ones are the paper's, for the shape of the curves only: other data, another task."
)
_LAWS = (
    "error = a C^-b + c, C the training compute, fitted to the finished trainings of each family "
    "on the most training images that differ in size and length alone; intervals are 95 % by "
    "bootstrap, with the scatter that lengths of one model share. Seeds, and amounts of compute "
    "within 10 %, are one point, their mean, and a prediction is of a mean of as many seeds: a "
    "single further run lies farther off."
)


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
    """A run has not ended: the page will have more to show."""


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
    """Write the page, the table of trainings as CSV, and the figures as SVG and PNG.

    Args:
        uri: MLflow tracking server or SQLite address; it is only read.
        experiment_or_parent_run_id: name of an experiment, or id of a run whose children count.
        output_path: the `.html` file; its folder is made.
        watch_s: while a run has not ended, the page in a browser reloads itself so often.

    Raises:
        ValueError: there is no such store, experiment or run.
    """
    archive = Archive(uri, experiment_or_parent_run_id)
    page = Path(output_path).resolve()
    counted, left_out = one_run_a_cell(archive.runs)
    runs = trainings(counted)
    compared = studied(runs)
    laws, sentences = laws_of(compared), fit_sentences(laws_of(compared))
    table = figures.cells(runs, archive)
    compute = figures.against_compute(compared)
    sections = [
        Section("Accuracy against compute", [_COMPUTE] if compute else [], compute),
        Section(
            "Fitted power laws",
            [_LAWS, *sentences] if sentences or laws else [],
            fit_charts(laws),
            fit_tables(laws),
        ),
        Section("Tables of the paper", tables=paper_tables(counted)),
        Section(
            "Sweep",
            sweeps.sweep_summary(runs),
            sweeps.sweep_charts(runs),
            [sweeps.sweep_table(runs)],
        ),
        Section("Trainings", tables=[table]),
        Section("Cost and speed", charts=figures.cost_and_speed(compared)),
        Section("Ablations and empirical cost", charts=ablation_charts(archive, compared)),
        Section("Learning curves", charts=figures.learning_curves(archive, compared)),
    ]
    missing = what_is_missing(archive, runs, left_out)
    is_live = any(run.status == "RUNNING" for run in archive.runs)
    paths = {path for run in runs for path in run.training_sets}
    # The end of a local path is what a reader knows the data by.
    short = {path if "://" in path else "/".join(Path(path).parts[-3:]) for path in paths}
    whose = f", run {archive.parent.run_id} and the runs below it" if archive.parent else ""
    proxy = (
        "The paper pre-trains on JFT-300M, which is private. The runs here were trained on "
        f"{', '.join(sorted(short)) or 'other data'}, so their accuracies can be compared with "
        "each other, not with the paper's."
    )
    document.write_page(
        page,
        archive.parent.name if archive.parent else archive.experiment,
        sections,
        origin=f"Made from MLflow experiment {archive.experiment}{whose}",
        opening=archive.opening,
        notices={"These results are a proxy.": [proxy], "What is missing": missing},
        tiles=_tiles(runs),
        refresh_s=watch_s if is_live else None,
    )
    document.replace_file(page.with_suffix(".csv"), table.csv().encode())
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
    folder = document.figures_folder(page)
    return [*parts, (folder, "figures")] if folder.is_dir() else parts


def _tiles(runs: Sequence[RecordedRun]) -> dict[str, str]:
    finished = sum(run.status == "FINISHED" for run in runs)
    tiles = {"trainings": str(len(runs)), "finished": str(finished)}
    compared = studied(runs)
    for key in accuracies_of(compared):
        for whose, members in by_sets(compared, key):
            if best := best_of(members, key):
                run, mean = best
                seeds = f" ({mean.count} seeds)" if mean.count > 1 else ""
                tiles[f"best {accuracy_name(key)}{whose}: {run.label}"] = f"{mean} %{seeds}"
    costs = {"study/exaflops": "exaFLOPs in all", "cost/core_days": "core-days in all"}
    for key, name in costs.items():
        values = [run.metrics[key] * figures.own_share(run) for run in runs if key in run.metrics]
        if values:
            tiles[name] = number(sum(values))
    return tiles
