"""The model that `mlflow.pyfunc.load_model` returns; it refers to the run's checkpoint.

`predict` takes images as `TrainedModel.predict` does, crops them as the recipe's evaluation does,
and returns float32 logits (N, K), or the classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pandas as pd
from mlflow.pyfunc import PythonModel  # type: ignore[attr-defined]

from vit_ray.config.recipe import recipe_from_dict

if TYPE_CHECKING:
    from vit_ray.launch.trained_model import TrainedModel

# Values of `predict`'s parameter `output`; the first is the default.
_OUTPUTS: Final = ("logits", "classes")


class LoggedModel(PythonModel):
    """The model, its classes and its crops."""

    model: TrainedModel

    def load_context(self, context: Any) -> None:
        """Open the checkpoint that `model_config` names.

        Raises:
            ValueError: there is no complete checkpoint, or it is of another model.
        """
        # MLflow imports this module to log a model; without torch that takes half the time.
        from vit_ray.checkpoints.init_weights import open_weights
        from vit_ray.launch.trained_model import TrainedModel

        path, checkpoint = context.artifacts["reference.json"], context.model_config["checkpoint"]
        reference = json.loads(Path(path).read_text())
        classes = tuple(reference.pop("classes"))
        try:
            recipe = recipe_from_dict({"name": "logged", **reference}, where=path)
            self.model = TrainedModel(recipe, open_weights(checkpoint), classes)
        except ValueError as error:
            raise ValueError(
                f"the model refers to the checkpoint {checkpoint}, which cannot be used here: "
                f"{error}; if it was moved, give load_model(..., "
                "model_config={'checkpoint': ADDRESS})"
            ) from error

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        """Logits, float32 (N, K), or a table of `class`, `probability` and `label`.

        Args:
            context: MLflow's.
            model_input: images as for `TrainedModel.predict`, or nested lists, as in JSON.
            params: `output`: `logits` or `classes`.

        Raises:
            ValueError: there is no such output, or an image cannot be read.
        """
        if isinstance(model_input, list) and model_input and isinstance(model_input[0], list):
            model_input = np.asarray(model_input)
        output = (params or {}).get("output", _OUTPUTS[0])
        if output not in _OUTPUTS:
            raise ValueError(f"params: output={output!r}; give one of {', '.join(_OUTPUTS)}")
        if output == "logits":
            return self.model.logits(model_input)
        return pd.DataFrame(
            self.model.predict(model_input), columns=["class", "probability", "label"]
        )
