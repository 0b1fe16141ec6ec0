"""Private names of libraries are there, in the doors alone: run first on a new version."""

import ast
import functools
import importlib
import inspect
import re
from importlib.metadata import version

import pytest
from ray.autoscaler._private.kuberay import node_provider

from tests.cluster.test_access import API
from tests.modules import MODULES, imported, tree_of
from vit_ray import deepspeed_internals, mlflow_internals, ray_internals

DOORS = {"ray": ray_internals, "deepspeed": deepspeed_internals, "mlflow": mlflow_internals}
ENTRIES = [
    pytest.param(entry, id=f"{entry.module}.{entry.name}")
    for door in DOORS.values()
    for entry in door.INTERNALS
]
PUBLIC_MODULES = {
    "mlflow", "mlflow.entities", "mlflow.exceptions", "mlflow.models", "mlflow.pyfunc",
    "mlflow.tracking", "mlflow.types.schema",
    "mlflow.store.artifact.artifact_repository_registry",
}  # fmt: skip
# Attributes of the doors' entries that are names of other things, too.
COMMON = {"engine", "key", "name", "numel", "start", "step", "store", "timestamp", "value"}


@pytest.mark.parametrize(("library", "door"), DOORS.items())
def test_a_library_is_of_the_version_that_its_door_was_written_for(library, door):
    assert version(library).rpartition(".")[0] == door.VERSION


@pytest.mark.parametrize("entry", ENTRIES)
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


@pytest.mark.parametrize(("library", "most"), [("ray", 15), ("deepspeed", 10), ("mlflow", 3)])
def test_few_private_names_of_a_library_are_used(library, most):
    assert len(DOORS[library].INTERNALS) <= most


@functools.cache
def private_attributes() -> set[str]:
    """Of the entries of DeepSpeed and MLflow, with their methods."""
    entries = [*deepspeed_internals.INTERNALS, *mlflow_internals.INTERNALS]
    names = {name for e in entries for name in (*e.attributes, *e.parameters) if name}
    named = {line.partition(".")[2].removesuffix(" =") for e in entries for line in e.source}
    return {n for n in names | named if n.isidentifier() and not n.startswith("__")} - COMMON


def test_private_names_of_deepspeed_and_mlflow_are_used_by_their_doors_alone():
    for path in MODULES:
        door = path.name.removesuffix("_internals.py")
        names = {name for name in imported(path) if name.split(".")[0] in DOORS}
        if door != "deepspeed":
            assert not {name for name in names if name.split(".")[0] == "deepspeed"}, path
        if door != "mlflow":
            mlflow = {name for name in names if name.split(".")[0] == "mlflow"}
            sampler = {"mlflow.system_metrics.system_metrics_monitor"}  # its type is only there
            allowed = PUBLIC_MODULES | (sampler if path.name == "mlflow_client.py" else set())
            assert mlflow <= allowed, path
        if door not in DOORS:
            used = {
                node.attr
                for node in ast.walk(tree_of(path))
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self"
            }
            assert not used & private_attributes(), path


def test_private_names_of_ray_are_used_by_its_door_alone():
    """By all imports, attributes and arguments: these do not show which objects are Ray's."""
    for path in MODULES:
        source = path.read_text()
        if path.name == "ray_internals.py" or not re.search(
            r"^\s*(import|from) ray\b", source, re.M
        ):
            continue
        nodes = [*ast.walk(tree_of(path))]
        named = {n.arg or "" for n in nodes if isinstance(n, ast.keyword)}
        read = [n for n in nodes if isinstance(n, ast.Attribute)]
        named |= {n.attr for n in read if ast.unparse(n.value) not in ("self", "cls", "os", "sys")}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
                named |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        named |= {part for n in imported(path) if n.startswith("ray.") for part in n.split(".")}
        assert not {n for n in named if n.startswith("_") and not n.startswith("__")}, path


def test_ray_reads_what_its_autoscaler_is_given():
    paths = (node_provider.IN_CLUSTER_TOKEN_PATH, node_provider.IN_CLUSTER_CA_CERT_PATH)
    assert paths == (f"{API}/token", f"{API}/ca.crt")
