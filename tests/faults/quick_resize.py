"""A driver that looks every second for room to grow; Ray's own minute is long for a test.

python -m tests.faults.quick_resize RECIPE
"""

import sys
from functools import partial

from ray.train import ScalingConfig

from vit_ray.commands.printed_tables import print_result
from vit_ray.config import load_recipe
from vit_ray.launch.pool import worker_pool as pool
from vit_ray.launch.run import train

if __name__ == "__main__":
    quick = partial(ScalingConfig, elastic_resize_monitor_interval_s=1.0)
    pool.ScalingConfig = quick  # type: ignore[assignment,misc]
    sys.exit(print_result(train(load_recipe(sys.argv[1]))))
