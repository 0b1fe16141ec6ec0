"""A training's result as a model of MLflow that refers to its checkpoint instead of copying it.

`mlflow.pyfunc.load_model` gives a model whose `predict` takes uint8 images (N, H, W, 3) of any
size, cuts them as the recipe's evaluation does, and returns float32 logits (N, K).
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from numpy.typing import NDArray

from vit_ray.config.training_sections import ModelConfig
from vit_ray.data.images.crops import Augmentation, UInt8Array, crop_of_pixels

EXAMPLE_SIDE: Final = 16
"""Pixels; the example is text, and images of any size are taken."""
_REFERENCE: Final = "reference.json"
_EXAMPLE: Final = "input_example.json"
_SERVING_EXAMPLE: Final = "serving_input_example.json"
_BATCH: Final = 64


def model_files(
    config: ModelConfig, augmentation: Augmentation, checkpoint: str, num_classes: int
) -> dict[str, str]:
    """Text by name of the files of the model's folder.

    MLflow's own `save_model` would import pandas, and takes seconds.

    Args:
        augmentation: of evaluations.
        checkpoint: address of the checkpoint's folder.
    """

    def tensor(dtype: str, shape: list[int]) -> str:
        return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}])

    description = {
        "flavors": {
            "python_function": {
                "loader_module": __name__,
                "data": _REFERENCE,
                "config": {"checkpoint": checkpoint},
                "python_version": platform.python_version(),
            }
        },
        "mlflow_version": version("mlflow"),
        "signature": {
            "inputs": tensor("uint8", [-1, -1, -1, 3]),
            "outputs": tensor("float32", [-1, num_classes]),
            "params": None,
        },
        "saved_input_example_info": {
            "artifact_path": _EXAMPLE,
            "serving_input_path": _SERVING_EXAMPLE,
            "type": "ndarray",
        },
    }
    # An image that is brighter to the right, and redder to the bottom.
    ramp = np.linspace(0, 127, EXAMPLE_SIDE, dtype=np.uint8)
    image = np.zeros((EXAMPLE_SIDE, EXAMPLE_SIDE, 3), np.uint8) + ramp[None, :, None]
    image[..., 0] += ramp[:, None]
    example = [image.tolist()]
    reference = {"model": config.model_dump(mode="json"), "augmentation": asdict(augmentation)}
    return {
        "MLmodel": yaml.safe_dump(description),
        _REFERENCE: json.dumps(reference, indent=1),
        _EXAMPLE: json.dumps(example),
        _SERVING_EXAMPLE: json.dumps({"inputs": example}),
        "requirements.txt": f"mlflow=={version('mlflow')}\nvit-ray\n",
    }


class LoadedModel:
    """What `mlflow.pyfunc.load_model` wraps."""

    def __init__(self, config: ModelConfig, augmentation: Augmentation, checkpoint: str) -> None:
        """
        Raises:
            ValueError: there is no whole checkpoint at the address, or it is of another model.
        """
        import torch  # where a model is used: it takes seconds

        from vit_ray.checkpoints.init_weights import open_weights
        from vit_ray.models import build_model

        weights = open_weights(checkpoint)
        model = build_model(
            config.name, weights.num_classes or 1, config.image_size, **config.options()
        )
        weights.load_into(model, False, "bilinear")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.eval().to(self._device)
        self._augmentation = augmentation

    def predict(
        self, images: UInt8Array, params: dict[str, Any] | None = None
    ) -> NDArray[np.float32]:
        """Logits, float32 (N, K), of uint8 images (N, H, W, 3).

        Args:
            params: MLflow's; there are none.
        """
        import torch

        from vit_ray.train.objective import normalize

        found: list[NDArray[np.float32]] = []
        for first in range(0, len(images), _BATCH):
            some = images[first : first + _BATCH]
            crops = np.stack([crop_of_pixels(image, self._augmentation) for image in some])
            with torch.no_grad():
                pixels = normalize(torch.from_numpy(crops).to(self._device), torch.float32)
                found.append(self._model(pixels).cpu().numpy())
        return np.concatenate(found)


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> LoadedModel:
    """MLflow's hook.

    Args:
        path: of the file that describes the model.
        model_config: `checkpoint`, its address; `load_model(..., model_config=...)` gives another
            where it has been moved.

    Raises:
        ValueError: as `LoadedModel`.
    """
    reference = json.loads(Path(path).read_text())
    augmentation = Augmentation(**reference["augmentation"])
    if isinstance(size := augmentation.size, list):
        augmentation = replace(augmentation, size=tuple(size))
    config = ModelConfig.model_validate_json(json.dumps(reference["model"]))
    checkpoint = model_config["checkpoint"]
    try:
        return LoadedModel(config, augmentation, checkpoint)
    except ValueError as error:
        raise ValueError(
            f"the model refers to the checkpoint {checkpoint}, which cannot be used here: {error}; "
            "where it has been moved, give load_model(..., model_config={'checkpoint': ADDRESS})"
        ) from error
