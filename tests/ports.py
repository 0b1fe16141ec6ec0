"""Ports for servers that must be told theirs."""

import random
import socket
from contextlib import ExitStack

# Below the ports that Linux hands to connections by default (32768 on), and above those of Ray's
# workers (10002 to 19999): one that was free a moment ago is then taken by no bystander.
_CANDIDATES = range(20000, 32000)


def free_ports(count: int) -> list[int]:
    ports: list[int] = []
    with ExitStack() as held:  # all are held while they are chosen, so they differ
        while len(ports) < count:
            sock = held.enter_context(socket.socket())
            port = random.SystemRandom().choice(_CANDIDATES)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.append(port)
    return ports
