"""Runs of the engine on small random batches, as the ranks of a test execute them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tests.training.ranks import run_ranks
from vit_ray import trust_modules
from vit_ray.checkpoints.checkpoint import Position, Progress
from vit_ray.checkpoints.checkpoint_writer import CheckpointWriter
from vit_ray.checkpoints.run_checkpoints import newest_checkpoint
from vit_ray.config.training_sections import CheckpointConfig, OptimConfig, TrainConfig
from vit_ray.models import build_model
from vit_ray.storage import locate
from vit_ray.training.engine import DeepSpeedEngine
from vit_ray.training.objective import classification_loss, freeze, normalize
from vit_ray.worker.saving import gather_by_own_group

GLOBAL_BATCH = 8
# ZeRO 3 puts its own in place for the rest of the process, whose sums are taken in another order.
PLAIN_LINEAR = torch.nn.functional.linear
OPTIM = OptimConfig(name="adamw", learning_rate=1e-2, weight_decay=0.1, clip_norm=1.0)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


class Run(NamedTuple):
    """What a run of some steps came to."""

    losses: list[float]
    averaged: torch.Tensor
    """Logits of `IMAGES` with the averaged weights, after the last step."""


def loss_of(train: TrainConfig) -> Any:
    def loss(module: Any, images: torch.Tensor, labels: torch.Tensor, *_: Any) -> torch.Tensor:
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        return classification_loss(module(normalize(images, dtype)), labels, train).mean()

    return loss


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (GLOBAL_BATCH, 8, 8, 3), generator=generator, dtype=torch.uint8)
    return images, torch.randint(0, 5, (GLOBAL_BATCH, 1), generator=generator)


def small_model(name: str = "ViT") -> torch.nn.Module:
    torch.manual_seed(0)
    # Odd sizes: nothing divides evenly by the ranks.
    sizes = {"depth": 2, "width": 30, "mlp_dim": 50, "num_heads": 3, "patch_size": 4}
    return build_model(name, 5, image_size=8, head_bias=-1.0, **sizes)


def plain_torch(
    model: torch.nn.Module, steps: int, frozen: Sequence[str] = ()
) -> Iterator[tuple[torch.nn.Module, float]]:
    """As `OPTIM` says, without this package: the model after each step, and the step's loss."""
    groups = []
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad_(False)
            continue
        decays = parameter.ndim > 1 and not name.startswith(("class_token", "positions"))
        groups.append({"params": [parameter], "weight_decay": 0.1 * decays})
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    for step in range(steps):
        images, labels = batch(step)
        loss = loss_of(TrainConfig(precision="fp32"))(model, images, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([group["params"][0] for group in groups], 1.0)
        optimizer.step()
        yield model, loss.item()


def build_engine(
    train: TrainConfig, world_size: int, micro: int, optim: Any = OPTIM, model: Any = None
) -> DeepSpeedEngine:
    torch.nn.functional.linear = PLAIN_LINEAR
    model = model or small_model()
    freeze(model, optim.frozen)
    return DeepSpeedEngine(
        model, train, optim, micro_batch_size=micro,
        accumulation_steps=GLOBAL_BATCH // (micro * world_size), loss_function=loss_of(train),
    )  # fmt: skip


def optim_of(config: dict[str, Any]) -> OptimConfig:
    trust_modules("tests.parts")
    return OptimConfig.model_validate(config["optim"]) if "optim" in config else OPTIM


def run_steps(engine: DeepSpeedEngine, first: int, last: int, micro: int) -> list[float]:
    """Mean losses of steps [first, last) on this rank's share of each global batch."""
    share = GLOBAL_BATCH // engine.world_size
    losses = []
    for step in range(first, last):
        samples = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        mine = slice(engine.rank * share, (engine.rank + 1) * share)
        parts = (part[mine].to(engine.device).split(micro) for part in (*batch(step), samples))
        total = sum(engine.backward(*piece, step) for piece in zip(*parts, strict=True))
        engine.step(1e-2)
        mean = torch.as_tensor(total) * micro / share
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / engine.world_size)
    return losses


def position(engine: DeepSpeedEngine, step: int) -> Position:
    return Position(
        Progress(step=step), applied_steps=engine.state.applied_steps,
        samples_seen=step * GLOBAL_BATCH, global_batch_size=GLOBAL_BATCH,
        shapes=engine.state.shapes, recipe={}, data_fingerprint="",
    )  # fmt: skip


def finished(engine: DeepSpeedEngine, losses: list[float]) -> Run:
    with engine.averaged():
        run = Run(losses, engine.predict(IMAGES.to(engine.dtype))[1])
    assert engine._engine.training  # again
    engine.close()
    return run


def refuse(*event: object) -> None:
    raise AssertionError(f"a save has failed: {event}")


def straight_and_saved(rank: int, configs: list[dict[str, Any]], folder: str) -> dict[str, Run]:
    """For each config: a run of 5 steps, saved after 2; the checkpoint lies in folder/NAME.

    It is written from the memory of a snapshot of the first weights.
    """
    world_size = torch.distributed.get_world_size()
    results = {}
    for config in configs:
        name, micro = config["name"], config["micro"]
        train = TrainConfig.model_validate(config["train"])
        engine = build_engine(train, world_size, micro, optim_of(config))
        memory = engine.state.snapshot(position(engine, 0)).memory
        losses = run_steps(engine, 0, 2, micro)
        taken = engine.state.snapshot(position(engine, 2), memory)
        assert all(taken.memory[part] is memory[part] for part in memory)
        run, gather = locate(folder).child(name), gather_by_own_group()
        CheckpointWriter(run, CheckpointConfig(), refuse, None, gather).write(taken)
        torch.distributed.barrier()
        losses += run_steps(engine, 2, 5, micro)
        results[name] = finished(engine, losses)
    return results


def resumed(rank: int, configs: list[dict[str, Any]], folder: str) -> dict[Any, Run]:
    """For each config: steps 2 to 4 after resuming from folder/FROM, over other first weights."""
    world_size = torch.distributed.get_world_size()
    results = {}
    for config in configs:
        train = TrainConfig.model_validate(config["train"])
        checkpoint = newest_checkpoint(locate(folder).child(config["from"]))
        assert checkpoint is not None
        model = small_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)
        engine = build_engine(train, world_size, config["micro"], optim_of(config), model)
        assert not engine.state.restore(checkpoint)
        losses = run_steps(engine, 2, 5, config["micro"])
        results[config["name"], config["from"]] = finished(engine, losses)
    return results


class StraightRuns:
    """Of 5 steps, each trained when it is first asked for; as saved after 2 they lie in
    folder/WORLD/NAME.
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._runs: dict[tuple[int, str], Run] = {}

    def of(self, world: int, configs: Iterable[dict[str, Any]]) -> dict[str, Run]:
        names = {config["name"]: config for config in configs}
        new = [config for name, config in names.items() if (world, name) not in self._runs]
        if new:
            found = run_ranks(world, straight_and_saved, new, f"{self._folder}/{world}")[0]
            self._runs |= {(world, name): run for name, run in found.items()}
        return {name: self._runs[world, name] for name in names}
