"""What a report lacks, in sentences for its reader."""

from __future__ import annotations

from collections.abc import Sequence

from vit_ray.report.runs import Archive, RecordedRun

MEASURED_KINDS = ("study_cell", "pretrain", "finetune")
"""Those whose accuracy is a result; trials of a sweep are measured so on purpose."""
LONGEST_LIST = 12
"""Names in one sentence."""


def what_is_missing(
    archive: Archive, shown: Sequence[RecordedRun], hidden: Sequence[RecordedRun]
) -> list[str]:
    """One sentence for each kind of gap; none where the report is whole.

    Args:
        shown: the trainings of the report.
        hidden: those that stand aside, see `one_run_a_cell`.
    """
    if not archive.runs:
        return [f"{archive.experiment!r} holds no runs yet; this page is empty until one begins"]
    finished = [run for run in shown if run.status == "FINISHED"]
    named = {
        "failed": [run for run in shown if run.status == "FAILED"],
        "stopped before the end": [run for run in shown if run.status == "KILLED"],
        "not finished, shown as far as recorded": [
            run for run in shown if run.status in ("RUNNING", "SCHEDULED")
        ],
        "finished without an accuracy, and so in no figure of accuracy": [
            run for run in finished if not _has_accuracy(run)
        ],
        "measured on images held out of the training set, and so neither a best accuracy, nor in a "
        "table of the paper or a law": [
            run for run in finished if run.is_on_dev("eval/top1") and run.kind in MEASURED_KINDS
        ],
        "fine-tuned from weights whose pre-training is not among these runs, and so in no figure "
        "over compute": [
            run
            for run in finished
            if "study/exaflops" in run.recorded and run.in_all("study/exaflops") is None
        ],
        "finished without exaFLOPs, and so not in figures over compute": [
            run for run in finished if run.kind == "study_cell" and not _has_compute(run)
        ],
        "another record of a training that is shown by a newer or finished one": list(hidden),
    }
    named |= {
        f"best of {count} evaluations on the test set": [
            run for run in finished if run.best_of_tests == count
        ]
        for count in sorted({run.best_of_tests or 0 for run in finished} - {0})
    }
    gaps = [f"{len(runs)} {what}: {_list(runs)}" for what, runs in named.items() if runs]
    return gaps + [
        text for parent in archive.runs for text in _untrained_cells(parent, [*shown, *hidden])
    ]


def _untrained_cells(parent: RecordedRun, runs: Sequence[RecordedRun]) -> list[str]:
    """Of a study that says how many cells it has, those that no run is of."""
    total = parent.tags.get("vit_ray.num_cells", "")
    mine = (run for run in runs if run.parent_id == parent.run_id and run.kind == "study_cell")
    begun = len({run.name for run in mine})
    if parent.kind != "study" or not total.isdecimal() or begun >= int(total):
        return []
    return [f"{int(total) - begun} of {total} cells of {parent.name} have not begun"]


def _has_accuracy(run: RecordedRun) -> bool:
    return any(key.endswith("top1") for key in run.metrics)


def _has_compute(run: RecordedRun) -> bool:
    return "study/exaflops" in run.metrics


def _list(runs: Sequence[RecordedRun]) -> str:
    names = ", ".join(run.name for run in runs[:LONGEST_LIST])
    more = len(runs) - LONGEST_LIST
    return f"{names} and {more} more" if more > 0 else names
