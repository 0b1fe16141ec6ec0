"""`vit-ray ui [STORE]`: MLflow's pages of a store, and the link to its newest runs."""

import os
import socket
import sys
from contextlib import suppress

from vit_ray.addresses import absolute_uri, sqlite_file
from vit_ray.config import load_recipe
from vit_ray.config.loading import mlflow_variables
from vit_ray.config.schema import validated
from vit_ray.config.training_sections import TrackingConfig
from vit_ray.mlflow_internals import runs_page
from vit_ray.tracking.mlflow_client import MlflowClient, asking, share_view
from vit_ray.tracking.store_requests import safe_uri


def open_pages(store: str | None, port: int) -> int:
    """Print the link, and serve a SQLite file until Ctrl-C.

    Args:
        store: address of a store, or a recipe with its `tracking.uri`; None for the default.
        port: of the server; another one if that is taken.

    Raises:
        ValueError: there is no such store, or no run in it.
    """
    uri = absolute_uri(_address(store))
    is_file = sqlite_file(uri) is not None
    port = _free(port)
    address = f"http://127.0.0.1:{port}" if is_file else safe_uri(uri).rstrip("/")
    with asking(uri) as client:
        print(_newest(client, address, uri), flush=True)
    if is_file:
        words = ["-m", "mlflow", "ui", "--backend-store-uri", uri, "--port", str(port)]
        words += ["--workers", "1"]  # one reader; four take their time to start
        os.execv(sys.executable, (sys.executable, *words))  # noqa: S606
    return 0


def _address(store: str | None) -> str:
    if store and "://" not in store:
        return load_recipe(store).tracking.uri
    return store or validated(TrackingConfig, mlflow_variables(), "vit-ray ui").uri


def _newest(client: MlflowClient, address: str, uri: str) -> str:
    """The link to the experiment of the newest run without a parent."""
    everywhere = [one.experiment_id for one in client.search_experiments()]
    begun = client.search_runs(everywhere, order_by=["attributes.start_time DESC"], max_results=50)
    roots = [run for run in begun if "mlflow.parentRunId" not in run.data.tags] or list(begun)
    if not roots:
        raise ValueError(f"{safe_uri(uri)} has no run yet; train first, or give another store")
    run = roots[0]
    kind = run.data.tags.get("vit_ray.kind", "")
    return runs_page(
        address, run.info.experiment_id, share_view(client, run.info.experiment_id, kind)
    )


def _free(port: int) -> int:
    """This port, or if it is taken one that the system chooses."""
    with suppress(OSError), socket.create_server(("127.0.0.1", port)) as server:
        return int(server.getsockname()[1])
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
