"""Sizes of ZeRO's collectives, in elements: for the engine that sets them, and for the plan.

Gradients are summed over workers in buckets beside the backward pass. What is left to wait for at
its end is the last bucket, so that small ones are better, until starting each costs more: for N
parameters of w bytes, a bucket of B costs B 2w / bandwidth at the end and N / B starts. New weights
of stages 1 and 2 have no size here: they are gathered after the step, in place and all at once
(DeepSpeed 0.19.8 heeds its `allgather_bucket_size` only where torch cannot do so).
"""

import math
from typing import Final

# Of an all-reduce over eight servers of eight H100 with eight adapters of 400 Gbit/s, by NCCL's own
# model of its trees (src/graph/tuning.cc, LL128). Eight servers stand for any number: the best
# bucket of one server is half as large, that of 64 a third larger, and this one costs both less
# than a millisecond of a step.
START_S: Final = 72.2e-6
LINK_BYTES_PER_S: Final = 352.5e9
PREFETCH: Final = 50_000_000  # about two blocks of ViT-H/14
"""Weights that stage 3 gathers ahead in each module, up to `HELD` altogether."""
HELD: Final = 1_000_000_000  # 2 GB of bf16: every model of the paper, whole
"""Weights that stage 3 holds gathered, to which those of one module may come. What is held when the
forward pass ends, the backward pass uses; the others are gathered again."""


def reduce_bucket(num_parameters: int, largest_parameter: int) -> int:
    """Gradients that are summed over workers at a time, on any number of workers.

    DeepSpeed allocates it whole.

    B/16 has 4 buckets, H/14 has 10. The largest parameter fits into one: what does not, DeepSpeed
    0.19.8 sums in place of copying it, and at stage 2 with overlap it gives the memory to the
    computing stream before the sum has read it (`stage_1_and_2.py: average_tensor`).

    Args:
        num_parameters: of all together; no bucket is larger.
        largest_parameter: elements of the largest one.
    """
    bytes_sent = 2 * 2  # of each element: bf16, and an all-reduce sends it twice
    best = math.sqrt(num_parameters * START_S * LINK_BYTES_PER_S / bytes_sent)
    return min(num_parameters, max(int(best), largest_parameter))
