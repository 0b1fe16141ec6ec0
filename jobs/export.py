"""Write weights for other programs: `python jobs/export.py RECIPE init_from=RUN export.path=F`."""

from vit_ray.commands.cli import run_job
from vit_ray.commands.export import export

if __name__ == "__main__":
    run_job(
        "Write the weights in init_from (a run, a checkpoint or a published file) to export.path "
        "in export.layout: jax, timm, huggingface or vit_ray.",
        export,
    )
