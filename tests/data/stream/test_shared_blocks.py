"""Who gets which blocks of a reading, with which others, and what is kept: no Ray."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vit_ray.data.stream import shared_blocks
from vit_ray.data.stream.ray_datasets import Segment
from vit_ray.data.stream.shared_blocks import (
    KeptBlocks,
    RankBlock,
    Reader,
    Reading,
    StreamLostError,
    blocks_of,
)

Blocks = list[RankBlock]


class Source:
    """Gives some blocks, and notes with which it was asked to begin, and how many it gave."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks, self.firsts, self.num_made = blocks, list[int](), 0

    @property
    def times(self) -> int:
        return len(self.firsts)

    def __call__(self, first: int = 0) -> Generator[RankBlock, None, None]:
        self.firsts.append(first)
        for one in self.blocks[first:]:
            self.num_made += 1
            yield one


def reader_of(
    source: Callable[[int], Any], ranks: range | None = None, most_bytes: float = 0.0, **how: Any
) -> Reader:
    reader = Reading(source, ranks, most_bytes=lambda: most_bytes, **how).new_reader()
    assert reader is not None
    return reader


def joined(reader: Reader) -> Reader:
    other = reader.reading.new_reader()
    assert other is not None
    return other


def all_of(reader: Reader, rank: int = 0, begun: int = 0) -> list[Any]:
    """What is left for a rank."""
    found = []
    while (one := reader.next_block(rank, begun + len(found))) is not None:
        found.append(one)
    return found


def block(name: Any, size: int = 1, rank: int = 0) -> RankBlock:
    return RankBlock(rank, name, size)


def test_a_block_reaches_its_rank_while_another_rank_makes_more() -> None:
    ranks, makes, is_taken = range(2), threading.Event(), threading.Event()

    def read(_: int) -> Generator[RankBlock, None, None]:
        makes.set()
        deadline_s = time.monotonic() + 10
        while reader.num_waiting != len(ranks) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.1)  # both wait by now, one of them for the other's making
        yield block("a", rank=0)
        assert is_taken.wait(10), "rank 0 waits for the block of rank 1"
        yield block("b", rank=1)

    reader = reader_of(read, ranks)
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(reader.next_block, 1, 0)
        makes.wait(10)
        assert reader.next_block(0, 0) == "a"
        is_taken.set()
        assert second.result() == "b"


def test_a_reading_that_fits_is_kept_and_one_that_does_not_is_read_again() -> None:
    kept = KeptBlocks(10)
    small, large = Source([block("a", 4), block("b", 6)]), Source([block("c", 5), block("d", 6)])
    for _ in range(3):
        assert list(kept.blocks(b"small", small)) == small.blocks
        assert list(kept.blocks(b"large", large)) == large.blocks
    assert (small.times, large.times) == (1, 3)


def test_what_was_used_last_is_kept() -> None:
    kept = KeptBlocks(10)
    readers = {key: Source([block(key, 4)]) for key in (b"a", b"b", b"c")}
    for key in (b"a", b"b", b"a", b"c", b"a", b"b"):
        assert list(kept.blocks(key, readers[key])) == [block(key, 4)]
    assert {key: reader.times for key, reader in readers.items()} == {b"a": 1, b"b": 2, b"c": 1}


def test_what_was_kept_can_be_given_up() -> None:
    kept, source = KeptBlocks(10), Source([block("a", 4)])
    for _ in range(2):
        assert list(kept.blocks(b"key", source)) == source.blocks
    kept.clear()
    assert list(kept.blocks(b"key", source)) == source.blocks
    assert source.times == 2


def test_a_reading_that_was_left_or_failed_is_not_kept() -> None:
    kept = KeptBlocks(10)
    source = Source([block("a"), block("b")])
    left = kept.blocks(b"key", source)
    next(left)
    left.close()

    def failing() -> Generator[RankBlock, None, None]:
        yield block("a")
        raise OSError("storage is away")

    with pytest.raises(OSError, match="away"):
        list(kept.blocks(b"key", failing))
    assert list(kept.blocks(b"key", source)) == source.blocks
    assert source.times == 2


