"""The rows of a source on disk, and in the order of the data set."""

import itertools
import json
import tracemalloc
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.data.converting import config_of
from vit_ray.data.convert import index, shards
from vit_ray.data.convert.index import RowStore, build_index
from vit_ray.data.convert.rows import ROW_SCHEMA, Row, in_pieces, row_table, table_rows
from vit_ray.data.convert.shards import Plan, rows_of_shard, write_lists
from vit_ray.data.convert.sources import units_of
from vit_ray.data.convert.staged_files import parquet_output
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.storage import Location, locate


def parts_of(keys: list[str], staging: Location) -> list[Location]:
    """An index in parts of unequal lengths."""
    cuts = [0, 1, len(keys) // 3, len(keys) // 3, len(keys)]
    parts = []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        part = staging.child(f"index-{number}.parquet")
        rows = [Row(k, ("cat", k), f"/{k}", 0, len(k)) for k in keys[begin:end]]
        with parquet_output(part, ROW_SCHEMA) as writer:
            for piece in in_pieces(rows, 50, 1 << 20):
                writer.write_table(row_table(piece))
        parts.append(part)
    return parts


def plan_of(num_images: int, num_shards: int) -> Plan:
    settings = {"rows_per_row_group": 4, "in_place": False}
    return Plan(settings, {}, "", ["cat"], False, num_images, num_shards)


def test_each_shard_lists_what_a_plain_shuffle_gives_it(tmp_path: Path) -> None:
    keys = [f"image {i}" for i in range(331)]
    staging, plan = locate(str(tmp_path / "staging")), plan_of(331, 17)
    write_lists(plan, RowStore(parts_of(keys, staging), str(tmp_path)), 9, staging)
    order = KeyedPermutation(331, shards._SHUFFLE, 9).ranks(np.arange(331, dtype=np.int64))
    listed = [rows_of_shard(staging, shard) for shard in range(17)]
    assert [row.key for shard in listed for row in shard] == [keys[row] for row in order]
    assert all(r.path == f"/{r.key}" and r.labels == ("cat", r.key) for s in listed for r in s)
    assert [len(shard) % 4 for shard in listed[:-1]] == [0] * 16


def test_only_the_first_of_equal_keys_is_usable(tmp_path: Path) -> None:
    keys = [f"image {i % 40}" for i in range(60)]
    store = RowStore(parts_of(keys, locate(str(tmp_path / "staging"))), str(tmp_path))
    store.find_repeated()
    problems = store.take(np.arange(60))["problem"].to_pylist()
    assert [row for row, problem in enumerate(problems) if problem] == list(range(40, 60))
    picked = list(table_rows(store.take(np.array([59, 3, 40, 0, 19, 20]))))
    assert [row.key for row in picked] == [keys[row] for row in (59, 3, 40, 0, 19, 20)]
    assert [row.problem is None for row in picked] == [False, True, False, True, True, True]


def test_long_texts_are_held_in_pieces_of_some_bytes(
    serial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """19 MB of captions and lists of labels, of which never more than a few MB are held."""
    monkeypatch.setattr(index, "CHARACTERS_AT_A_TIME", 1 << 19)
    labels = [f"{i:03d}" + "y" * 200 for i in range(40)]
    with (tmp_path / "a.jsonl").open("w") as file:
        for i in range(400):
            row = {"path": f"{i}.jpg", "label": labels[i % 2 :], "caption": "c" * 40_000}
            file.write(json.dumps(row) + "\n")
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        staging = locate(str(tmp_path / "staging"))
        config = config_of(tmp_path / "a.jsonl", tmp_path / "set", columns=["caption"])
        parts, _ = build_index(units_of(config), {}, staging, config)
        write_lists(plan_of(400, 40), RowStore(parts, str(tmp_path)), 9, staging)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
        assert pool.max_memory() < 5 << 20
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def test_a_row_is_kept_as_it_is() -> None:
    row = Row("caf\xe9", ("x", "y"), "/a", 3, 4, problem="a problem", extra=("of text", None))
    (again,) = table_rows(row_table([row]))
    assert again == row


def test_tens_of_thousands_of_class_folders_are_indexed_by_few_tasks() -> None:
    units = [index.Unit("folder", f"/a/{i}", "/a") for i in range(30_000)]
    parts = index._parts(units)
    assert len(parts) <= 1024
    assert [unit for part in parts for unit in part] == units


def test_two_forms_of_one_name_are_one_key(tmp_path: Path) -> None:
    keys = [unicodedata.normalize(form, "caf\xe9.jpg") for form in ("NFC", "NFD")]
    store = RowStore(parts_of([*keys, "tea.jpg"], locate(str(tmp_path / "staging"))), str(tmp_path))
    store.find_repeated()
    assert store.is_repeated.tolist() == [False, True, False]
