"""`vit-ray predict WEIGHTS PATHS...`: class and probability of images, as text, table and picture.

Paths and outputs are checked before torch is imported and the weights are read.
"""

import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from vit_ray.config.help import key_names
from vit_ray.config.loading import load_recipe
from vit_ray.config.secrets import redact
from vit_ray.data.convert.hub import IMAGE_COLUMNS, path_of_images
from vit_ray.data.crops import BadImageError, UInt8Array
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.data.file_names import IMAGE_SUFFIXES, is_image_name
from vit_ray.evaluation.image_grid import sheet
from vit_ray.launch.inputs.dataset import open_dataset
from vit_ray.storage import Location, locate

if TYPE_CHECKING:
    from vit_ray.launch.trained_model import TrainedModel

Named = tuple[str, bytes | Location]
"""An image's name, and its encoded bytes or its file."""

_OUTPUTS: Final = (".parquet", ".csv", ".png")
_NUM_CLASSES: Final = 3
_NUM_DRAWN: Final = 48
_SCHEMA: Final = pa.schema(
    [
        ("image", pa.string()),
        ("label", pa.int32()),
        ("class", pa.string()),
        ("probability", pa.float32()),
        ("problem", pa.string()),
    ]
)


def print_predictions(
    source: str,
    paths: Sequence[str],
    recipe: str | None,
    outputs: Sequence[str],
) -> int:
    """Predict, and print the most probable classes; returns 1 if an image cannot be read.

    Args:
        source: weights, as `vit_ray.load` takes them.
        paths: images, folders, parquet files and converted data sets; `key=value` among them
            changes the recipe.
        recipe: name or file, for weights that do not record their model.
        outputs: files to write: `.parquet` or `.csv` of all images, `.png` of the first ones.

    Raises:
        ValueError: a path holds no image, an output cannot be written, or as `vit_ray.load`.
    """
    _check_outputs(outputs)
    known = set(key_names())
    changes = [word for word in paths if "=" in word and word.partition("=")[0] in known]
    images = [_images_at(path) for path in paths if path not in changes]
    load = pkgutil.resolve_name("vit_ray.launch.trained_model:load")
    model: TrainedModel = (
        load(source, load_recipe(recipe, changes)) if recipe else load(source, overrides=changes)
    )
    print(_line(f"{model}"), file=sys.stderr)
    counts, drawn = Counter[str](), list[tuple[UInt8Array, str]]()
    with ExitStack() as files:
        tables = [files.enter_context(_table(out)) for out in outputs if not out.endswith(".png")]
        for rows, crops in _predicted(model, chain.from_iterable(images)):
            for row in rows:
                place = sys.stderr if row.get("problem") else sys.stdout
                print(_line(f"{row['image']}: {row.get('problem') or row['text']}"), file=place)
                counts[row.get("class", "")] += 1
            texts = (f"{row['probability']:.1%} {row['class']}" for row in rows if "text" in row)
            drawn += list(zip(crops, texts, strict=True))[: _NUM_DRAWN - len(drawn)]
            for table in tables:
                table.write_table(pa.Table.from_pylist(rows, _SCHEMA))
    num_bad, total = counts.pop("", 0), counts.total()
    pictures = [output for output in outputs if output.endswith(".png")]
    if drawn and pictures:
        crops_drawn, captions = zip(*drawn, strict=True)
        drawing = sheet(crops_drawn, captions, f"{source}: {len(drawn)} of {total:,} images")
        for output in pictures:
            drawing.save(locate(output).path)
    most = ", ".join(f"{count:,} {name}" for name, count in counts.most_common(_NUM_CLASSES))
    bad = f"; {num_bad:,} cannot be read" if num_bad else ""
    written = [output for output in outputs if drawn or output not in pictures]
    print(_line(f"{total:,} images{most and f': {most}'}{bad}"), file=sys.stderr)
    for output in written:
        print(f"wrote {output}", file=sys.stderr)
    return 1 if num_bad else 0


def _line(text: str) -> str:
    """Names and errors made safe to show, on one line."""
    return redact(text).replace("\n", r"\n")