def test_every_rank_is_told_that_a_stream_failed() -> None:
    def failing() -> Generator[RankBlock, None, None]:
        yield block("a")
        raise ValueError("too many bad images")

    dealt = reader_of(lambda _: failing())
    assert dealt.next_block(0, 0) == "a"
    for rank, index in ((1, 0), (2, 0), (0, 1)):
        with pytest.raises(ValueError, match="too many bad images"):
            dealt.next_block(rank, index)


def test_each_rank_takes_its_own_blocks_in_their_order() -> None:
    blocks = (block(name, rank=rank) for rank, name in enumerate(("a0", "b0", "c0")))
    later = (block(name, rank=rank) for name, rank in (("a1", 0), ("a2", 0), ("b1", 1)))
    dealt = reader_of(Source([*blocks, *later]))
    assert [dealt.next_block(1, 0), dealt.next_block(1, 1), dealt.next_block(1, 2)] == [
        "b0", "b1", None,
    ]  # fmt: skip
    assert [dealt.next_block(0, index) for index in range(4)] == ["a0", "a1", "a2", None]
    with pytest.raises(StreamLostError, match="rank 2 has had 1 blocks, but was given 0"):
        dealt.next_block(2, 1)


def test_a_rank_of_another_host_is_refused() -> None:
    dealt = reader_of(Source([block(name, rank=4) for name in "ab"]), range(4, 6))
    assert dealt.next_block(4, 0) == "a"
    with pytest.raises(StreamLostError, match="rank 6 asked the server of ranks 4 to 5"):
        dealt.next_block(6, 0)


def made_up_segments(started: list[int], sizes: list[int], next_at: int) -> Iterator[Segment]:
    """Segments of one rank without Ray, that note when they are executed."""

    class Executed:
        def __init__(self, number: int) -> None:
            self.number = number

        def iter_internal_ref_bundles(self) -> list[Any]:
            started.append(self.number)
            metadata = SimpleNamespace(size_bytes=1)
            names = [f"{self.number}.{index}" for index in range(sizes[self.number])]
            entries = [SimpleNamespace(ref=name, metadata=metadata) for name in names]
            return [SimpleNamespace(blocks=[entry]) for entry in entries]

    for number, size in enumerate(sizes):
        dataset: Any = Executed(number)
        yield Segment(dataset, [0] * size, next_at)


def test_the_next_segment_starts_while_the_last_blocks_of_one_are_taken() -> None:
    started: list[int] = []
    blocks = blocks_of(made_up_segments(started, [6, 4, 4], 2))
    names = [str(next(blocks).block) for _ in range(3)]
    assert started == [0]
    names.append(str(next(blocks).block))
    deadline_s = time.monotonic() + 30
    while started == [0] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert started == [0, 1]
    names += [str(one.block) for one in blocks]
    assert names == [f"{n}.{index}" for n, size in enumerate((6, 4, 4)) for index in range(size)]


def test_an_execution_that_gives_too_few_blocks_is_an_error() -> None:
    (whole,) = made_up_segments([], [3], 0)
    with pytest.raises(ValueError, match="shorter"):
        list(blocks_of(iter([replace(whole, ranks=[0, 0, 0, 0])])))


NAMES = [f"{rank}-{index}" for index in range(40) for rank in range(2)]
OF_TWO_RANKS = [block(name, rank=int(name[0])) for name in NAMES]


def of_rank(rank: int) -> list[str]:
    return [name for name in NAMES if name.startswith(f"{rank}-")]


def test_readers_of_one_reading_get_all_of_it_each_at_its_own_pace() -> None:
    source = Source(OF_TWO_RANKS)
    first = reader_of(source, most_bytes=1000)
    assert [first.next_block(0, index) for index in range(30)] == of_rank(0)[:30]
    second = joined(first)  # late, but nothing is gone yet
    for reader, begun in ((second, 0), (first, 30)):
        assert all_of(reader, 0, begun) == of_rank(0)[begun:]
        assert all_of(reader, 1) == of_rank(1)
    assert (source.firsts, source.num_made) == ([0], 80)


