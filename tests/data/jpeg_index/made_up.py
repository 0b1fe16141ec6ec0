"""Made-up JPEG files, and whether one changes its picture when it gets restart markers.

An encoder here writes random coefficients under random headers (colour spaces by JFIF, Adobe or
component numbers, samplings, quantization of 8 and 16 bits, 1 to 8 tables of codes in any places,
optimal, flat, skewed or standard ones, with and without a code for the end of a block, blocks that
end in odd ways, restart intervals, scans for each component, progressive scans, complete or not),
or Pillow writes a picture with random options; in a third of them bytes of the header, or of
anything, are changed. What a conversion rewrites must then decode as the original does: by Pillow,
and by OpenCV at all scales and from its restart index.
"""

import heapq
import io
import math
import random
from collections import Counter
from typing import Any

import numpy as np
from PIL import Image

from vit_ray.data.jpeg import decode_jpeg
from vit_ray.data.jpeg_index.rewriting import Libjpeg, with_restart_markers
from vit_ray.data.restart_index import crop_file

KEPT = ("icc_profile", "exif", "comment")
"""What Pillow finds beside the pixels; JFIF's own fields may be new."""
Codes = dict[int, tuple[int, int]]
"""Code and its length of each symbol."""


class _Bits:
    """Coded data: bits, and restart markers between them."""

    def __init__(self, choice: random.Random) -> None:
        self._pad = choice.choice([1, 1, 1, 0])
        self._value, self._count, self._done = 0, 0, bytearray()

    def put(self, value: int, count: int) -> None:
        self._value, self._count = self._value << count | value, self._count + count

    def end(self, marker: int = 0) -> bytes:
        padding = -self._count % 8
        self.put((1 << padding) - 1 if self._pad else 0, padding)
        coded = self._value.to_bytes(self._count // 8).replace(b"\xff", b"\xff\0")
        self._value = self._count = 0
        self._done += coded + (bytes([0xFF, marker]) if marker else b"")
        return bytes(self._done)


def _lengths(symbols: list[int], counts: Counter[int], choice: random.Random) -> dict[int, int]:
    """A length of each symbol's code, at most 16, that leaves the code of ones alone free."""
    flat = (len(symbols) + 1).bit_length() if symbols else 1
    kind = choice.choice(["optimal", "optimal", "flat", "skewed"])
    if kind == "skewed":
        count, long = len(symbols), max(1, (len(symbols) + 1).bit_length())
        first = max(0, min(count, 15 - long))
        return {s: i + 1 if i < first else min(16, first + long) for i, s in enumerate(symbols)}
    if kind == "optimal":
        heap = [(max(1, counts[s]), i, [s]) for i, s in enumerate(symbols)] + [(0, -1, [-1])]
        heapq.heapify(heap)
        depth = dict.fromkeys([*symbols, -1], 0)
        while len(heap) > 1:
            one, two = heapq.heappop(heap), heapq.heappop(heap)
            for symbol in one[2] + two[2]:
                depth[symbol] += 1
            heapq.heappush(heap, (one[0] + two[0], one[1], one[2] + two[2]))
        depth.pop(-1)
        if max(depth.values(), default=1) <= 16:
            return depth
    return dict.fromkeys(symbols, min(16, flat))


def _table(counts: Counter[int], is_dc: bool, choice: random.Random) -> tuple[bytes, Codes]:
    """The content of a DHT segment without its place, and the codes."""
    symbols = sorted(counts)
    if choice.random() < 0.3:
        more = range(12) if is_dc else (r << 4 | s for r in range(16) for s in range(11))
        symbols = sorted({*symbols, *(m for m in more if choice.random() < 0.4)})
    choice.shuffle(symbols)
    lengths = _lengths(symbols, counts, choice)
    ordered = sorted(symbols, key=lambda s: lengths[s])
    code, codes, last = 0, {}, 0
    for symbol in ordered:
        code <<= lengths[symbol] - last
        last = lengths[symbol]
        codes[symbol] = code, last
        code += 1
    per_length = Counter(lengths[s] for s in ordered)
    return bytes([per_length[n] for n in range(1, 17)]) + bytes(ordered), codes


def _block(choice: random.Random, style: str) -> list[tuple[int, int]]:
    """Symbols and values of the AC coefficients of a block, as (symbol, value)."""
    found, at, largest = [], 1, choice.choice([1, 2, 5, 10])
    stop = 64 if style == "full" else choice.choice([1, 1, 3, 10, 64])
    while at < stop:
        run = 0 if style == "full" and at > 40 else choice.choice([0, 0, 1, 3, 15, 20, 40])
        if at + run > 63:
            if style != "full":
                break
            run = 63 - at
        found += [(0xF0, 0)] * (run // 16)
        size = choice.randint(1, largest)
        value = choice.randrange(1 << (size - 1), 1 << size) * choice.choice([1, -1])
        found.append(((run % 16) << 4 | size, value))
        at += run + 1
    if at < 64 and style == "zeros":
        found += [(0xF0, 0)] * ((64 - at) // 16)
        at += (64 - at) // 16 * 16
    if at < 64:
        found.append((choice.choice([0x00, 0x10, 0x30]) if style == "odd end" else 0, 0))
    return found


def _coded(bits: _Bits, value: int) -> None:
    size = abs(value).bit_length()
    bits.put(value if value > 0 else value + (1 << size) - 1, size)


def _segment(marker: int, content: bytes) -> bytes:
    return b"\xff%c%b%b" % (marker, (len(content) + 2).to_bytes(2), content)


def _fronts(choice: random.Random) -> list[bytes]:
    """Segments of applications and comments, in any order."""
    jfif = _segment(0xE0, b"JFIF\0\1" + bytes([choice.choice([0, 1, 2]), choice.randrange(3)])
                    + bytes([0, 72, 0, 72, 0, 0]))  # fmt: skip
    adobe = _segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes([choice.choice([0, 0, 1, 1, 2])]))
    exif = _segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0")
    comment = _segment(0xFE, choice.choice([b"", b"text", b"\xff\xd9\xff\xda"]))
    found = [s for s in (jfif, adobe, exif, comment, adobe) if choice.random() < 0.4]
    choice.shuffle(found)
    return found


class _File:
    """One made-up file of coefficients."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice
        self._size = choice.choice([(1, 1), (8, 8), (16, 40), (17, 33), (40, 70), (9, 130)])
        count = choice.choice([1, 1, 3, 3, 3, 3, 3, 4, 2])
        self._ids = choice.choice(
            [list(range(1, 5)), list(range(4)), list(b"RGBA"), list(b"YCcK"), list(b"BGRA")]
        )[:count]
        usual = [[0x22, 0x11, 0x11], [0x21, 0x11, 0x11], [0x11] * 3, [0x12, 0x11, 0x11]]
        odd = [[0x41, 0x11, 0x11], [0x22, 0x21, 0x12], [0x22] * 3, [0x11, 0x22, 0x11],
               [0x31, 0x11, 0x11], [0x31, 0x21, 0x11], [0x14, 0x12, 0x11]]  # fmt: skip
        sampling = choice.choice(usual * 4 + odd)
        self._sampling = [*sampling, 0x11][:count] if count > 1 else [choice.choice(sampling)]
        places = choice.choice([2, 2, 2, 4])
        self._quantizations = [choice.randrange(places) for _ in self._ids]
        self._codings = [(choice.randrange(places), choice.randrange(places)) for _ in self._ids]
        if choice.random() < 0.5:
            self._codings = [(0, 0), (1, 1), (1, 1), (0, 0)][:count]
        self._style = choice.choice(["usual", "usual", "full", "zeros", "odd end"])
        self._kind = choice.choice([0xC0] * 6 + [0xC1, 0xC2, 0xC2])
        self._interval = choice.choice([0, 0, 0, 1, 3])
        self._largest_dc = choice.choice([0, 3, 10, 11])
        self._across = max(s >> 4 for s in self._sampling)
        self._down = max(s & 15 for s in self._sampling)

    def content(self) -> bytes:
        choice, (height, width) = self._choice, self._size
        head = _fronts(choice)
        head += [self._quantization(place) for place in sorted(set(self._quantizations))]
        components = zip(self._ids, self._sampling, self._quantizations, strict=True)
        frame = b"".join(map(bytes, components))
        head.append(
            _segment(self._kind, bytes([8]) + height.to_bytes(2) + width.to_bytes(2)
                     + bytes([len(self._ids)]) + frame)
        )  # fmt: skip
        if self._interval:
            head.append(_segment(0xDD, self._interval.to_bytes(2)))
        parts = [b"\xff\xd8", *head, *self._scans()]
        behind = choice.choice([b""] * 12 + [_segment(0xFE, b"late"), b"\0\0", self._stray_table()])
        return b"".join(parts) + behind + b"\xff\xd9"

    def _stray_table(self) -> bytes:
        return _segment(0xC4, bytes([0x10, 1] + [0] * 15 + [1]))

    def _quantization(self, place: int) -> bytes:
        wide = self._choice.random() < 0.1
        most = self._choice.choice([2, 40, 300 if wide else 255])
        values = [self._choice.randint(1, most) for _ in range(64)]
        content = b"".join(v.to_bytes(1 + wide) for v in values)
        return _segment(0xDB, bytes([wide << 4 | place]) + content)

    def _scans(self) -> list[bytes]:
        everything = list(range(len(self._ids)))
        if self._kind != 0xC2:
            groups = [everything] if self._choice.random() < 0.9 else [[i] for i in everything]
            return [part for group in groups for part in self._scan(group, (0, 63))]
        scans = [(everything, (0, 0))]
        scans += [([i], band) for band in ((1, 5), (6, 63)) for i in everything]
        complete = (
            len(scans) if self._choice.random() < 0.8 else self._choice.randint(1, len(scans))
        )
        return [part for group, band in scans[:complete] for part in self._scan(group, band)]

    def _scan(self, group: list[int], band: tuple[int, int]) -> list[bytes]:
        """Tables, and a scan of some components and of the coefficients of a band."""
        units = [self._unit(group, band) for _ in range(self._num_units(group))]
        used: dict[tuple[int, int], Counter[int]] = {}
        for unit in units:
            for kind, place, symbol, _ in unit:
                used.setdefault((kind, place), Counter())[symbol] += 1
        tables, codes = [], {}
        for (kind, place), counts in sorted(used.items()):
            content, codes[kind, place] = _table(counts, kind == 0, self._choice)
            tables.append(bytes([kind << 4 | place]) + content)
        bits = _Bits(self._choice)
        for number, unit in enumerate(units):
            if self._interval and number and number % self._interval == 0:
                bits.end(0xD0 + (number // self._interval - 1) % 8)
            for kind, place, symbol, value in unit:
                bits.put(*codes[kind, place][symbol])
                if symbol & 15:
                    _coded(bits, value)
        coded = bits.end()
        places = [self._codings[i][0] << 4 | self._codings[i][1] for i in group]
        head = bytes([len(group)]) + b"".join(
            bytes([self._ids[i], place]) for i, place in zip(group, places, strict=True)
        )
        joined = [_segment(0xC4, b"".join(tables))] if self._choice.random() < 0.5 else [
            _segment(0xC4, table) for table in tables
        ]  # fmt: skip
        return [*joined, _segment(0xDA, head + bytes([*band, 0])), coded]

    def _num_units(self, group: list[int]) -> int:
        height, width = self._size
        if len(group) > 1:
            return -(-height // (8 * self._down)) * -(-width // (8 * self._across))
        across, down = self._sampling[group[0]] >> 4, self._sampling[group[0]] & 15
        samples = math.ceil(height * down / self._down), math.ceil(width * across / self._across)
        return math.ceil(samples[0] / 8) * math.ceil(samples[1] / 8)

    def _unit(self, group: list[int], band: tuple[int, int]) -> list[tuple[int, int, int, int]]:
        """(0 for DC or 1, place of the table, symbol, value) of each code of an MCU."""
        found = []
        for i in group:
            dc, ac = self._codings[i]
            blocks = (self._sampling[i] >> 4) * (self._sampling[i] & 15) if len(group) > 1 else 1
            for _ in range(blocks):
                if band[0] == 0:
                    size = self._choice.randint(0, self._largest_dc) if self._largest_dc else 0
                    value = self._choice.randrange(1 << size >> 1, 1 << size) if size else 0
                    value *= self._choice.choice([1, -1])
                    found.append((0, dc, abs(value).bit_length(), value))
                if band == (0, 63):
                    found += [(1, ac, *one) for one in _block(self._choice, self._style)]
                elif band[1]:
                    if self._choice.random() < 0.5:
                        value = self._choice.choice([1, -1, 2, 3])
                        found.append((1, ac, abs(value).bit_length(), value))
                    found.append((1, ac, 0, 0))
        return found


def _of_pillow(choice: random.Random) -> bytes:
    mode = choice.choice(["L", "RGB", "RGB", "RGB", "CMYK"])
    height, width = choice.randint(1, 50), choice.randint(1, 70)
    random_numbers = np.random.default_rng(choice.getrandbits(32))
    shape = (-(-height // 4), -(-width // 4), len(Image.new(mode, (1, 1)).getbands()))
    pixels = random_numbers.integers(0, 256, shape, np.uint8).repeat(4, 0).repeat(4, 1)
    options: dict[str, Any] = {
        "quality": choice.randint(1, 100),
        "progressive": choice.random() < 0.4,
        "optimize": choice.random() < 0.5,
        "keep_rgb": choice.random() < 0.3,
        "restart_marker_blocks": choice.choice([0, 0, 2]),
        "comment": choice.choice([b"", b"text"]),
    }
    if mode == "RGB" and not options["keep_rgb"]:
        options["subsampling"] = choice.choice([0, 1, 2])
    sink = io.BytesIO()
    squeezed = pixels[:height, :width].squeeze(2) if mode == "L" else pixels[:height, :width]
    Image.fromarray(squeezed, mode).save(sink, "JPEG", **options)
    return sink.getvalue()


def crafted_jpeg(seed: int) -> bytes:
    """A made-up file; equal seeds give equal files."""
    choice = random.Random(seed)  # no secret
    image = bytearray(_of_pillow(choice) if choice.random() < 0.25 else _File(choice).content())
    if choice.random() < 0.35:
        end = image.find(b"\xff\xda") + 12 if choice.random() < 0.7 else len(image) - 2
        for _ in range(choice.randint(1, 2)):
            at = choice.randrange(2, max(3, end))
            image[at] = choice.choice([image[at] ^ 1 << choice.randrange(8), choice.randrange(256)])
    return bytes(image)


def difference(image: bytes, writer: Libjpeg) -> str | None:
    """How the file that is stored differs; empty if it does not, None if it is the original."""
    found = with_restart_markers(image, writer)
    if found is None:
        return None
    before, after = _by_pillow(image), _by_pillow(found.image)
    if before != after:
        return f"Pillow: {before[0]}, rewritten: {after[0]}"
    for scale in (1, 2, 4, 8):
        if not _are_equal(decode_jpeg(image, scale), decode_jpeg(found.image, scale)):
            return f"OpenCV at 1/{scale}"
    part = crop_file(found.image, found.index, found.size, (0, 0, *found.size))
    if not _are_equal(decode_jpeg(image), decode_jpeg(part.image)):
        return "its restart index"
    return ""


def _by_pillow(image: bytes) -> tuple[str, Any]:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            beside = {name: opened.info.get(name) for name in KEPT}
            return opened.mode, (opened.size, opened.tobytes(), beside)
    except Exception as error:  # whatever it is, it must be the same
        return type(error).__name__, None


def _are_equal(one: Any, other: Any) -> bool:
    return (one is None) == (other is None) and (one is None or np.array_equal(one, other))
