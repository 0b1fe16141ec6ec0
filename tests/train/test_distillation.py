"""Learning from a teacher: the losses by hand, the teacher's weights, and what they cost."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.recipes import recipe_with
from tests.trained_runs import write_run
from vit_ray.config import Recipe
from vit_ray.models import build_model
from vit_ray.train.distillation import (
    Teacher,
    changed_teacher,
    check_teacher,
    load_teacher,
)
from vit_ray.train.memory.memory_estimate import (
    estimate_memory,
    measure_activations,
    run_exaflops,
    step_macs,
)
from vit_ray.train.mixing import draw_mixing, mix_images, partners
from vit_ray.train.objective import build_objective, make_loss, normalize

CPU = torch.device("cpu")
CLASSES, BATCH, STEPS, RATE = 3, 4, 4, 0.5
STUDENT = {"name": "ViT", "image_size": 8, "depth": 1, "width": 16, "mlp_dim": 16, "num_heads": 2}
STUDENT |= {"patch_size": 4}
TEACHER = {**STUDENT, "depth": 2, "width": 24, "dropout": 0.3}


def recipe_of(folder: Path, train: Any = None, student: Any = None, **distill: Any) -> Recipe:
    return recipe_with(
        model={**STUDENT, **(student or {})},
        distill={"teacher": str(folder / "teacher"), "model": TEACHER, **distill},
        train={"precision": "fp32", "global_batch_size": BATCH, **(train or {})},
        optim={"steps": STEPS},
    )


def filled(recipe: Recipe, model: Any, num_classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    if isinstance(model, dict):
        options = {k: v for k, v in model.items() if k not in ("name", "image_size")}
        model = build_model(model["name"], num_classes, model["image_size"], **options)
    for name, parameter in model.named_parameters():
        if "head" in name:  # of zeros, which would teach nothing
            nn.init.normal_(parameter)
    return model


def write_teacher(folder: Path, **told: Any) -> nn.Module:
    teacher = filled(None, {**TEACHER, **told})
    write_run(folder / "teacher", teacher, **{**TEACHER, **told})
    return teacher.eval()


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (BATCH, 8, 8, 3), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, CLASSES, (BATCH, 1), generator=generator)
    return images, labels, torch.arange(BATCH) + step * BATCH


def soft(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """Hinton et al., arXiv:1503.02531, section 2: cross-entropy of softened targets, times T^2.

    Less the targets' own entropy, so that a student that is its teacher has none.
    """
    target = (teacher / temperature).exp()
    target = target / target.sum(1, keepdim=True)
    answer = (student / temperature).exp()
    answer = answer / answer.sum(1, keepdim=True)
    return temperature**2 * (target * (target / answer).log()).sum(1).mean()


def by_hand(recipe: Recipe, student: Any, teacher: Any, seen: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch that is not mixed."""
    distill = recipe.distill
    assert distill is not None
    if distill.kind == "features":
        features = student.model.features(seen)
        logits = student.model.head(features)
        ours, theirs = student.projection(features), teacher.features(seen).detach()
        lengths = ours.square().sum(1).sqrt() * theirs.square().sum(1).sqrt()
        taught = (1 - (ours * theirs).sum(1) / lengths).mean()
    else:
        logits = answers = student(seen)
        if recipe.model.distillation_token:
            logits, answers = student(seen, by_token=True)
        theirs = teacher(seen).detach()
        taught = (
            -torch.log_softmax(answers, 1)[range(BATCH), theirs.argmax(1)].mean()
            if distill.kind == "hard"
            else soft(answers, theirs, distill.temperature)
        )
    own = -torch.log_softmax(logits, 1)[range(BATCH), labels[:, 0]].mean()
    return (1 - distill.weight) * own + distill.weight * taught


