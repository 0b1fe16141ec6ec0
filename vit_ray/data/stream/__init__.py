"""The training and evaluation streams through Ray Data."""
