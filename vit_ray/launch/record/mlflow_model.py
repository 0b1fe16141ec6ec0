"""A training's result as a model of MLflow that refers to its checkpoint instead of copying it.

`mlflow.pyfunc.load_model` gives a model whose `predict` takes images as `TrainedModel.predict`
does, crops them as the recipe's evaluation does, and returns float32 logits (N, K), or the classes.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import yaml

from vit_ray.checkpoints.checkpoint import open_checkpoint
from vit_ray.config.command_sections import ExportConfig
from vit_ray.config.recipe import Recipe, recipe_from_dict
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import CARD, REQUIREMENTS

if TYPE_CHECKING:
    from vit_ray.launch.trained_model import TrainedModel

EXAMPLE_SIDE: Final = 16
"""Pixels of a side; the example is text, and images of any size are accepted."""
_REFERENCE: Final = "reference.json"
_EXAMPLE: Final = "input_example.json"
_SERVING_EXAMPLE: Final = "serving_input_example.json"
_ENVIRONMENT: Final = "python_env.yaml"
_USE: Final = """import mlflow

model = mlflow.pyfunc.load_model("models:/...")  # the id or name on the model's page
table = model.predict(["image.jpg"], params={"output": "classes"})"""
_OUTPUTS: Final = ("logits", "classes")
"""What `predict` returns for its parameter `output`; the first is the default."""

logger = logging.getLogger(__name__)


def model_files(
    use: dict[str, Any], classes: Sequence[str], checkpoint: str, card: str = ""
) -> dict[str, str]:
    """Text by name of the files of the model's folder.

    MLflow's own `save_model` would import pandas, which takes seconds.

    Args:
        use: sections of a recipe, as `used_sections` gives them.
        classes: names in the order of the logits.
        checkpoint: address of the checkpoint's folder.
        card: of the model, in Markdown.
    """

    def tensor(dtype: str, shape: list[int]) -> str:
        return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}])

    output = {"name": "output", "default": _OUTPUTS[0], "shape": None, "type": "string"}
    description = {
        "flavors": {
            "python_function": {
                "loader_module": __name__,
                "data": _REFERENCE,
                "config": {"checkpoint": checkpoint},
                "python_version": platform.python_version(),
                "env": {"virtualenv": _ENVIRONMENT},
            }
        },
        "mlflow_version": version("mlflow"),
        "signature": {
            "inputs": tensor("uint8", [-1, -1, -1, 3]),
            "outputs": tensor("float32", [-1, len(classes)]),
            "params": json.dumps([output]),
        },
        # MLflow would accept only arrays; the model itself documents its inputs.
        "is_signature_from_type_hint": True,
        "saved_input_example_info": {
            "artifact_path": _EXAMPLE,
            "serving_input_path": _SERVING_EXAMPLE,
            "type": "ndarray",
        },
    }
    # An image that gets brighter to the right, and redder to the bottom.
    ramp = np.linspace(0, 127, EXAMPLE_SIDE, dtype=np.uint8)
    image = np.zeros((EXAMPLE_SIDE, EXAMPLE_SIDE, 3), np.uint8) + ramp[None, :, None]
    image[..., 0] += ramp[:, None]
    example = [image.tolist()]
    reference = {**use, "classes": list(classes)}
    return {
        "MLmodel": yaml.safe_dump(description),
        _REFERENCE: json.dumps(reference, indent=1),
        _EXAMPLE: json.dumps(example),
        _SERVING_EXAMPLE: json.dumps({"inputs": example}),
        # The caller, who writes the folder, adds this package's wheel.
        REQUIREMENTS: f"mlflow=={version('mlflow')}\n",
        _ENVIRONMENT: yaml.safe_dump(
            {
                "python": platform.python_version(),
                "build_dependencies": ["pip"],
                "dependencies": [f"-r {REQUIREMENTS}"],
            }
        ),
        **({CARD: card} if card else {}),
    }


def card_of(recipe: Recipe, classes: Sequence[str], checkpoint: str) -> str:
    """The card of a training's result, in Markdown; empty if its checkpoint cannot be read."""
    from vit_ray.launch.record.model_card import model_card  # imports torch, and the hub's library

    # Named like the weights of an export without a folder.
    config = ExportConfig(path=recipe.name, layout="vit_ray")
    try:
        found = open_checkpoint(locate(checkpoint))
        if found is None:
            return ""
        count = sum(math.prod(shape) for shape in found.position.shapes.values())
        return str(model_card(recipe, config, (count, len(classes)), classes, found.position, _USE))
    except (OSError, ValueError) as error:  # the training has ended well in any case
        logger.warning("the logged model has no card: %s", error)
        return ""


class PyfuncModel:
    """The object that `mlflow.pyfunc.load_model` wraps."""

    def __init__(self, model: TrainedModel) -> None:
        self._model = model

    def get_raw_model(self) -> TrainedModel:
        """The model with its classes and crops; MLflow's `get_raw_model` returns it."""
        return self._model

    def predict(self, images: Any, params: dict[str, Any] | None = None) -> Any:
        """Logits, float32 (N, K), or a table of `class`, `probability` and `label`.

        Args:
            images: as for `TrainedModel.predict`, or lists of lists, as JSON has them.
            params: `output`: `logits` or `classes`.

        Raises:
            ValueError: there is no such output, or an image cannot be read.
        """
        if isinstance(images, list) and images and isinstance(images[0], list):
            images = np.asarray(images)
        output = (params or {}).get("output", _OUTPUTS[0])
        if output not in _OUTPUTS:
            raise ValueError(f"params: output={output!r}; give one of {', '.join(_OUTPUTS)}")
        if output == "logits":
            return self._model.logits(images)
        import pyarrow as pa  # which the process that logs models need not load

        columns = ("class", "probability", "label")
        found = self._model.predict(images)
        table = {name: [row[i] for row in found] for i, name in enumerate(columns)}
        return pa.table(table).to_pandas()


def _load_pyfunc(path: str, model_config: dict[str, Any]) -> PyfuncModel:
    """MLflow's hook.

    Args:
        path: of the file that describes the model.
        model_config: `checkpoint`, its address; give another one to `load_model(...,
            model_config=...)` if the checkpoint was moved.

    Raises:
        ValueError: there is no complete checkpoint, or it is of another model.
    """
    from vit_ray.checkpoints.init_weights import open_weights  # with torch, which takes seconds
    from vit_ray.launch.trained_model import TrainedModel

    reference = json.loads(Path(path).read_text())
    classes = tuple(reference.pop("classes", ()))
    checkpoint = model_config["checkpoint"]
    try:
        recipe = recipe_from_dict({"name": "logged", **reference}, where=path)
        return PyfuncModel(TrainedModel(recipe, open_weights(checkpoint), classes))
    except ValueError as error:
        raise ValueError(
            f"the model refers to the checkpoint {checkpoint}, which cannot be used here: {error}; "
            f"if it was moved, give load_model(..., model_config={{'checkpoint': ADDRESS}})"
        ) from error