@pytest.mark.parametrize(
    ("distill", "model"),
    [
        ({"kind": "logits", "temperature": 2.0, "weight": 0.3}, {}),
        ({"kind": "hard"}, {"distillation_token": True}),
        ({"kind": "logits"}, {"distillation_token": True}),
        ({"kind": "features", "weight": 0.7}, {}),
    ],
    ids=["logits", "DeiT's", "soft token", "features"],
)
def test_steps_are_those_of_plain_torch(
    tmp_path: Path, distill: dict[str, Any], model: dict[str, Any]
) -> None:
    theirs = write_teacher(tmp_path)
    recipe = recipe_of(tmp_path, student=model, **distill)
    teacher = load_teacher(recipe, CLASSES, CPU)
    assert teacher is not None
    loss_of, losses, expected = make_loss(recipe, teacher=teacher), [], []
    for found in (losses, expected):
        torch.manual_seed(2)
        student = filled(recipe, build_objective(recipe, CLASSES))
        optimizer = torch.optim.SGD(student.parameters(), lr=RATE)
        for step in range(STEPS):
            images, labels, samples = batch(step)
            if found is losses:
                loss = loss_of(student, images, labels, samples, step)
            else:
                seen = images.permute(0, 3, 1, 2) / 127.5 - 1
                loss = by_hand(recipe, student, theirs, seen, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert len(set(losses)) == STEPS
    (of_labels, of_teacher), count = teacher.take_losses()
    weight = recipe.distill.weight if recipe.distill else 0.0
    total = (1 - weight) * of_labels + weight * of_teacher
    assert float(total) / count == pytest.approx(losses[-1], rel=1e-4)
    assert teacher.take_losses()[1] == 0


def test_the_teacher_sees_the_mixed_images(tmp_path: Path) -> None:
    """As "a good teacher is patient and consistent", arXiv:2106.05237."""
    theirs = write_teacher(tmp_path)
    recipe = recipe_of(tmp_path, train={"mixup": 0.8, "cutmix": 1.0}, weight=1.0)
    student = filled(recipe, build_objective(recipe, CLASSES))
    images, labels, samples = batch(0)
    mixing = draw_mixing(samples, (8, 8), recipe.train, recipe.seed, 3)
    seen = mix_images(normalize(images, torch.float32), mixing.weight)
    assert not torch.allclose(seen, normalize(images, torch.float32))
    loss = make_loss(recipe, teacher=load_teacher(recipe, CLASSES, CPU))
    found = loss(student, images, labels, samples, 3)
    with torch.no_grad():
        torch.testing.assert_close(found, soft(student(seen), theirs(seen), 1.0))
    # Half of the loss is still that of the mixed labels.
    half = recipe_of(tmp_path, train={"mixup": 0.8, "cutmix": 1.0})
    both = make_loss(half, teacher=load_teacher(half, CLASSES, CPU))
    logits = student(seen)
    own = F.cross_entropy(logits, labels[:, 0], reduction="none")
    others = F.cross_entropy(logits, partners(labels)[:, 0], reduction="none")
    of_labels = torch.lerp(others, own, mixing.own_share).mean()
    expected = (of_labels + found) / 2
    torch.testing.assert_close(both(student, images, labels, samples, 3), expected)


def test_the_teacher_has_no_dropout_gradient_or_part_in_the_students_state(tmp_path: Path) -> None:
    theirs = write_teacher(tmp_path)
    recipe = recipe_of(tmp_path, train={"precision": "bf16"})
    teacher = load_teacher(recipe, CLASSES, CPU)
    assert teacher is not None
    images = normalize(batch(0)[0], torch.bfloat16)
    found = teacher.outputs(images, "logits")
    assert torch.equal(found, teacher.outputs(images, "logits"))
    assert {p.dtype for p in teacher.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in teacher.model.parameters())
    exact = theirs(images.float()).detach()
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
    plain = build_objective(recipe.with_changes(distill=None), CLASSES)
    assert build_objective(recipe, CLASSES).state_dict().keys() == plain.state_dict().keys()


def test_a_student_of_features_is_read_without_its_projection(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, kind="features")
    student: Any = filled(recipe, build_objective(recipe, CLASSES))
    write_run(tmp_path / "teacher", student, **STUDENT)
    again = recipe_of(tmp_path, kind="logits").with_changes(
        distill={"model": STUDENT, "teacher": str(tmp_path / "teacher")}
    )
    teacher = load_teacher(again, CLASSES, CPU)
    assert teacher is not None
    images = normalize(batch(0)[0], torch.float32)
    torch.testing.assert_close(teacher.outputs(images, "logits"), student(images).detach())


# What is refused.


def test_a_teacher_of_other_classes_teaches_features_alone(tmp_path: Path) -> None:
    write_teacher(tmp_path)
    with pytest.raises(ValueError, match="has 3 classes, and the data set has 7; fine-tune the"):
        check_teacher(recipe_of(tmp_path), 7)
    assert check_teacher(recipe_of(tmp_path, kind="features"), 7) == (3, True)


def test_a_teacher_of_another_size_is_refused(tmp_path: Path) -> None:
    write_teacher(tmp_path, image_size=12)
    with pytest.raises(ValueError, match=r"of another size of 12x12, and the student sees 8x"):
        check_teacher(recipe_of(tmp_path), CLASSES)
    with pytest.raises(ValueError, match=r"distill.model.image_size=12: the teacher sees the stud"):
        recipe_of(tmp_path).with_changes(distill={"model": {**TEACHER, "image_size": 12}})


def test_another_model_than_the_teachers_is_refused(tmp_path: Path) -> None:
    write_teacher(tmp_path)
    recipe = recipe_of(tmp_path)
    with pytest.raises(ValueError, match=r"distill\.teacher: .*does not fit"):
        check_teacher(recipe.with_changes(distill={"model": {**TEACHER, "depth": 3}}), CLASSES)


@pytest.mark.parametrize(
    ("train", "model", "distill", "told"),
    [
        ({"loss": "masked_patch"}, {}, {}, "masked_patch, which has no logits"),
        ({}, {"distillation_token": True}, {"kind": "features"}, "features train no head"),
        (
            {},
            {"distillation_token": True},
            {"weight": 1.0},
            "weight=1 with model.distillation_token",
        ),
        ({}, {}, {"model": {**TEACHER, "num_heads": 7}}, r"distill\.model\.num_heads=7"),
    ],
)
def test_what_cannot_be_taught_is_refused(
    tmp_path: Path, train: Any, model: Any, distill: Any, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        recipe_of(tmp_path, train=train, student=model, **distill)


def test_a_changed_teacher_is_refused_on_resuming(tmp_path: Path) -> None:
    model = write_teacher(tmp_path)
    recipe = recipe_of(tmp_path)
    before = load_teacher(recipe, CLASSES, CPU)
    assert before is not None
    with torch.no_grad():
        next(model.parameters()).view(-1)[0].add_(1e-3)
    write_run(tmp_path / "other", model, **TEACHER)
    moved = recipe.with_changes(distill={"teacher": str(tmp_path / "other")})
    after = load_teacher(moved, CLASSES, CPU)
    assert changed_teacher(recipe, before, before.digest) is None
    assert changed_teacher(recipe, before, "") is None  # of a run that had none
    assert "than the run was trained with" in str(changed_teacher(moved, after, before.digest))
    assert changed_teacher(moved.with_changes(resume="changed"), after, before.digest) is None


# What it costs.


def test_the_teachers_forward_pass_is_counted(tmp_path: Path) -> None:
    teacher = write_teacher(tmp_path)
    recipe = recipe_of(tmp_path)
    alone = recipe.with_changes(distill=None)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        teacher(torch.zeros(1, 3, 8, 8))
    macs = counter.get_total_flops() // 2
    whole, part = step_macs(recipe, CLASSES), step_macs(alone, CLASSES)
    assert whole.forward - part.forward == macs
    assert whole.backward == part.backward
    more = run_exaflops(recipe, CLASSES, 1e12, 1) - run_exaflops(alone, CLASSES, 1e12, 1)
    assert more == pytest.approx(2 * macs / 1e6, rel=0.35)  # the paper's count leaves nothing out
    assert more >= 2 * macs / 1e6


@pytest.mark.parametrize(("precision", "size"), [("fp32", 4), ("bf16", 2)])
def test_the_teachers_memory_is_planned(tmp_path: Path, precision: str, size: int) -> None:
    recipe = recipe_of(tmp_path, train={"precision": precision})
    parameters = sum(p.numel() for p in filled(None, TEACHER).parameters())
    planned = estimate_memory(recipe, CLASSES, BATCH, 1)
    assert planned.teacher * 2**30 == parameters * size
    alone = recipe.with_changes(distill=None)
    assert estimate_memory(alone, CLASSES, BATCH, 1).teacher == 0.0
    # Its activations are gone when the backward pass begins.
    kept = measure_activations(recipe, CLASSES, BATCH).kept
    extra = kept - measure_activations(alone, CLASSES, BATCH).kept
    assert 0 <= extra < 2000


def test_teacher_is_no_part_of_a_plain_recipe() -> None:
    assert load_teacher(recipe_with(), CLASSES, CPU) is None
    assert Teacher(nn.Linear(1, 1), "fp32", CPU).digest == ""
