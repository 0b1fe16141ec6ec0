"""The card of an exported or logged model: training data, settings and accuracy.

Facts that a run did not record, or that can no longer be read, are given as unknown.
"""

import contextlib
import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from PIL import Image

from vit_ray.addresses import redact, with_texts
from vit_ray.checkpoints.checkpoint import Position, open_checkpoint
from vit_ray.config import Recipe
from vit_ray.config.command_sections import ExportConfig
from vit_ray.config.loading import write_yaml
from vit_ray.data.boxes import Augmentation
from vit_ray.launch.paper_comparison import short_address, training_table
from vit_ray.metric_names import DEV_TOP1, EVAL_TOP1, with_best
from vit_ray.models.published import weights_file
from vit_ray.own_parts import is_own
from vit_ray.storage import locate
from vit_ray.training.memory_estimate import run_exaflops

# Sections and keys of the recipe that decide the result, without folders and servers.
_SECTIONS: Final = ("model", "data", "optim", "train", "evaluate", "paper", "init_from", "seed")
_UNKNOWN: Final = "unknown"
_LIBRARIES: Final = {"huggingface": "transformers", "timm": "timm"}
_PAPER: Final = " of [An Image is Worth 16x16 Words](https://arxiv.org/abs/2010.11929)"
_TEMPLATE: Final = """---
{{ card_data }}
---

# {{ name }}

{{ summary }}

## Use

```python
{% if layout == "huggingface" -%}
from transformers import AutoImageProcessor, ViTForImageClassification

processor = AutoImageProcessor.from_pretrained("{{ name }}")
model = ViTForImageClassification.from_pretrained("{{ name }}")
logits = model(**processor(images=image, return_tensors="pt")).logits
{%- elif layout == "timm" -%}
import timm

model = timm.create_model("hf-hub:{{ name }}", pretrained=True)
{%- elif layout == "mlflow" -%}
import mlflow

model = mlflow.pyfunc.load_model("models:/...")  # the id or name on the model's page
table = model.predict(["image.jpg"], params={"output": "classes"})
{%- else -%}
from vit_ray import build_model, load_weights{% if module %}, trust_modules{% endif %}

{% if module %}trust_modules({{ module }})  # runs its code
{% endif %}model = build_model({{ arguments }})
load_weights(model, "{{ file }}")
{%- endif %}
```

## Training

| | |
|---|---|
{% for fact, value in facts.items() -%}
| {{ fact }} | {{ value | replace("|", "/") }} |
{% endfor %}
## Evaluation

{{ evaluation }}
{% if recipe %}
## Recipe

```yaml
{{ recipe }}```
{% endif %}"""

logger = logging.getLogger(__name__)


def model_card(
    recipe: Recipe,
    config: ExportConfig,
    sizes: tuple[int, int],
    classes: Sequence[str],
    position: Position | None,
    layout: str,
) -> str:
    """The card in Markdown, with the hub's metadata.

    Args:
        recipe: of the export.
        config: the recipe's section `export`.
        sizes: parameters and classes of the exported model.
        classes: names of the classes, if known.
        position: of the run whose checkpoint is exported; None for a published file.
        layout: of the weights, or `mlflow`: how the model is used.
    """
    count, num_classes = sizes
    model = recipe.model
    name = (config.push or "").removeprefix("hf://") or PurePosixPath(config.path).name
    result: EvalResult | None = None
    evaluation, recorded = "No accuracy is recorded.", ""
    if position is not None:
        if "model" in position.recipe:
            recipe = Recipe.model_validate_json(json.dumps(position.recipe))
        result, evaluation = _evaluation(recipe, position)
        deciding = {k: v for k, v in recipe.recorded().items() if k in _SECTIONS and v is not None}
        recorded = redact(write_yaml(with_texts(deciding, _public)))
    data = ModelCardData(
        license=config.license,
        library_name=_LIBRARIES.get(layout, "vit_ray"),
        pipeline_tag="image-classification",
        tags=["image-classification", "vision", "vit_ray"],
        model_name=name if result else None,
        eval_results=[result] if result else None,
    )
    origin = "" if is_own(model.name) else _PAPER
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        name=name,
        summary=f"{model.name}{origin}: {count:,} parameters, {num_classes:,} classes"
        f"{'' if classes else ' (their names are unknown)'}, images of {model.sides[0]} x "
        f"{model.sides[1]} pixels.",
        layout=layout,
        module=repr(model.name.rpartition(".")[0]) if is_own(model.name) else "",
        arguments=", ".join([
            repr(model.name), str(num_classes), str(model.image_size),
            *(f"{key}={value!r}" for key, value in model.options().items()),
        ]),
        file=weights_file(config.layout),
        facts=_training_facts(recipe, num_classes, position),
        evaluation=evaluation,
        recipe=recorded,
    )  # fmt: skip
    return str(card).rstrip() + "\n"


