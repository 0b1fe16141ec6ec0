"""Parts of a user's own: how they are found, what they must be, and whose code is run."""

import json
import pickle
import sys
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from tests import parts
from tests.recipes import recipe_with
from vit_ray import own_parts
from vit_ray.checkpoints.init_weights import planned_load
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.training_sections import OptimConfig, TrainConfig
from vit_ray.data.boxes import Augmentation
from vit_ray.data.crops import crop_of
from vit_ray.data.keyed_random import KeyedUniform
from vit_ray.launch.resolved_run import check_model, check_own_parts
from vit_ray.models import build_model
from vit_ray.models.weights import load_weights, save_weights
from vit_ray.own_parts import own_part, trust_modules
from vit_ray.training.memory_estimate import step_macs
from vit_ray.training.objective import classification_loss
from vit_ray.training.optimizers import build_optimizer, state_types

SIZE = {"depth": 1, "width": 16, "mlp_dim": 32, "num_heads": 2, "patch_size": 4}
SIDES = {"image_size": 8}


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_parts, "_TRUSTED", {"tests.parts", "tests.parts2"})


def checked(**sections: Any) -> None:
    model = {"name": "ViT", **SIZE, **SIDES}
    recipe = recipe_with(**{"model": model, **sections})
    check_model(recipe)
    check_own_parts(recipe, 4)


def own_model(name: str, **options: Any) -> dict[str, Any]:
    return {"name": f"tests.parts.{name}", **SIDES, **options}


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"model": own_model("Convnet")}, r"Convnet in .*parts.py .*ConvNet\?"),
        ({"model": {"name": "tests.parts2.ConvNet"}}, "no module tests.parts2"),
        ({"model": own_model("NOT_A_FUNCTION")}, "is a int"),
        ({"model": own_model("without_size")}, r"without_size\(num_classes, image_size\)"),
        ({"model": own_model("ConvNet", depth=3)}, "argument 'depth'"),
        ({"model": own_model("no_module")}, "torch.nn.Module"),
        ({"model": own_model("Headless")}, r"layer `head` of 2 outputs"),
        ({"model": own_model("Normed")}, "norm.running_mean"),
        ({"model": own_model("Objective")}, "submodule `model`"),
        ({"model": own_model("Peeking")}, "multiply-adds"),
        ({"model": own_model("Features")}, r"\[1, 8, 4, 4\]"),
        ({"model": own_model("ConvNet"), "optim": {"frozen": ["blocks"]}}, "first, second, head"),
        (
            {"model": own_model("ConvNet"), "train": {"activation_checkpointing": 1}},
            "nn.ModuleList",
        ),
        ({"model": own_model("ConvNet"), "train": {"loss": "masked_patch"}}, "ConvNet"),
        ({"train": {"loss": "tests.parts.mean_loss"}}, r"mean_loss returns \[\] for 2 images"),
        ({"train": {"loss": "tests.parts.loss_of_logits"}}, r"loss_of_logits\(logits, labels\)"),
        ({"evaluate": {"metrics": ["tests.parts.mean_loss"]}}, "evaluate.metrics"),
        ({"data": {"augment": {"own": "tests.parts.as_floats"}}}, "float64"),
        ({"optim": {"name": "tests.parts.no_optimizer"}}, "a NoneType"),
        ({"optim": {"name": "tests.parts.RowNorm"}}, "does not treat each element alike"),
        ({"optim": {"name": "tests.parts.Anchored"}}, r"state \(first\) .* start with zeros"),
        ({"optim": {"name": "tests.parts.Noted"}}, r"state \(rows\) of tensors"),
        ({"train": {"callbacks": ["tests.parts.missing"]}}, "callbacks=.* is not there; give a"),
        ({"evaluate": {"metrics": ["a.top1"]}}, "eval/top1"),
        ({"evaluate": {"metrics": ["a.f1", "b.f1"]}}, "eval/f1"),
        ({"train": {"loss": "a.focal", "label_smoothing": 0.1}}, "label_smoothing"),
    ],
)
def test_what_is_not_as_its_contract_says_is_refused_by_name(sections, named):
    with pytest.raises(ValueError, match=named):
        checked(**sections)


def test_parts_that_are_as_their_contracts_say_pass():
    checked(
        model=own_model("ConvNet", width=4),
        optim={"name": "tests.parts.lion", "frozen": ["first"]},
        train={"loss": "tests.parts.cross_entropy", "callbacks": ["tests.parts.note"]},
        evaluate={"metrics": ["tests.parts.top3"]},
        data={"augment": {"own": "tests.parts.brighter"}},
    )


NAMES = {
    "model": own_model("ConvNet"),
    "train": {"loss": "tests.parts.cross_entropy"},
    "optim": {"name": "tests.parts.lion"},
}


