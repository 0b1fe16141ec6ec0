"""The report command: one page of a run, or of an experiment, from MLflow alone."""

import os
from dataclasses import replace
from pathlib import Path

from vit_ray.addresses import local_folder, redact, sqlite_file
from vit_ray.config import Recipe
from vit_ray.config.keys import PARENT_TAG, RUN_FOLDER
from vit_ray.experiments.write_page import keep_page, write_page
from vit_ray.report.page import Written
from vit_ray.tracking.mlflow_client import MlflowClient, asking, found_runs
from vit_ray.tracking.store_requests import redact_uri


def report(recipe: Recipe, keep_with: str | None = None) -> Written:
    """Report on the newest run with the recipe's name, or on its experiment if there is none.

    The page and its figures are kept as artifacts of that run, unless the store is a copy,
    see `are_own_files`.

    Args:
        keep_with: id of a run: report on the whole experiment, and keep the page with this run.

    Raises:
        ValueError: MLflow has no such runs.
        RuntimeError: MLflow does not answer, or cannot be used.
    """
    with asking(recipe.tracking.uri) as client:
        run_id = None if keep_with else _newest_run(client, recipe)
        written, keeper = write_page(recipe, run_id), keep_with or run_id
        if keeper is None:
            line = f"no run {recipe.name!r}; this page is of the whole experiment"
            missing = written.missing if written.is_empty else [line, *written.missing]
            return replace(written, missing=missing)
        files, problem = str(client.get_run(keeper).info.artifact_uri), ""
        if are_own_files(recipe.tracking.uri, files):
            try:
                keep_page(client, keeper, written, "experiment" if keep_with else "")
            except Exception as error:  # also of a bucket's library
                problem = redact_uri(f"{files}: {error}", recipe.tracking.uri)
        else:
            place = local_folder(files) or redact(files)
            problem = (
                f"MLflow has its files at {place}, which is not below mlruns/ next to the store"
            )
        if problem:
            print(f"page written to {written.page}; not kept with the run: {problem}")
        return written


def _newest_run(client: MlflowClient, recipe: Recipe) -> str | None:
    """The id of the newest run of this name, if there is one.

    A run in the recipe's output comes before those in other outputs, and a run without a parent
    before child runs.
    """
    named = found_runs(client, recipe.tracking.experiment, f"attributes.run_name = '{recipe.name}'")
    folder = recipe.with_absolute_paths().run_folder
    here = [run for run in named if run.data.tags.get(RUN_FOLDER) == folder]
    roots = [run for run in named if PARENT_TAG not in run.data.tags]
    # The folder may have another path here, or have moved since.
    return next((str(run.info.run_id) for run in here or roots or named), None)


def are_own_files(uri: str, artifact_uri: str) -> bool:
    """Whether a run's files may be written: those of a server, or below `mlruns` next to the SQLite
    file. Others, also on S3, may be those of another store, of which this one is a copy.

    The store, its folder and `mlruns` may be symbolic links. A copy in the folder of its original
    shares the files.
    """
    store, folder = sqlite_file(uri), local_folder(artifact_uri)
    if store is None or folder is None:
        return store is None
    typed = Path(os.path.abspath(store)).parent
    homes = {one / "mlruns" for one in (typed, typed.resolve(), store.resolve().parent)}
    addresses = Path(os.path.abspath(folder)), folder.resolve()
    return any(address.is_relative_to(home) for address in addresses for home in homes)


def report_page(recipe: Recipe) -> int:
    """Write the page; 1 if there are no runs yet, as the page then says."""
    written = report(recipe)
    print(f"report: {written.page}")
    for line in written.missing:
        print(f"missing: {line}")
    return 1 if written.is_empty else 0
