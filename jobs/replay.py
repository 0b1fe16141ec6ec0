"""Send metrics that MLflow missed: `python jobs/replay.py runs/NAME/metrics.jsonl URI`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("replay")
