"""Recipes of the field: they load, cost what their headers say, and are their authors'."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.jobs.headers import commands, header, stated_cost
from vit_ray.commands.plan import data_facts
from vit_ray.config import load_recipe
from vit_ray.data.augment import augmentation_of
from vit_ray.data.randaugment import RandAugment

FIELD = ROOT / "jobs" / "recipes" / "field"


@pytest.mark.parametrize("path", sorted(FIELD.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_header_says_where_from_what_differs_and_what_it_costs(path):
    text = header(path)
    assert re.search(r"Paper: arXiv:\d{4}\.\d{5}", text)
    assert "Left open: " in text
    assert "Differs: " in text
    facts = data_facts(load_recipe(path))
    exaflops, hours = stated_cost(path)
    assert exaflops == pytest.approx(facts.exaflops, rel=1e-3)
    assert hours == pytest.approx(facts.exaflops * 1e18 / (0.4 * 989e12) / 3600, rel=1e-3)
    assert commands(path)


def test_augreg_is_as_its_published_run_is_named():
    # B_16-i1k-300ep-lr_0.001-aug_strong2-wd_0.1-do_0.1-sd_0.1; aug_strong2 by big_vision's vit_i1k.
    recipe = load_recipe(FIELD / "augreg_b16_imagenet.yaml")
    assert recipe.model.name == "ViT-B/16"
    assert recipe.plan.num_images == 1_281_167
    assert data_facts(recipe).total_steps == round(300 * 1_281_167 / 4096)
    optim, model, train = recipe.optim, recipe.model, recipe.train
    assert (optim.learning_rate, optim.weight_decay, optim.clip_norm) == (1e-3, 0.1, 1.0)
    assert (optim.schedule, optim.warmup_steps) == ("cosine", 10_000)
    assert (model.dropout, model.stochastic_depth, model.representation) == (0.1, 0.1, True)
    assert (train.mixup, train.cutmix, train.loss, train.label_smoothing) == (0.8, 0, "sigmoid", 0)
    assert model.head_bias == -6.9
    augment = augmentation_of(recipe.model, recipe.data.augment)
    assert augment.randaugment == RandAugment(2, 20.0)
    assert augment.min_area == 0.05


def test_the_plain_baseline_is_as_its_authors_configuration():
    # google-research/big_vision, configs/vit_s16_i1k.py.
    recipe = load_recipe(FIELD / "vit_s16_imagenet.yaml")
    optim, model, train = recipe.optim, recipe.model, recipe.train
    assert data_facts(recipe).total_steps == round(90 * 1_281_167 / 1024)
    assert (model.name, model.pool, model.positions) == ("ViT-S/16", "gap", "sincos_2d")
    assert (model.representation, model.dropout, model.head_bias) == (True, 0.0, 0.0)
    assert (optim.name, optim.learning_rate, optim.clip_norm) == ("adamw", 1e-3, 1.0)
    assert optim.weight_decay * optim.learning_rate == pytest.approx(1e-4)
    assert (optim.schedule, optim.warmup_steps) == ("cosine", 10_000)
    assert (train.loss, train.label_smoothing, train.mixup) == ("softmax", 0.0, 0.2)
    augment = augmentation_of(model, recipe.data.augment)
    assert augment.randaugment == RandAugment(2, 10.0)
    assert (augment.kind, augment.min_area, augment.flip) == ("inception_crop", 0.05, True)
    assert augmentation_of(model, recipe.data.eval_augment).resize == 256
