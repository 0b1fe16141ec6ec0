"""The best evaluation of a run as its result, where the run keeps its best.

Its metrics are recorded as `eval/best_top1`, `few_shot/best_5_shot_top1` and so on, with the step
and the number of evaluations that it is the best of.
"""

from collections.abc import Mapping

from vit_ray.metric_names import BEST, RESULT_EVALUATIONS, RESULT_STEP


def without_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics without those of a best evaluation."""
    of_result = (RESULT_STEP, RESULT_EVALUATIONS)
    return {k: v for k, v in metrics.items() if BEST not in k and k not in of_result}


def with_best(metrics: Mapping[str, float]) -> dict[str, float]:
    """Results of a run by their plain names: of its best evaluation, where it keeps that.

    Those of the last evaluation stand beside them as `eval/last_top1` and so on.
    """
    results = dict(metrics)
    for key, value in metrics.items():
        if BEST in key:
            plain = key.replace(BEST, "/", 1)
            if plain in metrics:
                results["/last_".join(plain.rsplit("/", 1))] = metrics[plain]
            results[plain] = value
    return results
