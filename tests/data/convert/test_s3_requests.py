"""What a conversion asks an object store, counted at a real server, and what is denied there."""

import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.convert.archives import rejections, samples, tar_of, write_files
from tests.data.converting import convert
from tests.data.denying_s3 import policy_of, serve_s3_with_policy
from tests.data.pictures import jpeg
from tests.data.s3_server import FaultProxy, serve_s3, this_process_uses
from vit_ray import lock
from vit_ray.data.convert import conversion, rows
from vit_ray.data.convert.rows import Row
from vit_ray.storage import Location

pytestmark = pytest.mark.usefixtures("serial")

FEW, MANY = 10, 70


def write_sources(folder: Path, count: int) -> None:
    """The same images in class folders, a list and an archive."""
    images = [jpeg(i) for i in range(count)]
    rows = "".join(f"images/{i}.jpg,class_{i % 2}\n" for i in range(count))
    archive = tar_of(samples(images, [b"%d" % (i % 2) for i in range(count)]))
    for i, image in enumerate(images):
        places = f"folders/class_{i % 2}/{i}.jpg", f"list/images/{i}.jpg"
        write_files(folder, dict.fromkeys(places, image))
    write_files(folder, {"list/list.csv": f"path,label\n{rows}", "tars/0.tar": archive})


@pytest.mark.parametrize("layout", ["folders", "list", "tars"])
def test_each_further_image_is_asked_for_once(tmp_path, layout, monkeypatch):
    """Of all that a conversion from a store to a store asks it for."""
    for count in (FEW, MANY):
        write_sources(tmp_path / "sources" / f"{count}", count)
    (tmp_path / "sets").mkdir()
    monkeypatch.setattr(conversion, "SAMPLED", 4)
    # A store that ignores the condition of a lock is waited for.
    monkeypatch.setattr(lock, "HEARTBEAT_S", 600.0)  # its requests depend on the time
    monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _: None}))
    requests = {}
    with serve_s3(tmp_path) as port, FaultProxy(port) as proxy, this_process_uses(proxy.port):
        for count in (FEW, MANY):
            proxy.faults.set("", 0)
            report = convert(f"s3://sources/{count}/{layout}", f"s3://sets/{layout}-{count}")
            assert (report.num_images, report.num_rejected) == (count, 0)
            requests[count] = len(proxy.faults.requests)
    further = (requests[MANY] - requests[FEW]) / (MANY - FEW)
    assert 1 <= further <= 1.1


def test_an_object_that_is_denied_or_missing_is_one_rejected_row(tmp_path):
    images = {f"all/cat/{i}.jpg": jpeg(i) for i in range(4)}
    one = {"Effect": "Deny", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::source/all/cat/2*"}
    with serve_s3_with_policy({"source": images}) as allow:
        policy = policy_of({"source": ("list", "read")})
        allow(policy | {"Statement": [*policy["Statement"], one]})
        report = convert("s3://source/all", tmp_path / "set", max_rejected_fraction=0.5)
        for name in ("none", "x" * 1025):
            with pytest.raises(ValueError, match=f"it cannot be read: s3://source/all/{name}"):
                Row("key", path=f"s3://source/all/{name}").read()
    assert report.num_images == 3
    ((key, reason),) = rejections(tmp_path / "set").items()
    assert key == "cat/2.jpg"
    assert reason.startswith("it cannot be read: ")


def test_what_is_denied_as_a_whole_is_no_rejected_row(monkeypatch):
    def denied(*_: Any) -> bytes:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(Location, "read_range", denied)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "check_reachable", denied)
        with pytest.raises(PermissionError):  # the credentials are refused
            Row("key", path="s3://bucket/a.jpg").read()
    monkeypatch.setattr(rows, "check_reachable", lambda _: None)
    with pytest.raises(PermissionError):  # of an archive, all rows would be denied
        Row("key", path="s3://bucket/a.tar", offset=512, length=9).read()
