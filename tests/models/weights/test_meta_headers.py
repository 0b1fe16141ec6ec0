"""Names and shapes from the heads of files: those of the tensors, whatever is in the file."""

from pathlib import Path
from typing import IO

import numpy as np
import pytest

from tests.models.small import FAMILIES, small_model
from vit_ray.checkpoints.init_weights import initialize_weights, planned_load
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models.weights import read_tensors, save_weights

PLACES = {"jax": "model.npz", "timm": "model.safetensors", "huggingface": "hub", "vit_ray": "own"}


def opened(path: Path) -> IO[bytes]:
    return path.open("rb")


@pytest.mark.parametrize("layout", PLACES)
def test_an_outline_has_the_names_shapes_and_origin_of_the_file(layout, tmp_path):
    path = tmp_path / PLACES[layout]
    path = path.with_suffix(".safetensors") if layout == "vit_ray" else path
    save_weights(small_model("ViT", image_size=(16, 48)).bfloat16(), path, layout)
    tensors, origin = read_tensors(path, "it")
    outline, told = read_tensors(path, "it", opened)
    assert told == origin
    assert {name: t.shape for name, t in outline.items()} == {
        name: t.shape for name, t in tensors.items()
    }
    assert all(tensor.is_meta for tensor in outline.values())


@pytest.mark.parametrize("name", ["model.npz", "model.safetensors"])
def test_whatever_is_wrong_with_a_file_is_an_error_that_names_it(name, tmp_path):
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


@pytest.mark.parametrize(
    ("family", "new_head"), [("ViT", True), ("R+ViT", "auto"), ("ResNet", False)]
)
def test_a_planned_load_is_what_becomes_of_the_tensors(family, new_head, tmp_path):
    path = str(tmp_path / "model.npz")
    save_weights(small_model(family, image_size=32), path)
    model = small_model(family, image_size=64)
    real = initialize_weights(model, path, new_head=new_head)
    config = ModelConfig(name=family, image_size=64, **FAMILIES[family])
    planned = planned_load(config, 5, path, new_head)
    assert vars(planned) == vars(real)
    assert (planned.grids is None) == (family == "ResNet")
