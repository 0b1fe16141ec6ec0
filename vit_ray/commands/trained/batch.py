"""`vit-ray batch RUN|RECIPE step=k`: the crops of a step, before mixing and masking.

It reads only what the step reads: no Ray, no cluster, no weights.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.evaluation.examples import sheet
from vit_ray.launch.dataset import SeenBatches
from vit_ray.launch.named_run import find_run

MOST_SHOWN: Final = 64
"""Images in the picture; the table has all of them."""


def show_batch(source: str, words: Sequence[str], out: str | None) -> int:
    """Write a picture and a table, and print their paths.

    Args:
        source: a run or recipe, as `find_run` takes it.
        words: `step=k`, and changes of the recipe.
        out: folder to write; None for one named after the run and the step.

    Raises:
        ValueError: there is no such step, the folder is not empty, or as `find_run`.
    """
    changes = [word for word in words if not word.startswith("step=")]
    asked = [word.removeprefix("step=") for word in words if word.startswith("step=")]
    if len(asked) != 1 or not asked[0].isdecimal():
        raise ValueError("give one step, counted from 0, such as step=0")
    run = find_run(source, changes)
    step = run.checked_step(int(asked[0]))
    folder = Path(out or f"{run.recipe.name}-step-{step}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    pixels, rows = SeenBatches(run.resolved).read(step)
    table, picture = folder / "batch.parquet", folder / "batch.png"
    pq.write_table(pa.Table.from_pylist(rows), table)
    title = f"{run.recipe.name}, step {step}"
    title += f", the first {MOST_SHOWN} of {len(rows):,}" if len(rows) > MOST_SHOWN else ""
    shown = rows[:MOST_SHOWN]
    names = [f"{row['sample']} {', '.join(row['classes']) or 'no label'}" for row in shown]
    sheet(list(pixels[:MOST_SHOWN]), names, title).save(picture)
    print(f"wrote {picture}\nwrote {table}")
    return 0
