"""The rows of a source on disk, and in the order of the data set."""

import itertools
import json
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.data.converting import config_of
from tests.data.small_sets import flips
from vit_ray.data.convert import index, rows, shards
from vit_ray.data.convert.index import (
    RowStore,
    parquet_output,
    read_facts,
    read_groups,
    write_facts,
)
from vit_ray.data.convert.rows import ROW_SCHEMA, Row, Unit, row_table, table_rows
from vit_ray.data.convert.shards import Plan, rows_of_shard, write_lists
from vit_ray.data.convert.sources import units_of
from vit_ray.data.keyed_random import KeyedPermutation
from vit_ray.storage import Location, locate

CONFIG = config_of("source", "set")


def parts_of(keys: list[str], staging: Location) -> list[Location]:
    """An index in parts of unequal lengths."""
    cuts = [0, 1, len(keys) // 3, len(keys) // 3, len(keys)]
    parts = []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        part = staging.child(f"index-{number}.parquet")
        rows = [Row(k, ("cat", k), f"/{k}", 0, len(k)) for k in keys[begin:end]]
        with parquet_output(part, ROW_SCHEMA) as writer:
            for at in range(0, len(rows), 50):
                writer.write_table(row_table(rows[at : at + 50]))
        parts.append(part)
    return parts


def plan_of(num_images: int, num_shards: int) -> Plan:
    settings = {"rows_per_row_group": 4, "seed": 9}
    return Plan(settings, {}, "", ["cat"], False, num_images, num_shards, "")


def test_each_shard_lists_what_a_plain_shuffle_gives_it(tmp_path):
    keys = [f"image {i}" for i in range(331)]
    staging, plan = locate(str(tmp_path / "staging")), plan_of(331, 17)
    write_lists(plan, RowStore(parts_of(keys, staging), str(tmp_path), CONFIG), staging)
    order = KeyedPermutation(331, shards.SHUFFLE, 9).ranks(np.arange(331, dtype=np.int64))
    listed = [list(rows_of_shard(staging, shard)) for shard in range(17)]
    assert [row.key for shard in listed for row in shard] == [keys[row] for row in order]
    assert all(r.path == f"/{r.key}" and r.labels == ("cat", r.key) for s in listed for r in s)
    assert [len(shard) % 4 for shard in listed[:-1]] == [0] * 16


def test_rows_that_are_read_in_place_are_counted_and_not_kept(tmp_path):
    parts = parts_of([f"image {i}" for i in range(60)], locate(str(tmp_path / "staging")))
    store = RowStore(parts, str(tmp_path), CONFIG.model_copy(update={"in_place": True}))
    assert (store.facts.rows, len(store.is_repeated)) == (60, 0)


def test_only_the_first_of_equal_keys_is_usable(tmp_path):
    keys = [f"image {i % 40}" for i in range(60)]
    store = RowStore(parts_of(keys, locate(str(tmp_path / "staging"))), str(tmp_path), CONFIG)
    store.find_repeated()
    problems = store.take(np.arange(60))["problem"].to_pylist()
    assert [row for row, problem in enumerate(problems) if problem] == list(range(40, 60))
    picked = list(table_rows(store.take(np.array([59, 3, 40, 0, 19, 20]))))
    assert [row.key for row in picked] == [keys[row] for row in (59, 3, 40, 0, 19, 20)]
    assert [row.problem is None for row in picked] == [False, True, False, True, True, True]


def test_a_row_is_kept_as_it_is():
    row = Row("caf\xe9", ("x", "y"), "/a", 3, 4, problem="a problem", extra=("of text", None))
    (again,) = table_rows(row_table([row]))
    assert again == row


def test_a_part_of_rows_with_other_fields_is_another_part(monkeypatch):
    part = [Unit("folder", "/a/cat", "/a", config_of("/a", "/set"))]
    before = index._digest_of(part, {})
    monkeypatch.setattr(index, "ROW_SCHEMA", ROW_SCHEMA.remove(0))
    assert index._digest_of(part, {}) != before


def test_a_late_task_of_an_earlier_listing_replaces_no_rows(serial, tmp_path, monkeypatch):
    config = config_of(tmp_path / "a.jsonl", tmp_path / "set")
    staging, listed = locate(str(tmp_path / "staging")), []
    for label in ("old", "new"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"path": "1.jpg", "label": label}))
        units = units_of(config)
        rows, version = index._listed(units[0])
        listed.append((list(rows), version))
    (part,), *_ = index.build_index(units, staging, config)
    monkeypatch.setattr(index, "_listed", lambda _: listed[0])
    index._index(units, staging.uri)
    (table,) = read_groups(part)
    assert table["labels"].to_pylist() == [["new"]]
    assert len(list((tmp_path / "staging").glob("*.parquet"))) == 2
    monkeypatch.setattr(index, "_listed", lambda _: listed[1])
    index.build_index(units, staging, config)
    assert [file.stem for file in (tmp_path / "staging").glob("*.parquet")] == [
        Path(part.path).stem
    ]


