"""What `--dry-run` says beyond the resolved recipe: steps, batches, memory, exaFLOPs."""

from __future__ import annotations

from vit_ray.config import Recipe, accumulation_steps
from vit_ray.launch.preflight import plan_run
from vit_ray.launch.sweep import sweep_of, trial_recipe
from vit_ray.models.flops import forward_macs
from vit_ray.train.footprint import estimate_memory
from vit_ray.train.worker import micro_batch_size


def describe_training(recipe: Recipe) -> str:
    """Steps, batch, memory and compute of a training; reads the manifest and starts nothing."""
    plan = plan_run(recipe)
    batch = recipe.train.global_batch_size
    macs = forward_macs(
        recipe.model.name,
        plan.manifest.num_classes,
        recipe.model.image_size,
        **recipe.model.options(),
    )
    lines = [
        f"images in the training set   {plan.num_images}",
        f"steps                        {plan.total_steps}",
        f"epochs                       {plan.total_steps * batch / plan.num_images:.2f}",
    ]
    for world_size in recipe.workers.sizes:
        micro = micro_batch_size(recipe, world_size)
        passes = accumulation_steps(batch, micro, world_size)
        lines.append(
            f"batch with {world_size} workers         {batch} = {world_size} workers x {micro} "
            f"per pass x {passes} passes"
        )
        memory = estimate_memory(recipe, plan.manifest.num_classes, micro, world_size)
        lines.append(f"memory per worker            {memory}")
    exaflops = 6 * macs * plan.total_steps * batch / 1e18
    lines.append(f"forward pass                 {macs / 1e9:.4g} GMAC per image")
    lines.append(f"training                     {exaflops:.4g} exaFLOPs")
    return "\n".join(lines)


def describe_sweep(recipe: Recipe) -> str:
    """The trials of a sweep, and the plan of one of them."""
    config = sweep_of(recipe)
    rates = ", ".join(f"{rate:g}" for rate in config.learning_rates)
    trial = trial_recipe(recipe, config.learning_rates[0])
    return (
        f"{len(config.learning_rates)} trials (learning rates {rates}), then {config.seeds} "
        f"runs on the full training set\n\none trial:\n{describe_training(trial)}"
    )
