"""The best evaluation so far: keeping the best, and early stopping."""

import math
from collections.abc import Mapping

from vit_ray.checkpoints.checkpoint import Progress
from vit_ray.measure.best_evaluation import without_best
from vit_ray.metric_names import RESULT_EVALUATIONS, RESULT_STEP, best_key


def judge_evaluation(
    progress: Progress, metrics: Mapping[str, float], *, keeps_best: bool, patience: int | None
) -> tuple[bool, dict[str, float]]:
    """Compare an evaluation with the best so far; updates `progress`, and ends it when patience is
    used up.

    Args:
        metrics: of the evaluation, with `progress.loss_key`.
        patience: `train.early_stopping`.

    Returns:
        Whether its validation loss is the best so far, and the metrics of the best evaluation if
        the run keeps its best.
    """
    loss = metrics[progress.loss_key]
    if progress.best_loss_key != progress.loss_key:  # losses of other weights are not compared
        progress.best_loss_key = progress.loss_key
        progress.best_eval_loss, progress.evals_without_best, progress.num_evals = None, 0, 0
    progress.eval_step = progress.step
    progress.num_evals += 1
    best = progress.best_eval_loss
    is_best = math.isfinite(loss) and (best is None or not math.isfinite(best) or loss < best)
    of_best: dict[str, float] = {}
    if not keeps_best:
        progress.metrics = without_best(progress.metrics)
    elif is_best or RESULT_STEP in progress.metrics:
        of_best[RESULT_EVALUATIONS] = progress.num_evals
        if is_best:
            progress.metrics = without_best(progress.metrics)
            of_best |= {best_key(key): value for key, value in metrics.items()}
            of_best[RESULT_STEP] = progress.step
        progress.metrics |= of_best
    if is_best:
        progress.best_eval_loss, progress.evals_without_best = loss, 0
        return True, of_best
    progress.evals_without_best += 1
    if patience is not None and progress.evals_without_best >= patience:
        count = progress.evals_without_best
        progress.ended = f"no better validation loss in {count} evaluations"
    return False, of_best
