"""`vit-ray batch RUN|RECIPE step=k`: the images of a step as the model sees them, on one page.

It reads only what the step reads: no Ray, no cluster, no weights.
"""

import io
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from vit_ray.config.secrets import redact
from vit_ray.data.images.crops import UInt8Array, decode
from vit_ray.evaluation.contact_sheet import SIDE, sheet, square, strip
from vit_ray.launch.inputs.seen_batch import SeenBatches, SeenImage
from vit_ray.launch.inputs.stream_cost import STAGES, stream_cost
from vit_ray.launch.named_run import NamedRun, find_run
from vit_ray.metric_names import TRAIN_LOSS
from vit_ray.report.document import Gallery, Section, write_page
from vit_ray.report.tables import Column, Table
from vit_ray.tracking.metrics_log import MetricsLog, metrics_log_path

MOST_SHOWN: Final = 64
"""Images of a step on the page and in the picture; the table has all of them."""
MOST_BYTES: Final = 1 << 30
"""Most bytes read without `--large`; in this command, from a remote store."""
_BOX_COLOR: Final = (255, 64, 64)


def show_batch(
    source: str,
    words: Sequence[str],
    out: str | None,
    is_with_originals: bool,
    is_large: bool,
    is_timed: bool,
) -> int:
    """Write the page, the picture and the tables, and print their paths; or the steps of a sample.

    Args:
        source: a run or recipe, as `find_run` takes it.
        words: `step=k`, `step=k:n`, `sample=NUMBER` or `key=KEY`; `rank=r/n`; and changes of the
            recipe.
        out: folder to write; None for one named after the run and the step.
        is_with_originals: also write the stored files.
        is_large: read any number of bytes.
        is_timed: write nothing, and print the cost of each stage of the stream.

    Raises:
        ValueError: an argument is wrong, the run has no such step, rank or sample, or as
            `find_run`.
    """
    asked = {key: value for key, _, value in (word.partition("=") for word in words)}
    names = ("step", "sample", "key", "rank")
    own: dict[str, str] = {key: asked[key] for key in names if key in asked}
    if len(own.keys() & {"step", "sample", "key"}) != 1:
        raise ValueError(
            "no step is given; give step=K, step=K:N, sample=NUMBER or key=KEY, such as step=0"
        )
    run = find_run(source, [word for word in words if word.partition("=")[0] not in own])
    batches = SeenBatches(run.resolved)
    if "step" not in own:
        for sample in _samples(run, batches, own):
            _print_steps(run, batches, sample)
        return 0
    steps = run.checked_steps(_steps(own["step"]))
    places = _places(own.get("rank"), run, steps)
    costs = [batches.cost(step) for step in steps]
    groups, size = (sum(column) for column in zip(*costs, strict=True))
    is_remote = "://" in run.resolved.manifest.path
    print(f"reads {groups:,} row groups, {size / 2**20:,.1f} MiB", file=sys.stderr, flush=True)
    if is_remote and size > MOST_BYTES and not is_large:
        raise ValueError(
            f"{size / 2**30:.1f} GiB would be read from {run.resolved.manifest.path}; give fewer "
            "steps, or --large"
        )
    if is_timed:
        _print_cost(run, steps)
        return 0
    folder = new_folder(out or f"{run.recipe.name}-step-{own['step'].replace(':', '-')}")
    _write(run, batches, steps, places, folder, is_with_originals)
    return 0


def new_folder(name: str) -> Path:
    """The folder, made now unless it is there and empty.

    Raises:
        ValueError: there is something in it, or a file in its place.
    """
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _steps(text: str) -> range:
    """The steps of `100` or `100:110`."""
    if not (found := re.fullmatch(r"(\d+)(?::(\d+))?", text)):
        raise ValueError(f"step={text}: give a number, or a range such as 100:110")
    first = int(found[1])
    return range(first, int(found[2]) if found[2] else first + 1)


def _places(rank: str | None, run: NamedRun, steps: range) -> range:
    """Positions in the global batch: all, or those of rank `r/n`, or `r` if n is known."""
    batch = run.recipe.train.global_batch_size
    if rank is None:
        return range(batch)
    found = re.fullmatch(r"(\d+)(?:/(\d+))?", rank)
    number, world = (int(found[1]), int(found[2] or 0)) if found else (0, 0)
    if found and not found[2]:
        try:
            world, told_by = run.world_size(steps)
        except ValueError as error:
            raise ValueError(f"rank={rank}: {error}, or rank={rank}/8 for 8 workers") from None
        print(f"rank {number} of {world}, by {told_by}", file=sys.stderr, flush=True)
    if not world or not number < world or batch % world:
        of = f", of {world}" if world else ""
        raise ValueError(
            f"rank={rank}{of}: give the rank and the number of workers, such as rank=3/8, which "
            f"must divide train.global_batch_size={batch}"
        )
    share = batch // world
    return range(number * share, (number + 1) * share)


