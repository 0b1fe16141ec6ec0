"""What Ray Train runs on every worker; a driver can name it without importing torch."""

from typing import Any


def work_in_pool(config: dict[str, Any]) -> None:
    """See `worker.serve_pool`."""
    from vit_ray.worker.worker import serve_pool

    serve_pool(config)
