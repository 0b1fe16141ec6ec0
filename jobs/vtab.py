"""Fine-tune on the tasks of VTAB-1k: `python jobs/vtab.py RECIPE init_from=RUN [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("vtab")
