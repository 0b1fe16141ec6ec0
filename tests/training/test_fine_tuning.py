"""Parts that are frozen: which are refused before anything starts."""

from typing import Any

import pytest

from tests.recipes import recipe_with
from vit_ray.launch import prepared_run
from vit_ray.launch.resolved_run import check_head_is_trained, check_model

FIXED = ["embedding", "class_token", "positions", "blocks", "norm"]


def tuning_recipe(frozen: list[str], **model: Any) -> Any:
    optim = {"steps": 3, "frozen": frozen}
    return recipe_with(model=model or {"name": "ViT-Ti/16"}, optim=optim)


@pytest.mark.parametrize(
    ("frozen", "model", "word"),
    [
        (["stem"], {}, r"optim\.frozen: 'stem'.*embedding, class_token, pos"),
        (["blocks.9-12"], {}, r"'blocks.9-12'.*blocks\.0-11, norm, head"),
        (["blocks.5-4"], {}, "'blocks.5-4'"),
        (["head.0-1"], {}, "'head.0-1'"),
        (["class_token"], {"name": "ViT-B/16", "pool": "gap"}, "'class_token'"),
        (["blocks"], {"name": "R50x1"}, r"root, units\.0-15, norm, head"),
        ([*FIXED, "head"], {}, "nothing would be trained"),
    ],
)
def test_wrong_parts_are_refused_before_anything_is_opened(frozen, model, word):
    with pytest.raises(ValueError, match=word):
        check_model(tuning_recipe(frozen, **model))


@pytest.mark.parametrize(
    ("kind", "init_from"), [("finetune", "runs/a"), ("sweep_trial", "runs/a"), ("pretrain", None)]
)
def test_a_new_head_that_is_frozen_is_refused(kind, init_from):
    chosen = tuning_recipe(["norm", "head"]).with_changes(init_from=init_from)
    with pytest.raises(ValueError, match="remove head"):
        check_head_is_trained(chosen, kind)
    check_head_is_trained(chosen.with_changes(optim={"frozen": ("norm",)}), kind)
    # The objective has a head of its own, which is not a part of the model.
    check_head_is_trained(chosen.with_changes(train={"loss": "masked_patch"}), kind)
    check_head_is_trained(chosen.with_changes(init_from="runs/a"), "pretrain")


def test_it_is_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(prepared_run, "resolve_run", lambda recipe: None)
    refused = prepared_run.prepared_training(tuning_recipe(["norm", "head"]), "pretrain")
    with pytest.raises(ValueError, match="remove head"), refused:
        pass
