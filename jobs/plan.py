"""What a training costs before it starts: `python jobs/plan.py RECIPE [key=value ...]`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.plan import describe_plan

if __name__ == "__main__":
    run_job(
        "Memory per GPU for each ZeRO stage, communication, step and run time on plan.num_gpus "
        "of plan.device; starts nothing.",
        lambda recipe: print(describe_plan(recipe)),
        describe_plan,
    )
