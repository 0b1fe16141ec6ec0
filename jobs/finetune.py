"""Fine-tune: new head, positions resized: `python jobs/finetune.py RECIPE [key=value ...]`."""

from vit_ray.launch.command import run_job
from vit_ray.launch.dry_run import describe_training
from vit_ray.launch.reports import print_result
from vit_ray.launch.trainer import finetune

if __name__ == "__main__":
    run_job(
        "Fine-tune the weights in init_from: new zero head, positions resized.",
        lambda recipe: print_result(finetune(recipe)),
        describe_training,
    )
