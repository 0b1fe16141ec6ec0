"""What a `config.json` of transformers or timm says about the model of its weights.

transformers may leave out default values; timm has little more than a name. Sources: transformers'
configuration classes, and timm's `vision_transformer.py`.
"""

from typing import Any, Final

from vit_ray.model_aliases import canonical_model
from vit_ray.models.sizes import VitOptions
from vit_ray.models.weights.folder_config import FOLDER_CONFIG

ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
"""Our names; exact GELU and the one by tanh differ by 5e-4 at most."""
MOST_EPS: Final = 1e-5
"""torch's default epsilon of a layer norm."""

_SIZES: Final = {
    "image_size": 224, "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "patch_size": 16,
}  # fmt: skip
"""transformers' defaults of a ViT."""


def vision_settings(config: dict[str, Any]) -> dict[str, Any]:
    """All that is known about the model, on one level, with its library's names.

    Args:
        config: of transformers, or of timm, with its `model_args` or a name.
    """
    if config.get("model_type") == "vit":
        return {**_SIZES, **config}
    args = config.get("model_args")
    return {**config, **(args if isinstance(args, dict) else {})}


def model_section(config: dict[str, Any]) -> dict[str, Any] | None:
    """The recipe section `model` for what transformers or timm would build; None: not known.

    Args:
        config: as in `vision_settings`.
    """
    said = vision_settings(config)
    kind = said.get("model_type")
    if kind == "bit":
        factor = config.get("embedding_size", 64) // 64
        return {"name": "ResNet", "stages": config.get("depths"), "width_factor": factor}
    if kind == "vit":
        sizes = {
            "image_size": said["image_size"],
            "depth": said["num_hidden_layers"],
            "width": said["hidden_size"],
            "mlp_dim": said["intermediate_size"],
            "num_heads": said["num_attention_heads"],
        }
    elif {"embed_dim", "depth", "num_heads", "patch_size"} <= set(said):
        sizes = {
            "image_size": said.get("img_size", 224),
            "depth": said["depth"],
            "width": said["embed_dim"],
            "mlp_dim": int(said["embed_dim"] * said.get("mlp_ratio", 4)),
            "num_heads": said["num_heads"],
        }
    else:
        name = str(config.get("architecture"))
        return {"name": name} if canonical_model(name)[0] != name else None
    options = {
        "pool": "gap" if said.get("global_pool") == "avg" else "cls",
        "positions": _positions(said),
        "activation": ACTIVATIONS.get(str(said.get("hidden_act") or said.get("act_layer"))),
        "norm_eps": said.get("layer_norm_eps"),
    }
    given = {name: value for name, value in options.items() if value}
    return {"name": "ViT", **sizes, "patch_size": said["patch_size"], **given}


def _positions(said: dict[str, Any]) -> str | None:
    """Positions that do not show in the tensors; None for others."""
    return "none" if said.get("pos_embed") == "none" else None


def differences_of(config: dict[str, Any], options: VitOptions) -> list[str]:
    """Settings of the function that a file's tensors were trained in, which differ slightly here.

    Args:
        config: as in `vision_settings`.
        options: of the model that the tensors are for.

    Raises:
        ValueError: the model has other positions, or another activation or normalisation.
    """
    said, found = vision_settings(config), []
    if (positions := _positions(said)) not in (None, options.positions):
        raise ValueError(
            f"{FOLDER_CONFIG} has positions {positions}, and the model has {options.positions}; "
            f"set model.positions={positions}"
        )
    fixed = {"pooler_act": "tanh", "norm_layer": "layernorm"}
    for name, ours in fixed.items():
        if said.get(name) not in (None, ours):
            raise ValueError(f"{FOLDER_CONFIG} has {name}={said[name]!r}; use {ours}")
    for name in ("hidden_act", "act_layer"):
        value, here = said.get(name), options.activation
        if value is None or (there := ACTIVATIONS.get(str(value))) == here:
            continue
        if there is None:
            raise ValueError(
                f"{FOLDER_CONFIG} has {name}={value!r}, the model {here}; use "
                f"{' or '.join(ACTIVATIONS)}"
            )
        found.append(f"{name}={value}")
    epsilon = said.get("layer_norm_eps", options.norm_eps)
    is_number = isinstance(epsilon, int | float) and 0 <= epsilon < 1
    if epsilon == options.norm_eps:
        return found
    if not is_number or max(epsilon, options.norm_eps) > MOST_EPS:
        raise ValueError(
            f"{FOLDER_CONFIG} has layer_norm_eps={epsilon!r}, and the model "
            f"norm_eps={options.norm_eps:g}; only values up to {MOST_EPS:g} count as equal: set "
            "model.norm_eps to that of the file"
        )
    return [*found, f"layer_norm_eps={epsilon:g}"]
