"""A driver, given a recipe, whose workers have memory for a pass of 16 images, each of which takes
32 MiB beside what the model takes: what is more, the system refuses.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import ray
import torch

from vit_ray.commands.trainings import print_result
from vit_ray.config import load_recipe
from vit_ray.launch.run import train
from vit_ray.training.engine import DeepSpeedEngine

IMAGE_BYTES = 32 << 20
# More than 16 images, less than the 32 that are tried first; a pass that is refused leaves it all.
ROOM_BYTES = 24 * IMAGE_BYTES


def make_images_large() -> None:
    """Called by Ray in every process that it starts."""
    plain = DeepSpeedEngine.backward

    def backward(engine: DeepSpeedEngine, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        now, most = resource.getrlimit(resource.RLIMIT_AS)
        if now == resource.RLIM_INFINITY:  # from the first pass on, the room beside what there is
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM_BYTES, most))
        activations = torch.empty(len(images) * IMAGE_BYTES, dtype=torch.uint8)
        loss = plain(engine, images, *rest)
        del activations
        return loss

    DeepSpeedEngine.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    ray.init(runtime_env={"worker_process_setup_hook": make_images_large}, log_to_driver=False)
    sys.exit(print_result(train(load_recipe(sys.argv[1]))))
