"""A single training or evaluation, and what is printed for it."""

from vit_ray.config import Recipe
from vit_ray.launch import run
from vit_ray.launch.paper_comparison import evaluation_table
from vit_ray.launch.terminal import RunStoppedError


def pretrain(recipe: Recipe) -> int:
    """Train from the start, or from the newest checkpoint of this run name."""
    return print_result(run.train(recipe))


def finetune(recipe: Recipe) -> int:
    """Train from the weights in `init_from` with a new head."""
    return print_result(run.finetune(recipe))


def evaluate(recipe: Recipe) -> int:
    """Measure the weights in `init_from`; exit code 3 if it was stopped on request."""
    try:
        result = run.evaluated(recipe)
        print_metrics(result.metrics, result.num_eval_images)
        print_beside_paper(evaluation_table(recipe, result.metrics))
        print_link(result.hint, result.run_id)
        return 0
    except RunStoppedError as stopped:
        print(stopped)
        return 3
