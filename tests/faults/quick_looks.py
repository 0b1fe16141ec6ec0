"""A driver that looks every second for room to grow, and whether its workers are silent.

python -m tests.faults.quick_looks RECIPE
"""

import sys

from vit_ray.commands.trainings import print_result
from vit_ray.config import load_recipe
from vit_ray.launch import workers
from vit_ray.launch.run import train

if __name__ == "__main__":
    workers.LOOK_EVERY_S, workers.SILENT_S, workers.RETURN_S = 1.0, 60.0, 2.0
    sys.exit(print_result(train(load_recipe(sys.argv[1]))))