def _print_cost(run: NamedRun, steps: range) -> None:
    """The cost of each stage, over all images of the steps."""
    costs = [stream_cost(run.resolved, step) for step in steps]
    spent_s = {stage: statistics.fmean(one[stage] for one in costs) for stage in STAGES}
    whole_s = sum(spent_s.values())
    print(f"{'stage':<8}{'ms an image':>12}{'share':>8}")
    for stage, s in spent_s.items():
        print(f"{stage:<8}{1e3 * s:>12.3f}{s / whole_s:>8.1%}")
    print(
        f"{'all':<8}{1e3 * whole_s:>12.3f}{1:>8.0%}  {1 / whole_s:,.0f} images/s of one core, "
        "without Ray's own work"
    )


def _samples(run: NamedRun, batches: SeenBatches, own: Mapping[str, str]) -> list[int]:
    """The given number, or the numbers of the images with a key."""
    if "sample" in own:
        if not own["sample"].isdecimal():
            raise ValueError(f"sample={own['sample']}: give a number, or the key as key=KEY")
        return [int(own["sample"])]
    manifest = run.resolved.manifest
    print(f"reads the keys of {manifest.num_images:,} images", file=sys.stderr, flush=True)
    if not (samples := batches.samples_of_key(own["key"])):
        raise ValueError(f"key={own['key']}: {manifest.path} has no image with this key")
    return samples


def _print_steps(run: NamedRun, batches: SeenBatches, sample: int) -> None:
    done = run.newest.position.step if run.newest else 0
    steps = [one for one in batches.steps_of(sample) if one[0] < run.total_steps]
    print(f"sample {sample}; the newest checkpoint is of step {done}")
    for step, epoch, place in steps:
        when = "seen" if step < done else "to come"
        print(f"step {step:,} (epoch {epoch}), place {place} of its batch: {when}")
    if not steps:
        print("no step of this run has it")


def _write(
    run: NamedRun,
    batches: SeenBatches,
    steps: range,
    places: range,
    folder: Path,
    is_with_originals: bool,
) -> None:
    recipe, classes = run.recipe, run.resolved.manifest.classes
    losses = _losses(run, steps)
    rows, sections, drawn = [], [], list[tuple[UInt8Array, str]]()
    for step in steps:
        pixels, images = batches.read(step, places)
        rows += [one.row_of_table(classes) for one in images]
        sections.append(_section(step, pixels, images, classes, losses.get(step)))
        captions = [f"{one.sample} {_names(one, classes)}" for one in images]
        left = MOST_SHOWN - len(drawn)  # a copy, so that the batch can be freed
        drawn += zip(pixels[:left].copy(), captions[:left], strict=True) if left else ()
        originals = folder / "originals"
        if is_with_originals:
            originals.mkdir(exist_ok=True)
        for one in images if is_with_originals else ():  # by sample and the end of the key
            name = re.sub(r"[^A-Za-z0-9._-]", "_", one.key)[-80:]
            if not Path(name).suffix:
                name += f".{(Image.open(io.BytesIO(one.content)).format or 'bin').lower()}"
            (originals / f"{one.sample}-{name}").write_bytes(one.content)
    title = f"{recipe.name}, step {steps.start}"
    title += f" to {steps.stop - 1}" if len(steps) > 1 else ""
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "batch.parquet")
    texts = {
        name: pa.array([";".join(map(str, one)) for one in table[name].to_pylist()], pa.string())
        for name in ("labels", "classes", "operations")
    }
    flat = pa.table({name: texts.get(name, table[name]) for name in table.column_names})
    pacsv.write_csv(flat, folder / "batch.csv")
    shown, texts_shown = zip(*drawn, strict=True)
    part = f", the first {len(drawn)} of {len(rows):,}" if len(drawn) < len(rows) else ""
    sheet(shown, texts_shown, title + part).save(folder / "batch.png")
    data = redact(run.resolved.manifest.path)
    origin = f"Made from {data} in the order of seed {recipe.seed}"
    write_page(folder / "batch.html", title, sections, origin=origin)
    for name in ("batch.html", "batch.png", "batch.parquet", "batch.csv"):
        print(f"wrote {folder / name}")


