"""Commands for MLflow's store: report, web pages, and sending what it has missed."""

import os
import re
import socket
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vit_ray.addresses import absolute_uri, local_folder, redact, sqlite_file
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.keys import KIND, PARENT_TAG, RUN_FOLDER
from vit_ray.config.loading import mlflow_variables
from vit_ray.config.schema import validated
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.tracking.store_requests import redact_uri, safe_uri
from vit_ray.tracking.tracker import replay

if TYPE_CHECKING:
    from vit_ray.report.page import Written
    from vit_ray.tracking.mlflow_client import MlflowClient


def report(recipe: Recipe, keep_with: str | None = None) -> "Written":
    """Report on the newest run with the recipe's name, or on its experiment if there is none.

    The page and its figures are kept as artifacts of that run, unless the store is a copy, see
    `are_own_files`.

    Args:
        keep_with: id of a run: report on the whole experiment, and keep the page with this run.

    Raises:
        ValueError: MLflow has no such runs.
        RuntimeError: MLflow does not answer, or cannot be used.
    """
    from vit_ray.experiments.write_page import keep_page, write_page
    from vit_ray.tracking.mlflow_client import asking

    uri = recipe.tracking.uri
    with asking(uri) as client:
        run_id = None if keep_with else _newest_run(client, recipe)
        written, keeper = write_page(recipe, run_id), keep_with or run_id
        if keeper is None:
            line = f"no run {recipe.name!r}; this page is of the whole experiment"
            missing = written.missing if written.is_empty else [line, *written.missing]
            return replace(written, missing=missing)
        files, problem = str(client.get_run(keeper).info.artifact_uri), ""
        if are_own_files(uri, files):
            try:
                keep_page(client, keeper, written, "experiment" if keep_with else "")
            except Exception as error:  # also of a bucket's library
                problem = redact_uri(f"{files}: {error}", uri)
        else:
            place = local_folder(files) or redact(files)
            problem = (
                f"MLflow has its files at {place}, which is not below mlruns/ next to the store"
            )
    if problem:
        print(f"page written to {written.page}; not kept with the run: {problem}")
    return written


def _newest_run(client: "MlflowClient", recipe: Recipe) -> str | None:
    """The id of the newest run of this name, if there is one.

    A run in the recipe's output comes before those in other outputs, and a run without a parent
    before child runs.
    """
    from vit_ray.tracking.mlflow_client import found_runs

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


def open_pages(store: str | None, port: int) -> int:
    """Print the link to the experiment of the newest run without a parent, and serve a SQLite file
    until Ctrl-C.

    Args:
        store: address of a store, or a recipe with its `tracking.uri`; None for the default.
        port: of the server; another one if that is taken.

    Raises:
        ValueError: there is no such store, or no run in it.
    """
    from vit_ray.mlflow_internals import runs_page
    from vit_ray.tracking.mlflow_client import asking, share_view

    if not store:
        uri = validated(TrackingConfig, mlflow_variables(), "vit-ray ui").uri
    else:
        uri = store if "://" in store else load_recipe(store).tracking.uri
    uri = absolute_uri(uri)
    is_file = sqlite_file(uri) is not None
    port = _free(port)
    address = f"http://127.0.0.1:{port}" if is_file else safe_uri(uri).rstrip("/")
    with asking(uri) as client:
        everywhere = [one.experiment_id for one in client.search_experiments()]
        newest_first = ["attributes.start_time DESC"]
        begun = client.search_runs(everywhere, order_by=newest_first, max_results=50)
        roots = [run for run in begun if PARENT_TAG not in run.data.tags] or list(begun)
        if not roots:
            raise ValueError(f"{safe_uri(uri)} has no run yet; train first, or give another store")
        experiment, kind = roots[0].info.experiment_id, roots[0].data.tags.get(KIND, "")
        print(runs_page(address, experiment, share_view(client, experiment, kind)), flush=True)
    if is_file:
        words = ["-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port)]
        words += ["--workers", "1"]  # one reader; four take their time to start
        os.execv(sys.executable, (sys.executable, *words))  # noqa: S606
    return 0


def _free(port: int) -> int:
    """This port, or if it is taken one that the system chooses."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
        return int(server.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_replay(log: Path, uri: str) -> int:
    """Send a run's log to a tracking server; returns 1 if not everything was sent.

    Raises:
        ValueError: there is no such log, or the address cannot be replayed to.
    """
    is_none = "://" not in uri and uri not in ("databricks", "uc")
    if is_none or re.fullmatch(r"sqlite:/*(:memory:)?", uri):  # memory ends with the replay
        raise ValueError(
            f"URI {uri!r} is not an address; give sqlite:///mlflow.db or http://HOST:PORT"
        )
    if log.is_dir():
        raise ValueError(f"log {str(log)!r} is a folder; give a metrics.jsonl file in it")
    done = replay(log, uri)
    print(f"{done.num_points} points were new")
    for refused in done.refused:
        print(f"not sent: {refused}", file=sys.stderr)
    return 1 if done.refused else 0
