"""Weights of the Hugging Face hub: fetched once, read from the cache, refused in clear words."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from vit_ray.checkpoints.init_weights import download, open_weights
from vit_ray.models import build_model
from vit_ray.models.weights import save_weights

SIZE = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 2, "patch_size": 4}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def small_vit(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return build_model("ViT", 5, 16, **SIZE).eval()


class FakeHub(BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that a download of `someone/vit` takes."""

    folder: Path
    served: list[str]

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0]
        headers, status, files = {}, 200, sorted(self.folder.iterdir())
        file = self.folder / path.rpartition("/")[2]
        if "/tree/" in path:
            facts = {"type": "file", "oid": "0" * 40}
            rows = [{**facts, "path": f.name, "size": f.stat().st_size} for f in files]
            content = json.dumps(rows).encode()
        elif path.startswith("/api/models/someone/vit"):
            names = [{"rfilename": f.name} for f in files]
            listing = {"id": "someone/vit", "sha": COMMIT, "siblings": names}
            content = json.dumps(listing).encode()
        elif path.startswith("/someone/vit/resolve/") and file.is_file():
            content = file.read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
            self.served += [file.name] if self.command == "GET" else []
        else:
            content, headers, status = b"{}", {"X-Error-Code": "RepoNotFound"}, 404
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *_: object) -> None:
        """Quiet."""


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `HF_ENDPOINT` does in a new process."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    """A hub with an empty cache before it; `folder` is the repository `someone/vit`."""
    handler = type("Hub", (FakeHub,), {"folder": tmp_path / "repository", "served": []})
    handler.folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    point_at(f"http://127.0.0.1:{server.server_port}", monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield handler
    server.shutdown()
    server.server_close()


def test_a_repository_is_fetched_once_and_read_without_the_hub_after(hub, monkeypatch):
    model = small_vit(0)
    save_weights(model, hub.folder, "huggingface")
    (hub.folder / "pytorch_model.bin").write_bytes(b"a pickle that could run code")
    images = torch.rand(2, 3, 16, 16)
    for _ in range(2):
        other = small_vit(1)
        open_weights("hf://someone/vit").load_into(other, False)
        torch.testing.assert_close(other(images), model(images))
        point_at("http://127.0.0.1:9", monkeypatch)
    assert sorted(hub.served) == ["config.json", "model.safetensors"]


def test_without_a_network_and_a_cache_the_way_out_is_told(hub, monkeypatch):
    point_at("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(ValueError, match="hf download someone/vit"):
        download("hf://someone/vit")


def test_a_repository_without_safetensors_is_refused(hub):
    (hub.folder / "pytorch_model.bin").write_bytes(b"a pickle that could run code")
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        open_weights("hf://someone/vit")
    assert hub.served == []
