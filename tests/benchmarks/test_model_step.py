"""What the speed of a model is held against."""

import importlib
import importlib.util
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from benchmarks import model_step
from benchmarks.model_step import (
    OURS,
    Row,
    Trainee,
    choose,
    compile_blocks,
    measure,
    step_flops,
    table,
    without_broken,
)
from vit_ray.models.flops import forward_macs, training_macs

NAME = "ViT-B/16"
SIZES = [1, 2, 4]


@pytest.fixture(autouse=True)
def compiler_settings() -> Iterator[None]:
    """As they were, for the tests that follow."""
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        yield


def row_of(peer: str, mode: str = "compiled", **known: Any) -> Row:
    made = Row(NAME, mode, peer, torch.bfloat16, is_compiled=mode == "compiled")
    for name, value in known.items():
        setattr(made, name, value)
    return made


def test_the_floating_point_operations_of_our_step_are_those_of_mfu() -> None:
    count = training_macs(NAME, model_step.NUM_CLASSES, model_step.IMAGE_SIZE)
    assert step_flops(model_step.our_model, NAME) == 2 * count.model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a GPU of this name, on which an image a second is the peak by the paper's count."""
    paper = 6 * forward_macs(NAME, model_step.NUM_CLASSES, model_step.IMAGE_SIZE)

    def have(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(model_step, "peak_flops", lambda name, precision: paper)

    return have


ONE_S: dict[str, Any] = {"batch": 1, "wall_s": {0: 1.0}, "cpu_s": {0: 1.0}}


def test_the_bar_stands_beside_the_share_of_what_is_computed(gpu: Callable[[str], None]) -> None:
    gpu("NVIDIA H200")
    paper = 6 * forward_macs(NAME, model_step.NUM_CLASSES, model_step.IMAGE_SIZE)
    assert "| 50.0% (bar 45%) | 100.0% |" in table([row_of(OURS, flops=paper // 2, **ONE_S)])
    assert "| - (bar 45%) | 100.0% |" in table([row_of(OURS, **ONE_S)])  # was not counted


@pytest.mark.parametrize(
    ("device", "ours", "theirs", "bars"),
    [
        ("NVIDIA H200", "compiled", "compiled", ["(bar 45%)", "(bar 1.1)"]),
        ("NVIDIA H200", "compiled", "eager", ["(bar 45%)"]),
        ("NVIDIA H200", "eager", "compiled", []),
        ("NVIDIA L4", "compiled", "compiled", []),
        ("NVIDIA H100 80GB HBM3", "compiled", "compiled", []),
    ],
)
def test_bars_stand_only_where_they_hold(
    device: str, ours: str, theirs: str, bars: list[str], gpu: Callable[[str], None]
) -> None:
    """What could not be compiled is in the same table as what was."""
    gpu(device)
    rows = [row_of(OURS, flops=1, **ONE_S), row_of("timm", flops=1, **ONE_S)]
    rows[0].is_compiled, rows[1].is_compiled = ours == "compiled", theirs == "compiled"
    shown = table(rows)
    assert [bar for bar in ("(bar 45%)", "(bar 1.1)") if bar in shown] == bars
    assert shown.count("(bar") == len(bars)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Without the compiler."""
        self._compiled_call_impl = self._call_impl


class Broken(Block):
    def compile(self, *args: Any, **kwargs: Any) -> None:
        def fails(*_: Any) -> None:
            raise RuntimeError("Failed to find C compiler")

        self._compiled_call_impl = fails


class Refuses(Block):
    def compile(self, *args: Any, **kwargs: Any) -> None:
        raise AttributeError("this torch has no such setting")


class Steady:
    """Takes so many seconds a step by size of the batch; of other sizes there is no memory."""

    def __init__(self, eager: dict[int, float], compiled: dict[int, float]) -> None:
        self.model = nn.ModuleList([Block(), Block()])
        self.step_s = {"eager": eager, "compiled": compiled}

    def seconds(self, size: int, least_s: float) -> tuple[float, float] | None:
        is_compiled = self.model[0]._compiled_call_impl is not None
        found = self.step_s["compiled" if is_compiled else "eager"].get(size)
        return None if found is None else (found, 0.0)


def chosen(mode: str, eager: dict[int, float], compiled: dict[int, float]) -> Row:
    trainee: Any = Steady(eager, compiled)
    row = row_of(OURS, mode)
    choose(trainee, [16, 32, 64, 128, 256], row)
    return row


# Images per second: 16, 26.7, 32, 42.7, 51.2.
RISING = {16: 1.0, 32: 1.2, 64: 2.0, 128: 3.0, 256: 5.0}


def up_to(most: int) -> dict[int, float]:
    return {size: step_s for size, step_s in RISING.items() if size <= most}


@pytest.mark.parametrize(
    ("step_s", "found", "tried"),
    [
        (RISING, 256, [16, 32, 64, 128, 256]),
        (up_to(128), 128, [16, 32, 64, 128, 256]),
        (up_to(16), 16, [16, 32]),
        ({**RISING, 128: 4.1}, 256, [16, 32, 64, 128, 256]),  # a dip on the way up
        ({**RISING, 16: 0.3}, 16, [16, 32, 64, 128, 256]),  # the smallest is the fastest
    ],
)
def test_an_eager_model_takes_the_fastest_of_all_sizes_that_fit(
    step_s: dict[int, float], found: int, tried: list[int]
) -> None:
    row = chosen("eager", step_s, {})
    assert row.batch == found
    assert row.tried["compiled"] == {}
    rates = row.tried["eager"]
    assert list(rates) == tried
    assert rates == {n: n / step_s[n] if n in step_s else None for n in tried}


@pytest.mark.parametrize(
    ("eager", "compiled", "found", "tried"),
    [
        # Eager 64 is the fastest of three, compiled another of them.
        ({**RISING, 64: 1.0}, {**RISING, 32: 0.1}, 32, [64, 32, 128]),
        ({**RISING, 64: 1.0}, {**RISING, 128: 0.1}, 128, [64, 32, 128]),
        (RISING, RISING, 256, [256, 128, 64]),
        # Compiled, a larger one fits, or fewer do, or only small ones that are far from it.
        (up_to(64), up_to(128), 128, [64, 32, 128]),
        (up_to(128), up_to(64), 64, [128, 64, 32, 16]),
        (RISING, up_to(16), 16, [256, 128, 64, 32, 16]),
        ({}, up_to(16), 16, [16, 32]),
    ],
)
def test_a_compiled_model_takes_the_fastest_as_compiled_next_to_the_fastest_eager(
    eager: dict[int, float], compiled: dict[int, float], found: int, tried: list[int]
) -> None:
    row = chosen("compiled", eager, compiled)
    assert (row.batch, row.is_compiled, row.notes) == (found, True, [])
    assert list(row.tried["compiled"]) == tried


def test_no_further_size_is_compiled_once_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that fits is, however long it takes: without one there is no figure."""
    clock = itertools.count(step=model_step.COMPILED_S * 0.6)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert list(chosen("compiled", RISING, RISING).tried["compiled"]) == [256, 128]
    assert list(chosen("compiled", RISING, up_to(64)).tried["compiled"]) == [256, 128, 64, 32]


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_model_of_which_no_batch_fits_says_so(mode: str) -> None:
    with pytest.raises(MemoryError, match="16 images do not fit"):
        chosen(mode, {}, {})


def test_a_compiler_that_fails_later_leaves_what_it_compiled() -> None:
    class Fails(Steady):
        def seconds(self, size: int, least_s: float) -> tuple[float, float] | None:
            if size == 128 and self.model[0]._compiled_call_impl is not None:
                raise RuntimeError("no code for this size")
            return super().seconds(size, least_s)

    trainee: Any = Fails(RISING, RISING)
    row = row_of(OURS)
    choose(trainee, list(RISING), row)
    assert (row.batch, row.is_compiled) == (256, True)
    assert row.notes == ["no further size compiled: RuntimeError: no code for this size"]


class Tiny(nn.Module):
    """Of which a batch above some size says that there is no memory.

    Args:
        most_compiled: as most, once its blocks are compiled.
        passes: by size, how many forward passes it has the memory for.
        error: says that there is none.
    """

    def __init__(
        self,
        most: int = 100,
        most_compiled: int = 100,
        passes: dict[int, int] | None = None,
        error: str = "CUDA out of memory",
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(3, model_step.NUM_CLASSES)
        self.most, self.most_compiled, self.error = most, most_compiled, error
        self.passes = dict(passes or {})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        size = len(images)
        is_compiled = getattr(self.blocks[0], "_compiled_call_impl", None) is not None
        left = self.passes.get(size, 1)
        if size in self.passes:
            self.passes[size] -= 1
        if left <= 0 or size > (self.most_compiled if is_compiled else self.most):
            raise RuntimeError(self.error)
        x = images.mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_blocks(kind: type[Block]) -> nn.Module:
    model = Tiny()
    model.blocks = nn.ModuleList([kind() for _ in range(2)])
    return model


def missing(_: str) -> nn.Module:
    raise ModuleNotFoundError("No module named 'timm'")


Measure = Callable[..., list[Row]]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """The last rows of peers in their rounds, of which each has two steps, as has a trial."""
    monkeypatch.setattr(model_step, "IMAGE_SIZE", 8)
    monkeypatch.setattr(model_step, "step_flops", lambda build, name: 1)
    for name in ("TRIAL_S", "TURN_S"):
        monkeypatch.setattr(model_step, name, 0.0)

    def run(rounds: int, mode: str, **peers: Callable[[str], nn.Module]) -> list[Row]:
        monkeypatch.setattr(model_step, "PEERS", peers)
        *_, rows = measure(NAME, mode, SIZES, torch.float32, rounds)
        return rows

    return run


def test_a_model_that_fails_leaves_the_others_their_rows(measured: Measure) -> None:
    rows = measured(
        2,
        "compiled",
        vit_ray=lambda _: Tiny(most_compiled=2),
        small=lambda _: Tiny(most=1, most_compiled=1),
        none=lambda _: Tiny(most=0, most_compiled=0),
        uncompilable=lambda _: of_blocks(Broken),
        refuses=lambda _: of_blocks(Refuses),
        missing=missing,
    )
    by_peer = {row.peer: row for row in rows}
    assert by_peer[OURS].batch <= 2  # as compiled
    assert by_peer["small"].batch == 1
    rates = by_peer["small"].tried["eager"]
    assert rates == {1: rates[1], 2: None}
    assert by_peer["none"].notes == ["MemoryError: 1 images do not fit"]
    assert by_peer["uncompilable"].notes == [
        "not compiled: RuntimeError: Failed to find C compiler"
    ]
    assert by_peer["refuses"].notes == [
        "not compiled: AttributeError: this torch has no such setting"
    ]
    assert by_peer["missing"].notes == ["ModuleNotFoundError: No module named 'timm'"]
    assert {row.peer: list(row.wall_s) for row in rows} == {
        OURS: [0, 1], "small": [0, 1], "none": [], "uncompilable": [0, 1], "refuses": [0, 1],
        "missing": [],
    }  # fmt: skip
    assert {row.peer for row in rows if row.is_compiled and row.wall_s} == {OURS, "small"}
    head, _, *lines = table(rows).splitlines()
    assert all(line.count("|") == head.count("|") for line in lines)


def test_a_model_that_runs_out_of_memory_in_a_round_goes_on_smaller_or_says_why(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial and a round of a size each have two passes, so the third pair is the second round."""
    plain = Trainee.seconds
    a_second = 1.0, 1.0  # so that the largest is the fastest
    monkeypatch.setattr(Trainee, "seconds", lambda *args: plain(*args) and a_second)
    rows = measured(
        3,
        "eager",
        vit_ray=lambda _: Tiny(),
        falls=lambda _: Tiny(passes={4: 4}),
        falls_far=lambda _: Tiny(passes={4: 4, 2: 2}),
        ends=lambda _: Tiny(passes={4: 4, 2: 2, 1: 2}),
        breaks=lambda _: Tiny(passes={4: 4}, error="unspecified launch failure"),
    )
    no_memory = ["out of memory at 4 images in round 2", "out of memory at 2 images in round 2"]
    assert {row.peer: (row.batch, sorted(row.wall_s), row.notes) for row in rows} == {
        OURS: (4, [0, 1, 2], []),
        "falls": (2, [1, 2], no_memory[:1]),
        "falls_far": (1, [1, 2], no_memory),
        "ends": (
            0,
            [],
            [*no_memory, "out of memory at 1 images in round 2",
             "MemoryError: 1 images do not fit"],
        ),
        "breaks": (4, [0], ["RuntimeError: unspecified launch failure"]),
    }  # fmt: skip
    assert all(row.cpu_s.keys() == row.wall_s.keys() for row in rows)
    shown = table(rows).splitlines()
    assert "| falls | 2 | 2.00 | - | - | 2.000 | 2.000 |" in shown[3]
    assert shown[3].endswith("| out of memory at 4 images in round 2 |")
    assert "| ends | - | - | " in shown[5]


def test_what_lies_on_the_device_in_the_rounds_lies_there_when_sizes_are_tried(
    measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Trainee] = []
    plain_init, plain = Trainee.__init__, Trainee.seconds

    def init(self: Trainee, *args: Any) -> None:
        plain_init(self, *args)
        models.append(self)

    def seconds(self: Trainee, *args: Any) -> tuple[float, float] | None:
        assert len(models) == 2
        for one in models:
            weights = list(one.model.parameters())
            assert all("exp_avg_sq" in one.optimiser.state[weight] for weight in weights)
            assert all(weight.grad is None for weight in weights)
        return plain(self, *args)

    monkeypatch.setattr(Trainee, "__init__", init)
    monkeypatch.setattr(Trainee, "seconds", seconds)
    rows = measured(1, "compiled", vit_ray=lambda _: Tiny(), other=lambda _: Tiny())
    assert all(row.wall_s and not row.notes for row in rows)


def test_what_is_cut_off_before_the_first_round_has_the_figures_of_its_trial(
    measured: Measure, gpu: Callable[[str], None]
) -> None:
    rows = measured(0, "compiled", vit_ray=lambda _: Tiny(), none=lambda _: Tiny(0, 0))
    gpu("NVIDIA H200")
    head, _, ours, none = table(rows).splitlines()
    rate = rows[0].tried["compiled"][rows[0].batch]
    assert f"| vit_ray | {rows[0].batch} | {rate:.2f} | 0.0% | " in ours
    assert ours.split(" | ")[6].endswith("%")
    assert "| - | - | by its trial, without a round | " in ours
    assert "| none | - | - | - | - | - | - | - | " in none
    assert ours.count("|") == none.count("|") == head.count("|")


def test_the_clock_is_read_when_the_device_has_done_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU computes on while the host goes ahead."""
    events: list[str] = []
    clock = time.perf_counter
    monkeypatch.setattr(model_step, "IMAGE_SIZE", 8)
    trainee = Trainee(lambda _: Tiny(), NAME, torch.float32)
    monkeypatch.setattr(model_step, "wait", lambda: events.append("wait"))
    monkeypatch.setattr(time, "perf_counter", lambda: (events.append("clock"), clock())[1])
    assert trainee.seconds(1, 0.0) is not None
    assert events == ["wait", "clock", "wait", "clock"] * 2


def test_a_model_that_is_out_gives_the_others_its_memory(measured: Measure) -> None:
    """Blocks that are compiled refer to themselves, so that only a collection frees them."""
    ended: list[weakref.ref[nn.Module]] = []

    def build(_: str) -> nn.Module:
        model = Tiny(most_compiled=0, most=0)
        ended.append(weakref.ref(model.blocks[0]))
        return model

    class Asks(Tiny):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert ended[0]() is None
            return super().forward(images)

    (_, other) = measured(1, "compiled", vit_ray=build, other=lambda _: Asks())
    assert not other.notes


def test_ratios_are_of_the_time_for_an_image_in_the_rounds_of_both() -> None:
    seconds: dict[str, Any] = {
        "wall_s": {0: 9.0, 1: 1.0, 2: 1.0},
        "cpu_s": {0: 9.0, 1: 2.0, 2: 2.0},
    }
    ours = row_of(OURS, batch=10, **seconds)
    theirs = row_of("timm", batch=5, wall_s={1: 1.0, 2: 1.5}, cpu_s={1: 1.0, 2: 1.0})
    assert "| 2.500 | 1.000 |" in table([ours, theirs])


def test_the_first_step_of_a_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles, and takes memory. The second counts if it is long enough, else more do."""
    trainee = Trainee.__new__(Trainee)
    trainee.labels = torch.zeros(2)
    for step_s, count in ((5.0, [1, 1]), (0.25, [1, 1, 4]), (1e-6, [1, 1, model_step.MOST_STEPS])):
        taken: list[int] = []

        def steps(count: int, step_s: float = step_s, taken: list[int] = taken) -> Any:
            taken.append(count)
            return (100.0, 100.0) if len(taken) == 1 else (step_s, step_s)

        monkeypatch.setattr(trainee, "_steps", steps, raising=False)
        assert trainee.seconds(2, 1.0) == (step_s, step_s)
        assert taken == count


def test_a_size_beyond_what_the_compiler_keeps_is_no_silent_eager_step() -> None:
    class Eager(Block):
        def compile(self, *args: Any, **kwargs: Any) -> None:
            nn.Module.compile(self, *args, backend="eager", **kwargs)

    model = nn.Sequential(Eager())
    compile_blocks(model)
    with torch._dynamo.config.patch(recompile_limit=1):
        model(torch.zeros(2, 3))
        with pytest.raises(FailOnRecompileLimitHit):
            model(torch.zeros(4, 3))


def test_a_library_that_cannot_be_imported_is_as_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a torchvision of another torch is; transformers imports it because it is there."""
    other = "other_build"
    (tmp_path / f"{other}.py").write_text("raise RuntimeError('operator nms does not exist')")
    (tmp_path / "good_build.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with without_broken(other), without_broken("good_build"), without_broken("no_build"):
        assert importlib.util.find_spec(other) is None
        assert importlib.util.find_spec("good_build") is not None
        assert importlib.util.find_spec("no_build") is None
    with pytest.raises(RuntimeError, match="operator nms"):
        importlib.import_module(other)
