"""The process that owns the worker pools of many trainings, and lends them.

Pools are owned outside the trainings that use them and outlive them. A loan ends with the training,
or when the borrower's process dies; its workers then give up their places, and another attempt
continues from the newest checkpoint, with other workers. If the keeper's process dies, its pools
end too; Ray starts a new keeper without pools, and each training borrows a new pool from it.
"""

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal

import ray

from vit_ray.launch.cluster.connection import live_nodes
from vit_ray.launch.pool.actor_calls import PROCESS_DIED, answer
from vit_ray.launch.pool.group_callbacks import remove_groups
from vit_ray.launch.pool.placement_wait import NoPlaceError
from vit_ray.launch.pool.pool_server import start_stream_server
from vit_ray.launch.pool.worker_pool import (
    KEEPER_NAME,
    LEND_S,
    BorrowedPool,
    PoolLostError,
    PoolShape,
    WorkerPool,
    pools_of_job,
)

logger = logging.getLogger(__name__)

Ending = Literal["keep", "close", "abandon"]
"""What happens to a returned pool: it takes the next training, its workers end, or they are
abandoned."""

LOOK_S: Final = 1.0
"""Seconds between checks whether borrowers are alive."""
SERVER_THREADS: Final = 256
"""Calls that a server answers at the same time: two per rank."""
WAITS_S: Final = 60.0
"""A loan that has asked for another pool within this time is waiting for its place."""


@dataclass
class _Loan:
    pool: WorkerPool
    borrower: Any
    """Handle of the actor that borrows; None for the driver, with which this process ends."""
    asked: Any = None
    """A call of the borrower that fails when its process dies."""
    asked_s: float = -math.inf
    """When it last asked for the place of another pool."""

    @property
    def waits(self) -> bool:
        """Whether its workers wait for their place."""
        return time.monotonic() - self.asked_s < WAITS_S

    def is_over(self) -> bool:
        """Whether the borrower's process has died."""
        if self.borrower is None:
            return False
        if self.asked is None:
            self.asked = self.borrower.__ray_ready__.remote()
        if not ray.wait([self.asked], timeout=0)[0]:
            return False  # it is running
        call, self.asked = self.asked, None
        try:
            ray.get(call, timeout=0)
        except PROCESS_DIED:
            return True
        return False


