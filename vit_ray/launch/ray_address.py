"""The address of a Ray cluster, checked by its form alone."""

import re
from typing import Final

HOST_PORT: Final = r"\[?([^/\]]+)\]?:(\d+)"


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port of `HOST:PORT`; None for `auto` and `local`, which Ray finds itself.

    Raises:
        ValueError: it is neither; such as `ray://` of Ray Client, whose driver is outside.
    """
    if match := re.fullmatch(HOST_PORT, address):
        return match[1], int(match[2])
    if address not in ("auto", "local"):
        raise ValueError(
            f"RAY_ADDRESS={address} is not an address; give HOST:PORT as `ray start --head` "
            "printed it, or auto for the Ray of this machine; from outside of a cluster use `ray "
            "job submit`; or unset RAY_ADDRESS"
        )
    return None
