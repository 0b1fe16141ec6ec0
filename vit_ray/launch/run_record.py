"""The record of a run in MLflow: its contents, and how a command opens and ends it.

Only keys that decide the training are parameters: MLflow's compare view draws the parameters that
differ, which are then those that a sweep or a study varies.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

import psutil
import ray
from joblib import cpu_count

from vit_ray.addresses import absolute_uri, redact, redacted
from vit_ray.config import Recipe
from vit_ray.config.loading import write_yaml
from vit_ray.config.recipe import EVALUATED_SETS, is_trained
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.placement import give_back
from vit_ray.launch.resolved_run import ResolvedRun
from vit_ray.metric_names import (
    STUDY_EXAFLOPS,
    STUDY_FORWARD_GMACS,
    STUDY_IMAGES_SEEN,
    STUDY_STEPS,
    STUDY_TRAIN_IMAGES,
)
from vit_ray.outcomes import GROUP, KIND, RUN_FOLDER, RunStoppedError
from vit_ray.tracking.metrics_log import (
    FAILURE,
    MetricsLog,
    RunOpening,
    Status,
    lock_log,
    metrics_log_path,
)
from vit_ray.tracking.recorder import Recorder
from vit_ray.tracking.run_records import start_recorder
from vit_ray.tracking.tracker import Tracker, log_models_later

logger = logging.getLogger(__name__)

SIZES: Final = ("train.micro_batch_size", "train.zero_stage", "workers.num_workers")
NOTE: Final = "mlflow.note.content"
# Time limit of a git command, for a slow folder.
_GIT_S: Final = 10.0
_CONTEXTS: Final = {
    "train": "training",
    "eval": "evaluation",
    "dev": "held-out evaluation",
    "few_shot_train": "few-shot training",
    "few_shot_test": "few-shot evaluation",
}
# Sections of the recipe that runs of a kind need in addition to those of trainings.
_SECTIONS = {
    "sweep": ("sweep",), "study": ("study",), "vtab": ("vtab", "sweep"), "evaluate": ("benchmark",),
}  # fmt: skip


@dataclass
class OpenRun:
    """A run with an open record.

    Attributes:
        is_complete: set when the work is complete; otherwise the run ends as stopped.
    """

    record: Recorder
    is_complete: bool = False


def _opening(recipe: Recipe, run_id: str | None, **fields: Any) -> RunOpening:
    log_path = metrics_log_path(recipe.run_folder).absolute()
    fields["tags"] = {RUN_FOLDER: recipe.run_folder, **fields.get("tags", {})}
    return RunOpening(recipe.tracking, recipe.name, log_path, run_id, **fields)


@contextlib.contextmanager
def _open_run(opening: RunOpening, parent: OpenRun | None) -> Iterator[OpenRun]:
    """Open a run inside the block; a child run uses the recorder of its parent.

    The run ends as FINISHED, as KILLED if it was stopped, and as FAILED after any other error.
    """
    path, name = opening.log_path, opening.run_name
    if parent is None:
        record = start_recorder(opening.config.uri, path, name, command_line())
    else:
        record = replace(parent.record, log_path=path, run_name=name)
        opening = replace(opening, parent_log=parent.record.log_path)
    give_back(record.open(opening))
    run = OpenRun(record)
    status: Status = "FAILED"
    try:
        yield run
        status = "FINISHED" if run.is_complete else "KILLED"
    except (RunStoppedError, KeyboardInterrupt):
        status = "KILLED"
        raise
    except Exception as error:
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
            record.tag(FAILURE, str(error))
        raise
    finally:
        try:
            problem = record.finish(status)
        except (ray.exceptions.RayError, RuntimeError) as error:  # the result is valid without it
            problem = f"MLflow may not have all of it ({redact(str(error))})"
        if problem:
            logger.warning("run %s: %s; then run: vit-ray replay %s URI", name, problem, path)
        if parent is None:
            log_models_later(absolute_uri(opening.config.uri), path)


@contextlib.contextmanager
def open_record(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    cluster: ClusterShape,
    parent: OpenRun | None = None,
    *,
    run_id: str | None = None,
    tags: Mapping[str, str] | None = None,
    varied: Collection[str] = (),
    **opening: Any,
) -> Iterator[OpenRun]:
    """Record a run inside the block.

    Args:
        resolved: described in the run's metadata.
        parent: the sweep or study that the run is part of.
        run_id: the MLflow run to continue; None for a new one.
        tags: in addition to those that every run has.
        varied: keys or sections that only the child runs have as parameters or tags.
        opening: other fields of `RunOpening`.
    """

    def without_varied(facts: Mapping[str, str]) -> dict[str, str]:
        sections = tuple(f"{key}." for key in varied)
        return {key: value for key, value in facts.items() if not f"{key}.".startswith(sections)}

    command = parent.record.command if parent else command_line()
    facts = without_varied(run_facts(recipe, kind, resolved, cluster, command))
    start = _opening(
        recipe,
        run_id,
        params=without_varied(trained_params(recipe)),
        tags={**facts, **(tags or {})},
        datasets=data_inputs(resolved),
        **opening,
    )
    machine = {
        "driver": platform.node(),
        "cores_of_the_driver": cpu_count(),
        "ray_nodes": cluster.num_nodes,
        "ray_cpus": cluster.num_cpus,
        "ray_gpus": cluster.num_gpus,
        "ray": ray.__version__,
        "python": platform.python_version(),
    }
    written = recipe.written(*_SECTIONS.get(kind, ()))
    with _open_run(start, parent) as run:
        run.record.text("recipe.yaml", write_yaml(written), wait_s=0.0)
        run.record.text("machine.json", json.dumps(machine, indent=1), wait_s=0.0)
        yield run


def add_to_ended(
    recipe: Recipe, run_id: str | None, metrics: Mapping[str, float], parent: OpenRun
) -> None:
    """Add later measurements to the record of a run that has finished."""
    with _open_run(_opening(recipe, run_id, params=trained_params(recipe)), parent) as run:
        run.record.results(0, metrics)
        run.is_complete = True


def end_record(
    recipe: Recipe,
    run_id: str | None,
    step: int,
    metrics: Mapping[str, float],
    parent: OpenRun | None = None,
) -> str | None:
    """End the record of a complete training whose driver died before it recorded the end.

    Args:
        run_id: the MLflow run in the last checkpoint.
        step: the run's last step.
        metrics: recorded at this step.
        parent: the sweep or study that the run is part of.

    Returns:
        The MLflow run; None if the checkpoint has none and MLflow is away.
    """
    opening = _opening(recipe, run_id, parent_log=parent.record.log_path if parent else None)
    if MetricsLog(opening.log_path).end_is_sent("FINISHED"):
        return run_id
    # Imported here because it is rarely needed: MLflow takes seconds.
    from vit_ray.tracking.mlflow_client import asking

    with contextlib.ExitStack() as lock:
        try:
            # The log may be on another machine, so a run that has ended is not opened again.
            if run_id is not None:
                with asking(recipe.tracking.uri) as client:
                    if client.get_run(run_id).info.status == "FINISHED":
                        return run_id
            lock.enter_context(lock_log(opening.log_path))
        except (RuntimeError, TimeoutError, ValueError) as error:  # the next start tries again
            logger.warning("%s", error)
            return run_id
        tracker = Tracker.begin(opening)
        tracker.log.metrics(step, metrics)
        tracker.finish("FINISHED", timeout_s=10.0)
        return tracker.run_id or run_id


def trained_params(recipe: Recipe) -> dict[str, str]:
    """The keys that decide the training's result, its data and sizes; only those that are set."""
    flat = recipe.flat()
    return {
        key: value
        for key, value in flat.items()
        if is_trained(key) or key in (*SIZES, "data.train")
        if value != "None"
    }


