"""How a store is reached: as the AWS command line does it, by `~/.aws/config` alone."""

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.data import s3_server
from tests.data.s3_server import FaultProxy, forget_clients, serve_conditional_s3, serve_s3
from tests.net.cluster import free_ports
from vit_ray import storage
from vit_ray.config import load_recipe
from vit_ray.data import open_dataset
from vit_ray.launch.run import check_rights
from vit_ray.storage import Location, check_reachable, locate

Configure = Callable[..., None]
KEYS = {
    "aws_access_key_id": s3_server.ACCESS_KEY,
    "aws_secret_access_key": s3_server.SECRET_KEY,
}
CHECKSUMS = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """Writes `~/.aws/config` of a HOME of its own, in which no variable of AWS is set."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FSSPEC_S3", "{}")  # set back at the end
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # this machine has no role
    file = tmp_path / "home" / ".aws" / "config"
    file.parent.mkdir(parents=True)

    def write(section: str = "default", **values: str) -> None:
        lines = [f"{key} = {value}" for key, value in {**CHECKSUMS, **values}.items()]
        file.write_text("\n".join([f"[{section}]", *lines]))
        forget_clients()

    yield write
    forget_clients()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    (folder / "bucket").mkdir()
    (folder / "bucket" / "file").write_bytes(b"content")
    return folder


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[FaultProxy]:
    """A server that checks signatures."""
    with serve_s3(folder) as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def no_faults(store: FaultProxy) -> None:
    store.faults.set("", 0)
    store.heads.clear()


def url(server: FaultProxy) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
def reached(configure: Configure, store: FaultProxy) -> FaultProxy:
    configure(endpoint_url=url(store), region="us-east-1", **KEYS)
    return store


def test_endpoint_and_keys_are_those_of_the_file(reached, folder):
    check_rights(locate("s3://bucket/run"))
    locate("s3://bucket/made").write(b"here")
    assert (folder / "bucket" / "made").read_bytes() == b"here"
    with locate("s3://bucket/file").open() as file:
        assert file.read(3) == b"con"


def test_a_profile_has_keys_endpoint_and_region_of_its_own(configure, store, monkeypatch):
    configure("profile team", endpoint_url=url(store), region="eu-west-3", **KEYS)
    monkeypatch.setenv("AWS_PROFILE", "team")
    for variable, region in (("", "eu-west-3"), ("AWS_REGION", "ap-south-1")):
        if variable:
            monkeypatch.setenv(variable, region)
        forget_clients()
        assert locate("s3://bucket/file").read() == b"content"
        assert f"/{region}/s3/aws4_request" in store.heads[-1]
    monkeypatch.setenv("AWS_PROFILE", "other")
    forget_clients()
    with pytest.raises(OSError, match=r"other.*check AWS_PROFILE"):
        locate("s3://bucket/file").read()


def test_an_endpoint_without_a_scheme_is_named_at_once(configure, store):
    configure(endpoint_url=f"127.0.0.1:{store.port}", **KEYS)
    with pytest.raises(ValueError, match=r"127.*begins with http:// or https://"):
        open_dataset("s3://bucket/set")


def test_a_certificate_of_ones_own_is_believed_if_it_is_named(configure, folder, tmp_path):
    certificate, key = own_certificate(tmp_path)
    with serve_s3(folder, "--cert", str(certificate), "--key", str(key)) as port:
        place, keys = f"https://127.0.0.1:{port}", {"region": "us-east-1", **KEYS}
        configure(endpoint_url=place, **keys)
        with pytest.raises(OSError, match=r"s3://bucket: .*check AWS_CA_BUNDLE"):
            check_reachable(locate("s3://bucket/file"))
        configure(endpoint_url=place, ca_bundle=str(certificate), **keys)
        assert locate("s3://bucket/file").read() == b"content"
        locate("s3://bucket/by-tls").write(b"here")
    assert (folder / "bucket" / "by-tls").read_bytes() == b"here"


def own_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1 that signs itself, and of its key."""
    files = folder / "own.crt", folder / "own.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", str(files[0]), "-keyout", str(files[1])],
        check=True, capture_output=True,
    )  # fmt: skip
    return files


@pytest.fixture
def public() -> Iterator[FaultProxy]:
    """A server that asks for no signature; it has a file in a bucket."""
    with serve_conditional_s3() as port, FaultProxy(port) as proxy:
        yield proxy


