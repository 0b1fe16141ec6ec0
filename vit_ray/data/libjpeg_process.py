"""Rewrites JPEG files for its parent process: the same coefficients, with restart markers.

    python libjpeg_process.py PATH_OF_LIBJPEG

A request on standard input is three little-endian numbers of 4 bytes (the kind of request, the
interval of restart markers in MCUs, and the length of a file), then the file. The answer on
standard output is a length and that many bytes: a file without metadata, or text. This is a
separate process because libjpeg exits when it cannot continue, unless longjmp prevents that, which
Python does not have. It starts fast: it imports only the standard library.

Every written file is read again and compared with the original: the coefficients of all blocks,
their quantization, and everything that decides the colours. Only an equal file is returned.

The structures are those of libjpeg's ABI 6.2 on 64 bits (jpeglib.h), which libjpeg-turbo keeps;
libjpeg itself refuses a caller whose structures have other sizes.
"""

import ctypes
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

KEEP_TABLES, OPTIMIZE, WARNINGS = range(3)
"""Kinds of requests: rewrite the file with its own coding tables; rewrite it with optimised tables,
which takes twice as long; list libjpeg's warnings about the file, one line for each kind."""
REQUEST: Final = struct.Struct("<III")
ANSWER: Final = struct.Struct("<I")

_ABI: Final = 62
# Numbers of bits of a difference of DC coefficients, in baseline files (ITU T.81, table F.1).
_DC_SYMBOLS: Final = 12
_LONGEST_CODE: Final = 16
_BLOCK_BYTES: Final = 128
# JMSG_LENGTH_MAX.
_MESSAGE_BYTES: Final = 200
_MAX_WARNINGS: Final = 10
# CPU seconds for a file; then a signal (SIGPROF) ends this process.
_MAX_CPU_S: Final = 60
# Pixels of a file that is read for its warnings; Pillow refuses larger files anyway.
_MAX_PIXELS: Final = 178_956_970


def _structure(size: int, /, **fields: tuple[int, Any]) -> Any:
    """A structure with fields at their offsets in bytes, and unused space between them."""
    padded: list[tuple[str, Any]] = []
    end = 0
    for name, (offset, kind) in fields.items():
        padded += [(f"_{end}", ctypes.c_char * (offset - end)), (name, kind)]
        end = offset + ctypes.sizeof(kind)
    padded.append((f"_{end}", ctypes.c_char * (size - end)))
    return type("Structure", (ctypes.Structure,), {"_fields_": padded})


_EmitMessage: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)
_FormatMessage: Final = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)
_AccessBlocks: Final = ctypes.CFUNCTYPE(
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_int,
)  # fmt: skip
_Errors: Final = _structure(
    168, emit_message=(8, _EmitMessage), format_message=(24, _FormatMessage)
)
_Memory: Final = _structure(104, access_virt_barray=(64, _AccessBlocks))
# A Huffman table: how many codes have each length, and the symbols, those of short codes first.
_Table: Final = _structure(
    280,
    counts=(0, ctypes.c_ubyte * 17),
    symbols=(17, ctypes.c_ubyte * 256),
    sent_table=(276, ctypes.c_int),
)
# Four pointers to Huffman tables.
_Tables: Final = ctypes.POINTER(_Table) * 4
_Component: Final = _structure(
    96,
    id=(0, ctypes.c_int),
    across=(8, ctypes.c_int),
    down=(12, ctypes.c_int),
    tables=(20, ctypes.c_int * 2),
    width_in_blocks=(28, ctypes.c_uint),
    height_in_blocks=(32, ctypes.c_uint),
    quantization=(80, ctypes.POINTER(ctypes.c_uint16 * 64)),
)
_Decompress: Final = _structure(
    632,
    errors=(0, ctypes.POINTER(_Errors)),
    memory=(8, ctypes.POINTER(_Memory)),
    size=(48, ctypes.c_uint * 2),
    num_components=(56, ctypes.c_int),
    color_space=(60, ctypes.c_int),
    missing_bits=(192, ctypes.POINTER(ctypes.c_int * 64)),
    dc_tables=(232, _Tables),
    ac_tables=(264, _Tables),
    components=(304, ctypes.POINTER(_Component)),
)
_Compress: Final = _structure(
    520,
    errors=(0, ctypes.POINTER(_Errors)),
    components=(88, ctypes.POINTER(_Component)),
    dc_tables=(128, _Tables),
    ac_tables=(160, _Tables),
    optimize_coding=(264, ctypes.c_int),
    restart_interval=(280, ctypes.c_uint),
)


