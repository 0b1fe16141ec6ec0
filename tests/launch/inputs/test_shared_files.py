"""Which local files other nodes must see, and what is said of nodes that do not."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.recipes import recipe_with
from vit_ray import lock
from vit_ray.config import Recipe
from vit_ray.data import open_dataset
from vit_ray.data.prepare.subset import subset
from vit_ray.launch.cluster import node_files
from vit_ray.launch.cluster.connection import ClusterShape
from vit_ray.launch.cluster.node_files import Needed, unseen
from vit_ray.launch.inputs import shared_files
from vit_ray.launch.inputs.shared_files import check_shared, check_shared_by_tasks, needed_files

SET = Path(__file__).parents[2] / "net" / "kept" / "set"
SHARD = "part-00000-of-00001.parquet"


def id_of(name: str) -> str:
    """In Ray's form."""
    return name.encode().ljust(28, b"\0").hex()


def name_of(node_id: str) -> str:
    return bytes.fromhex(node_id).rstrip(b"\0").decode()


def node(name: str, number: int, labels: Mapping[str, str], **held: float) -> dict[str, Any]:
    return {
        "NodeID": id_of(name), "Labels": dict(labels), "Resources": held,
        "NodeManagerHostname": name, "NodeManagerAddress": f"10.0.0.{number}",
    }  # fmt: skip


NODES = (
    node("head", 1, {}, CPU=0.0),
    node("gpu", 2, {"pool": "train"}, CPU=8.0, GPU=2.0),
    node("cpu", 3, {"pool": "read"}, CPU=8.0),
    node("tiny", 4, {}, CPU=0.5),
)
CLUSTER = ClusterShape(4, 16.5, 2.0, 0.0, nodes=NODES)


def recipe(folder: Path, **sections: Any) -> Recipe:
    tree = {"output": str(folder / "runs"), "data": {"train": str(SET)}, "optim": {"steps": 4}}
    return recipe_with("run", **tree).with_changes(**sections)


def nodes_by_name(needed: Sequence[Needed]) -> dict[str, set[str]]:
    return {one.name: set(map(name_of, one.nodes)) for one in needed}


def test_reading_nodes_need_the_data_and_workers_their_weights(tmp_path: Path) -> None:
    """A task takes 0.66 CPUs, and a worker a CPU and a GPU."""
    weights = tmp_path / "vit.npz"
    weights.write_bytes(b"12345")
    one = recipe(tmp_path, init_from=str(weights))
    needed = needed_files(CLUSTER, [one])
    train, init = f"data.train={SET}", f"init_from={weights}"
    assert nodes_by_name(needed) == {train: {"gpu", "cpu"}, init: {"gpu"}}
    assert needed[1].sizes == {str(weights): 5}
    chosen = one.with_changes(
        data={"label_selector": {"pool": "read"}}, workers={"use_gpu": False}, init_from=None
    )
    assert nodes_by_name(needed_files(CLUSTER, [chosen])) == {train: {"cpu"}}
    # The GPUs of the driver's own node, which is not asked, are for workers, too.
    alone = replace(CLUSTER, nodes=(*NODES[:1], node("own", 2, {}, CPU=8.0, GPU=2.0), *NODES[2:]))
    assert nodes_by_name(needed_files(alone, [one]))[init] == {"own"}
    on_cpus = one.with_changes(workers={"use_gpu": False, "label_selector": {"pool": "!train"}})
    assert nodes_by_name(needed_files(CLUSTER, [on_cpus]))[init] == {"cpu"}


def test_what_is_in_a_bucket_is_not_looked_for(tmp_path: Path, monkeypatch: Any) -> None:
    one = recipe(tmp_path, data={"train": "s3://pictures/train"}, init_from="s3://weights/vit.npz")
    manifest = open_dataset(str(SET))
    vars(manifest)["root"] = "s3://pictures/train"
    monkeypatch.setattr(shared_files, "open_dataset", lambda _: manifest)
    assert needed_files(CLUSTER, [one]) == []


def test_an_evaluation_does_not_need_the_training_set(tmp_path: Path) -> None:
    other = tmp_path / "test"
    shutil.copytree(SET, other)
    one = recipe(tmp_path, data={"eval": str(other)})
    names = [f"data.train={SET}", f"data.eval={other}"]
    assert [needed.name for needed in needed_files(CLUSTER, [one])] == names
    assert [needed.name for needed in needed_files(CLUSTER, [one], trains=False)] == names[1:]


def test_an_evaluation_needs_the_training_set_for_its_held_out_part_alone(tmp_path: Path) -> None:
    other = tmp_path / "pool"
    shutil.copytree(SET, other)
    few_shot = {"few_shot_train": str(other), "few_shot_test": str(other)}
    one = recipe(tmp_path, data={"eval": None}, evaluate=few_shot)
    names = [f"evaluate.few_shot_{part}={other}" for part in ("train", "test")]
    assert [needed.name for needed in needed_files(CLUSTER, [one], trains=False)] == names
    held_out = one.with_changes(data={"held_out_fraction": 0.1})
    found = [needed.name for needed in needed_files(CLUSTER, [held_out], trains=False)]
    assert found == [f"data.train={SET}", *names]


