"""Restart markers in JPEG files, and the index by which crops of them are read alone."""