def _section(
    step: int,
    pixels: UInt8Array,
    images: Sequence[SeenImage],
    classes: list[str],
    loss: float | None,
) -> Section:
    """A step on the page: crops, originals with the box of the crop, and a table."""
    texts = [f"{len(images):,} images. MLflow shows the loss of this step at step {step + 1}."]
    if loss is not None:
        texts.append(f"Its loss was {loss:.5g}.")
    if replaced := [one for one in images if one.instead_of is not None]:
        bad = ", ".join(str(one.instead_of) for one in replaced)
        texts.append(f"These samples cannot be decoded, and neighbours replace them: {bad}.")
    shown = images[:MOST_SHOWN]
    captions = []
    for one in shown:
        mixed = "" if one.partner is None else f", {one.own_share:.0%} of it"
        captions.append(f"{one.sample}: {_names(one, classes)}{mixed}")
    note = "" if len(shown) == len(images) else f"The first {len(shown)}; the table has all."
    crops = Gallery(
        "As the model sees them", strip([square(one) for one in pixels[: len(shown)]]),
        captions, [False] * len(shown), note,
    )  # fmt: skip
    boxes = Gallery(
        "The stored image, and the box that is cut out", strip([_boxed(one) for one in shown]),
        [one.key for one in shown], [False] * len(shown),
    )  # fmt: skip
    whole = "{:,.0f}".format
    columns = [
        Column("place", whole), Column("sample", whole),
        Column("epoch", whole), Column("key"), Column("classes"), Column("stored"),
        Column("box (top, left, height, width)"), Column("mirrored"), Column("operations"),
        Column("mixed with", whole), Column("own share", "{:.2f}".format),
        Column("replaces", whole), Column("shard"),
    ]  # fmt: skip
    cells = [
        (
            one.place, one.sample, one.epoch, one.key, _names(one, classes),
            f"{one.size[1]} x {one.size[0]}",
            ", ".join(f"{v:g}" for v in (one.box.top, one.box.left, one.box.height, one.box.width)),
            "yes" if one.box.is_flipped else "", "; ".join(one.operations), one.partner,
            one.own_share, one.instead_of,
            f"{one.shard}, row {one.row} of row group {one.row_group}",
        )
        for one in images
    ]  # fmt: skip
    table = Table(f"Images of step {step}", columns, cells).used()
    return Section(f"Step {step}", texts, tables=[table], galleries=[crops, boxes])


def _names(one: SeenImage, classes: list[str]) -> str:
    return ", ".join(classes[label] for label in one.labels) or "no label"


def _boxed(one: SeenImage) -> UInt8Array:
    """The stored image as a small square, with the box of the crop."""
    image = Image.fromarray(decode(one.content))
    width = max(1, round(max(image.size) / SIDE))
    box = one.box
    corners = (box.left, box.top, box.left + box.width - 1, box.top + box.height - 1)
    ImageDraw.Draw(image).rectangle(corners, outline=_BOX_COLOR, width=width)
    return square(np.asarray(image))


def _losses(run: NamedRun, steps: range) -> dict[int, float]:
    """Loss of the logged steps: from this machine, or else from MLflow."""
    log, offset = MetricsLog(metrics_log_path(run.recipe.run_folder)), 0
    logged = dict[int, float]()
    while some := log.read(offset):
        offset = some[-1][1]
        for record, _ in some:
            if record["kind"] == "metrics" and TRAIN_LOSS in record["values"]:
                logged[record["step"]] = record["values"][TRAIN_LOSS]
    run_id = run.newest.position.tracking_run_id if run.newest else None
    # A log on this machine has the attempts that ran here. MLflow's steps count completed steps.
    if run_id is not None and not {step + 1 for step in steps} <= logged.keys():
        from vit_ray.tracking.mlflow_client import asking  # MLflow: seconds

        try:
            with asking(run.recipe.tracking.uri) as client:
                client.get_run(run_id)  # a history of no run is empty
                points = client.get_metric_history(run_id, TRAIN_LOSS)
            logged = {point.step: point.value for point in points} | logged
        except (ValueError, RuntimeError, TimeoutError) as error:
            print(f"without the loss of the step: {error}", file=sys.stderr)
    return {step: logged[step + 1] for step in steps if step + 1 in logged}