class Libjpeg:
    """libjpeg, called through ctypes, for one file after another."""

    def __init__(self, path: str) -> None:
        self._lib = ctypes.CDLL(path)
        self._free, self._compare = ctypes.CDLL(None).free, ctypes.CDLL(None).memcmp
        self._compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._lib.jpeg_std_error.restype = ctypes.POINTER(_Errors)
        self._lib.jpeg_read_coefficients.restype = ctypes.POINTER(ctypes.c_void_p)
        self._lib.jpeg_alloc_huff_table.restype = ctypes.POINTER(_Table)
        self._errors = _Errors()
        self._on_message = _EmitMessage(self._note)  # an attribute, so that it is not collected
        self._warnings: list[str] = []

    def _created(self, structure: Any, create: Any) -> Any:
        structure.errors = self._lib.jpeg_std_error(ctypes.byref(self._errors))
        self._errors.emit_message = self._on_message
        create(ctypes.byref(structure), _ABI, ctypes.c_size_t(ctypes.sizeof(structure)))
        return structure

    def _note(self, file: int, level: int) -> None:
        if level < 0 and len(self._warnings) < _MAX_WARNINGS:
            text = ctypes.create_string_buffer(_MESSAGE_BYTES)
            self._errors.format_message(file, text)
            self._warnings.append(text.value.decode("ascii", "replace"))

    def _opened(self, image: bytes) -> Any:
        """A new decompressor: a used one would lend the last file's tables to a file without."""
        self._warnings = []
        source = self._created(_Decompress(), self._lib.jpeg_CreateDecompress)
        self._lib.jpeg_mem_src(ctypes.byref(source), image, ctypes.c_ulong(len(image)))
        self._lib.jpeg_read_header(ctypes.byref(source), 1)
        return source

    def warnings(self, image: bytes) -> list[str]:
        """Warnings about the coded data of a file, each kind once, in the order found.

        Only the decoding of coefficients warns (jdhuff.c); it takes up to 6 bytes a pixel.
        """
        source = self._opened(image)
        if source.size[0] * source.size[1] <= _MAX_PIXELS:
            self._lib.jpeg_read_coefficients(ctypes.byref(source))
        self._lib.jpeg_destroy(ctypes.byref(source))
        return list(dict.fromkeys(self._warnings))

    def rewritten(self, image: bytes, interval: int, keeps_tables: bool) -> bytes:
        """The file with restart markers; empty for one that is damaged or lacks scans.

        It is also empty if the coefficients of the result differ.
        """
        source = self._opened(image)
        coefficients = self._lib.jpeg_read_coefficients(ctypes.byref(source))
        content = b""
        if not self._warnings and _has_all_scans(source):
            content = self._written(source, coefficients, interval, keeps_tables)
            if not self._is_equal(content, source, coefficients):
                content = b""
        self._lib.jpeg_destroy(ctypes.byref(source))
        return content

    def _written(self, source: Any, coefficients: Any, interval: int, keeps_tables: bool) -> bytes:
        lib, buffer, size = self._lib, ctypes.c_void_p(), ctypes.c_ulong()
        compress = self._created(_Compress(), lib.jpeg_CreateCompress)
        target = ctypes.byref(compress)
        lib.jpeg_mem_dest(target, ctypes.byref(buffer), ctypes.byref(size))
        lib.jpeg_copy_critical_parameters(ctypes.byref(source), target)
        compress.optimize_coding, compress.restart_interval = not keeps_tables, interval
        if keeps_tables:
            self._take_tables(source, compress)
        lib.jpeg_write_coefficients(target, coefficients)
        lib.jpeg_finish_compress(target)
        lib.jpeg_destroy(target)
        written = ctypes.string_at(buffer, size.value)
        self._free(buffer)
        return written

    def _take_tables(self, source: Any, compress: Any) -> None:
        """Code each component with the file's own tables.

        AC coefficients need no other codes. DC coefficients at the start of a restart interval may
        need a code that the table lacks; missing codes are added with the greatest length.
        """
        for tables in ("dc_tables", "ac_tables"):
            new, original = getattr(compress, tables), getattr(source, tables)
            for index in filter(original.__getitem__, range(len(original))):
                new[index] = new[index] or self._lib.jpeg_alloc_huff_table(ctypes.byref(compress))
                ctypes.memmove(new[index], original[index], _Table.sent_table.offset)
        for number in range(source.num_components):
            compress.components[number].tables = source.components[number].tables
        for pointer in filter(None, compress.dc_tables):
            table = pointer.contents
            count = sum(table.counts)
            missing = sorted({*range(_DC_SYMBOLS)} - {*table.symbols[:count]})
            table.symbols[count : count + len(missing)] = missing
            table.counts[_LONGEST_CODE] += len(missing)

    def _is_equal(self, content: bytes, source: Any, coefficients: Any) -> bool:
        """Whether a file has the coefficients of the original and decodes to the same pixels."""
        written = self._opened(content)
        rows = _rows(written, self._lib.jpeg_read_coefficients(ctypes.byref(written)))
        is_equal = (
            not self._warnings
            and _frame(written) == _frame(source)
            and all(
                self._compare(address, original, size) == 0
                for (address, size), (original, _) in zip(
                    rows, _rows(source, coefficients), strict=True
                )
            )
        )
        self._lib.jpeg_destroy(ctypes.byref(written))
        return is_equal


