"""One spelling for the names in published files, and how names show a file's layout."""

import re
from collections import Counter

import torch
from torch import Tensor

from vit_ray.models.positions import square_grid
from vit_ray.models.sizes import Grid
from vit_ray.models.weights.name_maps import JAX_POSITIONS, LAYOUTS, Tensors

_WRAPPERS = ("module.", "_orig_mod.", "model.", "state_dict.", "model_state_dict.")
# Pattern and replacement, in order: other spellings of the same tensors.
_SPELLINGS: dict[str, list[tuple[str, str]]] = {
    "jax": [
        (r"^(opt/target|params)/(img/)?", ""),
        (r"^Transformer/pos_embedding$", JAX_POSITIONS),
        # big_vision counts the parts of a block from 0 by kind.
        (r"/MultiHeadDotProductAttention_0/", "/MultiHeadDotProductAttention_1/"),
        (r"/MlpBlock_0/", "/MlpBlock_3/"),
        (r"(encoderblock_\d+)/LayerNorm_1/", r"\1/LayerNorm_2/"),
    ],
    "timm": [
        # `fc_norm` has no name here: it comes after the mean over tokens, our norm before it, and
        # is left out with the head (`WeightFile.load_into`).
        (r"^pre_logits\.(weight|bias)$", r"pre_logits.fc.\1"),
    ],
    "huggingface": [
        (r"^deit\.", "vit."),
        (r"^(embeddings|encoder|layers|layernorm|pooler)\.", r"vit.\1."),
        (r"^(embedder|norm)\.", r"bit.\1."),
        (r"^vit\.encoder\.stages\.", "bit.encoder.stages."),
        # The names inside transformers 5, which its saved files do not use.
        (r"^vit\.(encoder\.)?layers\.", "vit.encoder.layer."),
        (r"\.attention\.q_proj\.", ".attention.attention.query."),
        (r"\.attention\.k_proj\.", ".attention.attention.key."),
        (r"\.attention\.v_proj\.", ".attention.attention.value."),
        (r"\.attention\.o_proj\.", ".attention.output.dense."),
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
    ],
    "vit_ray": [],
}


def canonical_names(
    tensors: Tensors, layout: str, grid: Grid | None = None, model_grid: Grid | None = None
) -> Tensors:
    """The same tensors under the spelling of the rules.

    Stacked blocks are split, and positions get a row for the class token if it has none: as many
    rows as the file's `grid` has patches, if that is known. `model_grid` is that of the model to
    fill.
    """
    # big_vision may keep all blocks in one tensor, with the block as its first axis.
    stacked, renamed = "Transformer/encoderblock/", dict[str, Tensor]()
    for whole_name, whole in tensors.items():
        for index, tensor in enumerate(whole if stacked in whole_name else [whole]):
            name = whole_name.replace(stacked, f"Transformer/encoderblock_{index}/")
            for pattern, replacement in _SPELLINGS[layout]:
                name = re.sub(pattern, replacement, name)
            renamed[name] = tensor
    table_name = JAX_POSITIONS if layout == "jax" else "pos_embed"
    lacks_class_row = False
    if layout == "jax" and "pos_embedding" in renamed:
        # big_vision adds positions before the class token, which therefore has none.
        renamed[JAX_POSITIONS] = renamed.pop("pos_embedding")
        lacks_class_row = "cls" in renamed
    elif layout == "timm" and {"pos_embed", "cls_token"} <= set(renamed):
        # The same holds for timm models that do not embed the class token; only the row count shows
        # it.
        num_rows = renamed["pos_embed"].shape[1]
        if grid is not None:
            lacks_class_row = num_rows == grid[0] * grid[1]
        elif model_grid is None or num_rows != model_grid[0] * model_grid[1] + 1:
            # A table of n x (n + 2) patches and a class token also has a square number of rows.
            lacks_class_row = bool(square_grid(num_rows)) and not square_grid(num_rows - 1)
    if lacks_class_row:
        table = renamed[table_name]
        renamed[table_name] = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    return renamed


def without_wrappers(tensors: Tensors) -> Tensors:
    """Names without the prefixes that DDP, `torch.compile` and trainers put before all of them."""
    while tensors:
        wrapper = next(iter(tensors)).partition(".")[0] + "."
        if wrapper not in _WRAPPERS or not all(name.startswith(wrapper) for name in tensors):
            break
        tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
    return tensors


def without_training_state(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """The parameters of a file, and what its training stored with them, by first name.

    Checkpoints of big_vision and of flax are whole trainings, and are published in this form.
    """
    for prefix in ("params/", "opt/target/"):
        if any(name.startswith(prefix) for name in tensors):
            kept = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            ignored = Counter(name.partition("/")[0] for name in tensors if name not in kept)
            return kept, [f"{name} ({count} of training)" for name, count in ignored.items()]
    return tensors, []


def detect_layout(names: list[str]) -> str:
    """The layout of a file, from the names of its tensors.

    Raises:
        ValueError: if no layout has such names.
    """
    signs = {
        "jax": r"(^|/)embedding/kernel$|^resnet/root_block/",
        "huggingface": r"(^|\.)(embeddings\.patch_embeddings?|embedder\.convolution)\.",
        "timm": r"^patch_embed\.proj\.|^stem\.conv\.",
        "vit_ray": r"^embedding\.projection\.|^units\.0\.",
    }
    for layout, pattern in signs.items():
        if any(re.search(pattern, name) for name in names):
            return layout
    shown = ", ".join(sorted(names)[:8])
    raise ValueError(
        f"the tensors' names are of no known layout ({', '.join(LAYOUTS)}): {shown}, ...; check "
        "that the file holds a ViT, a hybrid or a BiT ResNet"
    )
