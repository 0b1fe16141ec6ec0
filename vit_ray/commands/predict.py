"""`vit-ray predict WEIGHTS PATHS...`: class and probability of images, as text, table and picture.

Paths and outputs are checked before torch is imported and the weights are read.
"""

import os
import re
import sys
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from vit_ray.addresses import redact, with_home
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.data.images import IMAGE_SUFFIXES, BadImageError, is_image_name
from vit_ray.evaluation.examples import sheet
from vit_ray.launch.dataset import open_dataset
from vit_ray.storage import RIGHTS_PROBE, Location, check_reachable, locate

if TYPE_CHECKING:
    from vit_ray.launch.trained_model import TrainedModel

NamedImage = tuple[str, bytes | Location]  # a name, and the encoded bytes or the file

_OUTPUTS: Final = (".parquet", ".png")
_NUM_CLASSES: Final = 5
_MAX_DRAWN: Final = 48
_SCHEMA: Final = pa.schema(
    [
        ("image", pa.string()),
        ("label", pa.int32()),
        ("class", pa.string()),
        ("probability", pa.float32()),
        ("expected", pa.string()),
        ("problem", pa.string()),
    ]
)


def print_predictions(
    source: str, paths: Sequence[str], recipe: str | None, outputs: Sequence[str]
) -> int:
    """Print the five most probable classes of each image; returns 1 if an image cannot be read.

    If the names of the classes are known, images in a folder with the name of a class are counted
    as right or wrong.

    Args:
        source: weights, as `vit_ray.load` takes them.
        paths: images, folders and converted data sets; `key=value` among them changes the recipe.
        recipe: name or file, for weights that do not record their model.
        outputs: files to write: `.parquet` of all images, `.png` of the first ones.

    Raises:
        ValueError: a path holds no image, an output cannot be written, or as `vit_ray.load`.
    """
    changes = [word for word in paths if re.match(r"[\w.]+=", word) and not os.path.exists(word)]
    if "://" not in source and not with_home(source).exists():
        raise ValueError(f"{source!r} is not there; give a run, a checkpoint or a weight file")
    counts, right, drawn = Counter[str](), Counter[bool](), list[dict[str, Any]]()
    with _opened(outputs) as (tables, pictures):
        images = [_images_at(path) for path in paths if path not in changes]
        from vit_ray.launch.trained_model import load  # torch takes seconds

        model = load(source, recipe, overrides=changes)
        print(_line(f"{model}"), file=sys.stderr)
        for rows in _predicted(model, chain.from_iterable(images)):
            for row in rows:
                stream = sys.stderr if "problem" in row else sys.stdout
                print(_line(f"{row['image']}: {row.get('problem') or row['text']}"), file=stream)
            counts.update(row.get("class", "") for row in rows)
            right.update(row["class"] == row["expected"] for row in rows if row.get("expected"))
            drawn = [*drawn, *(row for row in rows if "crop" in row)][:_MAX_DRAWN]
            for table in tables:
                table.write_table(pa.Table.from_pylist(rows, _SCHEMA))
        num_bad, total = counts.pop("", 0), counts.total()
        for picture in pictures:
            captions = [f"{row['probability']:.1%} {row['class']}" for row in drawn]
            title = f"{source}: {len(drawn)} of {total:,} images"
            sheet([row["crop"] for row in drawn], captions, title).save(picture, "PNG")
    classes = ", ".join(f"{count:,} {name}" for name, count in counts.most_common(_NUM_CLASSES))
    bad = f"; {num_bad:,} cannot be read" if num_bad else ""
    print(_line(f"{total:,} images{classes and f': {classes}'}{bad}"), file=sys.stderr)
    if num_compared := right.total():
        from vit_ray.commands.train import interval_note  # imports Ray

        top1 = right[True] / num_compared
        note = f"{right[True]:,} right, {right[False]:,} wrong: {top1:.2%}"
        print(f"in folders of classes: {note}{interval_note(top1, num_compared)}", file=sys.stderr)
    for output in outputs:
        print(f"wrote {output}", file=sys.stderr)
    return 1 if num_bad else 0


def _line(text: str) -> str:
    # Names and errors, safe to print, on one line.
    return redact(text).replace("\n", r"\n")


