"""One HTML page with the results of a study, a sweep or an experiment.

Everything comes from MLflow; the page is one file that loads nothing from the network, so it can be
mailed, kept with the run, and opened years later. Its figures are files in a folder next to it.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from vit_ray.metric_names import STUDY_EXAFLOPS
from vit_ray.report import document
from vit_ray.report.ablations import shapes
from vit_ray.report.document import Section
from vit_ray.report.figures import chart_list as figures
from vit_ray.report.figures.fit_figures import (
    MIN_AMOUNTS,
    fit_charts,
    fit_sentences,
    fit_tables,
    laws_of,
)
from vit_ray.report.gains import gain_sentences
from vit_ray.report.headline import headline, totals
from vit_ray.report.missing import what_is_missing
from vit_ray.report.paper_tables import THEIRS, comparing, paper_tables
from vit_ray.report.runs import Archive
from vit_ray.report.statistics.accuracies import accuracies_of, studied, trainings
from vit_ray.report.statistics.seeds import one_run_a_cell
from vit_ray.report.sweeps import sweep_charts
from vit_ray.report.time_spent import time_section
from vit_ray.report.training import training_sections

_COMPUTE = (
    "exaFLOPs = 6 x multiply-adds of a forward pass x images seen / 10^18, the convention that "
    "reproduces the paper's Table 6, whose own figure can be opened to compare the shape of the "
    "curves."
)
_LAWS = (
    "error = a C^-b + c, where C is the training compute, fitted to the finished trainings of each "
    "family on the largest number of training images that differ only in size and length; "
    "intervals are 95 % by bootstrap, with the scatter that lengths of one model share. Seeds, and "
    "amounts of compute within 10 %, are averaged to one point, and a prediction is for a mean "
    "over as many seeds: a single further run scatters more."
)

_SHARED = ("status", "data fraction", "seed", "git commit", "data fingerprint")
"""Columns of the table of trainings that a page replaces by one sentence if all rows are equal."""


@dataclass(frozen=True)
class Written:
    """A page and the remarks on it."""

    page: Path
    """Absolute path."""
    missing: list[str]
    """A sentence for each gap."""
    is_empty: bool
    """There are no runs yet."""


def write_report(
    uri: str,
    experiment_or_parent_run_id: str,
    output_path: str | Path,
) -> Written:
    """Write the page, and its figures as files.

    Args:
        uri: MLflow tracking server or SQLite address; it is only read.
        experiment_or_parent_run_id: name of an experiment, or id of a run whose children count.
        output_path: the `.html` file; its folder is created.

    Raises:
        ValueError: there is no such store, experiment or run.
    """
    archive = Archive(uri, experiment_or_parent_run_id)
    page = Path(output_path).resolve()
    counted, left_out = one_run_a_cell(archive.runs)
    runs = trainings(counted)
    compared = studied(runs)
    laws = laws_of(compared)
    is_study = any(run.kind == "study_cell" for run in runs)
    table = figures.cells(runs, archive)
    tables = paper_tables(counted)
    papers = Section(
        "Tables of the paper",
        tables=tables if is_study else comparing(tables, counted),
    )
    shaped = [chart for key in accuracies_of(compared)[:1] for chart in shapes(compared, key)]
    ablations = [Section("Ablations", charts=shaped)]
    curves = Section("Learning curves", charts=figures.learning_curves(archive, compared))
    shown, shared = table.without_shared(_SHARED)
    every = Section("Trainings", [f"All rows: {shared}."] if shared else [], tables=[shown])
    alone = training_sections(archive, runs[0]) if len(runs) == 1 else []
    time = [] if alone else [time_section(runs)]
    sections = [Section("Sweep", charts=sweep_charts(runs)), curves, *alone, every]
    if is_study or len({run.metrics.get(STUDY_EXAFLOPS) for run in compared}) > MIN_AMOUNTS:
        compute, sentences = figures.against_compute(compared), fit_sentences(laws)
        gains = gain_sentences(compared)
        unfitted = [
            f"No power law could be fitted. {one.name}, {law}: {why}."
            for one in laws[:1]
            for law, why in [*one.unfitted.items()][:1]
        ]
        sections = [
            Section("Accuracy against compute", [_COMPUTE, *gains] if compute else gains, compute),
            Section("Fitted power laws", [_LAWS, *sentences], fit_charts(laws), fit_tables(laws))
            if any(one.fits for one in laws)
            else Section("Fitted power laws", unfitted),
            papers,
            *ablations,
            Section("Cost and speed", charts=figures.cost_and_speed(compared)),
            *time,
            *sections,
        ]
    else:
        sections += [*time, papers, *ablations]
    missing = what_is_missing(archive, runs, left_out)
    paths = {run.training_set for run in runs if run.training_set}
    # The end of a local path is how a reader knows the data.
    short = {path if "://" in path else "/".join(Path(path).parts[-3:]) for path in paths}
    whose = f", run {archive.parent.run_id} and the runs below it" if archive.parent else ""
    lead = [*headline(archive, runs, laws), *totals(runs)]
    # Text at the top is not repeated below.
    sections = [replace(one, texts=[t for t in one.texts if t not in lead]) for one in sections]
    heads = [column.title for one in sections for table in one.tables for column in table.columns]
    drawn = [chart.title for one in sections for chart in one.charts]
    if figures.PAPER in drawn or any(head.startswith(THEIRS) for head in heads):
        lead.append(
            f"These results are a proxy: trained on {', '.join(sorted(short)) or 'other data'}, "
            "and not on the paper's JFT-300M, which is private."
        )
    document.write_page(
        page,
        archive.parent.name if archive.parent else archive.experiment,
        sections,
        lead=lead,
        missing=missing,
        origin=f"Made from MLflow experiment {archive.experiment}{whose}",
        opening=archive.opening,
    )
    return Written(page, missing, not archive.runs)


def parts_of(page: Path) -> list[tuple[Path, str]]:
    """The files of `write_report`, each with the artifact folder of the run that keeps it."""
    parts = [(page, "")]
    folder = document.files_folder(page)
    return [*parts, (folder, folder.name)] if folder.is_dir() else parts
