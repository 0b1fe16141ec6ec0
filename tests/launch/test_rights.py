"""A store that refuses one right: told in one line with its remedy, before anything starts."""

from collections.abc import Callable, Iterator

import pytest

from tests.data.converted_set import converted_set
from tests.data.denying_s3 import ACTIONS, Rights, policy_of, serve_s3_with_policy
from tests.data.s3_server import forget_clients
from tests.recipes import recipe_with
from vit_ray.commands import doctor
from vit_ray.commands.recorded_run import _refuse_taken
from vit_ray.data import open_dataset
from vit_ray.launch.named_run import find_resume_point
from vit_ray.launch.run import check_rights, prepared_training
from vit_ray.storage import RIGHTS_PROBE, locate

ALL = tuple(ACTIONS)


@pytest.fixture(scope="module")
def allow() -> Iterator[Callable[[Rights], None]]:
    folder = converted_set()
    places = [path for path in folder.rglob("*") if path.is_file()]
    files = {f"train/{path.relative_to(folder)}": path.read_bytes() for path in places}
    buckets = {"sets": files, "weights": {"w.npz": b""}, "runs": {}}
    with serve_s3_with_policy(buckets) as set_policy:
        yield lambda rights: set_policy(policy_of(rights))


def prepare(name: str, **sections: object) -> None:
    recipe = recipe_with(
        name, output="s3://runs/all", data={"train": "s3://sets/train", "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 4}, **sections,
    )  # fmt: skip
    with prepared_training(recipe, "pretrain"):
        pass


def test_the_rights_that_a_run_needs_are_enough_and_a_probe_that_stays_is_not_in_the_way(allow):
    allow({"sets": ("read",), "runs": ALL})
    prepare("enough")
    names = [info.base_name for info in locate("s3://runs/all/enough").list_files(recursive=True)]
    assert RIGHTS_PROBE not in names
    allow({"sets": ("read", "list"), "runs": ("list", "read", "write")})
    for _ in range(2):
        with pytest.raises(PermissionError, match="allow s3:DeleteObject"):
            prepare("once")
    folder = locate("s3://runs/all/once")
    assert [info.base_name for info in folder.list_files()] == [RIGHTS_PROBE]
    allow({"sets": ("read", "list"), "runs": ALL})
    _refuse_taken(folder)
    folder.child(RIGHTS_PROBE).write(b"left behind by a start that was killed")
    assert find_resume_point(recipe_with("once", output="s3://runs/all", resume=False)) is None


def test_a_machine_without_credentials_is_told_what_to_set(allow, monkeypatch, tmp_path):
    allow({"runs": ALL})
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    told = r"s3://\w+: Unable to locate .*set AWS_ACCESS_KEY_ID and AWS_SECRET.*env_vars"
    for use in (lambda: check_rights(locate("s3://runs/all")), lambda: open_dataset("s3://sets/a")):
        forget_clients()
        with pytest.raises(PermissionError, match=told):
            use()
    forget_clients()


@pytest.mark.parametrize("right", ALL)
def test_a_right_that_output_does_not_give_is_named_before_anything_starts(right, allow):
    allow({"sets": ("read", "list"), "runs": [one for one in ALL if one != right]})
    told = f"; allow {ACTIONS[right]} to the role of the node or "
    with pytest.raises(PermissionError) as error:
        prepare(f"without-{right}")
    assert str(error.value).startswith(f"s3://runs/all/without-{right}")
    assert told in str(error.value)
    assert "\n" not in str(error.value)
    recipe = recipe_with("r", output="s3://runs/all")
    ((_, is_good, text),) = [one for one in doctor.examine(recipe) if one[0] == "output"]
    assert not is_good
    assert told in text


@pytest.mark.parametrize(("rights", "sections", "place"), [
    ({"sets": ("list",)}, {}, "s3://sets/train"),
    ({"sets": ("read", "list")}, {"init_from": "s3://weights/w.npz"}, "s3://weights"),
])  # fmt: skip
def test_what_cannot_be_read_is_named_before_anything_starts(rights, sections, place, allow):
    allow({**rights, "runs": ALL})
    with pytest.raises(OSError, match=f"{place}/.*; allow s3:GetObject to the role"):
        prepare("unread", **sections)
