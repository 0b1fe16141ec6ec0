"""`vit-ray predict WEIGHTS PATHS...`: class and probability of images, as text, table and picture.

Paths and outputs are checked before torch is imported and the weights are read.
"""

import os
import pkgutil
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

Named = tuple[str, bytes | Location]
"""An image's name, and its encoded bytes or its file."""

_OUTPUTS: Final = (".parquet", ".png")
_NUM_CLASSES: Final = 5
_NUM_DRAWN: Final = 48
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
    """Predict, and print the five most probable classes; returns 1 if an image cannot be read.

    Images in a folder with the name of a class are counted as right or wrong, if the names of the
    classes are known.

    Args:
        source: weights, as `vit_ray.load` takes them.
        paths: images, folders and converted data sets; `key=value` among them changes the recipe.
        recipe: name or file, for weights that do not record their model.
        outputs: files to write: `.parquet` of all images, `.png` of the first ones.

    Raises:
        ValueError: a path holds no image, an output cannot be written, or as `vit_ray.load`.
    """
    changes = [word for word in paths if re.match(r"[\w.]+=", word) and not os.path.exists(word)]
    if "://" not in source and not with_home(source).exists():  # torch takes seconds
        raise ValueError(f"{source!r} is not there; give a run, a checkpoint or a weight file")
    counts, right, drawn = Counter[str](), Counter[bool](), list[dict[str, Any]]()
    with _opened(outputs) as (tables, pictures):
        images = [_images_at(path) for path in paths if path not in changes]
        load = pkgutil.resolve_name("vit_ray.launch.trained_model:load")
        model: TrainedModel = load(source, recipe, overrides=changes)
        print(_line(f"{model}"), file=sys.stderr)
        for rows in _predicted(model, chain.from_iterable(images)):
            for row in rows:
                place = sys.stderr if "problem" in row else sys.stdout
                print(_line(f"{row['image']}: {row.get('problem') or row['text']}"), file=place)
            counts.update(row.get("class", "") for row in rows)
            right.update(row["class"] == row["expected"] for row in rows if row.get("expected"))
            drawn = [*drawn, *(row for row in rows if "crop" in row)][:_NUM_DRAWN]
            for table in tables:
                table.write_table(pa.Table.from_pylist(rows, _SCHEMA))
        num_bad, total = counts.pop("", 0), counts.total()
        for picture in pictures:
            captions = [f"{row['probability']:.1%} {row['class']}" for row in drawn]
            title = f"{source}: {len(drawn)} of {total:,} images"
            sheet([row["crop"] for row in drawn], captions, title).save(picture, "PNG")
    most = ", ".join(f"{count:,} {name}" for name, count in counts.most_common(_NUM_CLASSES))
    bad = f"; {num_bad:,} cannot be read" if num_bad else ""
    print(_line(f"{total:,} images{most and f': {most}'}{bad}"), file=sys.stderr)
    if judged := right.total():
        share = right[True] / judged
        interval_note = pkgutil.resolve_name("vit_ray.commands.train:interval_note")
        note = f"{right[True]:,} right, {right[False]:,} wrong: {share:.2%}"
        print(f"in folders of classes: {note}{interval_note(share, judged)}", file=sys.stderr)
    for output in outputs:
        print(f"wrote {output}", file=sys.stderr)
    return 1 if num_bad else 0


def _line(text: str) -> str:
    """Names and errors made safe to show, on one line."""
    return redact(text).replace("\n", r"\n")


