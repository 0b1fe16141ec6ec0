"""Private names of libraries are there, and what ours make of them: run first on a new version."""

import importlib
import inspect
from importlib.metadata import version

import pytest
from ray.autoscaler._private.kuberay import node_provider

from vit_ray import deepspeed_internals, mlflow_internals, ray_internals
from vit_ray.launch.failures import cause

DOORS = {"ray": ray_internals, "deepspeed": deepspeed_internals, "mlflow": mlflow_internals}
ENTRIES = [entry for door in DOORS.values() for entry in door.INTERNALS]


@pytest.mark.parametrize(("library", "door"), DOORS.items())
def test_a_library_is_of_the_version_that_its_door_was_written_for(library, door):
    assert version(library).rpartition(".")[0] == door.VERSION


@pytest.mark.parametrize(("library", "most"), [("ray", 15), ("deepspeed", 10), ("mlflow", 3)])
def test_few_private_names_of_a_library_are_used(library, most):
    assert len(DOORS[library].INTERNALS) <= most


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.module}.{entry.name}")
def test_a_name_is_there_with_what_is_expected_of_it(entry):
    module = importlib.import_module(entry.module)
    found = getattr(module, entry.name) if entry.name else module
    for method, parameters in entry.parameters.items():
        target = getattr(found, method) if method else found
        names = tuple(inspect.signature(target).parameters)
        assert tuple(n for n in names if n != "_ray_trace_ctx") == parameters, method
    for attribute in entry.attributes:
        is_there = hasattr(found, attribute) or attribute in getattr(found, "__annotations__", ())
        assert is_there or f"self.{attribute} =" in inspect.getsource(found), attribute
    for expression in entry.source:
        owner = module if not inspect.isclass(found) else found
        assert expression in inspect.getsource(owner), expression


def test_ray_reads_what_its_autoscaler_is_given():
    paths = (node_provider.IN_CLUSTER_TOKEN_PATH, node_provider.IN_CLUSTER_CA_CERT_PATH)
    folder = "/var/run/secrets/kubernetes.io/serviceaccount"  # Kubernetes' own
    assert paths == (f"{folder}/token", f"{folder}/ca.crt")


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
    assert cause(error, {}) == "or has failed to load"
