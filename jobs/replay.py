"""Send metrics that MLflow missed: `python jobs/replay.py runs/NAME/metrics.jsonl URI`."""

from vit_ray.commands.replay import run_replay

if __name__ == "__main__":
    run_replay()
