"""Encoded images to crops of pixels, and to perceptual hashes."""
