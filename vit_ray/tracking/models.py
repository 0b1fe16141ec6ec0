"""Models of a command's runs, which another process logs in MLflow: it imports pandas and SciPy."""

import atexit
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vit_ray.tracking.metrics_log import MetricsLog, Record
from vit_ray.tracking.store_requests import redact_uri

MODELS_S: Final = 300.0
"""Limit for logging the models of a command."""

Model = tuple[str | None, Record]
"""A model to log: its MLflow run, and its record."""

logger = logging.getLogger(__name__)


def log_models_later(uri: str, log_path: Path) -> threading.Thread:
    """Log the models of a run and its child runs, for which the command's last line does not wait.

    The process waits for this thread before it ends, but not forever.
    """
    thread = threading.Thread(target=_log_models_of, args=(uri, log_path), daemon=True)
    thread.start()
    atexit.register(thread.join, MODELS_S + 30)
    return thread


def _log_models_of(uri: str, log_path: Path) -> None:
    found = recorded_models(log_path)
    problems = log_models(uri, [model for _, model in found])
    for (path, _), problem in zip(found, problems, strict=True):
        if problem:
            text = "a model is not logged (%s); run: vit-ray replay %s URI"
            logger.warning(text, problem, path)


def recorded_models(log_path: Path) -> list[tuple[Path, Model]]:
    """Models of a run and its child runs, each with the log that it is in.

    Until MLflow has all of a log, the noted run may be that of the folder's original.
    """
    found, paths = list[tuple[Path, Model]](), [log_path]
    for path in paths:
        log = MetricsLog(path)
        sent = log.read_sent()
        run_id = sent.run_id if sent.offset >= log.size else None
        for record in log.records("child", "model"):
            if record["kind"] == "model":
                found.append((path, (run_id, record)))
            elif (child := Path(record["path"])) not in paths:
                paths.append(child)
    return found


def log_models(uri: str, models: Sequence[Model]) -> list[str]:
    """Log models; says why each of them is not logged, empty if it is."""
    if not models:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-m", "vit_ray.tracking.mlflow_model"],
            input=json.dumps([uri, list(models)]),
            capture_output=True,
            text=True,
            check=True,
            timeout=MODELS_S,
        )
        return [redact_uri(one, uri) for one in json.loads(done.stdout.splitlines()[-1])]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return [redact_uri(repr(error), uri)] * len(models)
