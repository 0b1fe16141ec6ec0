"""The Python interface: recipes, models, weights, data sets, and whole trainings.

`vit_ray` has the same names, except `run_sweep` and the results, and imports what they need on
first use.
"""

from vit_ray.config import Recipe, load_recipe
from vit_ray.evaluation.few_shot import few_shot_accuracy
from vit_ray.experiments.sweep import SweepResult, run_sweep
from vit_ray.launch.dataset import open_dataset, training_batches
from vit_ray.launch.run import RunResult, evaluate, finetune, train
from vit_ray.launch.trained_model import TrainedModel, load
from vit_ray.models import build_model, model_names
from vit_ray.models.flops import forward_macs, training_exaflops
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.own_parts import trust_modules

__all__ = [
    "Recipe",
    "RunResult",
    "SweepResult",
    "TrainedModel",
    "build_model",
    "evaluate",
    "few_shot_accuracy",
    "finetune",
    "forward_macs",
    "load",
    "load_recipe",
    "load_weights",
    "model_names",
    "open_dataset",
    "run_sweep",
    "save_weights",
    "train",
    "training_batches",
    "training_exaflops",
    "trust_modules",
]