class PoolKeeper:
    """Runs as an actor with threads."""

    def __init__(self, environment: dict[str, str]) -> None:
        """`environment`: the user's settings for Ray Train, as in the driver."""
        os.environ.update(environment)
        if ray.is_initialized():
            context = ray.get_runtime_context()
            if context.get_actor_id() and context.was_current_actor_reconstructed:
                # Placed by an earlier keeper; Ray would keep it until the driver ends.
                remove_groups(pools_of_job(context.get_job_id()))
        self._idle: list[WorkerPool] = []
        """Pools that have trained, and so have their places."""
        self._started: list[WorkerPool] = []
        """Pools that wait for their first training, and perhaps for their places."""
        self._endings = ThreadPoolExecutor(8)
        """Ends pools in the background."""
        self._loans: dict[str, _Loan] = {}
        self._given_up: set[str] = set()
        """Loans that were cancelled before there was a pool."""
        self._num_started = 0
        self._servers: dict[tuple[Any, ...], tuple[str, Any]] = {}
        """By host and shape of the group: Ray's node id, and the shared stream server."""
        self._changed = threading.Condition()
        self._is_closed = False
        threading.Thread(target=self._watch, daemon=True, name="borrowers").start()

    def lend(self, loan: str, shape: PoolShape, is_private: bool, borrower: Any) -> Any:
        """Handle of the server of a pool of this shape.

        If none is idle, idle pools of other shapes give up their places to a new one.

        Args:
            loan: a unique name for this loan.
        """
        pool = self._idle_or_new(shape, is_private)
        with self._changed:
            is_closed = self._is_closed
            if loan in self._given_up:
                self._given_up.discard(loan)
                self._started.append(pool)
            else:
                self._loans[loan] = _Loan(pool, borrower)
        if is_closed:
            pool.abandon()
        return pool.server

    def start(self, shape: PoolShape, is_private: bool) -> None:
        """Start a pool of this shape if none is idle, before its training is ready."""
        pool = self._idle_or_new(shape, is_private)
        with self._changed:
            self._started.append(pool)

    def take_back(self, loan: str, ending: Ending) -> None:
        """The loan has ended, or will not be used."""
        with self._changed:
            for _, server in self._servers.values():
                server.close.remote(loan)  # no limit: the result is not waited for
            ended = self._loans.pop(loan, None)
            if ended is None:  # not lent yet, already returned, or from a keeper that has died
                self._given_up.add(loan)
                return
            if ending == "keep" and ended.pool.is_open and not self._is_closed:
                self._idle.append(ended.pool)
                return
        ended.pool.abandon() if ending == "abandon" else ended.pool.close()

    def free_place(self, loan: str) -> tuple[Any, bool]:
        """For a loan whose workers wait for their place, and that asks repeatedly.

        Idle pools of other shapes give up their places; the next idle pool of its shape is reserved
        for it.

        Returns:
            The server of an idle pool that replaces the loan's own, or None; and whether other
            trainings run.
        """
        with self._changed:
            its = self._loans.get(loan)
            if its is None:
                return None, False
            its.asked_s = time.monotonic()
            fitting = _fitting(self._idle, its.pool.shape)
            if fitting:
                self._idle.remove(fitting[0])
                self._endings.submit(its.pool.abandon)
                its.pool, its.asked_s = fitting[0], -math.inf
                return its.pool.server, True
            others = [pool for pool in self._idle if pool.shape != its.pool.shape]
            self._idle = [pool for pool in self._idle if pool.shape == its.pool.shape]
            for pool in others:
                self._endings.submit(pool.close)
            return None, any(not one.waits for one in self._loans.values())

    def stream_server(
        self, host: str, node: str, shape: tuple[int, int], how: dict[str, Any]
    ) -> Any:
        """Handle of the stream server that all trainings of one shape share on a host.

        Args:
            host: its address.
            node: Ray's id of a node of the host.
            shape: ranks on the host and in the whole group; they decide the server's CPU share.
            how: arguments of `StreamServer`.
        """
        key = host, shape, tuple(sorted(how.items()))
        alive = {one["NodeID"] for one in live_nodes()}
        with self._changed:
            if key not in self._servers or self._servers[key][0] not in alive:
                server = start_stream_server(node, SERVER_THREADS, how, max_restarts=-1)
                self._servers[key] = node, server
            return self._servers[key][1]

    def num_started(self) -> int:
        return self._num_started

    def close(self) -> None:
        with self._changed:
            loans = [loan.pool for loan in self._loans.values()]
            pools = [*self._idle, *self._started, *loans]
            self._idle, self._started, self._loans, self._is_closed = [], [], {}, True
            self._changed.notify_all()
        for pool in pools:
            self._endings.submit(pool.close)
        self._endings.shutdown()

    def _idle_or_new(self, shape: PoolShape, is_private: bool) -> WorkerPool:
        with self._changed:
            fitting = _fitting(self._idle, shape)
            waiting = [one for one in self._loans.values() if one.waits and one.pool.shape == shape]
            for pool in (*fitting[len(waiting) :], *_fitting(self._started, shape)):
                (self._idle if pool in self._idle else self._started).remove(pool)
                return pool
            others = [pool for pool in (*self._idle, *self._started) if pool not in fitting]
            self._idle, self._started = fitting, []
            self._num_started += 1
        # All in parallel: each pool that hangs takes the whole time limit.
        with ThreadPoolExecutor(len(others) or 1) as threads:
            list(threads.map(WorkerPool.close, others))
        return WorkerPool(shape, is_private=is_private)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, LOOK_S)
                if self._is_closed:
                    return
                loans = list(self._loans.items())
            for name, loan in loans:
                if loan.is_over():
                    try:
                        self.take_back(name, "abandon")
                    except Exception:  # the next loans must be watched, too
                        logger.exception("a pool could not be taken back")


