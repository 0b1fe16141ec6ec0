"""`vit-ray predict WEIGHTS PATHS...`: class and probability of images, as text, table and picture.

Paths and outputs are checked before torch is imported and the weights are read.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vit_ray.addresses import redact, with_home
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.data.images import IMAGE_SUFFIXES, BadImageError, is_image_name
from vit_ray.evaluation.examples import sheet
from vit_ray.launch.dataset import open_dataset
from vit_ray.storage import Location, locate

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
    files = _checked(outputs)
    images = [_images_at(path) for path in paths if path not in changes]
    if not images:
        raise ValueError("no PATH is given; name an image, a folder or a converted data set")
    from vit_ray.launch.trained_model import load  # torch takes seconds

    model = load(source, recipe, overrides=changes)
    about = f"{model.recipe.model.name}, {len(model.classes):,} classes, {model.source}"
    print(_line(about), file=sys.stderr)
    tables, drawn = list[pa.Table](), list[dict[str, Any]]()
    for rows in _predicted(model, chain.from_iterable(images)):
        for row in rows:
            stream = sys.stderr if "problem" in row else sys.stdout
            print(_line(f"{row['image']}: {row.get('problem') or row['text']}"), file=stream)
        tables.append(pa.Table.from_pylist(rows, _SCHEMA))
        drawn += [row for row in rows if "crop" in row][: _MAX_DRAWN - len(drawn)]
    table = pa.concat_tables(tables)
    num_bad = table["class"].null_count
    _print_counts(table)
    for file in files:
        with file.output() as stream:
            if file.path.endswith(".parquet"):
                pq.write_table(table, stream)
            else:
                captions = [f"{row['probability']:.1%} {row['class']}" for row in drawn]
                title = f"{source}: {len(drawn)} of {len(table) - num_bad:,} images"
                sheet([row["crop"] for row in drawn], captions, title).save(stream, "PNG")
        print(f"wrote {file.uri}", file=sys.stderr)
    return 1 if num_bad else 0


def _print_counts(table: pa.Table) -> None:
    """Print the most frequent classes, and how many are right."""
    names, expected = table["class"], table["expected"]
    counts, num_bad = Counter(names.drop_null().to_pylist()), names.null_count
    classes = ", ".join(f"{count:,} {name}" for name, count in counts.most_common(_NUM_CLASSES))
    bad = f"; {num_bad:,} cannot be read" if num_bad else ""
    print(_line(f"{counts.total():,} images{classes and f': {classes}'}{bad}"), file=sys.stderr)
    if num_compared := len(expected) - expected.null_count:
        from vit_ray.commands.trainings import interval_note  # imports Ray

        right = pc.sum(pc.equal(names, expected)).as_py()
        note = f"{right:,} right, {num_compared - right:,} wrong: {right / num_compared:.2%}"
        interval = interval_note(right / num_compared, num_compared)
        print(f"in folders of classes: {note}{interval}", file=sys.stderr)


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


def _checked(outputs: Sequence[str]) -> list[Location]:
    """The files to write, checked before anything is computed.

    Raises:
        ValueError: an output is of another kind, exists, is given twice, or cannot be written.
        OSError: a store refuses it.
    """
    files = [locate(output) for output in outputs]
    for output, file in zip(outputs, files, strict=True):
        if PurePosixPath(output).suffix not in _OUTPUTS:
            raise ValueError(f"--out {output}: expected a file that ends in {', '.join(_OUTPUTS)}")
        if file.exists() or files.count(file) > 1:
            raise ValueError(f"--out {output} exists already, or is given twice; name another file")
        folder = Location(file.protocol, file.path.rpartition("/")[0])
        if not file.is_local:  # a bucket refuses an upload only at its end
            from vit_ray.launch.run import check_rights  # imports Ray

            check_rights(folder)
        elif not os.access(f"{folder.path}/.", os.W_OK):
            raise ValueError(
                f"--out {output}: there is no folder {folder.path} that can be written to; name "
                "another file"
            )
    return files
