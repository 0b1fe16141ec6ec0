"""Formats of image sets, each turned into the same index."""