def _predicted(model: "TrainedModel", images: Iterator[Named]) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows of `_SCHEMA`, with a `crop` and a `text` where there is no problem."""
    while some := list(islice(images, model.recipe.evaluate.batch_size)):
        rows = [_cropped(model, name, content) for name, content in some]
        good = [row for row in rows if "crop" in row]
        for logits in model.logits_of_crops(row["crop"] for row in good):  # one batch, or none
            for row, shares in zip(good, model.probabilities(logits), strict=True):
                best = (-shares).argsort(kind="stable")[:_NUM_CLASSES].tolist()
                row |= {"label": best[0], "class": model.classes[best[0]]}
                folder = PurePosixPath(row["image"]).parent.name
                row["expected"] = folder if model.has_names and folder in model.classes else None
                row["probability"] = float(shares[best[0]])
                row["text"] = ", ".join(f"{model.classes[i]} {shares[i]:.1%}" for i in best)
        yield rows


def _cropped(model: "TrainedModel", name: str, content: bytes | Location) -> dict[str, Any]:
    try:
        encoded = content if isinstance(content, bytes) else content.read()
        return {"image": name, "crop": model.crop(encoded)}
    except (BadImageError, FileNotFoundError, PermissionError) as error:
        return {"image": name, "problem": str(error)}


def _images_at(path: str) -> Iterator[Named]:
    """The images of a path, read when they are needed.

    Raises:
        ValueError: raised at once if the path does not exist or holds no image.
    """
    place = locate(path)
    kind = place.info().kind
    if kind == "nothing":
        raise ValueError(f"{path!r}: no such file or folder; check the path")
    if kind == "file" and path.endswith(".parquet"):
        raise ValueError(
            f"{path!r} is parquet; give pictures, or convert it and give the folder of the set"
        )
    if kind == "file":
        return iter([(path, place)])
    if place.child(MANIFEST_FILE).exists():
        return iter(open_dataset(path).encoded())
    files = [Location(place.protocol, info.path) for info in place.list_files()]
    images = [file for file in files if is_image_name(file.path)]
    if not images:
        raise ValueError(
            f"{path!r} holds no images among its {len(files):,} files; images are found by file "
            f"names that end in {', '.join(sorted(IMAGE_SUFFIXES))}; convert parquet first"
        )
    if others := [file.path for file in files if not is_image_name(file.path)]:
        names = ", ".join(map(os.path.basename, others))
        text = f"{path}: {len(others):,} files without the name of an image are skipped: {names}"
        print(_line(text), file=sys.stderr)
    return ((file.uri, file) for file in images)


def _check_folder(output: Location) -> None:
    """
    Raises:
        OSError: a local folder is not there, or a store refuses what is written only at the end.
    """
    folder = Location(output.protocol, output.path.rpartition("/")[0])
    if not output.is_local:
        check_reachable(folder)
        probe = folder.child(f"{RIGHTS_PROBE}-{uuid.uuid4().hex[:8]}")  # others may try it, too
        probe.write(b"vit_ray")
        with suppress(OSError):  # that is no right which it needs
            probe.delete()
    elif not os.path.isdir(folder.path or "/"):
        raise NotADirectoryError(f"there is no folder {folder.path}")


@contextmanager
def _opened(outputs: Sequence[str]) -> Iterator[tuple[list[Any], list[Any]]]:
    """Writers of tables of `_SCHEMA`, and streams of pictures, tried before anything is computed.

    The files appear complete, when the block ends, or not at all.

    Raises:
        ValueError: a file of another kind, one that exists or is given twice, or one that cannot be
            written.
    """
    streams: dict[str, Any] = {}
    with ExitStack() as files:
        for output in outputs:
            place = locate(output)
            if PurePosixPath(output).suffix not in _OUTPUTS:
                expected = f"expected a file that ends in {', '.join(_OUTPUTS)}"
                raise ValueError(f"--out {output}: {expected}")
            if place.exists() or place.uri in streams:
                raise ValueError(
                    f"--out {output} exists already, or is given twice; name another file"
                )
            try:
                _check_folder(place)
                streams[place.uri] = files.enter_context(place.output())
            except OSError as error:
                raise ValueError(f"--out {output}: {error}; name another file") from None
        tables = [stream for uri, stream in streams.items() if uri.endswith(".parquet")]
        yield (
            [files.enter_context(pq.ParquetWriter(stream, _SCHEMA)) for stream in tables],
            [stream for stream in streams.values() if stream not in tables],
        )