def test_one_that_comes_after_what_is_kept_has_gone_is_too_late() -> None:
    reader = reader_of(Source(OF_TWO_RANKS), most_bytes=10)
    for index in range(6):
        reader.next_block(0, index)
    assert not reader.reading.can_be_joined
    assert reader.reading.new_reader() is None
    reader.close()
    alone = reader_of(Source(OF_TWO_RANKS))
    alone.next_block(0, 0)
    assert alone.reading.new_reader() is None


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Any]]:
    """Calls in threads; each gives a function that waits for what is returned."""
    with ThreadPoolExecutor(8) as threads:
        yield lambda call, *arguments: threads.submit(call, *arguments).result


def test_a_fast_reader_waits_for_a_slow_one_at_the_bound(in_thread: Any) -> None:
    source = Source(OF_TWO_RANKS)
    fast = reader_of(source, most_bytes=10, expected=2)
    slow = joined(fast)
    fast_one, fast_other = in_thread(all_of, fast, 0), in_thread(all_of, fast, 1)
    for index, name in enumerate(of_rank(0)):
        deadline_s = time.monotonic() + 30
        while slow.held_bytes < min(10, 80 - 2 * index) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert slow.held_bytes <= 10
        assert slow.next_block(0, index) == name
        assert slow.next_block(1, index) == of_rank(1)[index]
    assert fast_one(30) == of_rank(0)
    assert fast_other(30) == of_rank(1)
    assert source.firsts == [0]


def test_one_that_takes_nothing_reads_what_it_has_not_been_given_by_itself(
    in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "PATIENCE_S", 0.2)
    monkeypatch.setattr(shared_blocks, "LOOK_S", 0.02)
    source = Source(OF_TWO_RANKS)
    fast = reader_of(source, most_bytes=10)
    slow = joined(fast)
    assert slow.next_block(0, 0) == "0-0"
    others = in_thread(all_of, fast, 1)
    assert all_of(fast) == of_rank(0)
    assert others(30) == of_rank(1)
    fast.close()
    others = in_thread(all_of, slow, 1)
    assert all_of(slow, 0, 1) == of_rank(0)[1:]
    assert others(30) == of_rank(1)
    first, own = source.firsts
    assert (first, 10 <= own <= 12) == (0, True)


