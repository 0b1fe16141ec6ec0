"""The names of all metrics that runs record: `group/name_unit`.

Names with a number of shots, a data set or a task are built from a group below.
"""

from collections.abc import Mapping
from typing import Final

# Training, at each logged step.
TRAIN_LOSS: Final = "train/loss"
TRAIN_LR: Final = "train/lr"
TRAIN_GRAD_NORM: Final = "train/grad_norm"
TRAIN_SKIPPED_STEPS: Final = "train/skipped_steps"
TRAIN_IMAGES_PER_S: Final = "train/images_per_s"
DATA_WAIT_FRACTION: Final = "data/wait_fraction"
PERF_MODEL_TFLOPS_PER_GPU: Final = "perf/model_tflops_per_gpu"
PERF_MFU: Final = "perf/mfu"
PERF_STEP_MS_MEDIAN: Final = "perf/step_ms_median"
PERF_OWN_MS_MEDIAN: Final = "perf/own_ms_median"
PERF_OWN_MS_MAX: Final = "perf/own_ms_max"
PERF_SLOWEST_RANK: Final = "perf/slowest_rank"
PERF_MEMORY_GIB: Final = "perf/memory_gib"

# Start and checkpoints of an attempt.
STARTUP_FIRST_STEP_S: Final = "startup/first_step_s"
STARTUP_COMPILE_S: Final = "startup/compile_s"
PERF_COMPILED: Final = "perf/compiled"
CHECKPOINT_STALL_S: Final = "checkpoint/stall_s"

# Evaluation. `eval/` and `dev/` (held-out training images) have the same names.
EVAL_GROUP: Final = "eval/"
DEV_GROUP: Final = "dev/"
EVAL_TOP1: Final = "eval/top1"
EVAL_LOSS: Final = "eval/loss"
EVAL_LAST_TOP1: Final = "eval/last_top1"
EVAL_AVERAGED_TOP1: Final = "eval/averaged_top1"
DEV_TOP1: Final = "dev/top1"
DEV_LOSS: Final = "dev/loss"
FEW_SHOT_GROUP: Final = "few_shot/"

# Part of the name of every metric of averaged weights.
AVERAGED: Final = "/averaged_"

# Best evaluation of a run that keeps it: part of the names of its metrics, such as
# `eval/best_top1`; its step; and the number of evaluations from which it was selected.
BEST: Final = "/best_"
RESULT_STEP: Final = "result/step"
RESULT_EVALUATIONS: Final = "result/evaluations"

# A whole run.
RUN_GROUP: Final = "run/"
RUN_GOODPUT: Final = "run/goodput"
RUN_WALL_S: Final = "run/wall_s"
COST_CORE_DAYS: Final = "cost/core_days"
# Hours in which workers held GPUs.
COST_GPU_HOURS: Final = "cost/gpu_hours"
STUDY_EXAFLOPS: Final = "study/exaflops"
STUDY_STEPS: Final = "study/steps"
STUDY_FORWARD_GMACS: Final = "study/forward_gmacs"
STUDY_IMAGES_SEEN: Final = "study/images_seen"
STUDY_TRAIN_IMAGES: Final = "study/train_images"

# Many runs, recorded by their parent run.
STUDY_CELLS: Final = "study/cells"
STUDY_FAILED_CELLS: Final = "study/failed_cells"
SWEEP_GROUP: Final = "sweep/"
TRANSFER_GROUP: Final = "transfer/"
TRANSFER_MEAN_TOP1: Final = "transfer/mean_top1"
VTAB_GROUP: Final = "vtab/"
VTAB_NUM_TASKS: Final = "vtab/tasks"


def few_shot_top1(shots: int) -> str:
    """Accuracy with this many images per class, by least squares."""
    return f"{FEW_SHOT_GROUP}{shots}_shot_top1"


def best_key(key: str) -> str:
    """The name of an evaluation's metric for the best evaluation."""
    return BEST.join(key.rsplit("/", 1))


def averaged_key(key: str) -> str:
    """The same metric, with averaged weights."""
    return key.replace("/", AVERAGED, 1)


def without_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without those of a best evaluation."""
    result_keys = (RESULT_STEP, RESULT_EVALUATIONS)
    return {k: v for k, v in metrics.items() if BEST not in k and k not in result_keys}


def with_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Results of a run by their plain names: of its best evaluation, if it keeps that.

    Metrics of the last evaluation are then `eval/last_top1` and so on.
    """
    results = dict(metrics)
    for key, value in metrics.items():
        if BEST in key:
            plain = key.replace(BEST, "/", 1)
            if plain in metrics:
                results["/last_".join(plain.rsplit("/", 1))] = metrics[plain]
            results[plain] = value
    return results
