"""The actor of a pool: gives its workers one training after another.

It also runs the streams of the ranks on its own host, and starts servers for other hosts.
"""

import contextlib
import os
import signal
import threading
import time
import uuid
from dataclasses import replace
from typing import Any, Final

import ray
import ray.util

from vit_ray.data.stream.stream_server import Pass, PassName, StreamServer
from vit_ray.worker.job import TrainJob
from vit_ray.worker.pool_link import (
    Assignment,
    GroupBrokenError,
    Meeting,
    Member,
    OpensStreams,
)

ANSWER_S: Final = 5.0
"""Longest time after which a call answers that nothing has changed."""
ENDED_S: Final = 60.0
"""How long ranks may take to notice that the process they waited for was ended."""


class PoolServer:
    """Runs as an actor with a thread for every call; the process of its pool owns it."""

    def __init__(self, **how: Any) -> None:
        """`how`: arguments of `StreamServer`."""
        self._how = how
        self._streams = StreamServer(**how)
        self._workers = ""
        self._host_servers: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._assignment: Assignment | None = None
        self._num_assigned = 0
        self._has_ended = True
        self._ended: set[int] = set()
        self._start = ""
        self._members: dict[int, Member] = {}
        self._ended_s: dict[Member, float] = {}
        self._is_hung = False
        self._is_open = True
        self._error: BaseException | None = None
        self._is_placed = False

    def next_block(self, one: Pass | PassName, rank: int, index: int) -> list[Any]:
        """As `StreamServer.next_block`."""
        return self._streams.next_block(one, rank, index)

    def stream_server(self, group: str, host: str, node: str, ranks: range) -> Any:
        """Handle of the process that serves the ranks of a host, None for this actor itself.

        Servers of other hosts belong to one start of the worker group, and end with the handles of
        its workers.

        Args:
            group: as in `RankStreams`.
            host: its address.
            node: Ray's id of a node of the host, on which the server starts.
            ranks: all ranks of the group that are on the host.
        """
        if host == ray.util.get_node_ip_address():  # type: ignore[no-untyped-call]
            return None
        workers = group.partition(" ")[0]
        with self._changed:
            if workers != self._workers:
                self._workers, self._host_servers = workers, {}
            if host not in self._host_servers:
                at_once = 2 * len(ranks) + 2
                self._host_servers[host] = start_stream_server(node, at_once, self._how)
            return self._host_servers[host]

    def assign(self, job: TrainJob, use_gpu: bool, streams: OpensStreams) -> None:
        """Assign the next training; the previous one has ended."""
        with self._changed:
            self._begin(Assignment(self._num_assigned, job, use_gpu, streams))

    def reassign(self, *, alone: bool) -> bool:
        """Assign the current training again; some or all workers are new.

        Args:
            alone: only the workers that died are new.

        Returns:
            False if the remaining workers hang, so that all must start again.
        """
        with self._changed:
            if alone and self._is_hung:
                return False
            if not alone:
                self._start, self._is_hung = uuid.uuid4().hex, False
            if self._assignment is not None and not self._has_ended:
                self._begin(replace(self._assignment, number=self._num_assigned))
            return True

    def is_reassigned(self, number: int, wait_s: float) -> bool:
        """Whether there is another assignment than this one, now or within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_current(number), wait_s)

    def meet(self, number: int, rank: int, world_size: int, member: Member) -> Meeting | None:
        """All ranks of the group once they are there; None after some seconds.

        Raises:
            GroupBrokenError: the training is assigned again, or the pool is closed.
        """
        with self._changed:
            if self._is_current(number):
                self._members[rank] = member
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: not self._is_current(number) or len(self._members) == world_size, ANSWER_S
            )
            if not self._is_current(number):
                raise GroupBrokenError("another worker has died; the training is assigned again")
            if len(self._members) < world_size:
                return None
            members = tuple(self._members[one] for one in range(world_size))
            return Meeting(self._group(number), members)

    def end_silent(self, number: int, ranks: list[int]) -> bool:
        """End the processes of ranks that hang.

        Returns:
            False if no rank hangs, or ending them has not helped: then only a restart of all
            workers helps.
        """
        with self._changed:
            if not self._is_current(number):
                return True
            now_s = time.monotonic()
            found = [self._members[rank] for rank in ranks if rank in self._members]
            for member in found:
                if member not in self._ended_s:
                    self._ended_s[member] = now_s
                    end = ray.remote(_end_process).options(
                        num_cpus=0, label_selector={"ray.io/node-id": member.node}
                    )
                    end.remote(member.pid)  # no limit: the call's result is ignored
            self._is_hung = not any(now_s - self._ended_s[m] < ENDED_S for m in found)
            return not self._is_hung

    def current_job(self) -> TrainJob | None:
        """The current training; None between two of them."""
        return None if self._has_ended or self._assignment is None else self._assignment.job

    def note_placement(self, is_placed: bool) -> None:
        """Whether the worker group is running, according to its controller."""
        self._is_placed = is_placed

    def is_placed(self) -> bool:
        return self._is_placed

    def wait_until_ended(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether all workers have finished the training, now or within some seconds."""
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._has_ended or not self._is_open, timeout_s)
                and self._has_ended
            )

    def next_assignment(self, after: int) -> tuple[bool, Assignment | None]:
        """Whether the pool is open, and the current training if its number is above `after`."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_new(after) or not self._is_open, ANSWER_S)
            return self._is_open, self._assignment if self._has_new(after) else None

    def end_rank(self, number: int, rank: int, world_size: int) -> None:
        """Count a worker as done; the training ends when all workers of its group are."""
        with self._changed:
            if not self._is_current(number):
                return
            self._ended.add(rank)
            if len(self._ended) == world_size:
                self._has_ended = True
                self._close_streams()
                self._changed.notify_all()

    def close(self, why: tuple[BaseException | None] = (None,)) -> None:
        """Let the workers end, or note that they have, and why."""
        with self._changed:
            self._is_open, self._error = False, why[0] or self._error
            self._changed.notify_all()
        self._close_streams()

    def closed(self) -> tuple[bool, BaseException | None]:
        """Whether the pool takes no more trainings, and the error that ended it, if any."""
        return not self._is_open, self._error

    def _close_streams(self) -> None:
        self._streams.close()
        for server in self._host_servers.values():
            server.close.remote()  # no limit: the call's result is ignored

    def _group(self, number: int) -> str:
        return f"{self._start} {number}"

    def _begin(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._num_assigned += 1
        self._has_ended, self._ended, self._members = False, set(), {}
        self._changed.notify_all()

    def _is_current(self, number: int) -> bool:
        is_assigned = self._assignment is not None and self._assignment.number == number
        return is_assigned and self._is_open

    def _has_new(self, after: int) -> bool:
        return (
            self._assignment is not None and not self._has_ended and self._assignment.number > after
        )


def start_stream_server(node: str, at_once: int, how: dict[str, Any]) -> Any:
    """Handle of a new `StreamServer`.

    Args:
        at_once: calls that it answers at the same time.
        how: its arguments.
    """
    where = {"ray.io/node-id": node}
    actor: Any = ray.remote(StreamServer)
    actor = actor.options(num_cpus=0, max_concurrency=at_once, label_selector=where)
    return actor.remote(**{**how, "warms_up": True})


def _end_process(pid: int) -> None:
    """Runs on the process's node; a stopped process would not answer."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
