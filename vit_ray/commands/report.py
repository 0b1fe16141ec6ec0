"""The report command: one page of a run, or of an experiment, from MLflow alone."""

from dataclasses import replace

from vit_ray.addresses import local_folder
from vit_ray.config import Recipe
from vit_ray.config.recorded_recipe import PARENT_TAG, RUN_FOLDER
from vit_ray.config.secrets import redact
from vit_ray.experiments.write_page import are_own_files, keep_page, write_page
from vit_ray.report.page import Written
from vit_ray.tracking.mlflow_client import asking, found_runs, redact_uri


def report(
    recipe: Recipe,
    *,
    whole_experiment: bool = False,
    keep_with: str | None = None,
) -> Written:
    """Report on the newest run with the recipe's name, or on its experiment if there is none.

    A run in the recipe's output comes before runs of this name in other outputs, and a run without
    a parent before child runs of this name.

    The page and its figures are kept as artifacts of that run, unless the store is a copy,
    see `are_own_files`.

    Args:
        whole_experiment: always report on the experiment.
        keep_with: id of the run to keep them with instead.

    Raises:
        ValueError: MLflow has no such runs.
        RuntimeError: MLflow does not answer, or cannot be used.
    """
    with asking(recipe.tracking.uri) as client:
        run_id = None
        if not whole_experiment:
            folder = recipe.with_absolute_paths().run_folder
            experiment = recipe.tracking.experiment
            named = found_runs(client, experiment, f"attributes.run_name = '{recipe.name}'")
            here = [run for run in named if run.data.tags.get(RUN_FOLDER) == folder]
            roots = [run for run in named if PARENT_TAG not in run.data.tags]
            # The folder may have another path here, or have moved since.
            run_id = next((str(run.info.run_id) for run in here or roots or named), None)
        written = write_page(recipe, run_id)
        if not (whole_experiment or run_id or written.is_empty):
            line = f"no run {recipe.name!r}; this page is of the whole experiment"
            written = replace(written, missing=[line, *written.missing])
        if keeper := keep_with or run_id:
            files = str(client.get_run(keeper).info.artifact_uri)
            if not are_own_files(recipe.tracking.uri, files):
                print(
                    f"page written to {written.page}; not kept with the run: MLflow has its files "
                    f"at {local_folder(files) or redact(files)}, which is not below mlruns/ next "
                    "to the store"
                )
                return written
            try:
                keep_page(client, keeper, written, "experiment" if whole_experiment else "")
            except Exception as error:  # also of a bucket's library
                reason = redact_uri(f"{files}: {error}", recipe.tracking.uri)
                print(f"page written to {written.page}; not kept with the run: {reason}")
        return written


def report_page(recipe: Recipe) -> int:
    """Write the page; 1 if there are no runs yet, as the page then says."""
    written = report(recipe)
    print(f"report: {written.page}")
    for line in written.missing:
        print(f"missing: {line}")
    return 1 if written.is_empty else 0
