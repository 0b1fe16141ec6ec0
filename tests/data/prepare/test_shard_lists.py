import itertools
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.data.converting import config_of
from vit_ray.data.prepare.convert import shard_lists
from vit_ray.data.prepare.convert.shard_lists import ShardRows, list_of_shard, write_shard_lists
from vit_ray.data.prepare.convert.staged_files import parquet_output
from vit_ray.data.prepare.sources import label_map, source_index
from vit_ray.data.prepare.sources.entries import INDEX_SCHEMA, IndexEntry
from vit_ray.data.prepare.sources.source_index import (
    SourceIndex,
    entries_table,
    find_repeated_keys,
    in_pieces,
)
from vit_ray.storage import Location, locate


def index_of(keys: list[str], staging: Location, scratch: Path) -> SourceIndex:
    """An index in parts of unequal lengths."""
    cuts = [0, 1, len(keys) // 3, len(keys) // 3, len(keys)]
    parts, rows = [], []
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        part = staging.child(f"index-{number}.parquet")
        entries = [IndexEntry(f"/{k}", 0, len(k), k, ("cat", k)) for k in keys[begin:end]]
        with parquet_output(part, INDEX_SCHEMA) as writer:
            for piece in in_pieces(entries):
                writer.write_table(entries_table(piece))
        parts.append(part)
        rows.append(end - begin)
    repeated = find_repeated_keys(parts, len(keys), scratch)
    return SourceIndex(parts, rows, ["cat"], False, "", 0, 0, repeated)


@pytest.mark.parametrize(("per_bucket", "dealt"), [(10_000, 10_000), (64, 37), (5, 1), (33, 1000)])
def test_each_shard_lists_what_a_plain_shuffle_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_bucket: int, dealt: int
) -> None:
    monkeypatch.setattr(shard_lists, "_ROWS_PER_BUCKET", per_bucket)
    monkeypatch.setattr(shard_lists, "_ROWS_DEALT", dealt)
    monkeypatch.setattr(source_index, "ENTRIES_AT_A_TIME", 50)
    keys = [f"image {i}" for i in range(331)]
    staging = locate(str(tmp_path / "staging"))
    index = index_of(keys, staging, tmp_path)
    shards = ShardRows(len(keys), 17, 4)
    write_shard_lists(index, shards, 9, staging, tmp_path)
    order = shard_lists.shuffled_rows(len(keys), 9, np.arange(len(keys), dtype=np.int64))
    listed = [list_of_shard(shards, staging, shard) for shard in range(17)]
    assert [entry.key for shard in listed for entry in shard] == [keys[row] for row in order]
    assert all(e.path == f"/{e.key}" and e.labels == ("cat", e.key) for s in listed for e in s)
    assert [len(shard) % 4 for shard in listed[:-1]] == [0] * 16
    assert not list(tmp_path.glob("bucket-*"))


@pytest.mark.parametrize("num_bytes", [1, 3000, 20_000])
def test_long_texts_in_small_pieces_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    keys = [f"image {i}" + "x" * (i % 7 * 100) for i in range(60)]
    places, shards = np.array([0, 5, 30, 59]), ShardRows(len(keys), 9, 4)
    found = []
    for limit in (1 << 20, num_bytes):
        monkeypatch.setattr(source_index, "CHARACTERS_AT_A_TIME", limit)
        monkeypatch.setattr(shard_lists, "_BYTES_AT_A_TIME", limit)
        staging = locate(str(tmp_path / f"staging-{limit}"))
        index = index_of(keys, staging, tmp_path)
        write_shard_lists(index, shards, 9, staging, tmp_path)
        lists = [list_of_shard(shards, staging, shard) for shard in range(9)]
        found.append((list(index.entries(places)), lists))
    assert found[0] == found[1]


