"""How often a conversion asks an object store, counted at a real server."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.convert.archives import samples, tar_of, write_hub_file
from tests.data.converting import convert
from tests.data.denying_s3 import policy_of, serve_s3_with_policy
from tests.data.pictures import jpeg
from tests.data.s3_server import FaultProxy, serve_s3, this_process_uses
from vit_ray import lock
from vit_ray.data.convert import conversion
from vit_ray.data.convert.rows import Row

pytestmark = pytest.mark.usefixtures("serial")

FEW, MANY = 10, 70
MOST_AN_IMAGE = 1.1


def write_sources(folder: Path, count: int) -> None:
    """The same images in every layout."""
    images = [jpeg(i) for i in range(count)]
    for i, image in enumerate(images):
        for place in (folder / "folders" / f"class_{i % 2}", folder / "list" / "images"):
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{i}.jpg").write_bytes(image)
    rows = [f"images/{i}.jpg,class_{i % 2}\n" for i in range(count)]
    (folder / "list" / "list.csv").write_text("path,label\n" + "".join(rows))
    labels = [b"%d" % (i % 2) for i in range(count)]
    (folder / "tars").mkdir()
    (folder / "tars" / "0.tar").write_bytes(tar_of(samples(images, labels)))
    write_hub_file(
        folder / "hub" / "a.parquet", list(images), [i % 2 for i in range(count)], rows=count
    )


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    for count in (FEW, MANY):
        write_sources(folder / "sources" / f"{count}", count)
    (folder / "sets").mkdir()
    return folder


@pytest.fixture
def store(buckets: Path) -> Iterator[FaultProxy]:
    with serve_s3(buckets) as port, FaultProxy(port) as proxy, this_process_uses(proxy.port):
        yield proxy


@pytest.mark.parametrize("layout", ["folders", "list", "tars", "hub"])
def test_each_further_image_is_asked_for_once(store, layout, monkeypatch):
    """Of all that a conversion from a store to a store asks it for."""
    monkeypatch.setattr(conversion, "SAMPLED", 4)
    # A store that ignores the condition of a lock is waited for.
    monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _: None}))
    requests = {}
    for count in (FEW, MANY):
        store.faults.set("", 0)
        report = convert(f"s3://sources/{count}/{layout}", f"s3://sets/{layout}-{count}")
        assert (report.num_images, report.num_rejected) == (count, 0)
        requests[count] = len(store.faults.requests)
    further = (requests[MANY] - requests[FEW]) / (MANY - FEW)
    assert 1 <= further <= MOST_AN_IMAGE


def test_a_sample_of_images_is_found_in_few_requests(store, monkeypatch):
    """The index of a list is read once for all of them, and not once for each."""
    monkeypatch.setattr(lock, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _: None}))
    store.faults.set("", 0, path="/_staging/index-")
    convert(f"s3://sources/{MANY}/list", "s3://sets/sampled")
    assert len(store.faults.requests) < MANY / 2


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("sources", "names no object"),
        ("No such bucket/x.jpg", "names no object"),
        ("sources//x.jpg", "without empty parts"),
        ("sources/a/../x.jpg", "without empty parts, '.' and '..'"),
        ("sources/./x.jpg", "without empty parts, '.' and '..'"),
        ("sources/" + "x" * 1025, "of at most 1,024 bytes"),
        ("sources/none.jpg", "no such file: s3://sources/none.jpg"),
        ("none/x.jpg", "no such file: s3://none/x.jpg"),
    ],
)
def test_a_path_that_no_object_has_is_the_error_of_one_image(store, path, reason):
    """A store answers some of them as it answers a request that is wrong as a whole."""
    with pytest.raises(ValueError, match=reason):
        Row("key", path=f"s3://{path}").read()


def test_an_object_that_is_denied_is_one_rejected_row(tmp_path):
    images = {f"all/cat/{i}.jpg": jpeg(i) for i in range(4)}
    one = {"Effect": "Deny", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::source/all/cat/2*"}
    with serve_s3_with_policy({"source": images}) as allow:
        policy = policy_of({"source": ("list", "read")})
        allow(policy | {"Statement": [*policy["Statement"], one]})
        report = convert("s3://source/all", tmp_path / "set", max_rejected_fraction=0.5)
    assert report.num_images == 3
    ((key, reason),) = report.rejected.items()
    assert key == "cat/2.jpg"
    assert reason.startswith("it cannot be read: ")
