"""`vit-ray explain RUN step=k`: which images, or what else, made the gradient of a step large.

It reads the newest checkpoint at or before the step and three batches; no Ray, no cluster.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from vit_ray.checkpoints.checkpoint import Checkpoint, open_checkpoint
from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.commands.trained.batch import new_folder
from vit_ray.commands.trained.replay_steps import replay_steps
from vit_ray.config import Recipe
from vit_ray.evaluate.contact_sheet import sheet
from vit_ray.launch.inputs.seen_batch import SeenBatches, SeenImage
from vit_ray.launch.named_run import NamedRun, find_run
from vit_ray.report.tables import Column, Table
from vit_ray.storage import locate
from vit_ray.tracking.metrics_log import metrics_log_path
from vit_ray.train.gradient_shares import (
    SPIKE_FACTOR,
    Columns,
    StepGradient,
    find_culprits,
    second_moment_rms,
    step_gradient,
)
from vit_ray.train.loop import as_tensor
from vit_ray.train.objective import build_objective, make_image_losses
from vit_ray.train.optim.schedule import lr_at
from vit_ray.train.spikes import losses_file

SAME_LOSS: Final = 1e-4
"""Rounding of fp32 between the passes of a training and of this command."""
NUM_SHOWN: Final = 8
"""Images with the largest shares to show, or all images that make the spike."""
STALE_RMS: Final = 2.3
"""RMS of g / sqrt(v) above which Wortsman et al. (arXiv:2304.13013, section 3) saw spikes
follow."""


def explain_step(source: str, words: Sequence[str], out: str | None, replays: bool) -> int:
    """Print the verdict and what to do, and write the images with the largest shares.

    Args:
        source: a run, as `find_run` takes it.
        words: `step=k`, 0-based; and changes of the recipe, such as the present place of its data.
        out: folder to write; None for one named after the run and the step.
        replays: first train the steps between checkpoint and step again.

    Raises:
        ValueError: an argument is wrong, the run has no such step, or no checkpoint at or before
            it.
    """
    given = [word.partition("=")[2] for word in words if word.startswith("step=")]
    if len(given) != 1 or not given[0].isdecimal():
        raise ValueError(
            f"{f'step={given[-1]} is not a step' if given else 'no step is given'}; give the step "
            "to explain, counted from 0, such as step=1200"
        )
    run = find_run(source, [word for word in words if not word.startswith("step=")])
    (step,) = run.checked_steps(range(int(given[0]), int(given[0]) + 1))
    checkpoint = _checkpoint_before(run, step)
    batches = SeenBatches(run.resolved)
    steps = [one for one in (step, step - 1, step + 1) if 0 <= one < run.resolved.total_steps]
    if len(steps) == 1:
        raise ValueError(
            f"the run {run.recipe.name!r} has one step, and no other to compare it with"
        )
    groups, size = (sum(column) for column in zip(*map(batches.cost, steps), strict=True))
    reading = f"reads {groups:,} row groups, {size / 2**20:,.1f} MiB"
    print(f"{reading}; computes {len(steps)} batches", file=sys.stderr, flush=True)
    far = step - checkpoint.position.step
    if replays and far:
        images = far * run.recipe.train.global_batch_size
        print(
            f"first trains {far:,} steps again: {images:,} images on this machine's CPUs, "
            f"{far / len(steps):,.1f} times the rest of the work",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    folder = new_folder(out or f"{run.recipe.name}-explain-{step}")
    start = checkpoint  # from which a fork starts
    if replays and far:
        checkpoint = replay_steps(run, checkpoint, step, locate(str(folder)))
    exact = run.recipe.with_changes(train={"precision": "fp32", "activation_checkpointing": 0})
    model, second = _weights(run, exact, checkpoint)
    losses_of = make_image_losses(exact)
    columns: dict[int, Columns] = {}
    for one in steps:
        batch = batches.batch(one)
        pixels, labels, samples = (as_tensor(batch[key]) for key in ("image", "labels", "sample"))
        columns[one] = pixels, labels.long(), samples
    found = {one: step_gradient(model, losses_of, columns[one], one) for one in steps}

    def measure(places: list[int]) -> StepGradient:
        images, labels, samples = (column[places] for column in columns[step])
        return step_gradient(model, losses_of, (images, labels, samples), step)

    usual = max(found[one].norm for one in steps[1:])
    places = find_culprits(measure, found[step], usual, run.recipe.train.least_pass)
    limit = run.recipe.optim.clip_norm
    scale = min(1.0, limit / (found[step].norm + 1e-6)) if limit else 1.0
    rms = second_moment_rms(found[step].by_name, second, scale)
    _print_figures(run, checkpoint, found, rms, step)
    shown = places or torch.argsort(found[step].shares.abs(), descending=True)[:NUM_SHOWN].tolist()
    drawn = [batches.read(step, range(place, place + 1)) for place in shown]
    facts = [facts[0] for _, facts in drawn]
    _print_verdict(run, start, found, places, facts, rms, source)
    captions = [f"{found[step].shares[one.place]:.1%} {one.sample}" for one in facts]
    title = f"{run.recipe.name}, step {step}: largest shares of the gradient"
    sheet([pixels[0] for pixels, _ in drawn], captions, title).save(folder / "explain.png")
    kept = _kept_losses(run, step)
    of_step = found[step]
    of_images = (columns[step][2].tolist(), of_step.shares.tolist(), of_step.losses.tolist())
    titles = ("place", "sample", "share", "loss", "loss_when_it_happened")
    lines = [
        (place, sample, share, loss, kept.get(sample, ""))
        for place, (sample, share, loss) in enumerate(zip(*of_images, strict=True))
    ]
    table = Table(title, list(map(Column, titles)), lines)
    (folder / "images.csv").write_text(table.csv())
    if kept and checkpoint.position.step == step:
        print(likeness(found[step].losses.tolist(), columns[step][2].tolist(), kept))
    print(f"wrote {folder / 'explain.png'} and {folder / 'images.csv'}")
    return 0


def _checkpoint_before(run: NamedRun, step: int) -> Checkpoint:
    """The newest complete checkpoint with the weights before `step`, or before an earlier step."""
    there = list_checkpoints(locate(run.recipe.run_folder))
    for number, folder in there:
        checkpoint = open_checkpoint(folder) if number <= step else None
        if checkpoint is not None:
            return checkpoint
    steps = ", ".join(str(number) for number, _ in reversed(there)) or "none"
    raise ValueError(
        f"step={step}: the run {run.recipe.name!r} has no checkpoint at or before it (it has those "
        f"of steps {steps}); give a later step, or keep more with checkpoint.keep_every_steps"
    )


def _weights(
    run: NamedRun, exact: Recipe, checkpoint: Checkpoint
) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model whose gradients are measured, and Adam's second moment with bias correction.

    It is empty for other optimizers.

    Args:
        exact: the recipe in fp32.
    """
    recipe = run.recipe
    model = build_objective(exact, len(run.resolved.manifest.classes))
    missing = model.load_state_dict(checkpoint.weights(), strict=False)
    assert not missing.unexpected_keys, missing
    second: dict[str, Tensor] = {}
    if recipe.optim.name == "adamw" and "exp_avg_sq" in checkpoint.kinds():
        flat = {n: torch.zeros_like(p).view(-1) for n, p in model.named_parameters()}
        trained = {n: flat[n] for n, p in model.named_parameters() if p.requires_grad}
        checkpoint.fill(("exp_avg_sq", name, 0, values) for name, values in trained.items())
        correction = 1.0 - recipe.optim.betas[1] ** max(1, checkpoint.position.applied_steps)
        shapes = checkpoint.position.shapes
        second = {name: v.view(shapes[name]) / correction for name, v in trained.items()}
    return model.train(), second


