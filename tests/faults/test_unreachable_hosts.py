"""Hosts are cut off: a short cut restarts nothing, after a long one the run continues as it was.

`python -m tests.faults.cuts` measures how long each takes.
"""

from collections.abc import Iterator

import pytest

from tests import hosts
from tests.conftest import Digits
from tests.end_to_end.runs import same_weights, weights_of
from tests.faults.cuts import CUTS, EVERY, NOTICED, cut_recipe, cut_run, host_cluster
from tests.faults.host_cluster import HostCluster
from vit_ray.config import Recipe
from vit_ray.launch.run import train
from vit_ray.outcomes import EventKind

WITHOUT_RESTART = {"a trainer's host for 20 s", "the head's host for 20 s", "S3's host for 60 s"}
RAYS_OWN_S = 60.0
"""Ray's defaults notice a host that is cut off after 65 s, the shipped ones in half of that."""
QUICKEST = {"a trainer's host for 20 s", "the head's host for 20 s", "a trainer's host for good"}


@pytest.fixture(scope="module")
def cluster(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    hosts.require()
    with host_cluster(tmp_path_factory.mktemp("cuts"), digits) as made:
        yield made


@pytest.fixture(scope="module")
def alone(ray_cluster: object, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """On one host, undisturbed."""
    recipe = cut_recipe("alone", digits, tmp_path_factory.mktemp("alone"))
    assert train(recipe).is_complete
    return recipe


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICKEST else pytest.mark.slow) for n in CUTS]
)
def test_a_run_whose_hosts_are_cut_off_is_that_of_one_host(
    name: str, cluster: HostCluster, alone: Recipe
) -> None:
    cost, run, step = cut_run(cluster, name)
    failures = [one["text"] for one in run.events(*NOTICED, EventKind.RESUMED)]
    assert (failures == []) == (name in WITHOUT_RESTART), failures
    if failures:
        assert cost.gone_s is not None
        assert cost.noticed_s is not None
        assert cost.noticed_s < RAYS_OWN_S
        assert cost.repeated <= 2 * EVERY  # a save may be under way
    assert same_weights(weights_of(run.on_disk, step), weights_of(alone, step))
    cluster.wait_for_nodes()
