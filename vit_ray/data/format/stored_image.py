"""An image as a data set has it."""

from dataclasses import dataclass

from vit_ray.data.jpeg_index.restart_index import RestartIndex


@dataclass(frozen=True, eq=False)
class StoredImage:
    """An image as a data set has it: file, height and width, index of its restart markers."""

    content: bytes | memoryview
    size: tuple[int, int]
    index: RestartIndex | None = None
