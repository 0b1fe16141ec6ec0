"""What is read from a kept checkpoint and a kept data set of today's formats."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.data.small_sets import used_rows
from vit_ray.checkpoints.run_checkpoints import newest_verified_checkpoint
from vit_ray.data import open_dataset
from vit_ray.storage import locate

KEPT = Path(__file__).with_name("kept")


def record() -> dict[str, Any]:
    """Of the data set in `kept/set`, and of the newest checkpoint of the run in `kept/run`."""
    return {"data set": _data_set(), "checkpoint": _checkpoint()}


def _data_set() -> dict[str, Any]:
    opened = open_dataset(str(KEPT / "set"))
    rows, is_refused = used_rows(opened)
    return {
        "classes": list(opened.classes),
        "fingerprint": opened.fingerprint,
        "is refused": is_refused,
        "rows": {key: [*labels, _digest(image)] for image, labels, key in rows.values()},
    }


def _checkpoint() -> dict[str, Any]:
    notes: list[str] = []
    opened = newest_verified_checkpoint(locate(str(KEPT / "run")), notes.append)
    assert opened is not None
    kinds = sorted({key.split("|")[0] for shard in opened.shards for key in shard.tensors})
    return {
        "notes": notes,
        "position": json.loads(json.dumps(asdict(opened.position))),
        "tensors": {
            kind: _digest(
                *(
                    f"{name} {start} {len(values)}".encode() + values.numpy().tobytes()
                    for name, start, values in sorted(opened.parts(kind), key=lambda one: one[:2])
                )
            )
            for kind in kinds
        },
        "averaged": _digest(
            *(
                values.numpy().tobytes()
                for _, values in sorted(opened.weights(averaged=True).items())
            )
        ),
    }


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]