def run_facts(
    recipe: Recipe,
    kind: str,
    resolved: ResolvedRun,
    cluster: ClusterShape,
    command: str,
) -> dict[str, str]:
    """Tags that record what ran, by whom, on which code, data and cluster.

    Args:
        command: the command line.
    """
    # In a container, and on a shared account, the MLflow log-in identifies the person.
    user = os.environ.get("MLFLOW_TRACKING_USERNAME") or psutil.Process().username()
    return {
        KIND: kind,
        GROUP: group_of(recipe, resolved),
        "vit_ray.git_commit": git_commit(),
        "vit_ray.data_fingerprint": resolved.manifest.fingerprint,
        "vit_ray.cluster": str(cluster),
        RUN_FOLDER: recipe.run_folder,
        "mlflow.user": user,
        "mlflow.source.name": command,
        "mlflow.source.type": "JOB",
        NOTE: description(recipe, resolved, command),
    }


def group_of(recipe: Recipe, resolved: ResolvedRun) -> str:
    """Digest of recipe, data sets and commit, equal for runs that differ only in the seed."""
    flat = recipe.flat()
    excluded = {"seed", "data.train", *EVALUATED_SETS}
    trained = {k: v for k, v in flat.items() if is_trained(k) and k not in excluded}
    data = {name: spec.manifest.fingerprint for name, spec in resolved.streams.items()}
    text = json.dumps([trained, data, git_commit()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def description(recipe: Recipe, resolved: ResolvedRun, command: str, result: str = "") -> str:
    """The run's description in MLflow, Markdown: the user's text, the result, model, data, length
    and command.
    """
    training = (
        f"{recipe.model.name} on {resolved.num_images:,} images of "
        f"{resolved.manifest.num_classes:,} classes, {resolved.total_steps:,} steps of "
        f"{recipe.train.global_batch_size}"
    )
    parts = [recipe.tracking.description, result, training, f"    {command}\n"]
    return "\n\n".join(filter(None, parts))


def data_inputs(resolved: ResolvedRun) -> list[dict[str, Any]]:
    """The data sets of a run for MLflow: name, fingerprint, path, counts, terms, use.

    MLflow keeps one input of a name and fingerprint: what is held out of a set has its own name.
    """
    inputs = []
    for use, spec in resolved.streams.items():
        manifest, context = spec.manifest, _CONTEXTS[use]
        path = redact(manifest.path)
        is_part = use != "train" and manifest.fingerprint == resolved.manifest.fingerprint
        counts = {"num_images": spec.num_images, "num_classes": manifest.num_classes}
        inputs.append({
            "name": PurePosixPath(path).name + (f" ({context})" if is_part else ""),
            "digest": manifest.fingerprint[:32],
            "source": path,
            "context": context,
            "profile": {**counts, **redacted(manifest.about)},
        })  # fmt: skip
    return inputs


def training_cost(resolved: ResolvedRun, steps: int) -> dict[str, float]:
    """Compute and data of this many steps: `study/...`."""
    from vit_ray.models.flops import count_exaflops, forward_macs  # with torch: seconds

    model, num_classes = resolved.recipe.model, resolved.manifest.num_classes
    macs = forward_macs(model.name, num_classes, model.image_size, **model.options())
    images_seen = steps * resolved.recipe.train.global_batch_size
    return {
        STUDY_EXAFLOPS: count_exaflops(macs, images_seen),
        STUDY_FORWARD_GMACS: macs / 1e9,
        STUDY_STEPS: float(steps),
        STUDY_IMAGES_SEEN: float(images_seen),
        STUDY_TRAIN_IMAGES: float(resolved.num_images),
    }


def command_line() -> str:
    """The command line, without secrets."""
    return redact(shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]))


def git_commit() -> str:
    """Commit of the running code, with "+" after changes; "unknown" outside a checkout.

    `VIT_RAY_GIT_COMMIT` gives the commit of a submitted job, whose folder has no .git.
    """
    if commit := os.environ.get("VIT_RAY_GIT_COMMIT"):
        return commit

    def git(*words: str) -> str:
        command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_GIT_S
        ).stdout.strip()

    try:
        # An installed package may be in an ignored folder of a repository that is the user's own.
        git("ls-files", "--error-unmatch", os.path.basename(__file__))
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
