"""Rewriting changes no coefficient, loses nothing beside the pixels, leaves alone what is odd."""

import io
import logging
import os
import re
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from tests.data.jpeg_index.made_up import crafted_jpeg, difference
from tests.data.pictures import encoded, picture
from tests.data.test_restart_index import by_opencv
from vit_ray.data import libjpeg_process, restart_markers
from vit_ray.data.jpeg import header_segments, metadata_of
from vit_ray.data.restart_markers import Libjpeg, restart_writer, with_restart_markers

NUM_CRAFTED = int(os.environ.get("FUZZ_ROUNDS", "200"))
CHINA, FLOWER = load_sample_images().images


def adobe_rgb() -> bytes:
    """Three components that are red, green and blue, as an Adobe marker says."""
    return encoded(CHINA[:100, :160], keep_rgb=True)


FILES = {
    "4:2:0": encoded(CHINA, subsampling=2),
    "4:2:2 of odd size": encoded(FLOWER[:203, :173], subsampling=1),
    "4:4:4": encoded(FLOWER[:111, :320], subsampling=0),
    "grey": encoded(FLOWER[:150, :160, 0]),
    "of optimised tables": encoded(CHINA[:200, :320], optimize=True),
    "of few grey levels": encoded(np.full((64, 200), 128, np.uint8), optimize=True),
    "of rough DC": encoded(picture(1, 8, 6).repeat(40, 0).repeat(40, 1), optimize=True, quality=99),
    "progressive": encoded(CHINA[:200], progressive=True),
    "with other markers": encoded(CHINA[:160, :200], restart_marker_blocks=3),
    "RGB": adobe_rgb(),
    "of one pixel": encoded(picture(0, 1, 1)),
}


@pytest.fixture(scope="module")
def writer() -> Iterator[Libjpeg]:
    library = next(restart_markers._writers())
    yield library
    library.close()


@pytest.mark.parametrize("name", list(FILES))
def test_a_rewritten_file_has_the_pixels_of_the_original(name, writer):
    image = FILES[name]
    found = with_restart_markers(image, writer)
    np.testing.assert_array_equal(by_opencv(found.image), by_opencv(image))
    np.testing.assert_array_equal(
        *(np.asarray(Image.open(io.BytesIO(i))) for i in (found.image, image))
    )
    assert found.size == by_opencv(image).shape[:2]
    assert "progressive" not in Image.open(io.BytesIO(found.image)).info


def with_metadata() -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a caption"
    profile = bytes(range(256)) * 300  # longer than one segment
    return encoded(CHINA[:100, :160], exif=exif, icc_profile=profile, comment=b"\xff\xd9 mine")


def test_profile_exif_and_comment_stay(writer):
    image = with_metadata()
    found = with_restart_markers(image, writer)
    before, after = (Image.open(io.BytesIO(i)) for i in (image, found.image))
    for name in ("icc_profile", "exif", "comment", "dpi", "jfif"):
        assert after.info.get(name) == before.info.get(name), name
    assert after.getexif()[0x010E] == "a caption"
    assert metadata_of(found.image) == metadata_of(image)


def several_pictures() -> bytes:
    sink = io.BytesIO()
    first, second = Image.fromarray(CHINA[:80, :90]), Image.fromarray(FLOWER[:80, :90])
    first.save(sink, "MPO", save_all=True, append_images=[second])
    return sink.getvalue()


def cmyk() -> bytes:
    sink = io.BytesIO()
    Image.fromarray(CHINA[:64, :64]).convert("CMYK").save(sink, "JPEG")
    return sink.getvalue()


