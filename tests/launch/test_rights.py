"""A store that refuses one right: told in one line with its remedy, before anything starts."""

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.data.converted_set import converted_set
from tests.data.denying_s3 import ACTIONS, Rights, serve_s3_with_rights
from tests.ports import free_ports
from tests.recipes import recipe_with
from vit_ray import s3, storage
from vit_ray.commands import doctor
from vit_ray.commands.trained.fork import _is_free
from vit_ray.data import open_dataset
from vit_ray.launch.prepared_run import prepared_training
from vit_ray.launch.resuming import find_resume_point
from vit_ray.retry import DeniedError, with_retries
from vit_ray.storage import RIGHTS_PROBE, Location, check_rights, locate, needing_right

ALL = tuple(ACTIONS)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request is repeated as often as ever, but at once."""
    monkeypatch.setattr(storage, "_PROBE_POLICY", replace(storage._PROBE_POLICY, first_delay_s=0.0))


@pytest.fixture(scope="module")
def allow() -> Iterator[Callable[[Rights], None]]:
    folder = converted_set()
    places = [path for path in folder.rglob("*") if path.is_file()]
    files = {f"train/{path.relative_to(folder)}": path.read_bytes() for path in places}
    with serve_s3_with_rights({"sets": files, "weights": {"w.npz": b""}, "runs": {}}) as allowing:
        yield allowing


def prepare(name: str, **sections: object) -> None:
    recipe = recipe_with(
        name, output="s3://runs/all", data={"train": "s3://sets/train", "eval": None},
        optim={"steps": 4}, train={"global_batch_size": 4, "micro_batch_size": 4}, **sections,
    )  # fmt: skip
    with prepared_training(recipe, "pretrain"):
        pass


def test_the_rights_that_a_run_needs_are_enough(allow: Callable[[Rights], None]) -> None:
    allow({"sets": ("read",), "runs": ALL})
    prepare("enough")
    names = [info.base_name for info in locate("s3://runs/all/enough").list_files(recursive=True)]
    assert RIGHTS_PROBE not in names


def test_a_probe_that_could_not_be_deleted_does_not_stand_in_the_way(
    allow: Callable[[Rights], None],
) -> None:
    allow({"sets": ("read", "list"), "runs": ("list", "read", "write")})
    for _ in range(2):
        with pytest.raises(ValueError, match="no right to delete there"):
            prepare("once")
    folder = locate("s3://runs/all/once")
    assert [info.base_name for info in folder.list_files()] == [RIGHTS_PROBE]
    allow({"sets": ("read", "list"), "runs": ALL})
    assert _is_free(folder, "", 1)
    folder.child(RIGHTS_PROBE).write(b"left behind by a start that was killed")
    assert find_resume_point(recipe_with("once", output="s3://runs/all", resume=False)) is None


def test_a_bucket_that_is_not_there_is_named(allow: Callable[[Rights], None]) -> None:
    allow({"sets": ("read", "list"), "rums": ALL})
    with pytest.raises(ValueError, match=r"s3://rums/all: there is no bucket rums .*create it"):
        check_rights(locate("s3://rums/all"))


def test_a_key_or_secret_that_is_wrong_is_not_a_missing_right(
    allow: Callable[[Rights], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    allow({"runs": ALL})
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "wrong")
            s3.client_of.cache_clear()
            told = "does not accept these credentials: .*check AWS_ACCESS_KEY_ID, its secret and"
            with pytest.raises(ValueError, match=told):
                check_rights(locate("s3://runs/all"))
    s3.client_of.cache_clear()


def test_a_machine_without_credentials_is_told_what_to_set(
    allow: Callable[[Rights], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    allow({"runs": ALL})
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3.client_of.cache_clear()
    told = r"runs/all: there are no credentials .*set AWS_ACCESS_KEY_ID and AWS_SECRET.*env_vars"
    with pytest.raises(ValueError, match=told):
        check_rights(locate("s3://runs/all"))
    # pyarrow, which reads, sends a request without a signature.
    storage._s3.cache_clear()
    with pytest.raises(ValueError, match=r"sets/train: there are no credentials .*AWS_ACCESS_KEY"):
        open_dataset("s3://sets/train")
    storage._s3.cache_clear()
    s3.client_of.cache_clear()


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_store_that_does_not_answer_is_named_while_it_is_tried(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    policy = replace(storage._PROBE_POLICY, attempts=3)
    monkeypatch.setattr(storage, "_PROBE_POLICY", policy)
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")  # the other one is more specific
    monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    s3.client_of.cache_clear()
    told = f"s3://runs/all: the store does not answer: .*check {name}=.*:{port} and"
    caplog.set_level("INFO")
    with pytest.raises(OSError, match=told):
        check_rights(locate("s3://runs/all"))
    storage._s3.cache_clear()
    s3.client_of.cache_clear()
    # Of the write alone: the probe is deleted with less patience.
    attempts = [text.split(" failed (")[0] for text in caplog.messages if ": attempt " in text]
    assert attempts == [f"writing runs/all/rights-probe: attempt {n}" for n in (1, 2)]


def test_a_store_that_refuses_only_while_it_throttles_is_asked_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, answers = Location.read, iter([DeniedError("AccessDenied")] * 5)

    def throttled(location: Location) -> bytes:
        def once() -> bytes:
            for error in answers:
                raise error
            return plain(location)

        return with_retries(once, "reading", sleep=lambda _: None)

    monkeypatch.setattr(Location, "read", throttled)
    check_rights(locate(str(tmp_path)))


def test_a_full_disk_is_not_a_missing_right() -> None:
    with pytest.raises(OSError, match="No space"), needing_right("write", "/runs"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="no right to write"), needing_right("write", "/runs"):
        raise OSError(errno.EROFS, "Read-only file system")


@pytest.mark.parametrize("right", ALL)
def test_a_right_that_output_does_not_give_is_named_before_anything_starts(
    right: str, allow: Callable[[Rights], None]
) -> None:
    allow({"sets": ("read", "list"), "runs": [one for one in ALL if one != right]})
    with pytest.raises(
        ValueError, match=f"no right to {right} there: .*(ACCESS_DENIED|AccessDenied)"
    ) as error:
        prepare(f"without-{right}")
    assert str(error.value).startswith(f"s3://runs/all/without-{right}: ")
    assert f"; allow {ACTIONS[right]} to the role of the node or " in str(error.value)
    assert "\n" not in str(error.value)
    recipe = recipe_with("r", output="s3://runs/all")
    (found,) = [one for one in doctor.examine(recipe) if one.what == "output"]
    assert not found.is_good
    assert f"no right to {right} there" in found.text


@pytest.mark.parametrize(
    ("rights", "sections", "place"),
    [
        ({"sets": ("list",)}, {}, "s3://sets/train"),
        ({"sets": ("read", "list")}, {"init_from": "s3://weights/w.npz"}, "s3://weights/w.npz"),
    ],
)
def test_what_cannot_be_read_is_named_before_anything_starts(
    rights: Rights, sections: dict[str, str], place: str, allow: Callable[[Rights], None]
) -> None:
    allow({**rights, "runs": ALL})
    told = f"{place}: no right to read .*allow s3:GetObject.*for an object that does not exist$"
    with pytest.raises(ValueError, match=told):
        prepare("unread", **sections)
