"""Features of a data set in parquet files, written by many workers.

Each file has a row per image: `key`, `label` (the first, -1 for none), `sample` (row number in the
data set), `feature` (the head's input) and, if wanted, `logits`; the latter two are float32 lists
of equal length. A file's name has its range of positions in the set, so that an extraction
continues after the last positions for which all workers' files exist. `features.json` says where
the features come from, and whether they are complete.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from vit_ray.storage import Location

FACTS_FILE: Final = "features.json"
_NAME: Final = re.compile(r"features-(\d{12})-(\d{12})-(\d{5})-of-(\d{5})\.parquet")


@dataclass(frozen=True)
class FeatureRows:
    """Some images: columns of equal length.

    Attributes:
        features: (n, D).
        logits: (n, K); None if they are not kept.
    """

    keys: Sequence[str]
    labels: NDArray[np.integer]
    samples: NDArray[np.int64]
    features: NDArray[np.float32]
    logits: NDArray[np.float32] | None


def part_name(first: int, last: int, rank: int, world_size: int) -> str:
    """A rank's file of its part of positions [first, last)."""
    return f"features-{first:012d}-{last:012d}-{rank:05d}-of-{world_size:05d}.parquet"


def write_part(folder: Location, name: str, parts: Sequence[FeatureRows]) -> None:
    """Write a file of a rank, complete or not at all; without rows there is a file, too."""
    logits = [part.logits for part in parts if part.logits is not None]
    columns: dict[str, pa.Array] = {
        "key": pa.array([key for part in parts for key in part.keys], pa.string()),
        "label": pa.array(np.concatenate([part.labels for part in parts]), pa.int32()),
        "sample": pa.array(np.concatenate([part.samples for part in parts]), pa.int64()),
        "feature": _lists(np.concatenate([part.features for part in parts])),
        **({"logits": _lists(np.concatenate(logits))} if logits else {}),
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="none", use_dictionary=False)
    folder.child(name).write(sink.getvalue().to_pybytes())


def _lists(rows: NDArray[np.float32]) -> pa.Array:
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])


def whole_parts(folder: Location) -> tuple[list[str], list[str], int]:
    """Complete files from the start on, other files of features, and the end of the complete ones.

    The others are for positions that some worker had not written when the extraction ended.
    """
    names = [info.base_name for info in folder.list_files(recursive=False)]
    found = {name: tuple(map(int, m.groups())) for name in names if (m := _NAME.fullmatch(name))}
    by_start: dict[int, list[list[str]]] = {}
    for first, last, _, world_size in sorted(set(found.values())):
        parts = [part_name(first, last, rank, world_size) for rank in range(world_size)]
        if all(part in found for part in parts):
            by_start.setdefault(first, []).append(parts)
    whole: list[str] = []
    end = 0
    while end in by_start:
        here = by_start[end][0]
        whole += here
        end = found[here[0]][1]
    return whole, sorted(found.keys() - set(whole)), end


def read_facts(folder: Location) -> dict[str, Any] | None:
    """Facts about the features in a folder; None if none were begun.

    Raises:
        ValueError: the file with the facts is damaged.
    """
    file = folder.child(FACTS_FILE)
    if not file.exists():
        return None
    try:
        return dict(json.loads(file.read()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file.uri} is damaged ({error}); choose another folder") from None


def write_facts(folder: Location, facts: dict[str, Any]) -> None:
    """Write facts about the features in a folder."""
    folder.child(FACTS_FILE).write(json.dumps(facts, indent=1).encode())


def read_features(folder: Location, columns: Sequence[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Columns of all images, a file at a time, in no particular order of `sample`.

    `feature` and `logits` are float32 (n, D).

    Raises:
        ValueError: the extraction has not ended, or a file is missing.
    """
    facts = read_facts(folder)
    if facts is None or not facts.get("is_complete"):
        raise ValueError(
            f"{folder.uri} holds no complete set of features; run the same command again"
        )
    for name in facts["files"]:
        try:
            with folder.filesystem.open_input_file(folder.child(name).path) as file:
                table = pq.read_table(file, columns=list(columns))
        except (OSError, pa.ArrowException) as error:
            raise ValueError(
                f"{folder.uri}/{name} cannot be read ({error}); restore it, or extract the "
                "features into another folder"
            ) from error
        parts = {column: table[column].combine_chunks() for column in columns}
        yield {
            column: part.flatten().to_numpy().reshape(len(part), part.type.list_size)
            if pa.types.is_fixed_size_list(part.type)
            else part.to_numpy(zero_copy_only=False)
            for column, part in parts.items()
        }
