"""Names and shapes from the heads of files: those of the tensors, whatever is in the file."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT
from tests.models.small import FAMILIES, TINY_VIT, small_model
from vit_ray.checkpoints.init_weights import initialize_weights, planned_load
from vit_ray.checkpoints.weight_files import LOOK_BYTES
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models.weights import save_weights
from vit_ray.models.weights.load import read_tensors

PLACES = {"jax": "model.npz", "timm": "model.safetensors", "huggingface": "hub", "vit_ray": "own"}


def opened(path: Path) -> IO[bytes]:
    return path.open("rb")


@pytest.mark.parametrize("layout", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_outline_has_the_names_shapes_and_origin_of_the_file(
    layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / PLACES[layout]
    path = path.with_suffix(".safetensors") if layout == "vit_ray" else path
    save_weights(small_model("ViT", image_size=(16, 48)).to(dtype), path, layout)
    tensors, origin = read_tensors(path, "it")
    outline, told = read_tensors(path, "it", opened)
    assert told == origin
    assert {name: t.shape for name, t in outline.items()} == {
        name: t.shape for name, t in tensors.items()
    }
    assert all(tensor.is_meta for tensor in outline.values())


class Counted(io.FileIO):
    """A file that counts what is read of it."""

    count = 0

    def readinto(self, buffer: Any) -> int:
        found = super().readinto(buffer)
        Counted.count += found or 0
        return found


def test_an_outline_reads_a_small_part_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "large.npz"
    save_weights(small_model("ViT", width=256, mlp_dim=1024), path, "jax")
    size = path.stat().st_size
    Counted.count = 0
    read_tensors(path, "it", lambda p: io.BufferedReader(Counted(p), LOOK_BYTES))
    assert 0 < Counted.count < size / 20


@pytest.mark.parametrize("name", ["model.npz", "model.safetensors"])
def test_whatever_is_wrong_with_a_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    save_weights(small_model("ViT"), path, "timm" if "safe" in name else "jax")
    good = path.read_bytes()
    random = np.random.default_rng(0)
    problems: list[str] = []
    for number in range(300):
        content = bytearray(good)
        first = 0 if number % 2 else len(good) - 4000  # where a zip file has its directory
        for _ in range(3):
            content[first + random.integers(0, 4000)] ^= 1 << random.integers(0, 8)
        if number % 3 == 0:
            content = content[: random.integers(0, len(content))]
        path.write_bytes(content)
        try:
            read_tensors(path, "it", opened)
        except ValueError as error:
            problems.append(str(error))
    assert len(problems) >= 100
    assert all(problem.startswith("weights it cannot be read: ") for problem in problems)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("family", ["ViT", "R+ViT", "ResNet"])
@pytest.mark.parametrize("change", [lambda a: a.reshape(-1), lambda a: a[None], lambda a: a.sum()])
def test_tensors_of_other_ranks_fit_or_are_refused(
    family: str, change: Any, tmp_path: Path
) -> None:
    """Those of one head may be folded in other ways; nothing but a ValueError comes of others."""
    save_weights(small_model(family), tmp_path / "good.npz")
    good = dict(np.load(tmp_path / "good.npz"))
    config = ModelConfig(name=family, image_size=32, **FAMILIES[family])
    refused = 0
    for number, name in enumerate(good):
        path = tmp_path / f"{number}.npz"
        np.savez(path, **{**good, name: change(good[name])})
        try:
            planned_load(config, 5, str(path), False)
        except ValueError:
            refused += 1
    assert refused > 0


def test_storage_that_is_away_is_not_told_as_wrong_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    save_weights(small_model("ViT"), path)

    def away(_: Path) -> Any:
        raise ConnectionResetError("connection reset by peer")

    with pytest.raises(ConnectionResetError):
        read_tensors(path, "it", away)


def test_arrays_that_could_run_code_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", words=np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"words\.npy is of the type \|O"):
        read_tensors(tmp_path / "a.npz", "it", opened)


@pytest.mark.parametrize("family", ["ViT", "R+ViT", "ResNet"])
@pytest.mark.parametrize("new_head", [True, "auto", False])
def test_a_planned_load_is_what_becomes_of_the_tensors(
    family: str, new_head: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "model.npz")
    save_weights(small_model(family, image_size=32), path)
    model = small_model(family, image_size=64)
    real = initialize_weights(model, path, new_head=new_head)
    config = ModelConfig(name=family, image_size=64, **FAMILIES[family])
    planned = planned_load(config, 5, path, new_head)
    assert vars(planned) == vars(real)
    assert (planned.grids is None) == (family == "ResNet")


_PLANNED = """
import sys
from vit_ray.config.training_sections import ModelConfig
from vit_ray.checkpoints.init_weights import planned_load

config = ModelConfig.model_validate_json(sys.argv[1])
for path in sys.argv[2:]:
    assert planned_load(config, 9, path, True).grids == ((4, 4), (8, 8))
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_driver_that_looks_at_weights_does_not_import_torchs_compiler(tmp_path: Path) -> None:
    """Which takes about as long as torch itself."""
    config = ModelConfig(name="ViT", image_size=64, **TINY_VIT)
    paths = [tmp_path / "model.npz", tmp_path / "hub"]
    for path, layout in zip(paths, ("jax", "huggingface"), strict=True):
        save_weights(small_model("ViT"), path, layout)
    told = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3}
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(told))
    words = [sys.executable, "-c", _PLANNED, config.model_dump_json(), *map(str, paths)]
    subprocess.run(words, check=True, cwd=ROOT)
