"""Pre-train a model: `python jobs/pretrain.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.dry_run import describe_training
from vit_ray.launch.reports import print_result
from vit_ray.launch.trainer import train

if __name__ == "__main__":
    run_job(
        "Pre-train a model on a converted data set, or continue a run of the same name.",
        lambda recipe: print_result(train(recipe)),
        describe_training,
    )
