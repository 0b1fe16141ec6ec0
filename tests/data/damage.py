"""Copies of data sets, and damage to them."""

from pathlib import Path

from vit_ray.data import open_dataset
from vit_ray.data.dataset import Manifest, ShardFile
from vit_ray.data.shards import RowGroupReader


def broken_copy(dataset: Manifest, folder: Path) -> tuple[Manifest, Path]:
    for file in [*dataset.files, ShardFile("manifest.parquet", 0, 0, 0)]:
        (folder / file.path).write_bytes((Path(dataset.root) / file.path).read_bytes())
    return open_dataset(str(folder)), folder / dataset.files[0].path


def damage(manifest: Manifest, group: int, rows: list[int]) -> None:
    """Flip a byte in the middle of some images of a row group, on disk."""
    encoded = RowGroupReader(manifest).read(group)
    shard = Path(manifest.shard_location(group).path)
    content = shard.read_bytes()
    for row in rows:
        image = encoded.images[row].as_py()
        at = content.index(image) + len(image) // 2
        content = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
    shard.write_bytes(content)
