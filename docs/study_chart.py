"""Draws the README's picture from the study on CIFAR-10 whose store is in `benchmarks/results`.

python docs/study_chart.py
"""

import lzma
import tempfile
from pathlib import Path

from vit_ray.report.figures import fig_compute
from vit_ray.report.runs import load_runs, trainings
from vit_ray.report.tables import cells_of, comparable

ROOT = Path(__file__).parents[1]
STORE = ROOT / "benchmarks/results/study_cifar10_cpu_2026-11-25/store/mlflow.db.xz"


def draw(picture: Path) -> None:
    """Accuracy against compute on all training images, as on the page of the study."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "mlflow.db"
        store.write_bytes(lzma.decompress(STORE.read_bytes()))
        cells = comparable(cells_of(trainings(load_runs(f"sqlite:///{store}", "cifar10-study"))))
    figure = fig_compute(cells[cells["images"] == cells["images"].max()])
    figure.savefig(picture, dpi=150)


if __name__ == "__main__":
    draw(ROOT / "docs/pictures/study.png")