def _predicted(
    model: "TrainedModel", images: Iterator[Named]
) -> Iterator[tuple[list[dict[str, Any]], list[UInt8Array]]]:
    """Rows of `_SCHEMA`, with a `text` if there is no problem, and their crops."""
    rows: list[dict[str, Any]] = []
    crops: list[UInt8Array] = []

    def readable() -> Iterator[UInt8Array]:
        for name, content in images:
            rows.append({"image": name})
            try:
                crop = model.crop(content if isinstance(content, bytes) else content.read())
            except (BadImageError, FileNotFoundError, PermissionError) as error:
                rows[-1]["problem"] = str(error)
                continue
            crops.append(crop)
            yield crop

    for logits in model.logits_of_crops(readable()):
        found = model.probabilities(logits)
        good = [row for row in rows if "problem" not in row]
        for row, shares in zip(good, found, strict=True):
            best = (-shares).argsort(kind="stable")[:_NUM_CLASSES].tolist()
            row |= {"label": best[0], "class": model.classes[best[0]]}
            row |= {"probability": float(shares[best[0]])}
            row["text"] = ", ".join(f"{model.classes[i]} {shares[i]:.1%}" for i in best)
        yield rows, crops
        rows, crops = [], []
    yield rows, []


def _images_at(path: str) -> Iterator[Named]:
    """The images of a path, read when they are needed.

    Raises:
        ValueError: raised at once if the path does not exist or holds no image.
    """
    place = locate(path)
    kind = place.info().kind
    if kind == "nothing":
        raise ValueError(f"{path!r}: no such file or folder; check the path")
    if kind == "file":
        return _rows_of([place]) if path.endswith(".parquet") else iter([(path, place)])
    if place.child(MANIFEST_FILE).exists():
        found = open_dataset(path)
        return iter(found.encoded())
    files = [Location(place.protocol, info.path) for info in place.list_files()]
    images = [file for file in files if is_image_name(file.path)]
    if images:
        return ((file.uri, file) for file in images)
    if parquet := [file for file in files if file.path.endswith(".parquet")]:
        return _rows_of(parquet)
    raise ValueError(
        f"{path!r} holds no images among its {len(files):,} files; images are found by file names "
        f"that end in {', '.join(sorted(IMAGE_SUFFIXES))} or parquet"
    )


def _rows_of(files: list[Location]) -> Iterator[Named]:
    """Images in parquet files, with or without labels.

    Raises:
        ValueError: raised at once if a file is not parquet, or has no column of encoded images.
    """
    columns: list[tuple[str, bool]] = []
    for file in files:
        with file.open() as opened:
            try:
                schema = pq.read_schema(opened)
            except pa.ArrowException as error:
                raise ValueError(f"{file.uri!r} cannot be read as parquet: {error}") from None
        name = next((name for name in IMAGE_COLUMNS if name in schema.names), None)
        if name is None:
            raise ValueError(
                f"{file.uri!r} has the columns {schema.names}; encoded images must be in one of "
                f"{', '.join(IMAGE_COLUMNS)}"
            )
        path_of_images(schema, name, repr(file.uri))
        columns.append((name, "key" in schema.names))

    def rows() -> Iterator[Named]:
        for file, (name, has_keys) in zip(files, columns, strict=True):
            number = 0
            with file.open() as opened:
                wanted = [name, "key"] if has_keys else [name]
                for batch in pq.ParquetFile(opened).iter_batches(64, columns=wanted):
                    for row in batch.to_pylist():
                        image = row[name]["bytes"] if isinstance(row[name], dict) else row[name]
                        yield str(row.get("key") or f"{file.uri}#{number}"), image or b""
                        number += 1

    return rows()


def _check_outputs(outputs: Sequence[str]) -> None:
    """Refuse outputs that could not be written after the computation.

    Raises:
        ValueError: a file of another kind, one that exists or is given twice, or a picture outside
            a local folder.
    """
    for number, output in enumerate(outputs):
        place = locate(output)
        if PurePosixPath(output).suffix not in _OUTPUTS:
            raise ValueError(f"--out {output}: expected a file that ends in {', '.join(_OUTPUTS)}")
        if output.endswith(".png"):
            if not place.is_local:
                raise ValueError(f"--out {output}: a picture can only be written to a local file")
            if not (folder := Path(place.path).parent).is_dir():
                raise ValueError(f"--out {output}: there is no folder {str(folder)!r}")
        if place.exists():
            raise ValueError(f"--out {output} exists already; name another file, or delete it")
        if place.uri in [locate(other).uri for other in outputs[:number]]:
            raise ValueError(f"--out {output} is given twice; name each file once")


@contextmanager
def _table(output: str) -> Iterator[Any]:
    """Writes tables of `_SCHEMA` to a file that appears complete or not at all."""
    kind = pq.ParquetWriter if output.endswith(".parquet") else pacsv.CSVWriter
    with locate(output).output() as stream, kind(stream, _SCHEMA) as writer:
        yield writer
