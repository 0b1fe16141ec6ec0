"""Vision towers of others: the same features from the same weights, under two sets of names.

transformers runs and writes its own files. timm's names are those of its `vision_transformer.py`,
`_convert_openai_clip`, `_convert_dinov2`, `attention_pool.py` and `eva.py` (1.0.31).
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    PreTrainedModel,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
)

from tests.models.small import relative_difference, shake, some_images
from vit_ray.checkpoints.init_weights import planned_load
from vit_ray.checkpoints.weight_files import published_use
from vit_ray.config.training_sections import ModelConfig
from vit_ray.models import build_model
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.models.weights.published_models import model_section

SIZE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
MLP: dict[str, Any] = {"intermediate_size": 64}
TIMM_SIZE: dict[str, Any] = {
    "embed_dim": 32, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8, "mlp_ratio": 2,
}  # fmt: skip
DINOV3: dict[str, Any] = {
    "init_values": 1e-5, "act_layer": "gelu", "reg_tokens": 4, "layer_norm_eps": 1e-5,
    "rope_type": "dinov3", "rope_temperature": 100,
}  # fmt: skip
# transformers' model, and timm's `model_args` of the same.
TOWERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dinov2": (
        lambda: Dinov2Model(Dinov2Config(**SIZE, mlp_ratio=2)),
        {"init_values": 1e-5, "act_layer": "gelu"},
    ),
    "dinov2 with registers": (
        lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**SIZE, mlp_ratio=2)),
        {"init_values": 1e-5, "act_layer": "gelu", "reg_tokens": 4},
    ),
    "dinov3": (
        lambda: DINOv3ViTModel(DINOv3ViTConfig(**SIZE, **MLP, num_register_tokens=4)), DINOV3,
    ),
    "dinov3 without registers": (
        lambda: DINOv3ViTModel(DINOv3ViTConfig(**SIZE, **MLP)), {**DINOV3, "reg_tokens": 0},
    ),
    "dinov3 without biases": (
        lambda: DINOv3ViTModel(DINOv3ViTConfig(
            **SIZE, **MLP, num_register_tokens=4, query_bias=False, value_bias=False,
        )),
        DINOV3,
    ),
    "dinov3 plus": (
        lambda: DINOv3ViTModel(DINOv3ViTConfig(
            **SIZE, **MLP, num_register_tokens=4, use_gated_mlp=True, hidden_act="silu",
        )),
        {**DINOV3, "act_layer": "silu"},
    ),
    "mae": (
        lambda: ViTMAEModel(ViTMAEConfig(**SIZE, **MLP, mask_ratio=0.0)),
        {"act_layer": "gelu", "layer_norm_eps": 1e-12},
    ),
    "siglip": (
        lambda: SiglipVisionModel(SiglipVisionConfig(**SIZE, **MLP)),
        {"global_pool": "map", "act_layer": "gelu_tanh"},
    ),
    "siglip by exact gelu": (
        lambda: SiglipVisionModel(
            SiglipVisionConfig(**SIZE, **MLP, hidden_act="gelu", layer_norm_eps=1e-5)
        ),
        {"global_pool": "map", "act_layer": "gelu", "layer_norm_eps": 1e-5},
    ),
    "clip of openai": (
        lambda: CLIPVisionModel(CLIPVisionConfig(**SIZE, **MLP)),
        {"pre_norm": True, "act_layer": "quick_gelu", "layer_norm_eps": 1e-5},
    ),
    "clip of others": (
        lambda: CLIPVisionModel(CLIPVisionConfig(**SIZE, **MLP, hidden_act="gelu")),
        {"pre_norm": True, "act_layer": "gelu", "layer_norm_eps": 1e-5},
    ),
}  # fmt: skip
TIMM_NAMES = [
    (r"^(encoder\.layers?|layer)\.", "blocks."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"^embeddings\.patch_embeddings\.(weight|bias)$", r"patch_embed.proj.\1"),
    (r"\.(layer_norm|norm|layernorm_before$)1\.", ".norm1."),
    (r"\.(layer_norm|norm)2\.", ".norm2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.layer_scale(\d)\.lambda1", r".ls\1.gamma"),
    (r"\.(self_attn\.out_proj|attention\.output\.dense)\.", ".attn.proj."),
    (r"^(blocks\.\d+)\.intermediate\.dense", r"\1.mlp.fc1"),
    (r"^(blocks\.\d+)\.output\.dense", r"\1.mlp.fc2"),
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.(patch_embeddings\.projection|patch_embedding)\.", "patch_embed.proj."),
    (r"^embeddings\.(position_embeddings|position_embedding\.weight)$", "pos_embed"),
    (r"^pre_layrnorm\.", "norm_pre."),
    (r"^(post_layernorm|layernorm)\.", "norm."),
    (r"^head\.probe$", "attn_pool.latent"),
    (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^head\.layernorm\.", "attn_pool.norm."),
    (r"^head\.mlp\.", "attn_pool.mlp."),
]


def tower(name: str, folder: Path) -> Any:
    """A tower of transformers, saved as it saves, with no parameter at a first value."""
    torch.manual_seed(4)
    model = TOWERS[name][0]().eval()
    drawn(model).save_pretrained(folder)
    return model


def drawn(model: PreTrainedModel) -> PreTrainedModel:
    """Values at which another epsilon and another activation can be seen: small first tokens."""
    shake(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embeddings." in name:
                parameter.mul_(0.02)
            elif parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def features_of(model: Any, images: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(images)
    return found.get("pooler_output", found.last_hidden_state[:, 0])


def built(folder: Path, **changes: Any) -> Any:
    """The model that `config.json` says, for five classes."""
    section = model_section(json.loads((folder / "config.json").read_text()))
    assert section is not None
    section |= changes
    torch.manual_seed(11)
    return build_model(section.pop("name"), 5, section.pop("image_size"), **section).eval()


def to_timm(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        for pattern, replacement in TIMM_NAMES:
            name = re.sub(pattern, replacement, name)
        qkv = re.fullmatch(r"(blocks\.\d+)\..*\.(q|k|v)\w*\.(weight|bias)", name)
        if qkv:
            parts.setdefault(f"{qkv[1]}.attn.qkv.{qkv[3]}", {})[qkv[2]] = tensor
        elif "in_proj" in name:
            leaf, width = name.rpartition("_")[2], len(tensor) // 3
            found[f"attn_pool.q.{leaf}"] = tensor[:width]
            found[f"attn_pool.kv.{leaf}"] = tensor[width:]
        elif name != "embeddings.mask_token":
            found[name] = tensor
    for name, of in parts.items():
        if "k" in of:
            found[name] = torch.cat([of[part] for part in "qkv"])
        else:
            found |= {name.replace("qkv.", f"{part}_"): of[part] for part in "qv"}
    if "pos_embed" not in found:  # of the class Eva
        found = {re.sub(r"ls(\d)\.gamma", r"gamma_\1", name): t for name, t in found.items()}
        if "blocks.0.mlp.fc1_g.bias" in found:
            found = {name.replace(".fc1.", ".fc1_x."): t for name, t in found.items()}
        return {name: tensor.clone() for name, tensor in found.items()}
    if "cls_token" in found:
        found["cls_token"] = found["cls_token"].reshape(1, 1, -1)
    found["pos_embed"] = found["pos_embed"].reshape(1, -1, found["pos_embed"].shape[-1])
    if "reg_token" in found:  # neither class token nor registers have positions
        found["cls_token"] = found["cls_token"] + found["pos_embed"][:, :1]
        found["pos_embed"] = found["pos_embed"][:, 1:]
    return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize("layout", ["huggingface", "timm"])
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_the_features_that_it_has_there(name: str, layout: str, tmp_path: Path) -> None:
    theirs = tower(name, tmp_path)
    if layout == "timm":
        args = {**TIMM_SIZE, **TOWERS[name][1]}
        save_file(
            to_timm(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors"
        )
        (tmp_path / "config.json").write_text(json.dumps({"model_args": args}))
    model = built(tmp_path)
    report = load_weights(model, tmp_path)
    assert set(report.new) == {"head.weight", "head.bias"}
    section = model_section(json.loads((tmp_path / "config.json").read_text()))
    planned = planned_load(ModelConfig(**(section or {})), 5, str(tmp_path), "auto", "bilinear")
    assert planned.loaded == report.loaded  # before there are values
    assert set(report.ignored) <= {"embeddings.mask_token"}
    assert "trained with" not in report.source
    with torch.no_grad():
        ours = model.features(some_images())
    assert relative_difference(ours, features_of(theirs, some_images())) < 1e-5


@pytest.mark.parametrize("size", [(48, 24), (16, 16)])
def test_turned_queries_and_keys_are_theirs_at_any_size(
    size: tuple[int, int], tmp_path: Path
) -> None:
    theirs = features_of(tower("dinov3", tmp_path), some_images(size=size))
    model = built(tmp_path, image_size=size)
    load_weights(model, tmp_path)
    with torch.no_grad():
        ours = model.features(some_images(size=size))
    assert relative_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("layout", ["huggingface", "timm"])
def test_positions_that_leave_no_trace_are_compared(layout: str, tmp_path: Path) -> None:
    tower("dinov3", tmp_path / "dino")
    tower("dinov2 with registers", tmp_path / "other")
    config = json.loads((tmp_path / "dino" / "config.json").read_text())
    if layout == "timm":
        for folder in (tmp_path / "dino", tmp_path / "other"):
            file = folder / "model.safetensors"
            save_file(to_timm(load_file(file)), file)
        config = {"model_args": {**TIMM_SIZE, **DINOV3}}
        (tmp_path / "dino" / "config.json").write_text(json.dumps(config))
        (tmp_path / "other" / "config.json").unlink()
    model = built(tmp_path / "dino")
    for positions in ("none", "learned_1d"):
        with pytest.raises(ValueError, match=r"set model\.positions=rope_2d"):
            load_weights(built(tmp_path / "dino", positions=positions), tmp_path / "dino")
    with pytest.raises(ValueError, match=r"unexpected: .*pos(_embed|ition_embeddings)"):
        load_weights(model, tmp_path / "other")
    key = "rope_theta" if layout == "huggingface" else "rope_temperature"
    told = config if layout == "huggingface" else config["model_args"]
    told[key] = 10_000.0
    (tmp_path / "dino" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{key}=10000.0; use 100"):
        load_weights(model, tmp_path / "dino")


def test_a_block_without_its_biases_is_missed_where_others_have_them(tmp_path: Path) -> None:
    tower("dinov3", tmp_path)
    file = tmp_path / "model.safetensors"
    for rename, lost in (
        (dict, "layer.1.attention.q_proj.bias"),
        (to_timm, "blocks.1.attn.v_bias"),
    ):
        tensors = rename(load_file(file))
        (tmp_path / "torn").mkdir(exist_ok=True)
        del tensors[lost]
        save_file(tensors, tmp_path / "torn" / "model.safetensors")
        with pytest.raises(ValueError, match=r"missing: \S*1\.att\S*(query|qkv)\.bias"):
            load_weights(built(tmp_path), tmp_path / "torn")


@pytest.mark.parametrize("name", ["clip of openai", "siglip"])
def test_another_epsilon_or_activation_is_seen_or_refused(name: str, tmp_path: Path) -> None:
    theirs = features_of(tower(name, tmp_path), some_images())
    near = built(tmp_path, norm_eps=2e-6)
    assert "trained with layer_norm_eps=1e-0" in load_weights(near, tmp_path).source
    with torch.no_grad():
        assert relative_difference(near.features(some_images()), theirs) > 1e-4
    other = "gelu" if name.startswith("clip") else "quick_gelu"
    with pytest.raises(ValueError, match=r"hidden_act='.*set model\.activation="):
        load_weights(built(tmp_path, activation=other), tmp_path)
    with pytest.raises(ValueError, match="of a model with num_heads=4"):
        load_weights(built(tmp_path, num_heads=2), tmp_path)
    with pytest.raises(ValueError, match=r"set model\.norm_eps"):
        load_weights(built(tmp_path, norm_eps=0.1), tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "kept.json")  # of a file alone nothing is known
    wrong = build_model(
        "ViT", 5, 32, depth=2, width=32, mlp_dim=64, num_heads=4, patch_size=8,
        pool="map" if name == "siglip" else "cls", pre_norm=name != "siglip",
        norm_eps=1e-6 if name == "siglip" else 1e-5, activation=other,
    )  # fmt: skip
    load_weights(wrong, tmp_path)
    with torch.no_grad():
        assert relative_difference(wrong.features(some_images()), theirs) > 1e-3


def test_inputs_of_another_scale_are_folded_into_a_kernel_without_a_bias(tmp_path: Path) -> None:
    theirs = tower("clip of openai", tmp_path)
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    told = json.dumps({"image_mean": mean, "image_std": std})
    (tmp_path / "preprocessor_config.json").write_text(told)
    model, images = built(tmp_path), some_images()
    load_weights(model, tmp_path)
    shifted = (images / 2 + 0.5 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )
    with torch.no_grad():
        found = model.features(images)
    assert relative_difference(found, features_of(theirs, shifted)) < 1e-5


def test_what_a_file_holds_beyond_the_tower_is_named_and_left_out(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **MLP}
    whole = {
        "pair": CLIPModel(CLIPConfig(text_config=text, vision_config={**SIZE, **MLP})),
        "decoder": ViTMAEForPreTraining(ViTMAEConfig(
            **SIZE, **MLP, decoder_hidden_size=32, decoder_num_hidden_layers=1,
            decoder_num_attention_heads=4, decoder_intermediate_size=32, mask_ratio=0.0,
        )),
    }  # fmt: skip
    for name, model in whole.items():
        drawn(model.eval()).save_pretrained(tmp_path / name)
        inner: Any = model.vision_model if name == "pair" else model.vit
        ours = built(tmp_path / name)
        report = load_weights(ours, tmp_path / name)
        assert any(re.match(r"text_model\.|decoder\.", left) for left in report.ignored)
        with torch.no_grad():
            found = ours.features(some_images())
        assert relative_difference(found, features_of(inner, some_images())) < 1e-5


def test_a_classifier_is_taken_only_where_it_stands_on_the_same_features(tmp_path: Path) -> None:
    siglip = SiglipForImageClassification(
        SiglipConfig(vision_config={**SIZE, **MLP}, num_labels=5)
    ).eval()
    drawn(siglip).save_pretrained(tmp_path / "siglip")
    model = built(tmp_path / "siglip")
    assert load_weights(model, tmp_path / "siglip", new_head=False).new == []
    with torch.no_grad():
        theirs = siglip(some_images()).logits
        assert relative_difference(model(some_images()), theirs) < 1e-5
    config = Dinov2Config(**SIZE, mlp_ratio=2, num_labels=5)
    drawn(Dinov2ForImageClassification(config)).save_pretrained(tmp_path / "dino")
    report = load_weights(built(tmp_path / "dino"), tmp_path / "dino")
    assert {"classifier.bias", "classifier.weight"} <= set(report.ignored)
    assert "head.weight" in report.new


S, B, L = (
    {"depth": depth, "width": width, "mlp_dim": 4 * width, "num_heads": heads}
    for depth, width, heads in ((12, 384, 6), (12, 768, 12), (24, 1024, 16))
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"architecture": "vit_small_patch14_reg4_dinov2",
             "pretrained_cfg": {"input_size": [3, 518, 518]}},
            {**S, "patch_size": 14, "image_size": [518, 518], "registers": 4, "layer_scale": 1e-5,
             "activation": "gelu"},
        ),
        (
            {"architecture": "vit_small_patch16_dinov3_qkvb", "global_pool": "avg",
             "pretrained_cfg": {"input_size": [3, 256, 256]}},
            {**S, "patch_size": 16, "image_size": [256, 256], "registers": 4, "layer_scale": 1e-5,
             "activation": "gelu", "norm_eps": 1e-5, "positions": "rope_2d"},
        ),
        (
            {"architecture": "vit_huge_plus_patch16_dinov3",
             "pretrained_cfg": {"input_size": [3, 256, 256]}},
            {"depth": 32, "width": 1280, "mlp_dim": 5120, "num_heads": 20, "patch_size": 16,
             "image_size": [256, 256], "registers": 4, "layer_scale": 1e-5,
             "activation": "swiglu", "norm_eps": 1e-5, "positions": "rope_2d"},
        ),
        (
            {"architecture": "vit_7b_patch16_dinov3",
             "pretrained_cfg": {"input_size": [3, 256, 256]}},
            {"depth": 40, "width": 4096, "mlp_dim": 8192, "num_heads": 32, "patch_size": 16,
             "image_size": [256, 256], "registers": 4, "layer_scale": 1e-5,
             "activation": "swiglu", "norm_eps": 1e-5, "positions": "rope_2d"},
        ),
        (
            {"model_type": "dinov3_vit", "num_register_tokens": 4},
            {**S, "patch_size": 16, "image_size": 224, "registers": 4, "layer_scale": 1.0,
             "activation": "gelu", "norm_eps": 1e-5, "positions": "rope_2d"},
        ),
        (
            {"architecture": "vit_large_patch14_clip_quickgelu_336"},
            {**L, "patch_size": 14, "image_size": 336, "activation": "quick_gelu",
             "norm_eps": 1e-5, "pre_norm": True},
        ),
        (
            {"architecture": "vit_base_patch16_siglip_384"},
            {**B, "patch_size": 16, "image_size": 384, "pool": "map"},
        ),
        (
            {"architecture": "deit3_base_patch16_224"},
            {**B, "patch_size": 16, "image_size": 224, "layer_scale": 1e-6, "activation": "gelu"},
        ),
        # google/siglip-base-patch16-224 says no more than this of its tower.
        (
            {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}},
            {**B, "patch_size": 16, "image_size": 224, "pool": "map", "activation": "gelu_tanh",
             "norm_eps": 1e-6},
        ),
        (
            {"model_type": "clip", "vision_config": {}},
            {**B, "patch_size": 32, "image_size": 224, "activation": "quick_gelu",
             "norm_eps": 1e-5, "pre_norm": True},
        ),
    ],
)  # fmt: skip
def test_a_name_says_which_model_it_is(
    config: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = model_section(config)
    assert found == {"name": "ViT", "pool": "cls", **expected}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    use = published_use(str(tmp_path))
    assert use is not None
    assert use["model"] == found


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ({"pre_norm": True}, ("jax", "timm", "huggingface")),
        ({"activation": "quick_gelu"}, ("jax",)),
        ({"activation": "swiglu"}, ("jax", "timm", "huggingface")),
        ({"norm_eps": 1e-5}, ("jax", "timm")),
    ],
)
def test_a_layout_that_cannot_express_an_option_says_so(
    options: dict[str, Any], layouts: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {"depth": 2, "width": 32, "mlp_dim": 64, "num_heads": 4, "patch_size": 8}
    model = build_model("ViT", 5, 32, **sizes, **options).eval()
    shake(model)
    for layout in ("jax", "timm", "huggingface", "vit_ray"):
        if layout in layouts:
            with pytest.raises(ValueError, match="use layout='vit_ray'"):
                save_weights(model, tmp_path / layout, layout)
            continue
        save_weights(model, tmp_path / layout, layout)
        loaded = build_model("ViT", 5, 32, **sizes, **options).eval()
        load_weights(loaded, tmp_path / layout)
        with torch.no_grad():
            assert torch.equal(loaded(some_images()), model(some_images()))
        if "pre_norm" not in options and options != {"activation": "swiglu"}:
            with pytest.raises(ValueError, match=next(iter(options))):
                load_weights(build_model("ViT", 5, 32, **sizes), tmp_path / layout)