def _fitting(pools: Sequence[WorkerPool], shape: PoolShape) -> list[WorkerPool]:
    return [pool for pool in pools if pool.shape == shape and pool.is_open]


class _Kept:
    """The keeper of a block, started with its first pool."""

    def __init__(self, handle: Any = None, num_sharing: int = 0) -> None:
        self.handle, self.num_sharing = handle, num_sharing

    def keeper(self) -> Any:
        if self.handle is None:
            given = {key: text for key, text in os.environ.items() if key.startswith("RAY_TRAIN_")}
            node = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            options: dict[str, Any] = {
                "num_cpus": 0,
                "max_concurrency": 64,
                "max_restarts": -1,
                "max_task_retries": -1,  # the keeper's successor answers calls to one that died
            }
            actor = ray.remote(PoolKeeper).options(**options, label_selector=node)
            self.handle = actor.remote(given)
        return self.handle

    def close(self) -> None:
        if self.handle is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self.handle.close.remote(), timeout=LEND_S)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self.handle)


_KEPT: ContextVar[_Kept | None] = ContextVar("kept_pools", default=None)


@contextlib.contextmanager
def kept_pools() -> Iterator[None]:
    """Inside the block, pools stay open for the next training of their shape."""
    if _KEPT.get() is not None:
        yield
        return
    kept = _Kept()
    with _borrowing_from(kept):
        try:
            yield
        finally:
            kept.close()


@contextlib.contextmanager
def borrowing(keeper: Any, num_sharing: int) -> Iterator[None]:
    """Inside the block, in a trial's process, pools come from the driver's keeper.

    Args:
        num_sharing: as in `BorrowedPool`, for the first training; later ones do not wait for
            others.
    """
    with _borrowing_from(_Kept(keeper, num_sharing)):
        yield


@contextlib.contextmanager
def _borrowing_from(kept: _Kept) -> Iterator[None]:
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)


def keeper() -> Any:
    """Handle of the keeper of the block of `kept_pools`."""
    kept = _KEPT.get()
    assert kept is not None
    return kept.keeper()


@contextlib.contextmanager
def borrowed_pool(shape: PoolShape, *, is_private: bool) -> Iterator[BorrowedPool]:
    """A pool of this shape; after an error in the block it ends, and no other run gets it.

    Raises:
        PoolLostError: the keeper's process has died.
    """
    kept, ending = _KEPT.get(), "close"
    own: WorkerPool | None = None
    keeper: Any = None
    num_sharing = 0
    loan = uuid.uuid4().hex
    if kept is None:
        own = WorkerPool(shape, is_private=is_private)
        server = own.server
    else:
        context = ray.get_runtime_context()
        borrower = context.current_actor if context.get_actor_id() else None
        keeper, num_sharing = kept.keeper(), kept.num_sharing
        kept.num_sharing = min(1, num_sharing)
        lent = keeper.lend.remote(loan, shape, is_private, borrower)
        try:
            server = answer(lent, KEEPER_NAME, LEND_S)
        except PROCESS_DIED as error:
            raise PoolLostError("the process of the pools' keeper has died") from error
        except RuntimeError:
            keeper.take_back.remote(loan, "close")  # no limit: it did not answer the call before
            raise
    try:
        yield BorrowedPool(shape, server, keeper, loan, num_sharing)
        ending = "keep"
    except NoPlaceError:
        ending = "abandon"
        raise
    finally:
        if own is not None:
            own.abandon() if ending == "abandon" else own.close()
        else:
            with contextlib.suppress(*PROCESS_DIED):
                answer(keeper.take_back.remote(loan, ending), KEEPER_NAME, LEND_S)
