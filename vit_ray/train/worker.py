"""One Ray Train worker: asks Ray who it is, builds the engine, runs the loop.

Nothing else in this room knows Ray.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
from ray.train import CheckpointUploadMode
from torch import Tensor, nn

from vit_ray.config import Recipe
from vit_ray.config.training import accumulation_steps
from vit_ray.measure.devices import peak_flops
from vit_ray.measure.meters import Compute
from vit_ray.measure.profile import profiled
from vit_ray.models import build_model
from vit_ray.models.flops import forward_macs
from vit_ray.models.masked import MaskedPatchObjective
from vit_ray.models.weights.state_dicts import NewHead
from vit_ray.storage import locate
from vit_ray.train.checkpoint import (
    Checkpoint,
    Position,
    folder_name,
    newest_checkpoint,
    open_checkpoint,
)
from vit_ray.train.checkpoint_writer import CheckpointWriter
from vit_ray.train.collectives import all_max, all_rows, all_sum, from_first
from vit_ray.train.device_decode import DeviceDecoder
from vit_ray.train.engine import DeepSpeedEngine, LossFunction
from vit_ray.train.evaluation import measure_accuracy, measure_few_shot
from vit_ray.train.init_weights import initialize_weights
from vit_ray.train.loop import Batch, RankContext, as_tensor, run_training
from vit_ray.train.memory_estimate import largest_micro_batch
from vit_ray.train.micro_batch import CPU_MOST, lower_limit, micro_batch_size, read_limit
from vit_ray.train.objective import classification_loss, normalize
from vit_ray.train.prefetch import pin_batch, prefetch
from vit_ray.train.progress import Progress
from vit_ray.train.watchdog import Watchdog


@dataclass(frozen=True)
class TrainJob:
    """All that a worker needs to know; the driver makes it, Ray carries it."""

    recipe: Recipe
    kind: Literal["train", "evaluate"]
    num_classes: int
    num_images: int
    total_steps: int
    data_fingerprint: str
    run_folder: str
    new_head: NewHead
    """What `init_from` does about the head: as in `initialize_weights`."""
    few_shot_classes: int
    ray_ready_s: float
    """Unix time at which Ray was up, for the time to the first step."""
    recorder: Any
    """Actor handle: `metrics`, `event`, `poll`, `start_point`, `fail`, `run_id`."""
    note_bad_images: Callable[[dict[int, str]], None]
    """Counts images that cannot be decoded here: sample number to description; may raise."""


class UnrecoverableError(RuntimeError):
    """A restart would meet the same error: the run must end."""

    def __init__(self, text: str, *, is_agreed: bool = True) -> None:
        """`is_agreed`: all workers raise it at the same place, so that all may simply return."""
        super().__init__(text)
        self.is_agreed = is_agreed


class SmallerMicroBatchError(RuntimeError):
    """A pass did not fit into memory; the next attempt takes fewer images."""


def has_accuracy(recipe: Recipe) -> bool:
    """Whether there are images to measure accuracy on, and a head that was trained."""
    has_images = recipe.data.eval is not None or recipe.data.held_out_fraction > 0
    return has_images and recipe.train.loss != "masked_patch"


def train_worker(config: dict[str, Any]) -> None:
    """What `TorchTrainer` runs on every worker; `config["job"]` is a `TrainJob`."""
    job: TrainJob = config["job"]
    quiet_libraries()
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    services: WorkerServices | None = None
    start_step, failure = ray.get(job.recorder.start_point.remote())
    if failure or start_step == job.total_steps:
        return  # an earlier attempt ended the run, and was restarted all the same
    try:
        services = WorkerServices(job, rank, world_size, start_step)
        services.run()
    except UnrecoverableError as error:
        ray.get(job.recorder.fail.remote(str(error)))
        if not error.is_agreed:
            raise  # the other workers may wait for this one: let Ray end them
    finally:
        if services is not None:
            services.close()


def quiet_libraries() -> None:
    """Warnings of libraries that a user can do nothing about."""
    import warnings

    for module in ("deepspeed", "torch", "ray"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)


class WorkerServices:
    """The loop's world on a Ray Train worker."""

    def __init__(self, job: TrainJob, rank: int, world_size: int, start_step: int | None) -> None:
        """`start_step`: the checkpoint that the controller chose; None = there is none."""
        self._job = job
        self._recipe = job.recipe
        self._run_folder = locate(job.run_folder)
        self._stop: str | None = None
        self._noticed = ""
        self._saves_wanted = 0
        self._saves_met: int | None = None  # what earlier attempts were asked for is not known yet
        self._written = threading.Event()
        self._written.set()
        self._is_started = job.kind == "evaluate"
        self._is_evaluating = False
        self._progress = Progress()
        self._writer = CheckpointWriter(self._run_folder, job.recipe.checkpoint, self._tell)
        # Ranks on unlike GPUs, or that read the limit at unlike times, must pass equally often.
        device = ray.train.torch.get_device()
        micro = -int(all_max([-float(self._first_micro_batch(world_size))], device)[0])
        self._length = RankContext(job.total_steps, rank, world_size, micro)
        self._batches = self._start_stream() if job.kind == "train" else iter(())
        self._engine = self._build_engine(micro, world_size, start_step)
        self._watchdog = Watchdog(
            self._progress, job.recipe.train.step_timeout_s, self._beat, self._tell_hung
        )

    def run(self) -> None:
        """Train to the end, or evaluate once.

        Raises:
            UnrecoverableError: the recipe says to stop here, or the data are wrong.
        """
        try:
            self._run()
        except ray.exceptions.RayTaskError as error:
            # What the stream refuses (too many bad images, say) it would refuse again.
            if isinstance(error.cause, ValueError):
                raise UnrecoverableError(str(error.cause), is_agreed=False) from None
            raise
        except torch.OutOfMemoryError as error:
            if self._is_evaluating:
                size = self._recipe.evaluate.batch_size
                raise UnrecoverableError(
                    f"evaluate.batch_size={size} images do not fit into device memory; lower it",
                    is_agreed=False,
                ) from error
            raise self._smaller_micro_batch() from error

    def _run(self) -> None:
        if self._job.kind == "evaluate":
            self.log(0, self.evaluate(0))
            return
        reason = run_training(
            self._engine,
            self._traced(self._batches),
            self._recipe,
            self._length,
            self,
            self._progress,
            self._compute(),
        )
        if reason != "finished":
            # The worker that heard it first may be another one; the recorder knows why.
            poll = self._job.recorder.poll.remote(self._length.rank, self._progress.step)
            reason = ray.get(poll)[0] or reason
            text = f"{reason}; checkpoint at step {self._progress.step}"
            # Waited for: this process ends right after.
            ray.get(self._tell("stopped", text) or [])

    def close(self) -> None:
        """Stop the threads and leave the process group as Ray expects it."""
        self._watchdog.stop()
        self._engine.close()

    # What the loop asks for

    def sum(self, values: list[float]) -> list[float]:
        """Sum over ranks."""
        return all_sum(values, self._engine.device)

    def max(self, values: list[float]) -> list[float]:
        """Maximum over ranks."""
        return all_max(values, self._engine.device)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send metrics to the one writer; nothing waits for it."""
        if self._length.rank > 0 or not metrics:
            return
        if not self._is_started:  # the loop logs the first step of every attempt
            self._is_started = True
            since_ray_s = time.time() - self._job.ray_ready_s
            metrics = {**metrics, "startup/first_step_s": since_ray_s}
            self._tell("first step", f"{since_ray_s:.1f} s after Ray was up")
        self._job.recorder.metrics.remote(step, metrics)

    def evaluate(self, step: int) -> dict[str, float]:
        """Accuracy and few-shot accuracy, of the weights and of the averaged weights."""
        self._is_evaluating = True
        self._watchdog.expect_long_steps()
        try:
            metrics = self._measure("")
            if self._engine.average is not None and metrics:
                with self._engine.averaged():
                    metrics |= self._measure("averaged_")
        except ray.exceptions.RayTaskError:
            raise  # of the stream, and of one rank alone
        except ValueError as error:
            # All ranks have the same figures and so the same error; training is not at fault.
            if self._job.kind == "evaluate":
                raise UnrecoverableError(str(error)) from None
            self._tell("evaluation failed", str(error))
            metrics = {}
        self._watchdog.resume()
        self._is_evaluating = False
        return metrics

    def save(self, progress: Progress) -> None:
        """Snapshot now, write in Ray Train's upload thread while training goes on."""
        start_s = time.perf_counter()
        self._watchdog.pause()  # the report below waits for the slowest rank
        self._written.wait()  # storage slower than the cadence must not pile up copies
        self._written.clear()
        snapshot = self._engine.snapshot(self._position(progress))
        name, storage = folder_name(progress.step), self._run_folder.for_ray()

        def upload(_: Any, __: str) -> ray.train.Checkpoint:
            try:
                self._writer.write(snapshot, name)
            except OSError as error:
                ray.get(self._job.recorder.fail.remote(str(error)))  # a restart would not help
                raise
            finally:
                self._written.set()
            return ray.train.Checkpoint(self._run_folder.child(name).path, storage)

        ray.train.report(
            dict(progress.metrics),
            checkpoint=ray.train.Checkpoint(self._run_folder.path, storage),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=upload,
        )
        self._watchdog.resume()
        stall_s = time.perf_counter() - start_s
        progress.metrics["checkpoint/stall_s"] = stall_s
        self.log(progress.step, {"checkpoint/stall_s": stall_s})

    def save_is_wanted(self) -> bool:
        """Once for each wish of the driver's, and each notice that a node of this run goes away."""
        if self._length.rank == 0 and self._saves_met not in (None, self._saves_wanted):
            self._saves_met = self._saves_wanted
            self._tell("resizing", "the group is about to change its size: checkpoint at once")
            return True
        notice = _preemption_notice()
        if notice is None or repr(notice) == self._noticed:
            return False
        self._noticed = repr(notice)
        self._tell("preemption", "a node goes away: checkpoint at once")
        return True

    def stop_reason(self) -> str | None:
        """Set by the driver's poll (SIGTERM)."""
        return self._stop

    def nonfinite(self, progress: Progress, batch: Batch) -> None:
        """Report the refused step; then stop, go on, or roll back, as the recipe says."""
        samples = np.sort(all_rows(batch["sample"].astype(np.int64), self._engine.device))
        text = (
            f"loss or gradient of step {progress.step - 1} is not finite; the step was not "
            f"applied. Samples {_abridged(samples.tolist())}. {self._layers_of(batch)}"
        )
        self._tell("not finite", text)
        policy, train = self._recipe.train.nonfinite, self._recipe.train
        if policy == "stop" or progress.nonfinite_steps >= train.max_nonfinite_steps:
            raise UnrecoverableError(
                f"{text}. train.nonfinite={policy} with {progress.nonfinite_steps} such steps in a "
                "row; lower optim.learning_rate, or set train.nonfinite to skip or rollback"
            )
        if policy == "rollback":
            self._roll_back()

    def _layers_of(self, batch: Batch) -> str:
        """Norms by layer, of weights and of the batch's activations; all ranks call it."""
        engine, micro = self._engine, self._length.micro_batch_size
        images = as_tensor(batch["image"])
        pieces = [
            engine.activation_sizes(normalize(piece.to(engine.device), engine.dtype))
            for piece in torch.split(images, micro)
        ]
        names = list(pieces[0])
        sizes = all_max([max(piece[n] for piece in pieces) for n in names], engine.device)
        activations = dict(zip(names, sizes, strict=True))
        bad = next((name for name, size in activations.items() if not math.isfinite(size)), None)
        where = f"first not finite in {bad}" if bad else "finite when the model is evaluated"
        return (
            f"Activations are {where}; their size by layer: {_listed(list(activations.items()))}. "
            f"Largest weight norms: {_listed(_largest(engine.weight_norms()))}"
        )

    # Inside

    def _first_micro_batch(self, world_size: int) -> int:
        """As the recipe says, within what fits by estimate and what has turned out to fit."""
        recipe, limit = self._recipe, read_limit(self._run_folder)
        if self._job.kind == "evaluate":
            return 1  # nothing is accumulated; evaluate.batch_size decides
        if recipe.train.micro_batch_size == "auto" and limit is None:
            limit = CPU_MOST
            if torch.cuda.is_available():
                memory_gib = torch.cuda.get_device_properties(0).total_memory / 2**30
                classes = self._job.num_classes
                limit = largest_micro_batch(recipe, classes, world_size, memory_gib) or 1
        return micro_batch_size(recipe, world_size, limit)

    def _smaller_micro_batch(self) -> SmallerMicroBatchError:
        """Lower the limit, which the restarted group reads."""
        failed = self._length.micro_batch_size
        try:
            limit = lower_limit(self._run_folder, failed)
        except ValueError as error:
            raise UnrecoverableError(str(error), is_agreed=False) from None
        text = f"{failed} images per pass do not fit; trying at most {limit}"
        self._tell("out of memory", text)
        return SmallerMicroBatchError(text)

    def _start_stream(self) -> Iterator[Batch]:
        """The training batches; the first is being read while the engine is built."""
        shard = ray.train.get_dataset_shard("train")
        share = self._length.share(self._recipe.train.global_batch_size)
        ahead = self._recipe.data.prefetch_batches
        if self._recipe.data.decode == "device":
            blocks = shard.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=ahead
            )
            return self._decoded(blocks, share)  # it looks ahead by itself
        return prefetch(shard.iter_batches(batch_size=share, prefetch_batches=ahead), pin_batch)

    def _decoded(self, blocks: Any, share: int) -> Iterator[Batch]:
        """Batches of images that arrive encoded."""
        size = self._recipe.model.image_size
        height, width = (size, size) if isinstance(size, int) else size
        try:
            decoder = DeviceDecoder(
                ray.train.torch.get_device(), (height, width), share, self._job.note_bad_images
            )
            yield from decoder.batches(blocks)
        except ValueError as error:
            raise UnrecoverableError(str(error), is_agreed=False) from None

    def _traced(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """With a profile of the steps that the recipe names, of the first worker."""
        steps = self._recipe.train.profile_steps
        if steps is None or self._length.rank > 0:
            return batches
        recorder = self._job.recorder

        def keep(name: str, content: bytes) -> None:
            ray.get(recorder.content.remote(name, content))  # this process may be about to end

        return profiled(batches, steps, self._progress.step + 1, keep)

    def _build_engine(self, micro: int, world_size: int, start_step: int | None) -> DeepSpeedEngine:
        recipe, job = self._recipe, self._job
        torch.manual_seed(recipe.seed)
        model: nn.Module = build_model(
            recipe.model.name, job.num_classes, recipe.model.image_size, **recipe.model.options()
        )
        if recipe.train.loss == "masked_patch":
            model = MaskedPatchObjective(model, recipe.train.masked_target, recipe.seed)
        checkpoint = self._chosen_checkpoint(start_step)
        if checkpoint is None and recipe.init_from is not None:
            try:
                report = initialize_weights(
                    model, recipe.init_from, new_head=job.new_head, resize=recipe.init_resize
                )
            except ValueError as error:
                raise UnrecoverableError(f"init_from: {error}") from None
            if self._length.rank == 0:
                self._tell("weights", str(report))
        engine = DeepSpeedEngine(
            model,
            recipe.train,
            recipe.optim,
            micro_batch_size=micro,
            accumulation_steps=self._accumulation_steps(),
            loss_function=self._make_loss(),
        )
        if checkpoint is not None:
            self._restore(engine, checkpoint)
        return engine

    def _accumulation_steps(self) -> int:
        if self._job.kind == "evaluate":
            return 1
        length = self._length
        batch = self._recipe.train.global_batch_size
        return accumulation_steps(batch, length.micro_batch_size, length.world_size)

    def _chosen_checkpoint(self, start_step: int | None) -> Checkpoint | None:
        """The one that the stream was built for, whatever has come to storage since."""
        if start_step is None:
            return None
        checkpoint = open_checkpoint(self._run_folder.child(folder_name(start_step)))
        if checkpoint is None:
            raise RuntimeError(f"checkpoint {start_step} of {self._run_folder.path} has gone")
        return checkpoint

    def _make_loss(self) -> LossFunction:
        """The recipe's loss as the engine calls it."""
        train = self._recipe.train
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32

        def classify(module: nn.Module, images: Tensor, labels: Tensor, _: Tensor) -> Tensor:
            return classification_loss(module(normalize(images, dtype)), labels, train).mean()

        def predict_patches(
            module: nn.Module, images: Tensor, _: Tensor, samples: Tensor
        ) -> Tensor:
            # The epoch of the batch's first image: other patches are corrupted in each epoch.
            epoch = self._progress.step * train.global_batch_size // self._job.num_images
            loss: Tensor = module(normalize(images, dtype), samples, epoch)
            return loss

        return predict_patches if train.loss == "masked_patch" else classify

    def _restore(self, engine: DeepSpeedEngine, checkpoint: Checkpoint) -> None:
        engine.restore(checkpoint)
        position = checkpoint.position
        self._progress = deepcopy(position.progress)
        self._tell("resumed", f"from step {position.step} ({position.samples_seen} samples seen)")

    def _roll_back(self) -> None:
        """Weights and optimizer of the last checkpoint; the data since then are passed over."""
        # Until every rank has written, ranks could see another one as the newest.
        self._watchdog.pause()
        self._written.wait()
        self.sum([0.0])
        newest = newest_checkpoint(self._run_folder) if self._length.rank == 0 else None
        step = from_first(newest.position.step if newest else -1, self._engine.device)
        if step < 0:
            raise UnrecoverableError("there is no checkpoint to roll back to; the run stops")
        checkpoint = self._chosen_checkpoint(step)
        assert checkpoint is not None
        self._engine.restore(checkpoint)
        self._watchdog.resume()
        self._tell("rolled back", f"weights of step {step}, data go on at {self._progress.step}")

    def _measure(self, prefix: str) -> dict[str, float]:
        config, recipe = self._recipe.evaluate, self._recipe
        metrics: dict[str, float] = {}
        if has_accuracy(recipe):
            accuracy = measure_accuracy(self._engine, self._eval_batches("eval"), recipe.train)
            metrics |= {f"eval/{prefix}{name}": value for name, value in accuracy.items()}
        if config.few_shot_train is not None:
            few_shot = measure_few_shot(
                self._engine,
                self._eval_batches("few_shot_train"),
                self._eval_batches("few_shot_test"),
                config,
                self._job.few_shot_classes,
            )
            metrics |= {k.replace("/", f"/{prefix}"): v for k, v in few_shot.items()}
        return metrics

    def _eval_batches(self, name: str) -> Iterator[dict[str, np.ndarray]]:
        shard = ray.train.get_dataset_shard(name)
        for batch in shard.iter_batches(batch_size=self._recipe.evaluate.batch_size):
            self._watchdog.note_move()
            yield batch

    def _compute(self) -> Compute:
        recipe = self._recipe
        macs = forward_macs(
            recipe.model.name,
            self._job.num_classes,
            recipe.model.image_size,
            **recipe.model.options(),
        )
        every = recipe.train.activation_checkpointing
        peak = None
        if torch.cuda.is_available():
            peak = peak_flops(torch.cuda.get_device_name(), recipe.train.precision)
        return Compute(macs, 1.0 / every if every else 0.0, peak)

    def _position(self, progress: Progress) -> Position:
        batch = self._recipe.train.global_batch_size
        return Position(
            progress=deepcopy(progress),
            applied_steps=self._engine.applied_steps,
            samples_seen=progress.step * batch,
            global_batch_size=batch,
            shapes=self._engine.shapes,
            recipe=self._recipe.model_dump(mode="json"),
            data_fingerprint=self._job.data_fingerprint,
            tracking_run_id=self._tracking_run_id(),
            versions={"ray": ray.__version__, "torch": torch.__version__},
        )

    def _tracking_run_id(self) -> str | None:
        """Asked for late: MLflow opens its store while the workers start."""
        if self._length.rank > 0:
            return None  # only rank 0's position is kept
        try:
            return ray.get(self._job.recorder.run_id.remote(), timeout=20)
        except ray.exceptions.RayError:
            return None  # training goes on without its tracking

    def _beat(self, step: int) -> None:
        """Tell the driver's recorder where this worker is, and hear from it."""
        # The recorder lives with the driver; if it is gone, Ray ends this worker too.
        with contextlib.suppress(ray.exceptions.RayError):
            poll = self._job.recorder.poll.remote(self._length.rank, step)
            stop, saves = ray.get(poll, timeout=30)
            self._stop = stop or self._stop
            self._saves_wanted = saves
            self._saves_met = saves if self._saves_met is None else self._saves_met

    def _tell_hung(self, reason: str) -> None:
        text = f"worker {self._length.rank}: {reason}"
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._job.recorder.event.remote("hung", text, self._progress.step), timeout=10)

    def _tell(self, kind: str, text: str) -> Any:
        """Send an event for the run's history; returns what to wait for, if it was sent."""
        if self._length.rank == 0 or kind in ("checkpoint failed", "preemption", "out of memory"):
            return self._job.recorder.event.remote(kind, text, self._progress.step)
        return None


def _preemption_notice() -> Any:
    """Ray's notice for this worker group without its barrier; the loop agrees by itself.

    The public `ray.train.get_preemption_info` (Ray 2.60) waits for all workers at each call.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    return get_train_context().preemption_context.preemption_info


def _abridged(numbers: list[int], most: int = 64) -> str:
    shown = ", ".join(str(n) for n in numbers[:most])
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > most else shown


def _listed(sizes: list[tuple[str, float]]) -> str:
    return ", ".join(f"{name} {size:.3g}" for name, size in sizes)


def _largest(norms: dict[str, float], most: int = 8) -> list[tuple[str, float]]:
    return sorted(norms.items(), key=lambda item: -item[1])[:most]