def card_of(recipe: Recipe, classes: Sequence[str], checkpoint: str) -> str:
    """The card of a training's result, in Markdown; empty if its checkpoint cannot be read."""
    # The title of the card is the run's name.
    config = ExportConfig(path=recipe.name, layout="vit_ray")
    try:
        if opened := open_checkpoint(locate(checkpoint)):
            count = sum(math.prod(shape) for shape in opened.position.shapes.values())
            sizes = count, len(classes)
            return model_card(recipe, config, sizes, classes, opened.position, "mlflow")
    except (OSError, ValueError) as error:  # the training has succeeded nevertheless
        logger.warning("the logged model has no card: %s", error)
    return ""


def _public(_: str, text: str) -> str:
    # Of a text in a recipe, only absolute paths and addresses are shortened.
    return short_address(text) if re.match(r"/|\w+://", text) else text


def _training_facts(recipe: Recipe, num_classes: int, position: Position | None) -> dict[str, str]:
    if position is None:
        return {"weights": short_address(str(recipe.init_from)), "licence of the data": "not given"}
    progress, terms, compute = position.progress, position.data_terms, _UNKNOWN
    with contextlib.suppress(ValueError):  # the model's code is not trusted
        exaflops = run_exaflops(recipe, num_classes, position.samples_seen)
        compute = f"{exaflops:.4g} exaFLOPs"
    return {
        "data": short_address(recipe.data.train or _UNKNOWN),
        "fingerprint of the data": position.data_fingerprint or _UNKNOWN,
        "licence of the data": terms.get("license", "not given"),
        "source of the data": redact(terms.get("source_url", "not given")),
        "start": short_address(recipe.init_from) if recipe.init_from else "from scratch",
        "steps": f"{position.step:,} of {position.global_batch_size:,} images",
        "images seen": f"{position.samples_seen:,}",
        "compute": compute,
        "hardware": f"{progress.worker_seconds / 3600:.4g} worker-hours "
        f"({recipe.train.precision}, one device each)",
        "MLflow run": position.tracking_run_id or _UNKNOWN,
        "software": ", ".join(f"{k} {v}" for k, v in position.versions.items()) or _UNKNOWN,
    }


def _evaluation(recipe: Recipe, position: Position) -> tuple[EvalResult | None, str]:
    """The accuracy on the test set, or on images held out of the training set, and a sentence."""
    metrics, data = with_best(position.progress.metrics), recipe.data
    key = EVAL_TOP1 if EVAL_TOP1 in metrics else DEV_TOP1
    if key not in metrics:
        return None, "No accuracy is recorded."
    is_test = key == EVAL_TOP1 and data.eval is not None
    path = short_address((data.eval if is_test else data.train) or _UNKNOWN)
    name = path if is_test else f"{path} (held out)"
    note: object = "the test set is no longer there, or is not one of the paper's"
    with contextlib.suppress(ValueError, OSError):
        if data.eval:
            ours, *_ = training_table(recipe, [metrics[key]])
            note = ours["note"]
    setting = "Test set, pre-training and model are those of the paper."
    if note:
        setting = f"A proxy, not a result in the paper's setting: {note}."
    result = EvalResult(
        task_type="image-classification",
        dataset_type=path,
        dataset_name=name,
        metric_type="accuracy",
        metric_value=round(metrics[key], 6),
    )
    return result, f"Top-1 accuracy on {name}: {metrics[key]:.2%}. {setting}"


def image_processor(augmentation: Augmentation) -> dict[str, Any]:
    """`preprocessor_config.json`: transformers' image processor for the evaluation crop.

    Args:
        augmentation: of an evaluation.

    Raises:
        ValueError: the crop has a border, which no image processor cuts off.
    """
    if augmentation.border:
        raise ValueError(
            f"data.eval_augment.border={augmentation.border}: an image processor cannot cut a "
            "border off; set it to 0 to export"
        )
    size = {"height": augmentation.height, "width": augmentation.width}
    crops = augmentation.kind == "center_crop"
    return {
        # In transformers, BiT's processor resizes the shorter side and crops, ViT's resizes both.
        "image_processor_type": "BitImageProcessor" if crops else "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": augmentation.resize} if crops else size,
        "resample": Image.Resampling[augmentation.interpolation.upper()].value,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        **({"do_center_crop": True, "crop_size": size} if crops else {}),
    }
