"""Features as parquet: `python jobs/extract_features.py RECIPE init_from=RUN [key=value ...]`."""

from vit_ray.commands.cli import run_job

if __name__ == "__main__":
    run_job("extract_features")
