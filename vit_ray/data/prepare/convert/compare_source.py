"""Whether JPEG files that a conversion rewrote decode as the files that they came from.

A data set keeps the checksum of each file as it came. Where the source is still there, that says
whether a file of it is the one that was converted; its pixels must then be those of the data set.
"""

import json
import tempfile
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final

from vit_ray.data.format.manifest import Manifest
from vit_ray.data.format.schema import REPORT_FILE, checksum
from vit_ray.data.images.crops import UInt8Array, decode
from vit_ray.data.prepare.convert.shard_images import orientation_of
from vit_ray.data.prepare.progress import Shown
from vit_ray.data.prepare.run_tasks import run_tasks
from vit_ray.data.prepare.sources.entries import IndexEntry, SourceUnit
from vit_ray.data.prepare.sources.formats import index_unit, key_prefix, list_units
from vit_ray.retry import with_retries
from vit_ray.storage import locate

OTHER_PIXELS: Final = "it does not decode to the pixels of the file that it was made from"


@dataclass(frozen=True)
class Rewritten:
    """An image whose file in the data set differs from its source's."""

    file: str
    row_group: int
    key: str
    original_crc32: int
    pixels_crc32: int
    shorter_side: int


@dataclass(frozen=True)
class Comparison:
    """The result; `source` is a sentence that says what was compared."""

    num_equal: int
    differing: list[Rewritten]
    source: str


def checksum_of_pixels(pixels: UInt8Array) -> int:
    """Of their values and of their shape."""
    return zlib.crc32(pixels.tobytes(), zlib.crc32(repr(pixels.shape).encode()))


def compare_with_source(
    manifest: Manifest, rewritten: list[Rewritten], num_cpus: float
) -> Comparison:
    """Read the files that some images were made from, where they are still there."""
    if not rewritten:
        return Comparison(0, [], "")
    settings = _settings(manifest)
    if not {"source", "format", "split", "shrink_to"} <= settings.keys():
        return Comparison(0, [], _NOT_COMPARED.format(f"{REPORT_FILE} does not name the source"))
    source, shrink_to = settings["source"], settings["shrink_to"]
    try:
        units = list_units(source, settings["format"], settings["split"])
    except (ValueError, OSError) as error:
        why = "cannot be read" if _why_unread(error) else "is gone"
        return Comparison(0, [], _NOT_COMPARED.format(f"the source {why} ({error})"))
    label, image = settings.get("label_field"), settings.get("image_field")
    units = [replace(unit, label_field=label, image_field=image) for unit in units]
    wanted = {r.key: r for r in rewritten if shrink_to is None or r.shorter_side < shrink_to}
    turns = bool(settings.get("apply_orientation"))
    shown = Shown(f"comparing with {source}")
    results = run_tasks(_compare_part, _parts(units, wanted), num_cpus, turns, shown=shown)
    equal = {key for found, _, _ in results for key in found}
    # A key may stand twice in a list or a tar, and its first image alone was converted.
    differing = {key for _, found, _ in results for key in found} - equal
    unread = {
        key: why
        for _, _, found in results
        for key, why in found.items()
        if key not in equal | differing
    }
    others = len(wanted) - len(equal) - len(differing) - len(unread)
    text = f"{len(equal)} rewritten JPEG files decode to the pixels of the originals in {source}"
    if unread:
        text += f"; {len(unread)} originals could not be read ({next(iter(unread.values()))})"
    if others:
        text += f"; of {others} the originals are gone or have changed"
    return Comparison(len(equal), [wanted[key] for key in sorted(differing)], text)


_NOT_COMPARED: Final = "rewritten JPEG files are not compared with their originals: {}"


def _settings(manifest: Manifest) -> dict[str, Any]:
    """Those of the conversion that made the shards; empty where nothing says them."""
    try:
        return dict(json.loads(locate(manifest.root).child(REPORT_FILE).read())["settings"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}


def _why_unread(error: ValueError | OSError) -> str | None:
    """What storage said that does not answer or refuses; None where something is gone or other."""
    cause = error if isinstance(error, OSError) else error.__cause__
    is_storage = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return str(error) if is_storage else None


def _parts(
    units: list[SourceUnit], wanted: dict[str, Rewritten]
) -> list[tuple[SourceUnit, dict[str, Rewritten]]]:
    """Those units that may hold one of the images, each with the images that it may hold."""
    held: dict[str, dict[str, Rewritten]] = {key_prefix(unit): {} for unit in units}
    for key, one in wanted.items():
        for prefix in ("", *(key[: at + 1] for at, c in enumerate(key) if c == "/")):
            if prefix in held:
                held[prefix][key] = one
    parts = ((unit, held[key_prefix(unit)]) for unit in units)
    return [(unit, images) for unit, images in parts if images]


def _compare_part(
    part: tuple[SourceUnit, dict[str, Rewritten]], turns: bool
) -> tuple[set[str], set[str], dict[str, str]]:
    """Keys of equal and of differing images, and why others could not be read."""
    unit, wanted = part
    equal: set[str] = set()
    differing: set[str] = set()
    unread: dict[str, str] = {}
    found: list[IndexEntry] = []
    with tempfile.TemporaryDirectory() as scratch:

        def index() -> None:
            found.clear()
            entries = index_unit(unit, locate(f"{scratch}/pack.bin"))
            found.extend(entry for entry in entries if entry.key in wanted)

        try:
            with_retries(index, f"reading {unit.path}")
        except (ValueError, OSError) as error:  # of a unit that ends early, what stands before that
            if (why := _why_unread(error)) is not None:
                unread = dict.fromkeys(wanted, why)
        for entry in found:
            expected = wanted[entry.key]
            try:
                original = entry.read()
                is_turned = turns and orientation_of(original) != 1
                # Else it is another file, or its pixels were encoded again.
                if checksum(original) == expected.original_crc32 and not is_turned:
                    is_equal = checksum_of_pixels(decode(original)) == expected.pixels_crc32
                    (equal if is_equal else differing).add(entry.key)
            except (ValueError, OSError) as error:
                if (why := _why_unread(error)) is not None:
                    unread[entry.key] = why
    return equal, differing, unread
