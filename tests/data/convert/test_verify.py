import pytest

from tests.data.damage import broken_copy
from vit_ray.data.convert.finished_sets import verify

pytestmark = pytest.mark.usefixtures("serial")


def test_a_whole_data_set_has_no_problems(dataset):
    report = verify(dataset.path, decode_fraction=1.0)
    assert (report.num_images, report.num_decoded, report.problems) == (300, 300, [])
    assert report.num_files == len(dataset.files)


def test_a_part_of_the_images_is_decoded(dataset):
    assert 30 < verify(dataset.path, decode_fraction=0.2).num_decoded < 90


def test_a_flipped_byte_is_found_by_its_checksum(dataset, tmp_path):
    _manifest, shard = broken_copy(dataset, tmp_path)
    content = bytearray(shard.read_bytes())
    content[len(content) // 3] ^= 0xFF
    shard.write_bytes(content)
    report = verify(str(tmp_path), decode_fraction=0.0)
    assert [(p.file, "checksum" in p.what) for p in report.problems] == [(shard.name, True)]
    assert report.num_decoded == 0
    assert report.problems[0].key.startswith("class_")


def test_missing_and_truncated_files_are_named(dataset, tmp_path):
    manifest, shard = broken_copy(dataset, tmp_path)
    shard.unlink()
    other = tmp_path / manifest.files[1].path
    other.write_bytes(other.read_bytes()[:1000])
    report = verify(str(tmp_path))
    found = {problem.file: problem.what for problem in report.problems}
    assert set(found) == {shard.name, other.name}
    assert found[shard.name] == "it cannot be opened: the file is missing"
    assert "has 1000 bytes and the manifest says" in found[other.name]
    assert found[other.name].endswith("it was changed or cut short after conversion")


def test_a_torn_footer_is_named(dataset, tmp_path):
    _, shard = broken_copy(dataset, tmp_path)
    shard.write_bytes(shard.read_bytes()[:-100] + bytes(100))
    (problem,) = verify(str(tmp_path)).problems
    assert problem.file == shard.name
    assert "cannot be opened: Parquet magic bytes not found in footer" in problem.what


def test_verifying_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no data set at"):
        verify(str(tmp_path))
