"""What a conversion keeps for itself: no flipped bit of it is taken for what was written."""

from pathlib import Path

import pyarrow as pa
import pytest

from tests.data.small_sets import flips
from vit_ray.data.convert.staged_files import (
    parquet_output,
    read_facts,
    read_many_facts,
    read_row_groups,
    write_facts,
)
from vit_ray.storage import Location, locate

FACTS = {"rows": [64, 64, 12], "row_group_crc32": [7, 8, 9], "reason": "of\ntwo lines \u00fc"}
TABLE = pa.table({"key": [f"image {i}" for i in range(20)]})


@pytest.fixture
def facts(tmp_path: Path) -> Location:
    file = locate(str(tmp_path / "shard-000000.json"))
    write_facts(file, FACTS)
    return file


def test_facts_are_read_as_they_were_written(facts: Location) -> None:
    assert read_facts(facts) == FACTS
    assert list(read_many_facts([facts] * 40)) == [FACTS] * 40


def test_every_flipped_bit_of_facts_is_found(facts: Location) -> None:
    for flip in flips(Path(facts.path), bits_per_byte=2):
        with pytest.raises(ValueError, match="is not what was written"):
            pytest.fail(f"{flip}: read as {read_facts(facts)}")


def test_a_flip_on_the_way_is_read_again(facts: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = facts.read()
    answers = [whole.replace(b"64", b"65", 1), whole]
    monkeypatch.setattr(Location, "read", lambda _: answers.pop(0))
    assert read_facts(facts) == FACTS
    assert answers == []


def test_a_flipped_bit_of_a_table_is_no_other_value(tmp_path: Path) -> None:
    file = locate(str(tmp_path / "index.parquet"))
    with parquet_output(file, TABLE.schema) as writer:
        writer.write_table(TABLE, row_group_size=10)
    assert pa.concat_tables(read_row_groups(file)).equals(TABLE)
    for flip in flips(Path(file.path), bits_per_byte=1):
        try:
            found = pa.concat_tables(read_row_groups(file))
            # Names and types stand in the footer, which has no checksum.
            values = found.rename_columns(TABLE.column_names).cast(TABLE.schema)
        except (pa.ArrowException, OSError, KeyError, ValueError):
            continue
        assert values.equals(TABLE), flip