def _print_figures(
    run: NamedRun,
    checkpoint: Checkpoint,
    found: dict[int, StepGradient],
    rms: dict[str, float],
    step: int,
) -> None:
    """The measurements for each step, and what the optimizer would do with them."""
    recipe, distance = run.recipe, step - checkpoint.position.step
    far = f", {distance:,} steps before" if distance else ", the weights of the step"
    print(f"weights of checkpoint {checkpoint.position.step}{far}, in fp32")
    print(f"{'step':>9} {'mean loss':>10} {'gradient norm':>14} {'largest share':>14}")
    for one in sorted(found):
        loss, norm, shares = found[one].losses.mean(), found[one].norm, found[one].shares
        print(f"{one:>9,} {loss:>10.4g} {norm:>14.4g} {shares.max():>14.1%}")
    of_step = found[step]
    rate = lr_at(step, recipe.optim, run.resolved.total_steps)
    parts = [f"learning rate {rate:.3g}"]
    if of_step.largest_logit is not None:
        parts.append(f"largest attention logit {of_step.largest_logit:.3g} ({of_step.logit_layer})")
    if rms:
        name, largest = next(iter(rms.items()))
        parts.append(f"rms of g / sqrt(v) at most {largest:.3g} ({name}; stale above {STALE_RMS})")
    print("; ".join(parts))


