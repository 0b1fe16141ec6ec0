"""The Python interface: recipes, models, weights, data sets, and whole trainings.

`from vit_ray import build_model` and so on give the same names without importing what they do not
need. `train` and `evaluate` are only here: `vit_ray.train` and `vit_ray.evaluate` are packages.
"""

from vit_ray.config import Recipe, load_recipe
from vit_ray.data.images.explore import open_dataset
from vit_ray.evaluate.few_shot import few_shot_accuracy
from vit_ray.experiments.sweep import SweepResult, run_sweep
from vit_ray.launch.inputs.training_batches import training_batches
from vit_ray.launch.run import RunResult, evaluate, finetune, train
from vit_ray.models import build_model, model_names
from vit_ray.models.flops import forward_macs, training_exaflops
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.own_parts import trust_modules

__all__ = [
    "Recipe",
    "RunResult",
    "SweepResult",
    "build_model",
    "evaluate",
    "few_shot_accuracy",
    "finetune",
    "forward_macs",
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
