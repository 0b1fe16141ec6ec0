"""The teacher of a distilled training: its weights, its outputs, and the loss against them."""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_ray.checkpoints.init_weights import initialize_weights, meta_state_of, planned_load
from vit_ray.config import Recipe
from vit_ray.config.training_sections import DistillConfig
from vit_ray.models import build_model
from vit_ray.models.flops import forward_macs, training_macs
from vit_ray.models.layers import Head
from vit_ray.own_parts import is_own


class Teacher:
    """The teacher model in evaluation mode, without gradients; and sums of a run's two losses."""

    def __init__(
        self, model: nn.Module, precision: str, device: torch.device, digest: str = ""
    ) -> None:
        self.digest = digest
        """Its weights' `digest_of`."""
        self.model = model.to(device).eval().requires_grad_(False)
        if precision == "bf16":
            heads = [module for module in model.modules() if isinstance(module, Head)]
            exact = [head.bias.detach().clone() for head in heads]
            model.to(torch.bfloat16)
            for head, bias in zip(heads, exact, strict=True):
                head.exact_bias = bias
        self._sums = torch.zeros(2, device=device)
        self._count, self._step = 0, -1

    @torch.no_grad()
    def outputs(self, images: Tensor, kind: str) -> Tensor:
        """fp32 logits (B, K) of images in the student's normalization, or features (B, T)."""
        model = self.model
        found: Tensor = model.features(images) if kind == "features" else model(images)  # type: ignore[operator]
        return found.float()

    def note(self, label_losses: Tensor, teacher_losses: Tensor, step: int) -> None:
        """Keep the two losses (B,) of a micro-batch, next to the others of its step."""
        if step != self._step:
            self._step = step
            self.take_losses()
        losses = torch.stack([label_losses.detach(), teacher_losses.detach()])
        self._sums += losses.mean(1)
        self._count += 1

    def take_losses(self) -> tuple[Tensor, int]:
        """Sums of the two losses over the last step's micro-batches, and their number."""
        taken = self._sums.clone(), self._count
        self._sums.zero_()
        self._count = 0
        return taken


def teacher_losses(config: DistillConfig, answers: Tensor, taught: Tensor) -> Tensor:
    """Loss of each image, float32 (B,), between the student's and the teacher's answers.

    Args:
        answers: logits (B, K), or projected features (B, T).
        taught: from `Teacher.outputs`.
    """
    answers = answers.float()
    if config.kind == "features":
        return 1.0 - F.cosine_similarity(answers, taught)
    if config.kind == "hard":
        return F.cross_entropy(answers, taught.argmax(dim=1), reduction="none")
    student, teacher = (F.log_softmax(x / config.temperature, dim=1) for x in (answers, taught))
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(dim=1)
    return divergence * config.temperature**2


def check_teacher(recipe: Recipe, num_classes: int) -> tuple[int, bool] | None:
    """Check the teacher's weights by names and shapes.

    Returns:
        Classes of the model to load them into, and whether they have a head; None without a
        teacher.

    Raises:
        ValueError: they do not exist, do not fit `distill.model` at the student's image size, or
            lack logits of the data set's classes that the student is to learn.
    """
    config = recipe.distill
    if config is None:
        return None
    setting = f"distill.teacher={config.teacher}"
    try:
        weights = meta_state_of(config.teacher)
        built_for, has_head = weights.num_classes or num_classes, weights.num_classes is not None
        report = planned_load(config.model, built_for, config.teacher, not has_head, "bilinear")
    except ValueError as error:
        raise ValueError(f"distill.teacher: {error}") from None
    classes = weights.num_classes or "no"
    if config.kind != "features" and classes != num_classes:
        raise ValueError(
            f"{setting} has {classes} classes, and the data set has {num_classes}; fine-tune the "
            "teacher on this data set first, or set distill.kind=features"
        )
    height, width = recipe.model.sides
    if weights.sides not in (None, recipe.model.sides) or report.grids is not None:
        trained = f" of {'x'.join(map(str, weights.sides))}" if weights.sides else ""
        raise ValueError(
            f"{setting} was trained on images of another size{trained}, and the student sees "
            f"{height}x{width}; set model.image_size to the teacher's size, or fine-tune the "
            "teacher at the student's"
        )
    if new := [name for name in report.new if not name.startswith("head.")]:
        raise ValueError(f"{setting} has no {', '.join(new)}; describe its model in distill.model")
    return built_for, has_head


def load_teacher(recipe: Recipe, num_classes: int, device: torch.device) -> Teacher | None:
    """The recipe's teacher with its weights; None without one.

    Raises:
        ValueError: as `check_teacher`.
    """
    checked, config = check_teacher(recipe, num_classes), recipe.distill
    if checked is None or config is None:
        return None
    built_for, has_head = checked
    model = _built(config, built_for)
    initialize_weights(model, config.teacher, new_head=not has_head)
    return Teacher(model, recipe.train.precision, device, digest_of(model))


def unread_teacher(recipe: Recipe, num_classes: int, device: torch.device) -> Teacher | None:
    """The same with random weights, for measuring memory and time."""
    if recipe.distill is None:
        return None
    with device:
        model = _built(recipe.distill, num_classes)
    return Teacher(model, recipe.train.precision, device)


def teacher_macs(recipe: Recipe, num_classes: int, *, is_pruned: bool) -> int:
    """Multiply-adds of the teacher's forward pass of one image; 0 without a teacher.

    Args:
        is_pruned: as computed; otherwise by the paper's count (`models/flops.py`).
    """
    if recipe.distill is None:
        return 0
    model = recipe.distill.model
    of_model = model.name, num_classes, model.image_size
    if is_pruned and not is_own(model.name):
        return training_macs(*of_model, **model.options()).forward
    return forward_macs(*of_model, **model.options())


def teacher_width(config: DistillConfig) -> int:
    """The features that its head gets."""
    with torch.device("meta"):
        return int(_built(config, 1).head.in_features)  # type: ignore[union-attr,arg-type]


def changed_teacher(recipe: Recipe, teacher: Teacher | None, before: str) -> str | None:
    """Why a checkpoint's run cannot be resumed with this teacher; None if it can.

    Args:
        before: digest of the teacher that the run was trained with; empty without one.
    """
    if teacher is None or before in ("", teacher.digest) or recipe.resume == "changed":
        return None
    assert recipe.distill is not None
    return (
        f"distill.teacher={recipe.distill.teacher} has other weights (digest {teacher.digest}) "
        f"than the run was trained with (digest {before}); restore the file, or set resume=changed "
        "to learn from the new ones"
    )


def digest_of(model: nn.Module) -> str:
    """16 hexadecimal digits of SHA-256 over the names and fp32 values of a model's state."""
    digest = hashlib.sha256()
    for name, values in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(values.detach().cpu().float().contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()[:16]


def _built(config: DistillConfig, num_classes: int) -> nn.Module:
    model = config.model
    return build_model(model.name, num_classes, model.image_size, **model.options())