def test_the_worker_that_reads_few_shot_labels_needs_their_set(tmp_path: Path) -> None:
    """`few_shot_labels` of a job opens the set by its path on rank 0, which any worker may be."""
    pool, other = tmp_path / "pool", tmp_path / "test"
    shutil.copytree(SET, pool)
    shutil.copytree(SET, other)
    few_shot = {"few_shot_train": str(pool), "few_shot_test": str(other)}
    one = recipe(tmp_path, data={"label_selector": {"pool": "read"}}, evaluate=few_shot)
    assert nodes_by_name(needed_files(CLUSTER, [one])) == {
        f"data.train={SET}": {"cpu"}, f"evaluate.few_shot_train={pool}": {"cpu", "gpu"},
        f"evaluate.few_shot_test={other}": {"cpu"},
    }  # fmt: skip


def test_a_data_set_is_known_by_its_manifest_and_its_shards(tmp_path: Path) -> None:
    (needed,) = needed_files(CLUSTER, [recipe(tmp_path)])
    files = ("manifest.parquet", SHARD)
    assert needed.sizes == {str(SET / name): (SET / name).stat().st_size for name in files}


def test_a_subset_needs_the_shards_of_the_whole_set_alone(tmp_path: Path) -> None:
    """Reading tasks get its manifest from the driver."""
    subset(str(SET), str(tmp_path / "part"), fraction=0.5, seed=0)
    (needed,) = needed_files(CLUSTER, [recipe(tmp_path, data={"train": str(tmp_path / "part")})])
    assert needed.sizes == {str(SET / SHARD): (SET / SHARD).stat().st_size}


def test_trainings_of_one_set_need_it_on_the_nodes_of_each(tmp_path: Path) -> None:
    recipes = [
        recipe(tmp_path, data={"label_selector": {"pool": pool}}) for pool in ("read", "train")
    ]
    assert nodes_by_name(needed_files(CLUSTER, recipes)) == {f"data.train={SET}": {"gpu", "cpu"}}


def test_a_node_sees_files_of_the_right_size_and_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "folder").mkdir()
    sizes = {
        str(tmp_path / "file"): 3, str(tmp_path / "folder"): None,
        str(tmp_path / "gone"): 3, str(tmp_path / "no folder"): None,
    }  # fmt: skip
    assert unseen(sizes, 0.0) == {str(tmp_path / "gone"), str(tmp_path / "no folder")}
    assert unseen({str(tmp_path / "file"): 4}, 0.0) == {str(tmp_path / "file")}
    assert unseen({str(tmp_path / "folder"): 0}, 0.0) == {str(tmp_path / "folder")}


def test_a_file_that_a_shared_disk_shows_late_is_seen(tmp_path: Path) -> None:
    late = tmp_path / "late"
    threading.Timer(0.3, late.touch).start()
    assert unseen({str(late): 0}, 30.0) == set()


def test_a_disk_that_workers_wait_for_is_waited_for_here() -> None:
    assert node_files.SHOWN_S >= lock.SHOWN_S
    # A process on the node starts before, and the answer comes back.
    assert node_files.ANSWER_LIMIT_S >= node_files.SHOWN_S + 8.0


def asked(
    monkeypatch: pytest.MonkeyPatch, see: Mapping[str, bool | None], own: str = "head"
) -> list[tuple[str, dict[str, int | None]]]:
    """What each node is asked for; it sees all or nothing, or does not answer (None).

    Args:
        own: the driver's node.
    """
    questions: list[tuple[str, dict[str, int | None]]] = []

    class Task:
        def options(self, scheduling_strategy: Any) -> Task:
            self.node = name_of(scheduling_strategy.node_id)
            return self

        def remote(self, sizes: dict[str, int | None], patience_s: float) -> tuple[str, set[str]]:
            questions.append((self.node, sizes))
            return self.node, set() if see[self.node] else set(sizes)

    def get(reference: tuple[str, set[str]], timeout: float) -> set[str]:
        assert timeout <= node_files.ANSWER_LIMIT_S
        if see[reference[0]] is None:
            raise ray.exceptions.GetTimeoutError
        return reference[1]

    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: Task())
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    here = type("Here", (), {"get_node_id": lambda _: id_of(own)})
    monkeypatch.setattr(ray, "get_runtime_context", here)
    return questions


