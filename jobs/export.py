"""Write weights for other programs: `python jobs/export.py RECIPE init_from=RUN export.path=F`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("export")
