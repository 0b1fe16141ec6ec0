"""What Ray Train runs on every worker; to name it, a driver need not import torch."""

from typing import Any


def work_in_lane(config: dict[str, Any]) -> None:
    """See `worker.serve_lane`."""
    from vit_ray.train.worker import serve_lane

    serve_lane(config)
