"""What a report lacks, in sentences for its reader."""

from collections.abc import Sequence

from vit_ray.config.secrets import redact
from vit_ray.metric_names import EVAL_TOP1, STUDY_EXAFLOPS
from vit_ray.report.copied_store import local_folder
from vit_ray.report.runs import Archive, RecordedRun
from vit_ray.report.tables import first_of

MEASURED_KINDS = ("study_cell", "pretrain", "finetune")
"""Runs whose accuracy is a result; a sweep's trials are measured on a dev split on purpose."""
LONGEST_LIST = 12
"""Names in one sentence."""


def what_is_missing(
    archive: Archive, shown: Sequence[RecordedRun], hidden: Sequence[RecordedRun]
) -> list[str]:
    """One sentence for each kind of gap; empty if the report is complete.

    Args:
        shown: the trainings of the report.
        hidden: those that are left out, see `one_run_a_cell`.
    """
    if not archive.runs:
        return [f"{archive.experiment!r} holds no runs yet; this page is empty until one begins"]
    finished = [run for run in shown if run.status == "FINISHED"]
    is_tested = any(EVAL_TOP1 in run.metrics and run.is_tested(EVAL_TOP1) for run in finished)
    named = {
        "failed": [run for run in shown if run.status == "FAILED"],
        "stopped before the end": [run for run in shown if run.status == "KILLED"],
        "not finished, shown as far as recorded": [
            run for run in shown if run.status in ("RUNNING", "SCHEDULED")
        ],
        "finished without an accuracy, and so in no figure of accuracy": [
            run for run in finished if not any(key.endswith("top1") for key in run.metrics)
        ],
        "measured on held-out training images, and so not compared with accuracies on a test set": [
            run
            for run in finished
            if run.is_on_dev(EVAL_TOP1) and run.kind in MEASURED_KINDS and is_tested
        ],
        "fine-tuned from weights whose pre-training is not among these runs, and so in no figure "
        "over compute": [
            run
            for run in finished
            if STUDY_EXAFLOPS in run.recorded and run.in_all(STUDY_EXAFLOPS) is None
        ],
        "finished without exaFLOPs, and so not in figures over compute": [
            run
            for run in finished
            if run.kind == "study_cell" and STUDY_EXAFLOPS not in run.metrics
        ],
        "another record of a training that is shown by a newer or finished one": list(hidden),
    }
    for run in finished:
        if run.best_of_tests:
            one_of = f"the best of {run.best_of_tests} evaluations on the test set"
            what = f"with an accuracy that is {one_of}"
            named.setdefault(what, []).append(run)
    found = []
    for what, runs in named.items():
        if len(runs) == len(shown) > LONGEST_LIST:
            found.append(f"all {len(runs)} {what}")
        elif runs:
            names = first_of([run.name for run in runs], LONGEST_LIST)
            found.append(f"{len(runs)} {what}: {names}")
    for parent in archive.runs:
        # A study records how many cells it has.
        total = parent.tags.get("vit_ray.num_cells", "")
        mine = [run for run in (*shown, *hidden) if run.parent_id == parent.run_id]
        begun = len({run.name for run in mine if run.kind == "study_cell"})
        if parent.kind == "study" and total.isdecimal() and begun < int(total):
            found.append(f"{int(total) - begun} of {total} cells of {parent.name} have not begun")
    # Only the page of one training shows files.
    alone = shown[0] if len(shown) == 1 else None
    if alone is not None and alone.kind and not archive.paths(alone):
        recorded = str(alone.run.info.artifact_uri)
        place = local_folder(recorded) or redact(recorded)
        found.append(
            f"the files of run {alone.name} cannot be read at {place}: images, errors and events "
            "are not shown"
        )
    return found
