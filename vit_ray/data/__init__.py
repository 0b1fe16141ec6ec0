"""Sharded parquet data sets of images, and the exact stream that reads them."""

from vit_ray.data.dataset import open_dataset

__all__ = ["open_dataset"]
