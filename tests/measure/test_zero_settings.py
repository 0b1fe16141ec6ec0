"""Sizes of ZeRO's collective operations, by hand."""

import math

import pytest

from vit_ray.measure.memory import reduce_bucket


@pytest.mark.parametrize(
    ("num_parameters", "largest", "buckets"),
    [(86_567_656, 2_359_296, 4), (632_045_800, 6_553_600, 10)],
)
def test_b16_and_h14_have_so_many_buckets(num_parameters, largest, buckets):
    bucket = reduce_bucket(num_parameters, largest)
    assert math.ceil(num_parameters / bucket) == buckets


def test_the_head_of_imagenet_21k_fits_into_a_bucket():
    # Of a ViT of 1,536 channels and one block, which the head is most of.
    head = 1536 * 21_843
    assert reduce_bucket(64_000_000, head) == head


def test_a_bucket_is_no_larger_than_the_model():
    assert reduce_bucket(100_000, 30_000) == 100_000
