"""A run's metadata in MLflow: parameters, tags, data sets and the recipe.

Parameters are only those that train, so that MLflow's compare view, which draws the parameters that
differ, draws what a sweep or a study varies.
"""

import getpass
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import PurePosixPath
from typing import Any, Final

import ray
from joblib import cpu_count

from vit_ray.addresses import redact, redacted
from vit_ray.config import Recipe
from vit_ray.config.keys import (
    EVALUATED_SETS,
    GROUP,
    KIND,
    RUN_FOLDER,
    TAGGED,
    is_trained,
    unused_keys,
)
from vit_ray.launch.connection import ClusterShape
from vit_ray.launch.resolved_run import ResolvedRun
from vit_ray.metric_names import (
    STUDY_EXAFLOPS,
    STUDY_FORWARD_GMACS,
    STUDY_IMAGES_SEEN,
    STUDY_STEPS,
    STUDY_TRAIN_IMAGES,
)

SIZES: Final = ("train.micro_batch_size", "train.zero_stage", "workers.num_workers")
SOURCE_NAME: Final = "mlflow.source.name"
NOTE: Final = "mlflow.note.content"
GIT_S: Final = 10.0
"""Time limit of a git command, for a slow folder."""
_CONTEXTS: Final = {
    "train": "training",
    "eval": "evaluation",
    "dev": "held-out evaluation",
    "few_shot_train": "few-shot training",
    "few_shot_test": "few-shot evaluation",
}


def trained_params(recipe: Recipe) -> dict[str, str]:
    """The keys that decide the training's result, and its sizes; only those that are set."""
    flat = recipe.flat()
    left_out = {*TAGGED, *unused_keys(flat)}
    return {
        key: value
        for key, value in flat.items()
        if (is_trained(key) and key not in left_out) or key in SIZES
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
        command: the line that was typed.
    """
    flat = recipe.flat()
    try:
        # In a container, and on a shared account, the MLflow log-in says more.
        user = os.environ.get("MLFLOW_TRACKING_USERNAME") or getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return {
        **{key: flat[key] for key in TAGGED if flat[key] not in ("None", "0.0")},
        KIND: kind,
        GROUP: group_of(recipe, resolved),
        "vit_ray.git_commit": git_commit(),
        "vit_ray.data_fingerprint": resolved.manifest.fingerprint,
        "vit_ray.cluster": str(cluster),
        RUN_FOLDER: recipe.run_folder,
        "mlflow.user": user,
        SOURCE_NAME: command,
        "mlflow.source.type": "JOB",
        NOTE: description(recipe, resolved, command),
    }


def group_of(recipe: Recipe, resolved: ResolvedRun) -> str:
    """Digest of what two runs share that differ by the seed alone: recipe, data sets, commit."""
    flat = recipe.flat()
    left_out = {"seed", "data.train", *EVALUATED_SETS, *unused_keys(flat)}
    decides = {k: v for k, v in flat.items() if is_trained(k) and k not in left_out}
    data = {name: spec.manifest.fingerprint for name, spec in resolved.streams.items()}
    text = json.dumps([decides, data, git_commit()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def description(recipe: Recipe, resolved: ResolvedRun, command: str, result: str = "") -> str:
    """The run's description in MLflow, Markdown: the user's own, the result, model, data, length
    and command.
    """
    first = [recipe.tracking.description or "", result]
    what = (
        f"{recipe.model.name} on {resolved.num_images:,} images of "
        f"{resolved.manifest.num_classes:,} classes, {resolved.total_steps:,} steps of "
        f"{recipe.train.global_batch_size}"
    )
    return "\n\n".join([*filter(None, first), what, f"    {command}\n"])


def machine_facts(cluster: ClusterShape) -> str:
    """The driver's machine, and what Ray knows about the machines, as JSON."""
    facts = {
        "driver": platform.node(),
        "cores_of_the_driver": cpu_count(),
        "ray_nodes": cluster.num_nodes,
        "ray_cpus": cluster.num_cpus,
        "ray_gpus": cluster.num_gpus,
        "ray": ray.__version__,
        "python": platform.python_version(),
    }
    return json.dumps(facts, indent=1)


def data_inputs(resolved: ResolvedRun) -> list[dict[str, Any]]:
    """The data sets of a run as MLflow shows them: name, fingerprint, path, counts, terms, use."""
    found = []
    for name, spec in resolved.streams.items():
        path = redact(spec.manifest.path)
        profile = {
            "num_images": spec.num_images,
            "num_images_of_the_whole": spec.manifest.num_images,
            "num_classes": spec.manifest.num_classes,
            **redacted(spec.manifest.about),
        }
        found.append(
            {
                "name": PurePosixPath(path).name,
                "digest": spec.manifest.fingerprint[:32],
                "source": path,
                "context": _CONTEXTS[name],
                "profile": profile,
            }
        )
    return found


def training_cost(resolved: ResolvedRun, steps: int) -> dict[str, float]:
    """Compute and data of this many steps: `study/...`."""
    from vit_ray.models.flops import forward_macs  # with torch: seconds
    from vit_ray.training.memory_estimate import run_exaflops

    model, batch = resolved.recipe.model, resolved.recipe.train.global_batch_size
    macs = forward_macs(
        model.name, resolved.manifest.num_classes, model.image_size, **model.options()
    )
    images_seen = steps * batch
    return {
        STUDY_EXAFLOPS: run_exaflops(resolved.recipe, resolved.manifest.num_classes, images_seen),
        STUDY_FORWARD_GMACS: macs / 1e9,
        STUDY_STEPS: float(steps),
        STUDY_IMAGES_SEEN: float(images_seen),
        STUDY_TRAIN_IMAGES: float(resolved.num_images),
    }


def command_line() -> str:
    """The command line, without secrets."""
    return redact(shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]]))


def git_commit() -> str:
    """Commit of the running code, with "+" if it was changed since; "unknown" outside a checkout.

    The folder of a submitted job has no .git: `VIT_RAY_GIT_COMMIT` gives the commit there.
    """
    if commit := os.environ.get("VIT_RAY_GIT_COMMIT"):
        return commit
    git = ["git", "-C", os.path.dirname(os.path.abspath(__file__))]
    # An installed package may be in an ignored folder of a repository that is the user's own.
    is_tracked = ["ls-files", "--error-unmatch", os.path.basename(__file__)]
    asked = is_tracked, ["rev-parse", "HEAD"], ["status", "--porcelain"]
    try:
        _, commit, changes = (
            subprocess.run(
                [*git, *words], capture_output=True, text=True, check=True, timeout=GIT_S
            ).stdout.strip()
            for words in asked
        )
        return commit + ("+" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