def test_a_public_bucket_is_read_without_keys_if_the_recipe_says_so(configure, public):
    place, of_all = locate("s3://bucket/file"), {"Bucket": "bucket", "ACL": "public-read"}
    configure(endpoint_url=url(public), region="us-east-1", **KEYS)
    place.filesystem.call_s3("create_bucket", **of_all)
    place.filesystem.call_s3("put_object", Key="file", Body=b"open", **of_all)
    configure(endpoint_url=url(public), region="us-east-1")
    with pytest.raises(PermissionError, match=r"s3://bucket: .*storage.anonymous=true"):
        check_reachable(place)
    load_recipe("digits", ["storage.anonymous=true"])
    public.heads.clear()
    assert place.read() == b"open"
    assert [info.size for info in locate("s3://bucket").list_files()] == [4]
    assert public.heads
    assert not any("authorization:" in head.lower() for head in public.heads)
    load_recipe("digits")  # which asks for nothing
    with pytest.raises(PermissionError, match=r"s3://bucket: .*storage.anonymous=true"):
        check_reachable(place)


def test_settings_of_fsspec_that_the_user_has_stay(configure, monkeypatch):
    own = '{"version_aware": true}'
    monkeypatch.setenv("FSSPEC_S3", own)
    load_recipe("digits", ["storage.anonymous=true"])
    assert json.loads(os.environ["FSSPEC_S3"]) == {"version_aware": True, "anon": True}
    load_recipe("digits")
    assert os.environ["FSSPEC_S3"] == own


def test_an_upload_whose_last_answer_is_lost_is_complete(configure, public):
    configure(endpoint_url=url(public), region="us-east-1", **KEYS)
    place, content = locate("s3://large/file"), os.urandom(1 << 20) * 51  # two parts
    place.filesystem.call_s3("create_bucket", Bucket="large")
    public.faults.set("cut", 1, path="POST /large/file?uploadId=")
    place.write(content)
    assert len(public.faults.requests) == 2
    assert place.read() == content


def test_a_store_that_takes_connections_and_never_answers_is_not_waited_for(reached, monkeypatch):
    monkeypatch.setitem(storage._FIRST_CONFIG, "read_timeout", 0.5)
    reached.faults.set("hang", 1000)
    with pytest.raises(
        storage.UnavailableError, match=r"^s3://bucket: Read timeout .*check AWS_ENDPOINT_URL"
    ):
        check_reachable(locate("s3://bucket/run"))
    monkeypatch.setattr(storage, "_REQUEST_LIMIT_S", 2.0)
    for read in (Location.read, Location.list_files, lambda place: place.open().read(3)):
        reached.faults.set("hang", 1000)
        with pytest.raises(
            storage.UnavailableError, match=r"s3://bucket/file: .*check AWS_ENDPOINT_URL"
        ):
            read(locate("s3://bucket/file"))
        assert len(reached.faults.requests) == 1  # all attempts of one request have the limit


def test_who_pays_for_requests_is_told_with_each_of_them(reached):
    load_recipe("digits", ["storage.requester_pays=true"])
    assert locate("s3://bucket/file").read() == b"content"
    assert locate("s3://bucket").list_files(recursive=False)
    with locate("s3://bucket/file").open() as file:
        assert file.read() == b"content"
    assert all("x-amz-request-payer: requester" in head.lower() for head in reached.heads)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("403 AccessDenied", "s3:PutObject"), ("400 ExpiredToken", "AWS_SESSION_TOKEN"),
        ("403 InvalidAccessKeyId", "AWS_ACCESS_KEY_ID"), ("404 NoSuchBucket", "create the bucket"),
        ("403 SignatureDoesNotMatch", "AWS_ACCESS_KEY_ID"),
        ("400 AuthorizationHeaderMalformed", "AWS_REGION"),
    ],
)  # fmt: skip
def test_a_refusal_is_one_line_with_bucket_cause_and_setting(reached, answer, named):
    reached.faults.set(answer, 1000)
    with pytest.raises(OSError, match=rf"^s3://bucket.*\({answer[4:]}\); .*{named}") as caught:
        check_rights(locate("s3://bucket/run"))
    assert "\n" not in str(caught.value)
    assert len(reached.faults.requests) <= 4  # it is not asked again and again


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port whose queue of connections is full: the next ones get no answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        yield server.getsockname()[1]
        for one in waiting:
            one.close()


def test_a_wrong_port_and_a_host_that_does_not_answer_are_one_line(configure, monkeypatch):
    for config in (storage._FIRST_CONFIG, storage._S3_CONFIG):
        monkeypatch.setitem(config, "connect_timeout", 0.5)
    (port,) = free_ports(1)
    with silent_port() as silent:
        for place in (port, silent):
            configure(endpoint_url=f"http://127.0.0.1:{place}", region="us-east-1", **KEYS)
            for use in (open_dataset, lambda path: check_rights(locate(path))):
                with pytest.raises(OSError, match=rf"s3://bucket: .*:{place}/.*endpoint_url in"):
                    use("s3://bucket/set")
