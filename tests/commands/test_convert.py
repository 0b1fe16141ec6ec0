"""What the last line of a conversion says of files that are not, or not whole, in the set."""

from typing import Any

from vit_ray.commands.convert import rejected_text
from vit_ray.data.convert.commit import ConvertReport


def report_of(**counts: Any) -> ConvertReport:
    facts = {"num_images": 901, "num_classes": 2, "num_shards": 1, "num_rejected": 0, "bytes": 9}
    return ConvertReport(**facts | counts, fingerprint="", label_histogram={}, rejected={})


def test_rejected_and_damaged_files_are_told_in_proportion() -> None:
    assert rejected_text(report_of()) == "0 files rejected"
    text = rejected_text(report_of(num_rejected=99, num_damaged=3))
    assert text == (
        "99 files rejected (9.9% of 1000; rejected.parquet says why); "
        "3 damaged files kept (damaged.parquet)"
    )