def test_patience_begins_when_others_must_wait(
    in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the last block before a pause that all have, such as an evaluation."""
    monkeypatch.setattr(shared_blocks, "LOOK_S", 0.02)
    source = Source(OF_TWO_RANKS)
    fast = reader_of(source, most_bytes=10)
    slow = joined(fast)
    assert slow.next_block(0, 0) == fast.next_block(0, 0)
    now_s, plain = time.monotonic() + 3600.0, time.monotonic
    monkeypatch.setattr(shared_blocks.time, "monotonic", lambda: now_s + plain() % 1e-3)
    rest = in_thread(all_of, fast, 0, 1)
    deadline_s = plain() + 30
    while slow.held_bytes < 10 and plain() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.1)
    assert slow.reading is fast.reading
    assert source.num_made <= 12
    slow.close()
    assert rest(30) == of_rank(0)[1:]


def test_nobody_waits_for_one_that_leaves(in_thread: Any) -> None:
    fast = reader_of(Source(OF_TWO_RANKS), most_bytes=10)
    slow = joined(fast)
    rest = in_thread(all_of, fast, 0)
    while slow.held_bytes < 10:
        time.sleep(0.001)
    began_s = time.monotonic()
    slow.close()
    held = [slow.next_block(1, index) for index in range(len(slow._ready[1]))]
    assert held == of_rank(1)[: len(held)]
    with pytest.raises(StreamLostError, match="stream of rank 1 was closed before its end"):
        slow.next_block(1, len(held))  # it has not come to its end
    assert rest(30) == of_rank(0)
    assert time.monotonic() - began_s < shared_blocks.PATIENCE_S / 2
    fast.close()
    assert fast.reading.new_reader() is None


def test_the_last_that_leaves_ends_the_reading() -> None:
    ended = threading.Event()

    def endless(first: int) -> Generator[RankBlock, None, None]:
        try:
            for index in itertools.count(first):
                yield block(index)
        finally:
            ended.set()

    one = reader_of(endless, most_bytes=10)
    other = joined(one)
    assert (one.next_block(0, 0), other.next_block(0, 0)) == (0, 0)
    one.close()
    assert not ended.is_set()
    other.close()
    assert ended.is_set()


def test_those_that_are_expected_are_waited_for_and_not_forever(
    in_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "LOOK_S", 0.02)
    source = Source([block(name) for name in range(40)])
    first = reader_of(source, most_bytes=10, expected=2)
    rest = in_thread(all_of, first)
    deadline_s = time.monotonic() + 30
    while source.num_made < 10 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    time.sleep(0.1)
    assert source.num_made == 10  # it waits
    second = in_thread(all_of, joined(first))
    assert rest(30) == second(30) == [*range(40)]
    monkeypatch.setattr(shared_blocks, "GATHER_S", 0.1)
    alone = reader_of(Source([block(name) for name in range(40)]), most_bytes=10, expected=2)
    assert all_of(alone) == [*range(40)]


def test_every_reader_is_told_that_a_stream_failed() -> None:
    def failing(_: int) -> Generator[RankBlock, None, None]:
        yield block("a")
        raise ValueError("too many bad images")

    one = reader_of(failing, most_bytes=10)
    other = joined(one)
    assert one.next_block(0, 0) == other.next_block(0, 0) == "a"
    for reader in (other, one):
        with pytest.raises(ValueError, match="too many bad images"):
            reader.next_block(0, 1)
    assert one.reading.new_reader() is None


@pytest.mark.parametrize("seed", range(12))
def test_whoever_comes_waits_hangs_or_leaves_each_rank_gets_its_blocks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "PATIENCE_S", 0.05)
    monkeypatch.setattr(shared_blocks, "LOOK_S", 0.01)
    rng = random.Random(seed)
    ranks = range(rng.choice([1, 2, 3]))
    blocks = [
        block((rank, index), rng.randint(1, 9), rank) for index in range(60) for rank in ranks
    ]
    source = Source(blocks)
    first = reader_of(source, most_bytes=rng.choice([1, 30, 200]), expected=rng.choice([1, 3]))
    readers = [first, *(one for _ in range(3) if (one := first.reading.new_reader()) is not None)]
    plans = [
        (rng.random() * 0.004, rng.choice([None, 10, 40]), rng.choice([None, 20]), rng.random())
        for _ in readers
    ]

    def take(
        number: int, reader: Reader, rank: int, plan: tuple[float, int | None, int | None, float]
    ) -> tuple[bool, list[Any]]:
        pause_s, leaves_at, hangs_at, _ = plan
        mine, found = random.Random(f"{seed} {number} {rank}"), list[Any]()
        while True:
            try:
                one = reader.next_block(rank, len(found))
            except StreamLostError:  # another of its ranks has left
                assert number
                assert leaves_at
                return False, found
            if one is None:
                return True, found
            found.append(one)
            if len(found) == hangs_at:
                time.sleep(0.15)
            if len(found) == leaves_at and number:
                reader.close()
                return False, found
            time.sleep(mine.random() * pause_s)

    with ThreadPoolExecutor(16) as threads:
        ends = [
            (plan[1] if number else None, rank, threads.submit(take, number, reader, rank, plan))
            for number, (reader, plan) in enumerate(zip(readers, plans, strict=True))
            for rank in ranks
        ]
        for leaves_at, rank, end in ends:
            whole, found = end.result(60)
            assert found == [(rank, index) for index in range(len(found))]
            assert len(found) == 60 or not whole
            assert whole or leaves_at


def test_a_reading_that_all_have_had_is_not_kept() -> None:
    one = reader_of(Source(OF_TWO_RANKS), range(2), most_bytes=1000)
    assert all_of(one, 0) == of_rank(0)
    other = joined(one)  # until then it is there for others
    assert all_of(one, 1) == of_rank(1)
    third = joined(one)
    for reader in (other, third):
        assert [all_of(reader, rank) for rank in range(2)] == [of_rank(0), of_rank(1)]
    assert not one.reading.can_be_joined
