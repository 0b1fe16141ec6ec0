"""The decode on the device beside its peers, on the device that there is."""

import pytest

from benchmarks import device_decode
from benchmarks.device_decode import OURS, ROWS, Work, measure, picture, table
from vit_ray.data.images.jpeg import size_of_jpeg


def test_every_way_is_measured_or_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(_: Work) -> device_decode.Pass:
        raise ImportError("No module named 'torchvision'")

    work = Work(None, count=3, size=16)
    monkeypatch.setitem(ROWS, "torchvision, whole images, none resized", lacks)
    *_, (found, missing) = measure(work, rounds=2)
    assert [len(times) for times in found.values()] == [2] * (len(ROWS) - 1)
    assert missing == {
        "torchvision, whole images, none resized": "ImportError: No module named 'torchvision'"
    }
    head, _, *rows = table(found, missing, work.count).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(ROWS)
    assert all(row.count("|") == head.count("|") for row in rows)
    assert "| not run: `ImportError" in rows[list(ROWS).index(*missing)]


def test_each_round_has_a_table_and_a_way_that_fails_in_one_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is cut off has its last one."""
    calls = iter([None, None, RuntimeError("no space | on the device")])

    def ends(_: Work) -> device_decode.Pass:
        def work() -> None:
            error = next(calls)
            if error is not None:
                raise error

        return work

    monkeypatch.setattr(device_decode, "ROWS", {OURS: lambda _: lambda: None, "other": ends})
    tables = [table(found, missing, 3) for found, missing in measure(Work(None, 3, 16), rounds=3)]
    assert [("| other | not run" in shown) for shown in tables] == [False, True, True]
    assert "| other | not run: `RuntimeError: no space / on the device` | | |" in tables[-1]
    assert all(f"| {OURS} | " in shown for shown in tables)


def test_ratios_are_of_the_same_round_and_rates_of_all_images() -> None:
    other = "data.decode=host, one core"
    found = {OURS: [1.0, 4.0, 1.0], other: [3.0, 4.0, 2.0]}
    missing = {name: "" for name in ROWS if name not in found}
    rows = table(found, missing, 6).splitlines()
    assert f"| {OURS} | 6 | 1.00 | 1000 to 4000 ms |" in rows
    assert f"| {other} | 2 | 2.00 | 2000 to 4000 ms |" in rows


def test_pictures_are_as_large_as_photographs() -> None:
    files = [picture(seed) for seed in range(3)]
    assert len(set(files)) == 3
    for file in files:
        assert size_of_jpeg(file) == (device_decode.HEIGHT, device_decode.WIDTH)
        assert 60_000 < len(file) < 160_000
