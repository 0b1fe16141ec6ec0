"""Pre-train a model: `python jobs/pretrain.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.dry_run import describe_training
from vit_ray.commands.train import pretrain

if __name__ == "__main__":
    run_job(
        "Pre-train a model on a converted data set, or continue a run of the same name.",
        pretrain,
        describe_training,
    )