def _print_verdict(
    run: NamedRun,
    checkpoint: Checkpoint,
    found: dict[int, StepGradient],
    places: list[int] | None,
    facts: Sequence[SeenImage],
    rms: dict[str, float],
    source: str,
) -> None:
    step = facts[0].step
    size, others = len(found[step].shares), sorted(one for one in found if one != step)
    compared = " and ".join(map(str, others))
    usual = max(found[one].norm for one in others)
    factor = found[step].norm / usual if usual else float("inf")
    if places is None:
        print(
            f"verdict: the gradient is {factor:.1f} times that of step {compared}, because of more "
            "than a quarter of the images: the whole batch is unusual, or it is for these weights"
        )
    elif places:
        print(
            f"verdict: {len(places)} of {size} images make the gradient {factor:.1f} times that of "
            f"step {compared}; without them it is not larger"
        )
    else:
        print(
            f"verdict: no image is the cause; with these weights the gradient is {factor:.1f} "
            f"times that of step {compared}, and a spike is {SPIKE_FACTOR:g} times or more"
        )
    if not places and (stale := [f"{n} ({v:.1f})" for n, v in rms.items() if v > STALE_RMS]):
        print(
            f"the second moment is out of date in {', '.join(stale[:NUM_SHOWN])}: the update there "
            "is too large; lower optim.betas[1] or optim.learning_rate"
        )
    for one in facts:
        names = ", ".join(run.resolved.manifest.classes[label] for label in one.labels)
        share, loss = found[step].shares[one.place], found[step].losses[one.place]
        print(f"  sample {one.sample} ({one.key}, {names}): share {share:.1%}, loss {loss:.3g}")
    if places:
        excluded = f"data.exclude={sorted({one.sample for one in facts})}".replace(" ", "")
        origin = f"step={checkpoint.position.step} name={run.recipe.name}-without"
        print(f"{excluded} leaves them out; to train without them from this checkpoint on, run:")
        print(f"  vit-ray fork {source} {origin} {excluded}")


def _kept_losses(run: NamedRun, step: int) -> dict[int, float]:
    """Loss of each sample in the run itself, if this machine recorded it; MLflow has it as well."""
    file = metrics_log_path(run.recipe.run_folder).parent / losses_file(step)
    if not file.exists():
        return {}
    table = pq.read_table(file)
    of_step = np.asarray(table["step"]) == step
    samples, losses = (np.asarray(table[name])[of_step].tolist() for name in ("sample", "loss"))
    return dict(zip(samples, losses, strict=True))


def likeness(losses: Sequence[float], samples: Sequence[int], kept: Mapping[int, float]) -> str:
    """Whether these are the run's weights at this step, judged by its losses."""
    pairs = zip(losses, samples, strict=True)
    off = max((abs(loss - kept[one]) for loss, one in pairs if one in kept), default=math.inf)
    if off < SAME_LOSS:
        return "the losses of its images equal those of the run: these are its weights"
    return (
        f"the losses of its images differ from those of the run by up to {off:.2g}: these are not "
        "exactly its weights; that would need the run's precision, threads, workers and images per "
        "pass"
    )
