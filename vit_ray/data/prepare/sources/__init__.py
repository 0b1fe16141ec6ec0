"""Formats in which people keep images, each turned into the same index."""
