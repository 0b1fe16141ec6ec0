"""The digest of a run's samples depends on samples, places and steps, and not on who had them."""

import numpy as np
import pytest

from vit_ray.checkpoints.checkpoint import add_digests, of_floats, samples_digest, to_floats

BATCH, STEPS = 24, 7
SAMPLES = np.random.default_rng(0).permutation(BATCH * STEPS).astype(np.int64)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 24])
def test_ranks_and_steps_add_up_to_the_digest_of_all(world_size):
    share = BATCH // world_size
    ranks = []
    for rank in range(world_size):
        mine = 0
        for step in range(STEPS):
            first = step * BATCH + rank * share
            mine = add_digests(mine, samples_digest(first, SAMPLES[first : first + share]))
        ranks.append(to_floats(mine))
    summed = of_floats(np.sum(ranks, axis=0).tolist())
    assert summed == samples_digest(0, SAMPLES)


def test_parts_of_many_ranks_are_summed_exactly():
    digests = np.random.default_rng(1).integers(0, 2**64, 100_000, dtype=np.uint64)
    parts = np.sum([to_floats(int(one)) for one in digests], axis=0)
    assert of_floats(parts.tolist()) == int(digests.sum(dtype=np.uint64))


def test_a_swap_a_repetition_and_a_shift_change_it():
    wanted = samples_digest(0, SAMPLES)
    swapped, repeated = SAMPLES.copy(), SAMPLES.copy()
    swapped[[3, 90]] = swapped[[90, 3]]
    repeated[5] = repeated[6]
    found = [samples_digest(0, one) for one in (swapped, repeated)] + [samples_digest(1, SAMPLES)]
    assert wanted not in found
    assert len(set(found)) == 3