def damaged() -> bytes:
    image = bytearray(FILES["4:2:0"])
    image[len(image) // 2 : len(image) // 2 + 40] = bytes(40)
    return bytes(image)


def with_a_frame_marker(marker: int) -> bytes:
    image = FILES["4:2:0"]
    at = image.index(b"\xff\xc0")
    return image[: at + 1] + bytes([marker]) + image[at + 2 :]


def without_its_last_scans() -> bytes:
    """A progressive file cut where a scan ends; libjpeg smooths what it shows of one."""
    image = FILES["progressive"]
    scans = [match.start() for match in re.finditer(rb"\xff\xda", image)]
    tables = image.rindex(b"\xff\xc4", 0, scans[2])
    return image[:tables] + b"\xff\xd9"


def of_sampling(*samplings: int) -> bytes:
    """64 x 48 pixels of coefficients that are all 0; a block of them is two bits that are 0."""
    across, down = max(s >> 4 for s in samplings), max(s & 15 for s in samplings)
    blocks = sum((s >> 4) * (s & 15) for s in samplings)
    bits = 2 * blocks * -(-64 // (8 * across)) * -(-48 // (8 * down))
    frame = bytes([8, 0, 48, 0, 64, 3])
    frame += b"".join(bytes([i, s, 0]) for i, s in enumerate(samplings))
    segments = (
        (0xDB, b"\0" + bytes([1]) * 64),
        (0xC0, frame),
        (0xC4, b"\0\1" + bytes(16)),
        (0xC4, b"\x10\1" + bytes(16)),
        (0xDA, b"\3\0\0\1\0\2\0\0\x3f\0"),
    )
    header = b"".join(b"\xff%c%b%b" % (m, (len(c) + 2).to_bytes(2), c) for m, c in segments)
    padding = bytes([(1 << -bits % 8) - 1]) if bits % 8 else b""
    return b"\xff\xd8" + header + bytes(bits // 8) + padding + b"\xff\xd9"


def with_a_comment_between_its_scans() -> bytes:
    image = FILES["progressive"]
    at = image.index(b"\xff\xc4", image.index(b"\xff\xda"))
    return image[:at] + b"\xff\xfe\0\6mine" + image[at:]


def with_a_thumbnail() -> bytes:
    """One pixel, in the segment of JFIF."""
    image = FILES["4:2:0"]
    return image[:4] + b"\0\x13" + image[6:18] + b"\1\1abc" + image[20:]


def of_several_scans() -> bytes:
    """A scan for each component, those of three grey files, in the header of a file of all."""
    whole = encoded(CHINA[:96, :160], subsampling=0, qtables=[[1] * 64] * 2)
    planes = Image.fromarray(CHINA[:96, :160]).convert("YCbCr").split()
    segments = {marker: (at, length) for marker, at, length in header_segments(whole)}
    content = whole[: segments[0xDA][0] - 2]
    for number, plane in enumerate(planes):
        grey = encoded(np.asarray(plane), qtables=[[1] * 64])
        ((at, length),) = [s[1:] for s in header_segments(grey) if s[0] == 0xDA]
        scan = b"\0\x08\1" + bytes([number + 1]) + b"\0\0\x3f\0"
        content += b"\xff\xda" + scan + grey[at + length : -2]
    return content + b"\xff\xd9"


ODD = {
    "several pictures": several_pictures,
    "cmyk": cmyk,
    "damaged": damaged,
    "cut, with an end": lambda: FILES["4:2:0"][:20000] + b"\xff\xd9",
    "followed by padding": lambda: FILES["4:2:0"] + bytes(10) + b"\xff\xd9",
    "arithmetic": lambda: with_a_frame_marker(0xC9),
    "png": lambda: encoded(CHINA[:64, :64], "PNG"),
    "empty": lambda: b"",
    "progressive without its last scans": without_its_last_scans,
    "with a comment between its scans": with_a_comment_between_its_scans,
    "with a comment behind its scan": lambda: FILES["grey"][:-2] + b"\xff\xfe\0\6mine\xff\xd9",
    "with a thumbnail": with_a_thumbnail,
    "of several scans": of_several_scans,
    "of fractional sampling": lambda: of_sampling(0x31, 0x21, 0x11),
    "of impossible sampling": lambda: FILES["4:2:0"].replace(b"\x01\x22\0\x02", b"\x01\x2f\0\x02"),
}


@pytest.mark.parametrize("name", list(ODD))
def test_what_is_odd_stays_as_it_came(name, writer):
    assert with_restart_markers(ODD[name](), writer) is None
    # Files of usual form are rewritten.
    for image in (FILES["grey"], of_sampling(0x21, 0x11, 0x11)):
        assert with_restart_markers(image, writer) is not None


def test_the_crafted_file_of_several_scans_is_a_picture():
    one_scan = encoded(CHINA[:96, :160], subsampling=0, qtables=[[1] * 64] * 2)
    difference = by_opencv(of_several_scans()).astype(int) - by_opencv(one_scan)
    assert abs(difference).mean() < 1  # Pillow rounds colours otherwise than libjpeg


def without(image: bytes, marker: int) -> bytes:
    for found, at, length in reversed(list(header_segments(image))):
        if found == marker:
            image = image[: at - 2] + image[at + length :]
    return image


def test_a_file_is_not_given_the_tables_of_the_file_before(writer):
    before = encoded(FLOWER[:64, :64], optimize=True, quality=30)
    assert with_restart_markers(before, writer) is not None
    assert with_restart_markers(without(FILES["4:2:0"], 0xDB), writer) is None
    assert with_restart_markers(before, writer) is not None
    of_standard_codes = without(FILES["4:2:0"], 0xC4)  # as a frame of motion JPEG
    found = with_restart_markers(of_standard_codes, writer)
    np.testing.assert_array_equal(by_opencv(found.image), by_opencv(FILES["4:2:0"]))


def test_a_library_with_other_structures_is_passed_over(monkeypatch, caplog, tmp_path):
    (tmp_path / "libjpeg.so").write_bytes(b"no library")
    foreign = Libjpeg(str(tmp_path / "libjpeg.so"))
    monkeypatch.setattr(restart_markers, "_writers", lambda: iter([foreign]))
    restart_writer.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert restart_writer() is None
    restart_writer.cache_clear()
    assert "install Pillow from PyPI" in caplog.text


def of_red_green_blue(image: bytes, *, by_adobe: bool) -> bytes:
    """A file of YCbCr, each with codes of its own, as one of red, green and blue."""
    image = without(image, 0xE0)
    if by_adobe:
        return image[:2] + b"\xff\xee\0\x0eAdobe" + b"\0\x64\0\0\0\0\0" + image[2:]
    changed = bytearray(image)
    for marker, first, step in ((0xC0, 8, 3), (0xDA, 3, 2)):
        ((at, _),) = [
            (at, length) for found, at, length in header_segments(image) if found == marker
        ]
        changed[at + first : at + first + 3 * step : step] = b"RGB"
    return bytes(changed)


@pytest.mark.parametrize("by_adobe", [True, False])
def test_components_of_any_colours_keep_their_own_codes(writer, by_adobe):
    """libjpeg would code red, green and blue with the tables of the first."""
    cut = encoded(CHINA[:200, :320], subsampling=0, optimize=True)
    image = of_red_green_blue(cut, by_adobe=by_adobe)
    assert Image.open(io.BytesIO(image)).mode == "RGB"
    found = with_restart_markers(image, writer)
    np.testing.assert_array_equal(
        *(np.asarray(Image.open(io.BytesIO(i))) for i in (found.image, image))
    )
    np.testing.assert_array_equal(by_opencv(found.image), by_opencv(image))
    assert ac_tables(found.image) == ac_tables(image)
    assert len(ac_tables(image)) == 2


def ac_tables(image: bytes) -> list[bytes]:
    found = [image[at + 2 : at + n] for m, at, n in header_segments(image) if m == 0xC4]
    return [table for table in found if table[0] >> 4]


PLAIN = encoded(CHINA[:96, :160], subsampling=0)


OTHERS = {
    "a picture with one other pixel": encoded(
        np.where(np.arange(96 * 160).reshape(96, 160, 1) == 9999, 0, CHINA[:96, :160]),
        subsampling=0,
    ),
    "other quantization": encoded(CHINA[:96, :160], subsampling=0, quality=74),
    "other colours": of_red_green_blue(PLAIN, by_adobe=True),
    "another height": encoded(CHINA[:95, :160], subsampling=0),
    "stray bytes": PLAIN[:-2] + bytes(40) + PLAIN[-2:],
}


@pytest.mark.parametrize("name", [*OTHERS, ""])
def test_only_what_has_the_coefficients_of_the_original_is_an_answer(name, monkeypatch):
    library = libjpeg_process.Libjpeg(next(restart_markers._writers())._command[-1])
    other = OTHERS.get(name, PLAIN)
    monkeypatch.setattr(library, "_written", lambda *_: other)
    assert library.rewritten(PLAIN, 1, True, b"") == (b"" if name else PLAIN)


def test_no_made_up_file_changes_its_picture(writer):
    found = [difference(crafted_jpeg(seed), writer) for seed in range(NUM_CRAFTED)]
    assert [(seed, what) for seed, what in enumerate(found) if what] == []
    assert found.count("") > 0.4 * NUM_CRAFTED


def test_a_helper_that_is_killed_is_no_fault_of_the_file(writer, monkeypatch, tmp_path):
    image = FILES["4:2:0"]
    undisturbed = with_restart_markers(image, writer)
    assert undisturbed is not None
    writer._process.kill()
    again = with_restart_markers(image, writer)
    assert again.image == undisturbed.image
    helper = tmp_path / "killed.py"
    monkeypatch.setattr(restart_markers, "_HELPER", helper)
    helper.write_text("import os\nos.kill(os.getpid(), 11)\n")  # as libjpeg, by a bad pointer
    assert with_restart_markers(image, Libjpeg("")) is None
    helper.write_text("import os\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(OSError, match=r"rewrites JPEG files was killed 3 times"):
        with_restart_markers(image, Libjpeg(""))


@pytest.mark.parametrize(
    ("deaf", "length"), [("sys.stdin.buffer.read()", 100), ("time.sleep(60)", 1 << 20)]
)
def test_a_process_that_does_not_answer_is_not_waited_for(monkeypatch, tmp_path, deaf, length):
    """Nor one that does not listen, and it is no fault of the file: a machine may be busy."""
    (tmp_path / "deaf.py").write_text(f"import sys, time\n{deaf}\n")
    monkeypatch.setattr(restart_markers, "_HELPER", tmp_path / "deaf.py")
    monkeypatch.setattr(restart_markers, "_ANSWER_WITHIN_S", 0.1)
    monkeypatch.setattr(restart_markers, "_ENDS_WITHIN_S", 0.01)
    with pytest.raises(OSError, match=r"3 times, or did not answer in 0.1 s"):
        Libjpeg("").ask(libjpeg_process.WARNINGS, bytes(length))
