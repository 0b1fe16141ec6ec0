"""Tables of the data benchmarks: of made-up measurements, and in the docs those of the results."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import data_convert, data_cores, data_decode
from tests.data.pictures import jpeg
from vit_ray.measure.devices import find_device

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULT = """2026-01-02, Some Processor, 2 cores, last-level cache 32 MiB.

| contender | images/s | CPU ms an image |
|---|---|---|
| vit_ray stream | 1000 | 2.000 |
| vit_ray stream, data.decode=device | 3000 | 0.500 |

| contender | Ray's workers |
|---|---|
| vit_ray stream | 1.5 |
"""


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_the_page_has_the_table_of_the_result_that_it_names() -> None:
    page = PAGE.read_text()
    between = page.partition(data_cores.BEGIN)[2].partition(data_cores.END)[0]
    (name,) = re.findall(r"From `([\w.-]+)`", between)
    table = data_cores.table(ROOT / "benchmarks" / "results" / name)
    assert data_cores.written(page, table) == page


def test_cores_are_the_rate_of_a_gpu_times_the_time_of_an_image(tmp_path: Path) -> None:
    """ViT-B/16 has 17.56 G multiply-adds forward, as torchvision lists.

    Of its last block this code computes the class token alone, about 7 % less.
    """
    (tmp_path / "result.md").write_text(RESULT)
    row = data_cores.table(tmp_path / "result.md").splitlines()[4]
    rate, host, device = (float(cell.replace(",", "")) for cell in cells(row)[2:])
    h100 = find_device("H100")
    assert h100 is not None
    whole = 0.4 * h100.bf16_flops / (2 * 3 * 17.56e9)
    assert whole < rate < 1.1 * whole
    assert host == pytest.approx(rate * 2e-3, abs=0.06)
    assert device == pytest.approx(rate * 0.5e-3, abs=0.06)


def test_the_page_has_the_sizes_of_the_result_that_it_names() -> None:
    page = PAGE.read_text()
    (name,) = re.findall(r"`benchmarks/results/(data_shrink_to_[\w-]+\.md)`", page)
    result = (ROOT / "benchmarks" / "results" / name).read_text()
    rows = [line for line in result.splitlines() if line.startswith("|")]
    assert "\n".join(rows) in page
    assert [cells(row)[0] for row in rows[2:]] == ["unset", "512", "384", "320", "256"]


def test_a_smaller_size_is_measured_on_the_images_that_a_conversion_makes() -> None:
    """Nothing is smaller than the images that are small already."""
    files = [jpeg(number, 300, 400) for number in range(3)]
    unset, large, small = data_decode.shrinking_table(files, [500, 60])[2:]
    assert cells(unset)[1] == cells(large)[1]
    assert (cells(unset)[2], cells(large)[2]) == ("100%", "100%")
    assert int(cells(small)[1].replace(",", "")) < int(cells(large)[1].replace(",", ""))
    assert cells(small)[5] == "100%"  # crops of 80 x 60 pixels are enlarged to 224


def test_the_cost_of_an_index_is_a_ratio_within_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine becomes three times as slow from round to round, which no ratio shows."""
    times = {"none": 2.0, "index": 3.0}

    def measured(source: Path, target: Path, writer: str = "") -> dict[str, Any]:
        assert len(list(source.glob("*/*.jpg"))) == 4
        turn = int(target.name.removeprefix(writer))
        indexed = 0 if writer == "none" else 4
        return {"seconds": times[writer] * 3**turn, "indexed": indexed, "bytes": 100 + indexed}

    monkeypatch.setattr(data_convert, "measure", measured)
    (tmp_path / "a.jpg").write_bytes(b"")
    rows = data_convert.index_table([tmp_path / "a.jpg"], 4, tmp_path)[2:]
    assert [cells(row)[4:] for row in rows] == [
        ["1.00", "1.000"], ["1.50", "1.040"],
    ]  # fmt: skip


def test_writers_are_compared_on_distinct_files_and_within_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios of rounds are 2, 4 and 1, that of the medians is 1."""
    turns: dict[str, list[float]] = {}

    def measured(way: str, source: Path, target: Path) -> dict[str, Any]:
        files = sorted(source.glob("*/*.jpg"))
        assert len({file.read_bytes() for file in files}) == 6
        total = sum(file.stat().st_size for file in files)
        facts = {"images": len(files), "bytes": 2 * total, "cpu_s": 0.03}
        if len(files) == 20:
            return {**facts, "seconds": 1.0}
        done = turns.setdefault(way, [])
        done.append(([2.0, 12.0, 3.0] if way in data_convert.OURS else [1.0, 3.0, 3.0])[len(done)])
        return {**facts, "seconds": done[-1], "synced_s": 2 * done[-1]}

    monkeypatch.setattr(data_convert, "measure_way", measured)
    images = [tmp_path / name for name in ("a.jpg", "b.jpg")]
    for number, image in enumerate(images):
        image.write_bytes(jpeg(number, 200, 300))
    text, *rows = data_convert.peers_table(images, 6, tmp_path / "copies", 3)
    assert "takes 1.0 s; without it the rates of the first 3 rows are 3, 3, 3 images/s" in text
    found = [cells(row) for row in rows[2:]]
    assert [row[0] for row in found] == [*data_convert.OURS, *data_convert.PEERS]
    assert [row[2:5] for row in found] == [
        *[["2", "0 to 3", "1.00"]] * 3, *[["2", "2 to 6", "2.00"]] * 4,
    ]  # fmt: skip
    assert {tuple(row[5:]) for row in found} == {("5.00", "2.000", "1")}