def test_tens_of_thousands_of_class_folders_are_indexed_by_few_tasks():
    config = config_of("/a", "/set")
    units = [Unit("folder", f"/a/{i}", "/a", config) for i in range(30_000)]
    parts = index._parts(units)
    assert len(parts) <= 1024
    assert [unit for part in parts for unit in part] == units


def test_two_forms_of_one_name_are_one_key(tmp_path):
    keys = [unicodedata.normalize(form, "caf\xe9.jpg") for form in ("NFC", "NFD")]
    store = RowStore(
        parts_of([*keys, "tea.jpg"], locate(str(tmp_path / "staging"))), str(tmp_path), CONFIG
    )
    store.find_repeated()
    assert store.is_repeated.tolist() == [False, True, False]


def test_long_texts_are_held_in_pieces_of_some_bytes(serial, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "CHARACTERS_AT_A_TIME", 3000)
    lines = [json.dumps({"path": f"{i}.jpg", "label": "a", "caption": "c" * 900}) for i in range(9)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = config_of(tmp_path / "a.jsonl", tmp_path / "set", columns=["caption"])
    (part,), *_ = index.build_index(units_of(config), locate(str(tmp_path / "staging")), config)
    tables = list(read_groups(part))
    assert all(1 <= len(table) <= 4 for table in tables)
    assert pa.concat_tables(tables)["key"].to_pylist() == [f"{i}.jpg" for i in range(9)]


FACTS = {"rows": [64, 64, 12], "row_group_crc32": [7, 8, 9], "reason": "of\ntwo lines \u00fc"}
TABLE = pa.table({"key": [f"image {i}" for i in range(20)]})


@pytest.fixture
def facts(tmp_path: Path) -> Location:
    file = locate(str(tmp_path / "shard-000000.json"))
    write_facts(file, FACTS)
    return file


def test_facts_are_read_as_they_were_written(facts):
    assert read_facts(facts) == FACTS


def test_every_flipped_bit_of_facts_is_found(facts):
    for flip in flips(Path(facts.path), bits_per_byte=2):
        with pytest.raises(ValueError, match="is not what was written"):
            pytest.fail(f"{flip}: read as {read_facts(facts)}")


def test_a_flip_on_the_way_is_read_again(facts, monkeypatch):
    whole = facts.read()
    answers = [whole.replace(b"64", b"65", 1), whole]
    monkeypatch.setattr(Location, "read", lambda _: answers.pop(0))
    assert read_facts(facts) == FACTS
    assert answers == []


def test_a_flipped_bit_of_a_table_is_no_other_value(tmp_path):
    file = locate(str(tmp_path / "index.parquet"))
    with parquet_output(file, TABLE.schema) as writer:
        writer.write_table(TABLE, row_group_size=10)
    assert pa.concat_tables(read_groups(file)).equals(TABLE)
    for flip in flips(Path(file.path), bits_per_byte=1):
        try:
            found = pa.concat_tables(read_groups(file))
            # Names and types stand in the footer, which has no checksum.
            values = found.rename_columns(TABLE.column_names).cast(TABLE.schema)
        except (pa.ArrowException, OSError, KeyError, ValueError):
            continue
        # Rows that are missing are found when all images are counted.
        assert values.equals(TABLE) or values.num_rows != TABLE.num_rows, flip
