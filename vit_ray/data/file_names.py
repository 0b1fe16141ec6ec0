"""Which files are images by their names, and which are not a user's at all."""

from typing import Final

FORMAT_SUFFIXES: Final = {
    "JPEG": ("jpg", "jpeg", "jpe", "jfif"),
    "PNG": ("png", "apng"),
    "WEBP": ("webp",),
    "BMP": ("bmp", "dib"),
    "GIF": ("gif",),
    "TIFF": ("tif", "tiff"),
    "PPM": ("ppm", "pgm", "pbm", "pnm"),
    "JPEG2000": ("jp2", "j2k", "jpf", "jpx"),
    "AVIF": ("avif",),
}
"""Formats that Pillow opens for us, and their suffixes. Its others include PostScript, which it
passes to another program, and formats that are not for photographs."""
IMAGE_SUFFIXES: Final = frozenset(sum(FORMAT_SUFFIXES.values(), ("img", "image")))

_OF_SYSTEMS: Final = frozenset(
    {
        "thumbs.db", "desktop.ini", "__macosx", "lost+found", "@eadir", "#recycle",
        "$recycle.bin", "system volume information",
    }
)  # fmt: skip
"""What Windows, macOS, ext4 and network disks add to folders, in lower case."""
_UNFINISHED: Final = (".part", ".partial", ".crdownload", "~")
"""Ends of the names of downloads and copies that are not finished."""


def is_hidden(path: str) -> bool:
    """Whether a component of a relative path begins with a dot, or no user has made it."""
    return any(
        part.startswith(".") or part in _OF_SYSTEMS or part.endswith(_UNFINISHED)
        for part in path.lower().split("/")
    )


def is_image_name(path: str) -> bool:
    """Whether a file is named as an image is, and not hidden."""
    name = path.rsplit("/", 1)[-1]
    return not is_hidden(name) and name.rpartition(".")[2].lower() in IMAGE_SUFFIXES
