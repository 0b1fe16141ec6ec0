"""What Ray Train runs on every worker; a driver can name it without importing torch."""

from typing import Any


def work(config: dict[str, Any]) -> None:
    """See `worker.work`."""
    from vit_ray.worker import worker

    worker.work(config["start"])
