"""Commands for MLflow's store: report, web pages, and replay of a run's log."""

import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from vit_ray.addresses import absolute_uri, local_folder, sqlite_file
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.loading import mlflow_variables
from vit_ray.config.schema import validated
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.outcomes import KIND, PARENT_TAG, RUN_FOLDER
from vit_ray.tracking.store_requests import redact_uri, safe_uri
from vit_ray.tracking.tracker import replay

if TYPE_CHECKING:
    from vit_ray.report.page import Written
    from vit_ray.tracking.mlflow_client import MlflowClient


def report(recipe: Recipe) -> "Written":
    """Report on the newest run with the recipe's name, or on its experiment if there is none.

    The page and its figures are kept as artifacts of that run, unless the store is a copy of
    another (`are_own_files`).

    Raises:
        ValueError: MLflow has no such runs.
        RuntimeError: MLflow does not answer, or cannot be used.
    """
    from vit_ray.report.page import keep_page, write_page
    from vit_ray.tracking.mlflow_client import asking

    uri = recipe.tracking.uri
    with asking(uri) as client:
        run_id = _newest_run(client, recipe)
        written = write_page(recipe, run_id)
        if run_id is None:
            if not written.is_empty:
                line = f"no run {recipe.name!r}; this page is of the whole experiment"
                written.missing.insert(0, line)
            return written
        artifacts = str(client.get_run(run_id).info.artifact_uri)
        try:
            if not are_own_files(uri, artifacts):
                raise ValueError("not below mlruns/ next to the store")
            keep_page(client, run_id, written)
        except Exception as error:  # also of a bucket's library
            files = f"MLflow has its files at {local_folder(artifacts) or artifacts}: {error}"
            print(
                f"page written to {written.page}; not kept with the run: {redact_uri(files, uri)}"
            )
        return written


def _newest_run(client: "MlflowClient", recipe: Recipe) -> str | None:
    """The id of the newest run of this name; None if there is none.

    Runs in the recipe's output are preferred, then runs without a parent.
    """
    from vit_ray.tracking.mlflow_client import found_runs

    named = found_runs(client, recipe.tracking.experiment, f"attributes.run_name = '{recipe.name}'")
    folder = recipe.with_absolute_paths().run_folder
    in_folder = [run for run in named if run.data.tags.get(RUN_FOLDER) == folder]
    roots = [run for run in named if PARENT_TAG not in run.data.tags]
    # The recorded folder may have another path on this machine, or have been moved.
    return next((str(run.info.run_id) for run in in_folder or roots or named), None)


def are_own_files(uri: str, artifact_uri: str) -> bool:
    """Whether a run's files may be written: those of a server, or below `mlruns` next to the SQLite
    file. Other files, also on S3, may belong to another store, of which this one is a copy.

    The store and its folder may be symbolic links. A copy in the folder of its original shares the
    files.
    """
    store, folder = sqlite_file(uri), local_folder(artifact_uri)
    if store is None or folder is None:
        return store is None
    roots = [path.parent / "mlruns" for path in (store.absolute(), store.resolve())]
    paths = folder.absolute(), folder.resolve()
    return any(path.is_relative_to(root) for path in paths for root in roots)


def report_page(recipe: Recipe) -> int:
    """Write the page and print its path; returns 1 if there are no runs yet."""
    written = report(recipe)
    print(f"report: {written.page}")
    for line in written.missing:
        print(f"missing: {line}")
    return 1 if written.is_empty else 0


def open_pages(store: str | None, port: int) -> None:
    """Print the link to the experiment of the newest run without a parent, and serve a SQLite file
    until Ctrl-C.

    Args:
        store: address of a store, or a recipe for its `tracking.uri`; None = the default.
        port: of the server; if it is taken, a free port is used.

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
        experiments = [one.experiment_id for one in client.search_experiments()]
        newest = client.search_runs(
            experiments, order_by=["attributes.start_time DESC"], max_results=50
        )
        roots = [run for run in newest if PARENT_TAG not in run.data.tags] or list(newest)
        if not roots:
            raise ValueError(f"{safe_uri(uri)} has no run yet; train first, or give another store")
        experiment, kind = roots[0].info.experiment_id, roots[0].data.tags.get(KIND, "")
        print(runs_page(address, experiment, share_view(client, experiment, kind)), flush=True)
    if is_file:
        words = [
            "-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port),
            "--workers", "1",  # enough for one reader; MLflow's four start slowly
        ]  # fmt: skip
        os.execv(sys.executable, (sys.executable, *words))  # noqa: S606


def _free(port: int) -> int:
    # This port, or if it is taken a free one.
    with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
        return int(server.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_replay(log: Path, uri: str) -> int:
    """Send a run's log to a tracking server; returns 1 if not everything was sent.

    Raises:
        ValueError: there is no such log, or the address cannot be replayed to.
    """
    is_address = "://" in uri or uri in ("databricks", "uc")
    if not is_address or re.fullmatch(r"sqlite:/*(:memory:)?", uri):  # memory: lost at the end
        raise ValueError(
            f"URI {uri!r} is not an address; give sqlite:///mlflow.db or http://HOST:PORT"
        )
    result = replay(log, uri)
    print(f"{result.num_points} points were new")
    for refused in result.refused:
        print(f"not sent: {refused}", file=sys.stderr)
    return 1 if result.refused else 0
