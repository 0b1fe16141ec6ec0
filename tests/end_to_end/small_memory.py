"""A driver whose workers run out of memory where a pass has more than 16 images, as GPUs would.

python -m tests.end_to_end.small_memory RECIPE
"""

import sys
from typing import Any

import ray
import torch

from vit_ray.commands.tables import print_result
from vit_ray.config import load_recipe
from vit_ray.launch.run import train
from vit_ray.train.engine import DeepSpeedEngine

MOST_IMAGES = 16


def take_memory_away() -> None:
    """Called by Ray in every process that it starts."""
    plain = DeepSpeedEngine.backward

    def backward(engine: DeepSpeedEngine, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        if len(images) > MOST_IMAGES:
            raise torch.OutOfMemoryError(f"{len(images)} images")
        return plain(engine, images, *rest)

    DeepSpeedEngine.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    ray.init(runtime_env={"worker_process_setup_hook": take_memory_away}, log_to_driver=False)
    sys.exit(print_result(train(load_recipe(sys.argv[1]))))
