"""How the images of a global batch are numbered."""

from typing import Final

COPY: Final = 1 << 40
"""The k-th copy of an image in a batch has k times this added to the image's number, so that
everything drawn by sample number (crops, mixing, masks, dropout) differs between copies."""
