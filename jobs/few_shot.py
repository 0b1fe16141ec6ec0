"""Few-shot accuracy of weights: `python jobs/few_shot.py RECIPE init_from=RUN [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("few_shot")
