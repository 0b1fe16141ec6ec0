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
        (r"\.gamma_([12])$", r".ls\1.gamma"),  # of its class Eva, which has DINOv3
        (r"\.mlp\.fc1_x\.", ".mlp.fc1."),
    ],
    "huggingface": [
        (r"^(deit|dinov2|dinov2_with_registers|vision_model)\.", "vit."),
        (r"^(embeddings|encoder|layers|layernorm|pooler)\.", r"vit.\1."),
        (r"^(head|pre_layrnorm|post_layernorm)\.", r"vit.\1."),
        (r"^(embedder|norm)\.", r"bit.\1."),
        (r"^vit\.encoder\.stages\.", "bit.encoder.stages."),
        (r"^(model\.)?layer\.", "vit.encoder.layer."),  # DINOv3's
        # The names inside transformers 5, which its saved files do not use.
        (r"^vit\.(encoder\.)?layers\.", "vit.encoder.layer."),
        (r"\.(self_attn|attention)\.q_proj\.", ".attention.attention.query."),
        (r"\.(self_attn|attention)\.k_proj\.", ".attention.attention.key."),
        (r"\.(self_attn|attention)\.v_proj\.", ".attention.attention.value."),
        (r"\.(self_attn\.out|attention\.o)_proj\.", ".attention.output.dense."),
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
        # DINOv2's, and those of CLIP and SigLIP.
        (r"^(vit\.encoder\.layer\.\d+)\.(layer_)?norm1\.", r"\1.layernorm_before."),
        (r"^(vit\.encoder\.layer\.\d+)\.(layer_)?norm2\.", r"\1.layernorm_after."),
        (r"^vit\.post_layernorm\.", "vit.layernorm."),
        (r"\.class_embedding$", ".cls_token"),
        (r"\.patch_embedding\.", ".patch_embeddings.projection."),
        (r"\.patch_embeddings\.(weight|bias)$", r".patch_embeddings.projection.\1"),
        (r"\.mlp\.up_proj\.", ".intermediate.dense."),
        (r"\.mlp\.down_proj\.", ".output.dense."),
        (r"\.position_embedding\.weight$", ".position_embeddings"),
    ],
    "vit_ray": [],
}
# Norms before the first block, and the patch embeddings before them, which have no bias.
_UNBIASED = {
    "norm_pre": "patch_embed.proj",
    "vit.pre_layrnorm": "vit.embeddings.patch_embeddings.projection",
}
# Projections that some models have without a bias, which equals a bias of zeros.
_MAY_LACK_BIAS = re.compile(r"\.(attn\.qkv|attention\.attention\.(query|key|value))\.weight$")
_OTHER_PARTS = (
    r"(text_model|decoder|text_projection|visual_projection)\.|logit_(scale|bias)$"
    r"|(.*\.)?(mask_token|position_ids)$"
)


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
        if not whole.numel():  # as transformers writes a DINOv3 without registers
            continue
        for index, tensor in enumerate(whole if stacked in whole_name else [whole]):
            name = whole_name.replace(stacked, f"Transformer/encoderblock_{index}/")
            for pattern, replacement in _SPELLINGS[layout]:
                name = re.sub(pattern, replacement, name)
            renamed |= _taken_apart(name, tensor)
    for norm, kernel in _UNBIASED.items():
        if f"{norm}.weight" in renamed and f"{kernel}.weight" in renamed:
            zeros = torch.zeros_like(renamed[f"{norm}.weight"])
            renamed.setdefault(f"{kernel}.bias", zeros)
    if "vit.embeddings.cls_token" in renamed:  # the last norm of DINOv3 has the same name as BiT's
        renamed = {name.replace("bit.norm.", "vit.layernorm."): t for name, t in renamed.items()}
    renamed = _with_qkv_biases(renamed)
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


def _with_qkv_biases(tensors: Tensors) -> Tensors:
    """The tensors with a bias of q, k and v for all blocks, if no block has it in this form.

    timm's Eva may have biases of q and v with separate names, and none of k.
    """
    found = dict(tensors)
    for name in tensors:
        other = f"{name.removesuffix('q_bias')}v_bias"
        if name.endswith(".attn.q_bias") and other in tensors:
            query, value = found.pop(name), found.pop(other)
            qkv = torch.cat([query, torch.zeros_like(query), value])
            found[name.replace("q_bias", "qkv.bias")] = qkv
    given = " ".join(found)
    for name, weight in tensors.items():
        kind = _MAY_LACK_BIAS.search(name)
        if kind and kind[0].replace("weight", "bias") not in given:
            found[name.replace("weight", "bias")] = weight.new_zeros(len(weight))
    return found


def _taken_apart(name: str, tensor: Tensor) -> Tensors:
    """Tensors of a ViT by its rules and shapes; towers keep several of them in one."""
    stem, _, leaf = name.rpartition(".")
    if stem == "attn_pool.kv":
        parts = zip("kv", tensor.chunk(2), strict=True)
        return {f"attn_pool.{part}.{leaf}": piece for part, piece in parts}
    if leaf.startswith("in_proj_"):
        kinds = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
        leaf = leaf.removeprefix("in_proj_")
        return {f"{stem}.{part}.{leaf}": piece for part, piece in kinds}
    if leaf in ("cls_token", "position_embeddings") and tensor.dim() in (1, 2):
        return {name: tensor.reshape(1, -1, tensor.shape[-1])}
    return {name: tensor}


def without_other_parts(tensors: Tensors, layout: str) -> tuple[Tensors, list[str]]:
    """A tower's own tensors, and the other tensors in a file of transformers or timm.

    Text towers, decoders, mask tokens; and a classifier on other features than those of the model's
    head (in CLIP the mean before the last norm, in DINOv2 also the mean of patches), or pooling
    that is not followed by a classifier (SigLIP).
    """
    if layout not in ("timm", "huggingface"):
        return tensors, []
    names, unused = " ".join(tensors), _OTHER_PARTS
    if "pre_layrnorm." in names or "layer_scale1." in names:
        unused += r"|classifier\."
    elif "classifier." in names:
        unused += r"|(vision_model\.)?head\."
    if layout == "timm":
        unused = "mask_token$"
    kept = {name: tensor for name, tensor in tensors.items() if not re.match(unused, name)}
    return kept, sorted(set(tensors) - set(kept))


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