def test_nodes_that_see_neither_are_named_with_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = asked(monkeypatch, {"gpu": False, "cpu": False})
    one = recipe(tmp_path)
    with pytest.raises(ValueError, match="give folders that all nodes share") as raised:
        check_shared(CLUSTER, [one], ("output", one.output))
    text = str(raised.value)
    assert f"output={one.output}: not on gpu (10.0.0.2); " in text
    assert f"data.train={SET}: not on cpu (10.0.0.3), gpu (10.0.0.2); " in text
    assert "\n" not in text
    assert {name for name, _ in questions} == {"gpu", "cpu"}
    of_gpu, of_cpu = (dict(questions)[name] for name in ("gpu", "cpu"))
    (marker,) = of_gpu.keys() - of_cpu.keys()
    # In the folder that exists: one that the run would make would be left.
    assert (Path(marker).parent, of_gpu[marker]) == (tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_nodes_that_see_all_or_do_not_answer_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, {"gpu": True, "cpu": None})
    one = recipe(tmp_path)
    check_shared(CLUSTER, [one], ("output", one.output))
    asked(monkeypatch, {"gpu": None, "cpu": False})
    with pytest.raises(ValueError, match=r"not on cpu \(10\.0\.0\.3\); give"):
        check_shared(CLUSTER, [one], ("output", one.output))


def test_no_more_than_the_limit_is_waited_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, {str(number): None for number in range(4)})
    waits: list[float] = []

    def get(_: Any, timeout: float) -> set[str]:
        waits.append(timeout)
        time.sleep(min(timeout, 0.2))
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(node_files, "ANSWER_LIMIT_S", 0.3)
    nodes = [id_of(str(number)) for number in range(4)]
    assert node_files.nodes_without([Needed("data", {"/a": 1}, nodes)]) == [set()]
    assert waits[-1] == 0.0


@pytest.mark.parametrize(
    "cluster",
    [ClusterShape(1, 8, 0, 0.0, nodes=NODES[1:2]), ClusterShape(4, 8, 0, 0.0, is_private=True)],
)
def test_nothing_is_asked_on_one_node(
    cluster: ClusterShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "open_dataset", None)
    one = recipe(tmp_path)
    check_shared(cluster, [one], ("output", one.output))


def test_the_drivers_own_node_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees what the driver sees."""
    questions = asked(monkeypatch, {"gpu": True}, own="cpu")
    one = recipe(tmp_path)
    check_shared(CLUSTER, [one], ("output", one.output))
    assert [name for name, _ in questions] == ["gpu"]


def test_a_driver_outside_asks_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Ray Client its machine is none of the cluster's."""
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    asked(monkeypatch, {"gpu": False})
    one = recipe(tmp_path)
    with pytest.raises(ValueError, match=r"not on gpu \(10\.0\.0\.2\)"):
        check_shared(ClusterShape(1, 8, 2, 0.0, nodes=NODES[1:2]), [one], None)


def test_many_nodes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tuple(node(f"n{number:02d}", number, {}, CPU=8.0) for number in range(20))
    asked(monkeypatch, {one["NodeManagerHostname"]: False for one in nodes})
    cluster = ClusterShape(20, 160, 0, 0.0, nodes=nodes)
    with pytest.raises(ValueError, match=r"not on n00 .* n07 \(10\.0\.0\.7\), 12 more; give"):
        check_shared(cluster, [recipe(tmp_path)], None)


def test_an_output_that_cannot_be_written_is_left_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    questions = asked(monkeypatch, {"gpu": True, "cpu": True})
    monkeypatch.setattr(Path, "touch", refuse)
    check_shared(CLUSTER, [recipe(tmp_path)], ("output", "/nowhere/runs"))
    assert all(str(SET) in path for _, sizes in questions for path in sizes)


def test_tasks_of_a_data_command_need_what_they_read_and_write_on_every_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task takes a CPU, which the head and the tiny node do not have."""
    (tmp_path / "images").mkdir()
    (tmp_path / "one.tar").write_bytes(b"123")
    questions = asked(monkeypatch, {"gpu": True, "cpu": False})
    read = [
        ("verify.path", str(SET)), ("convert.source", str(tmp_path / "images")),
        ("convert.source", str(tmp_path / "one.tar")), ("convert.source", f"{tmp_path}/*.tar"),
        ("convert.source", "hf://owner/images"), ("convert.source", "s3://bucket/images"),
    ]  # fmt: skip
    written = ("convert.destination", str(tmp_path / "data" / "set"))
    with pytest.raises(ValueError, match=r"not on cpu \(10\.0\.0\.3\); give") as raised:
        check_shared_by_tasks(CLUSTER, read, written)
    names = [f"convert.destination={written[1]}", *(f"{key}={path}" for key, path in read[:3])]
    assert f": {', '.join(names)}: not on" in str(raised.value)
    assert [name for name, _ in sorted(questions)] == ["cpu", "gpu"]
    sizes = dict(questions)["gpu"]
    assert sizes[str(tmp_path / "images")] is None
    assert sizes[str(tmp_path / "one.tar")] == 3
    assert sizes[str(SET / SHARD)] == (SET / SHARD).stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "one.tar"]
    check_shared_by_tasks(CLUSTER, read, written, num_cpus=9.0)