def test_long_texts_are_held_in_pieces_of_some_bytes(
    serial: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """19 MB of captions and lists of labels, of which never more than a few MB are held."""
    monkeypatch.setattr(source_index, "CHARACTERS_AT_A_TIME", 1 << 19)
    monkeypatch.setattr(shard_lists, "_BYTES_AT_A_TIME", 1 << 19)
    labels = [f"{i:03d}" + "y" * 200 for i in range(40)]
    row = {"label": labels, "caption": "c" * 40_000}
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"path": f"{i}.jpg", **row}) + "\n" for i in range(400))
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        staging = locate(str(tmp_path / "staging"))
        config = config_of(tmp_path / "a.jsonl", tmp_path / "set", columns=["caption"])
        index = source_index.build_index(config, staging, tmp_path)
        list(index.entries(np.array([3, 200, 399])))
        write_shard_lists(index, ShardRows(400, 40, 4), 9, staging, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
        assert pool.max_memory() < 5 << 20
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def test_only_the_first_of_equal_keys_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_index, "ENTRIES_AT_A_TIME", 7)
    keys = [f"image {i % 40}" for i in range(60)]
    index = index_of(keys, locate(str(tmp_path / "staging")), tmp_path)
    tables = pa.concat_tables([table for _, table in index.tables()])
    problems = tables["problem"].to_pylist()
    assert [row for row, problem in enumerate(problems) if problem] == list(range(40, 60))
    picked = list(index.entries(np.array([59, 3, 40, 0, 19, 20])))
    assert [entry.key for entry in picked] == [keys[row] for row in (0, 3, 19, 20, 40, 59)]
    assert [entry.problem is None for entry in picked] == [True] * 4 + [False] * 2
    twice = replace(index, parts=index.parts * 2, rows=index.rows * 2)
    picked = list(twice.entries(np.array([119, 3, 60, 67])))
    assert [entry.key for entry in picked] == [keys[row] for row in (3, 0, 7, 59)]


def test_a_column_that_is_no_label_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_map, "MOST_CLASSES", 3)
    facts, unit = source_index.UnitFacts(), source_index.SourceUnit("csv", "list.csv", ".")
    for i in range(3):
        facts.add(unit, IndexEntry("a", 0, 1, str(i), (f"caption {i}",)))
    with pytest.raises(
        ValueError, match=r"more than 3 different labels; check convert\.label_field"
    ):
        facts.add(unit, IndexEntry("a", 0, 1, "3", ("caption 3",)))


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            {"0", "-1", "1"},
            "a label is -1, which by convention means that an image is not labelled",
        ),
        ({"0", "1", "3"}, "integers 0 to 3, without 2, .*labels_are=indices .*labels_are=names"),
        ({"1", "2", "3"}, "integers 1 to 3, without 0"),
        ({"0", "1", "01"}, "integers 0 to 1, such as"),
    ],
)
def test_integers_that_are_not_all_from_0_on_are_not_closed_up_without_a_word(
    labels: set[str], told: str
) -> None:
    for kinds in ({"index"}, {"text"}):
        with pytest.raises(ValueError, match=told):
            label_map.class_names(labels, kinds, None, "auto")
    # What a folder is called is a name; and names may be what they like.
    numbered = sorted(labels, key=lambda label: (int(label), label))
    assert label_map.class_names(labels, {"text"}, None, "auto", of_folders=True) == (
        numbered,
        False,
    )
    assert label_map.class_names(labels, {"text"}, None, "names") == (numbered, False)


def test_indices_without_names_keep_their_places() -> None:
    found = label_map.class_names({"0", "3"}, {"index"}, None, "indices")
    assert found == (["0", "1", "2", "3"], True)
    assert label_map.class_names({"0", "1"}, {"index"}, None, "auto") == (["0", "1"], False)
    for wrong in ({"0", "-1"}, {"0", "cat"}, {"0", "01"}):
        with pytest.raises(ValueError, match=r"are not integers from 0 on; correct them"):
            label_map.class_names(wrong, {"text"}, None, "indices")
    with pytest.raises(ValueError, match=r"check convert\.label_field"):
        label_map.class_names({"0", "999999999999"}, {"index"}, None, "indices")


def test_an_index_is_kept_as_it_is() -> None:
    entry = IndexEntry("/a", 3, 4, "caf\xe9", ("x", "y"), "a problem", extra=("of text", None))
    (again,) = source_index.table_entries(entries_table([entry]))
    assert again == entry


def test_a_source_without_any_label_has_no_classes() -> None:
    for labels_are in ("auto", "names", "indices"):
        assert label_map.class_names(set(), set(), None, labels_are)[0] == []
