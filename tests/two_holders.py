"""Two processes that ask for the lock of one folder in the same moment, again and again."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.data import s3_server
from vit_ray import lock
from vit_ray.storage import locate

_LIMIT_S = 60.0


def _ask(place: Callable[[int], str], rounds: int, together: Any, answers: Any) -> None:
    lock.RELEASE_S, lock.POLL_S = 0.02, 0.01
    lock.SETTLE_S = 2.0
    s3_server.forget_clients()
    for index in range(rounds):
        folder = locate(place(index))
        together.wait(_LIMIT_S)
        try:
            with lock.hold_lock(folder, lambda _: None) as number:
                answers.put((index, number))
                together.wait(_LIMIT_S)  # until the other has been told
        except lock.HeldError:
            answers.put((index, 0))
            together.wait(_LIMIT_S)


def holders(place: Callable[[int], str], rounds: int) -> list[list[int]]:
    """Of each round what the two processes got: their numbers, 0 for a refusal; sorted.

    Args:
        place: a module's function: the folder of a round.
    """
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(2), context.Queue()
    asking = [
        context.Process(target=_ask, args=(place, rounds, together, answers)) for _ in range(2)
    ]
    for process in asking:
        process.start()
    got: list[list[int]] = [[] for _ in range(rounds)]
    for _ in range(2 * rounds):
        index, number = answers.get(timeout=_LIMIT_S)
        got[index].append(number)
    for process in asking:
        process.join(_LIMIT_S)
    return [sorted(numbers) for numbers in got]


def in_folder(root: str, index: int) -> str:
    return f"{root}/{index:03d}"


@contextlib.contextmanager
def lock_bucket(folder: Path, *, is_conditional: bool) -> Iterator[str]:
    """A place on a store that heeds If-None-Match, or on one that ignores it."""
    (folder / "locks").mkdir()
    with (
        s3_server.serve_conditional_s3() if is_conditional else s3_server.serve_s3(folder) as port,
        s3_server.this_process_uses(port, timeout_s=60),  # moto's first answer takes seconds
    ):
        if is_conditional:
            s3_server.create_bucket("locks")
        yield "s3://locks/runs"
