"""What the server that ranks are forked off has imported, once for all of them."""

import pytest  # noqa: F401
import scipy.stats  # noqa: F401

import tests.training.engine_runs
import tests.worker.fakes  # noqa: F401
from vit_ray.training.engine import warm_up_process

warm_up_process()
