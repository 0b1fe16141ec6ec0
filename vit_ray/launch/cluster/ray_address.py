"""The address of a Ray cluster, checked by its form alone."""

import re
from typing import Final

HOST_PORT: Final = r"\[?([^/\]]+)\]?:(\d+)"


def host_and_port(address: str) -> tuple[str, int] | None:
    """Host and port of `HOST:PORT` and `ray://HOST:PORT`; None for a form that Ray checks itself.

    Raises:
        ValueError: it is not an address.
    """
    if match := re.fullmatch(rf"(?:ray://)?{HOST_PORT}", address):
        return match[1], int(match[2])
    if "://" not in address and address not in ("auto", "local"):
        raise ValueError(
            f"RAY_ADDRESS={address} is not an address; give HOST:PORT as `ray start --head` "
            "printed it, ray://HOST:PORT, or auto for the Ray of this machine; or unset RAY_ADDRESS"
        )
    return None
