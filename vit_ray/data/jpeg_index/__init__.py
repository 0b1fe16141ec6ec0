"""Restart markers in JPEG files, and the index by which single crops of them are read."""
