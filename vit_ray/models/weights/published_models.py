"""What a `config.json` of transformers or timm says about the model of its weights.

transformers keeps the vision tower of a pair in a separate section and may leave out default
values; timm has little more than a name. Sources: their configuration classes, and timm's
`vision_transformer.py`, `deit.py` and `eva.py`.
"""

import re
from typing import Any, Final

from vit_ray.model_aliases import canonical_model
from vit_ray.models.catalog import ENCODERS
from vit_ray.models.positions import ROPE_BASE
from vit_ray.models.sizes import EncoderSize, VitOptions
from vit_ray.models.weights.folder_config import FOLDER_CONFIG

ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "swiglu",  # its third layer shows in the tensors
}
"""Our names; exact GELU and the one by tanh differ by 5e-4 at most."""
MOST_EPS: Final = 1e-5
"""torch's default epsilon of a layer norm."""

_SIZES: Final = {
    "image_size": 224, "num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "patch_size": 16,
}  # fmt: skip
_DINOV2: Final = {
    "patch_size": 14, "mlp_ratio": 4, "layerscale_value": 1.0, "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}  # fmt: skip
# transformers' defaults by model type, and by timm's names what a type always has.
_TYPES: Final[dict[str, dict[str, Any]]] = {
    "vit": {},
    "vit_mae": {"hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "dinov2": _DINOV2,
    "dinov2_with_registers": {**_DINOV2, "num_register_tokens": 4},
    "dinov3_vit": {
        "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6,
        "layerscale_value": 1.0, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
        "rope_type": "dinov3",
    },
    "siglip_vision_model": {
        "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "global_pool": "map",
    },
    "clip_vision_model": {
        "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "pre_norm": True,
    },
}  # fmt: skip
_PAIRS: Final = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}

_TIMM: Final = re.compile(
    r"(?:vit|(deit3))_(small|base|large|huge|7b)(_plus)?_patch(\d+)(?:_reg(\d+))?"
    r"(?:_(dinov2|dinov3|clip|clip_quickgelu|siglip|siglip_gap)(?:_qkvb)?)?(?:_(\d+))?"
)
_DINOV3_7B: Final = EncoderSize(depth=40, width=4096, mlp_dim=8192, num_heads=32)
_CLIP: Final = {"act_layer": "gelu", "layer_norm_eps": 1e-5, "pre_norm": True}
_TIMM_KINDS: Final[dict[str, dict[str, Any]]] = {
    "deit3": {"act_layer": "gelu", "init_values": 1e-6},
    "dinov2": {"act_layer": "gelu", "init_values": 1e-5},
    # Its models use the class token as feature, and timm the mean over all patches.
    "dinov3": {
        "act_layer": "gelu", "init_values": 1e-5, "layer_norm_eps": 1e-5, "reg_tokens": 4,
        "rope_type": "dinov3", "global_pool": "token",
    },
    "clip": _CLIP,
    "clip_quickgelu": {**_CLIP, "act_layer": "quick_gelu"},
    "siglip": {"global_pool": "map"},
    "siglip_gap": {"global_pool": "avg"},
}  # fmt: skip


def vision_settings(config: dict[str, Any]) -> dict[str, Any]:
    """All that is known about the image model, on one level, with its library's names.

    Args:
        config: of transformers, or of timm, with its `model_args` or a name.
    """
    kind = config.get("model_type")
    if kind in _PAIRS:
        inner, kind = config.get("vision_config"), _PAIRS[kind]
        config = {**config, **(inner if isinstance(inner, dict) else {}), "model_type": kind}
    if kind in _TYPES:
        found = {**_SIZES, **_TYPES[kind], **config}
        if "mlp_ratio" in _TYPES[kind]:
            found["intermediate_size"] = int(found["hidden_size"] * found["mlp_ratio"])
        # Its classifier uses the mean of the tokens, without the pooling.
        is_mean = "SiglipForImageClassification" in (config.get("architectures") or ())
        if is_mean or config.get("vision_use_head") is False:
            found["global_pool"] = "avg"
        return found
    args = config.get("model_args")
    return {**config, **_timm_args(config), **(args if isinstance(args, dict) else {})}


def _timm_args(config: dict[str, Any]) -> dict[str, Any]:
    """`model_args` of a model that timm has by name."""
    named = _TIMM.fullmatch(str(config.get("architecture")))
    facts = config.get("pretrained_cfg")
    facts = facts if isinstance(facts, dict) else {}
    kind = named and (named[1] or named[6])
    if not named or not kind:
        return {"act_layer": "gelu"} if facts.get("tag") == "mae" else {}
    size = _DINOV3_7B if named[2] == "7b" else ENCODERS[named[2][0].upper()]
    sides = facts.get("input_size")
    return {
        "embed_dim": size.width,
        "depth": size.depth,
        "num_heads": size.width // 64 if named[3] else size.num_heads,
        "mlp_ratio": size.mlp_dim / size.width,
        "patch_size": int(named[4]),
        "img_size": sides[-2:] if isinstance(sides, list) else int(named[7] or 224),
        "reg_tokens": int(named[5] or 0),
        **_TIMM_KINDS[kind],
        **({"act_layer": "silu"} if named[3] or named[2] == "7b" else {}),
    }


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
    if kind in _TYPES:
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
        "pool": {"avg": "gap", "map": "map"}.get(str(said.get("global_pool")), "cls"),
        "positions": _positions(said),
        "registers": said.get("num_register_tokens") or said.get("reg_tokens"),
        "layer_scale": said.get("layerscale_value") or said.get("init_values"),
        "qk_norm": said.get("qk_norm"),
        "pre_norm": said.get("pre_norm"),
        "activation": ACTIVATIONS.get(str(said.get("hidden_act") or said.get("act_layer"))),
        "norm_eps": said.get("layer_norm_eps"),
    }
    given = {name: value for name, value in options.items() if value}
    return {"name": "ViT", **sizes, "patch_size": said["patch_size"], **given}


def _positions(said: dict[str, Any]) -> str | None:
    """Options that do not show in the tensors; None for others."""
    if said.get("rope_type") == "dinov3":
        return "rope_2d"
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
    fixed = {
        "pooler_act": "tanh", "norm_layer": "layernorm", "rope_theta": ROPE_BASE,
        "rope_temperature": ROPE_BASE,
    }  # fmt: skip
    for name, ours in fixed.items():
        if said.get(name) not in (None, ours):
            raise ValueError(f"{FOLDER_CONFIG} has {name}={said[name]!r}; use {ours}")
    for name in ("hidden_act", "act_layer"):
        value, here = said.get(name), options.activation
        if value is None or (there := ACTIVATIONS.get(str(value))) == here:
            continue
        if there is None or {"quick_gelu", "swiglu"} & {there, here}:
            use = f"set model.activation={there}" if there else f"use {' or '.join(ACTIVATIONS)}"
            raise ValueError(f"{FOLDER_CONFIG} has {name}={value!r}, the model {here}; {use}")
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
