"""A driver that looks every second for room to grow; half a minute is long for a test.

python -m tests.faults.quick_resize RECIPE
"""

import sys

from vit_ray.commands.printed_tables import print_result
from vit_ray.config import load_recipe
from vit_ray.launch import workers
from vit_ray.launch.run import train

if __name__ == "__main__":
    workers.LOOK_EVERY_S = 1.0
    sys.exit(print_result(train(load_recipe(sys.argv[1]))))