def _has_all_scans(file: Any) -> bool:
    """Whether decoders take the coefficients as they are: they smooth progressive files whose first
    ten coefficients of a block are not all known to the last bit (jdcoefct.c).
    """
    missing = file.missing_bits if file.missing_bits else ()
    return not any(any(bits[:10]) for bits in missing[: file.num_components])


def _frame(file: Any) -> tuple[Any, ...]:
    """All that decides the pixels, except for the coefficients."""
    components = [file.components[number] for number in range(file.num_components)]
    tables = [(c.id, c.across, c.down, bytes(c.quantization.contents)) for c in components]
    return tuple(file.size), file.color_space, tables


def _rows(file: Any, coefficients: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of each row of blocks, without the blocks that pad the last MCUs."""
    access, address = file.memory.contents.access_virt_barray, ctypes.addressof(file)
    for number in range(file.num_components):
        component, blocks = file.components[number], coefficients[number]
        size = component.width_in_blocks * _BLOCK_BYTES
        for row in range(component.height_in_blocks):
            yield access(address, blocks, row, 1, 0)[0], size


def serve(library: Libjpeg, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the input ends."""
    while head := requests.read(REQUEST.size):
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)
        kind, interval, length = REQUEST.unpack(head)
        image = requests.read(length)
        if kind == WARNINGS:
            content = "\n".join(library.warnings(image)).encode()
        else:
            content = library.rewritten(image, interval, kind == KEEP_TABLES)
        answers.write(ANSWER.pack(len(content)) + content)
        answers.flush()


if __name__ == "__main__":
    serve(Libjpeg(sys.argv[1]), sys.stdin.buffer, sys.stdout.buffer)
