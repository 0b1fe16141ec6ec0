"""What the functions of Ray's door do; `test_internals.py` finds the names."""

import importlib
from types import SimpleNamespace

import ray
import ray.train

from vit_ray import ray_internals
from vit_ray.launch.failures import cause


def test_a_server_may_take_its_share_of_the_cluster_that_no_rank_has(monkeypatch):
    """Ray's own share of 64 servers on nodes of 16 CPUs would be none."""
    autoscaler = ray_internals.RateBasedClusterAutoscaler
    plain = autoscaler.get_total_resources
    cluster = {"CPU": 1024.0, "object_store_memory": 6400.0, "memory": 640.0}
    monkeypatch.setattr(ray, "cluster_resources", lambda: cluster)
    nodes = [{"NodeID": "here", "Resources": {"object_store_memory": 300.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    here = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    try:
        ray_internals.give_datasets(1 / 64, 512)
        part = autoscaler.get_total_resources(None)
        assert (part.cpu, part.object_store_memory, part.memory) == (8, 100, 10)
        ray_internals.give_datasets(1 / 2, 512)
        half = autoscaler.get_total_resources(None)
        assert (half.cpu, half.object_store_memory) == (256, 300)  # of this node's own store
        ray_internals.give_datasets(1 / 2, 2000)
        assert autoscaler.get_total_resources(None).cpu == 0
    finally:
        ray_internals.give_datasets(1, 0)
    assert autoscaler.get_total_resources is plain


def test_ray_datas_advice_on_retries_is_taken_off_an_error():
    """As Ray itself writes it; the last line of an error is shown as its cause."""
    util = importlib.import_module("ray.data._internal.util")
    text = "shard 'a' is missing\nor has failed to load"
    error = util._annotate_exception_with_retry_context(
        ValueError(text), description="apply UDF transform", attempts=1, max_attempts=1,
        total_backoff_s=0.0, exception_str="",
    )  # fmt: skip
    assert "DataContext" in str(error)
    assert ray_internals.without_retry_note(str(error)) == text
    assert ray_internals.without_retry_note(text) == text
    assert cause(error) == "or has failed to load"
