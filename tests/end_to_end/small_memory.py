"""A driver, given a recipe, whose workers have memory for a pass of 16 images, each of which takes
32 MiB beside what the model takes: what is more, the system refuses.
"""

import resource
import sys
from typing import Any

import ray
import torch

from vit_ray.commands.train import print_result
from vit_ray.config import load_recipe
from vit_ray.launch.run import train
from vit_ray.training.engine import DeepSpeedEngine

IMAGE_BYTES = 32 << 20
# More than 16 images, less than the 32 that are tried first; a pass that is refused leaves it all.
ROOM_BYTES = 24 * IMAGE_BYTES


def cap_memory() -> None:
    """Let this process take no more than the room beside what it has."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM_BYTES, most))


def make_images_large() -> None:
    """Called by Ray in every process that it starts."""
    plain = DeepSpeedEngine.backward

    def backward(engine: DeepSpeedEngine, images: torch.Tensor, *rest: Any) -> torch.Tensor:
        if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
            cap_memory()
        activations = torch.empty(len(images) * IMAGE_BYTES, dtype=torch.uint8)
        loss = plain(engine, images, *rest)
        del activations
        return loss

    DeepSpeedEngine.backward = backward  # type: ignore[method-assign]


if __name__ == "__main__":
    ray.init(runtime_env={"worker_process_setup_hook": make_images_large}, log_to_driver=False)
    sys.exit(print_result(train(load_recipe(sys.argv[1]))))
