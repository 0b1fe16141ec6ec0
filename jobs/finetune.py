"""Fine-tune: new head, positions resized: `python jobs/finetune.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("finetune")