def test_a_recipe_of_a_checkpoint_does_not_have_its_code_imported(monkeypatch):
    monkeypatch.setattr(own_parts, "_TRUSTED", set())
    monkeypatch.delitem(sys.modules, "tests.parts")
    recorded = json.dumps(recipe_with(**NAMES).model_dump(mode="json"))
    recipe = Recipe.model_validate_json(recorded)
    with pytest.raises(ValueError, match=r"--module tests\.parts"):
        check_model(recipe)
    with pytest.raises(ValueError, match=r"model\.name=tests\.parts\.ConvNet"):
        build_model(recipe.model.name, 2, 8)
    with pytest.raises(ValueError, match=r"vit_ray\.trust_modules\('tests\.parts'\)"):
        classification_loss(torch.zeros(1, 2), torch.zeros(1, 1).long(), recipe.train)
    trust_modules("tests.part", "tests.parts.ConvNet", "test")  # others
    with pytest.raises(ValueError, match="trust_modules"):
        check_model(recipe)
    assert "tests.parts" not in sys.modules
    trust_modules("tests")
    build_model(recipe.model.name, 2, 8)
    assert "tests.parts" in sys.modules


def test_modules_of_the_users_recipe_are_trusted_here_and_where_it_is_sent(monkeypatch, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"name": "own", "base": "digits", "train": NAMES["train"]}))
    monkeypatch.setattr(own_parts, "_TRUSTED", set())
    recipe = load_recipe(path)
    own_part(recipe.train.loss, "train.loss")
    sent = pickle.dumps(recipe)
    monkeypatch.setattr(own_parts, "_TRUSTED", set())
    own_part(pickle.loads(sent).train.loss, "train.loss")


def test_an_own_model_or_loss_is_counted_and_computed_as_ours():
    ours = {"name": "ViT", **SIZE, **SIDES, "depth": 2}
    expected = step_macs(recipe_with(model=ours), 5)
    assert step_macs(recipe_with(model={**ours, "name": "tests.parts.Wrapped"}), 5) == expected
    # The loss needs values, which there are not.
    own = recipe_with(model=ours, train={"loss": "tests.parts.hardest_half"})
    assert step_macs(own, 5) == expected
    own = recipe_with(model=ours, train={"loss": "tests.parts.cross_entropy"}).train
    logits, labels = torch.arange(24.0).view(6, 4).sin(), torch.tensor([0, 1, 3, -1, 2, 2])[:, None]
    assert torch.equal(
        classification_loss(logits, labels, own), classification_loss(logits, labels, TrainConfig())
    )


def test_its_weights_go_to_our_layout_and_come_back_with_another_head(tmp_path):
    model, other = (build_model("tests.parts.ConvNet", k, 8) for k in (5, 3))
    for place in (tmp_path / "weights.safetensors", tmp_path / "folder"):
        save_weights(model, place, "vit_ray")
        report = load_weights(other, place)
        assert sorted(report.new) == ["head.bias", "head.weight"]
        torch.testing.assert_close(other.get_parameter("first.weight"), model.first.weight)
    config = recipe_with(model=own_model("ConvNet")).model  # a plan needs no values
    planned = planned_load(config, 5, str(tmp_path / "weights.safetensors"), "auto")
    assert planned.new == []
    with pytest.raises(ValueError, match="timm"):
        save_weights(model, tmp_path / "timm.safetensors", "timm")


def test_an_own_augmentation_draws_by_sample_alone():
    encoded = cv2.imencode(".png", np.zeros((20, 20, 3), np.uint8))[1].tobytes()
    how = Augmentation(size=8, own=parts.brighter)
    crops = [int(crop_of(encoded, how, (3, 0, sample)).max()) for sample in (0, 1, 2, 0)]
    assert crops[0] == crops[3] == KeyedUniform(3, 0, 0, 6).below(128)
    assert len(set(crops)) == 3
    one, other = KeyedUniform(3, 0, 0, 6), KeyedUniform(3, 0, 0, 6)  # as docs/python.md has it
    drawn = [one.draw() for _ in range(3)]
    assert other.draw() == drawn[0]
    assert other.between(-2, 6) == -2 + 8 * drawn[1]
    assert other.below(128) == int(drawn[2] * 128)


def test_what_an_own_optimizer_keeps_is_known_before_a_run():
    lion = OptimConfig(name="tests.parts.lion", betas=(0.9, 0.99))
    assert state_types(lion) == {"momentum": torch.float32}
    assert state_types(OptimConfig(name="tests.parts.adamw")) == state_types(OptimConfig())


def test_a_refused_step_of_an_own_optimizer_changes_nothing():
    model = parts.ConvNet(2, (8, 8))
    optimizer: Any = build_optimizer(model, OptimConfig(name="tests.parts.lion"))
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    before = [p.detach().clone() for p in model.parameters()]
    for refused in (1.0, 0.0):
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        for p in model.parameters():
            p.grad = torch.full_like(p, float("nan") if refused else 1.0)
        optimizer.found_inf = torch.tensor(refused)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) is bool(refused)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