def _predicted(
    model: "TrainedModel", images: Iterator[NamedImage]
) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows of `_SCHEMA`; rows without a problem also have a `crop` and a `text`."""
    while batch := list(islice(images, model.recipe.evaluate.batch_size)):
        rows = list[dict[str, Any]]()
        for name, content in batch:
            try:
                crop = model.crop(content if isinstance(content, bytes) else content.read())
                rows.append({"image": name, "crop": crop})
            except (BadImageError, FileNotFoundError, PermissionError) as error:
                rows.append({"image": name, "problem": str(error)})
        good = [row for row in rows if "crop" in row]
        for logits in model.logits_of_crops(row["crop"] for row in good):  # one batch, or none
            for row, probabilities in zip(good, model.probabilities(logits), strict=True):
                best = (-probabilities).argsort(kind="stable")[:_NUM_CLASSES].tolist()
                row |= {"label": best[0], "class": model.classes[best[0]]}
                folder = PurePosixPath(row["image"]).parent.name
                row["expected"] = folder if model.has_names and folder in model.classes else None
                row["probability"] = float(probabilities[best[0]])
                row["text"] = ", ".join(f"{model.classes[i]} {probabilities[i]:.1%}" for i in best)
        yield rows


def _images_at(path: str) -> Iterator[NamedImage]:
    """The images of a path; files are not read here.

    Raises:
        ValueError: the path does not exist or holds no image; raised before the first image.
    """
    location = locate(path)
    kind = location.info().kind
    if kind == "nothing":
        raise ValueError(f"{path!r}: no such file or folder; check the path")
    if kind == "file" and path.endswith(".parquet"):
        raise ValueError(
            f"{path!r} is parquet; give pictures, or convert it and give the folder of the set"
        )
    if kind == "file":
        return iter([(path, location)])
    if location.child(MANIFEST_FILE).exists():
        return iter(open_dataset(path).encoded())
    files = [Location(location.protocol, info.path) for info in location.list_files()]
    images = [file for file in files if is_image_name(file.path)]
    if not images:
        raise ValueError(
            f"{path!r} holds no images among its {len(files):,} files; images are found by file "
            f"names that end in {', '.join(sorted(IMAGE_SUFFIXES))}; convert parquet first"
        )
    if skipped := [file.path for file in files if not is_image_name(file.path)]:
        names = ", ".join(map(os.path.basename, skipped))
        count = f"{len(skipped):,} files without the name of an image are skipped"
        print(_line(f"{path}: {count}: {names}"), file=sys.stderr)
    return ((file.uri, file) for file in images)


@contextmanager
def _opened(outputs: Sequence[str]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Open writers of tables of `_SCHEMA` and streams of pictures, before anything is computed.

    The files appear complete, when the block ends, or not at all.

    Raises:
        ValueError: an output is of another kind, exists, is given twice, or cannot be written.
    """
    streams: dict[str, Any] = {}
    with ExitStack() as files:
        for output in outputs:
            location = locate(output)
            if PurePosixPath(output).suffix not in _OUTPUTS:
                raise ValueError(
                    f"--out {output}: expected a file that ends in {', '.join(_OUTPUTS)}"
                )
            if location.exists() or location.uri in streams:
                raise ValueError(
                    f"--out {output} exists already, or is given twice; name another file"
                )
            folder = Location(location.protocol, location.path.rpartition("/")[0])
            try:
                if not location.is_local:  # a bucket refuses an upload only at its end
                    check_reachable(folder)
                    probe = folder.child(f"{RIGHTS_PROBE}-{uuid.uuid4().hex[:8]}")
                    probe.write(b"vit_ray")
                    with suppress(OSError):  # the right to delete is not needed
                        probe.delete()
                elif not os.path.isdir(folder.path or "/"):
                    raise NotADirectoryError(f"there is no folder {folder.path}")
                streams[location.uri] = files.enter_context(location.output())
            except OSError as error:
                raise ValueError(f"--out {output}: {error}; name another file") from None
        tables = [stream for uri, stream in streams.items() if uri.endswith(".parquet")]
        yield (
            [files.enter_context(pq.ParquetWriter(stream, _SCHEMA)) for stream in tables],
            [stream for stream in streams.values() if stream not in tables],
        )
