"""Fine-tune: new head, positions resized: `python jobs/finetune.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.dry_run import describe_training
from vit_ray.commands.train import finetune

if __name__ == "__main__":
    run_job(
        "Fine-tune the weights in init_from: new zero head, positions resized.",
        finetune,
        describe_training,
    )
