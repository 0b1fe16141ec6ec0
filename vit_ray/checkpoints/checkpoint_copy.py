"""A checkpoint taken over by another run, which goes on from it as if it had been its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from vit_ray.checkpoints.checkpoint import Position
from vit_ray.checkpoints.checkpoint_format import (
    commit,
    compare,
    index_name,
    read_folder,
    tensors_name,
    write_part,
)
from vit_ray.storage import Location


def copy_checkpoint(
    source: Location, target: Location, change: Callable[[Position], Position]
) -> None:
    """Copy a whole checkpoint file by file and commit the copy, which is read back before.

    Args:
        change: of the position, which names the run that the checkpoint is of.

    Raises:
        DamagedCheckpointError: a file is not what was written.
        OSError: the storage cannot be read or written; the copy does not count.
    """
    shards = {shard.file: shard for shard in read_folder(source).shards}
    world_size = len(shards)
    for rank in range(world_size):
        name = index_name(rank, world_size)
        index = json.loads(source.child(name).read())
        if "position" in index:
            index["position"] = change(Position.from_json(index["position"])).to_json()
        shard = shards[tensors_name(name)]
        content = source.child(shard.file).read()
        compare(source, shard, hashlib.sha256(content).hexdigest())
        write_part(target, rank, world_size, content, index)
    commit(target, world_size, lambda: None)
