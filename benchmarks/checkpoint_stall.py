"""How long training stands still for a checkpoint, beside torch's own ways to write one.

    python benchmarks/checkpoint_stall.py [--model ViT-B/16] [--checkpoints 4] [--every 12]
        [--folder DIR] [--out FILE.md]

Ours: a training by `vit_ray.launch.run.train` on scikit-learn's digits at 32 px, 2 workers
under ZeRO 1 in fp32 with Adam's moments and the Polyak average, a checkpoint every few steps to a
local folder. The stall is the job's own `checkpoint/stall_s`, the time inside `save` until the next
step may begin. Writing goes on beside the training and slows it; what the steps between two
checkpoints took beyond the median one, the stall included, is the time lost.

Peers, in the same run, after it: two processes that hold the same fp32 values in the same halves
and do nothing else, no training and no Ray either. A copy of every tensor in memory, the least that
writing beside a training needs; `torch.save` to a file of each, with fsync and without; and
`torch.distributed.checkpoint.async_save`, the time until it returns and until all is written. The
slower of the two processes counts; the first save of each, which makes buffers, is left out.
"""

import argparse
import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.result import finish, header, machine

# Before Ray is imported: the ports of a local cluster are open to the network.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

import ray
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from vit_ray.checkpoints.run_checkpoints import list_checkpoints
from vit_ray.config import Recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.config.recipe import recipe_from_dict
from vit_ray.data.prepare.convert.conversion import convert
from vit_ray.data.prepare.digits import write_digits
from vit_ray.launch.run import train
from vit_ray.models import build_model
from vit_ray.storage import locate

WORKERS, IMAGE_SIZE, CLASSES = 2, 32, 10
KINDS = ["weight", "exp_avg", "exp_avg_sq", "average"]
CADENCE_S = 15 * 60  # `checkpoint.every_minutes` by default
BAR = 0.05
GIB = 2**30
PORT = 29519


def recipe_of(args: argparse.Namespace, folder: Path) -> Recipe:
    tree = {
        "name": "stall",
        "output": str(folder / "runs"),
        "model": {"name": args.model, "image_size": IMAGE_SIZE},
        "data": {"train": str(folder / "set"), "cpus_per_task": 0.5},
        "optim": {"steps": args.every * (args.checkpoints + 1), "learning_rate": 1e-4},
        "train": {
            "global_batch_size": 32,
            "micro_batch_size": 16,
            "zero_stage": 1,
            "precision": "fp32",
            "averaging": 0.9999,
            "log_every_steps": 1,
        },
        "checkpoint": {"every_steps": args.every, "every_minutes": None},
        "workers": {"num_workers": WORKERS},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "system_metrics": False},
    }
    return recipe_from_dict(tree, "benchmark")


def train_with_checkpoints(args: argparse.Namespace, folder: Path) -> tuple[list[float], ...]:
    """Stalls, times lost around each checkpoint, and its bytes; and the median step, in s."""
    recipe = recipe_of(args, folder)
    write_digits(folder / "images")
    ray.init(address="local", num_cpus=4, log_to_driver=False, logging_level="ERROR")
    convert(ConvertConfig(source=f"{folder}/images/train", destination=f"{folder}/set"))
    train(recipe)
    ray.shutdown()
    run = Path(recipe.output) / recipe.name
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if record["kind"] == "metrics"]
    stalls = {r["step"]: r["values"].get("checkpoint/stall_s") for r in records}
    done_s = {r["step"]: r["time_ms"] / 1e3 for r in records if "train/loss" in r["values"]}
    steps = {b: done_s[b] - done_s[a] for a, b in itertools.pairwise(sorted(done_s))}
    # The first steps warm up; the run's last checkpoint has no steps after it.
    due = [args.every * (number + 1) for number in range(args.checkpoints)]
    typical_s = statistics.median(steps[s] for s in steps if s > 3)
    windows = [[steps[s] for s in range(step + 1, step + args.every + 1)] for step in due]
    lost = [sum(window) - typical_s * len(window) for window in windows]
    newest = list_checkpoints(locate(str(run)))[0][1]
    num_bytes = float(sum(file.size for file in newest.list_files()))
    return [stalls[step] or 0.0 for step in due], lost, [num_bytes], [typical_s]


def parameter_counts(model: str) -> dict[str, int]:
    with torch.device("meta"):
        parameters = build_model(model, CLASSES, IMAGE_SIZE).named_parameters()
    return {name: parameter.numel() for name, parameter in parameters}


def state_of(rank: int, model: str) -> dict[str, Tensor]:
    """This process's half of every parameter, in every kind."""
    return {
        f"{kind}|{name}|{rank}": torch.randn(count // WORKERS)
        for kind in KINDS
        for name, count in parameter_counts(model).items()
    }


def save_plainly(state: dict[str, Tensor], folder: Path, is_synced: bool) -> Callable[[], None]:
    with open(folder / f"{dist.get_rank()}.pt", "wb") as file:
        torch.save(state, file)
        if is_synced:
            file.flush()
            os.fsync(file.fileno())
    return lambda: None


def save_by_dcp(state: dict[str, Tensor], folder: Path) -> Callable[[], None]:
    future: Any = dcp.async_save(state, checkpoint_id=str(folder))
    return lambda: future.result()


def copy_only(state: dict[str, Tensor], folder: Path) -> Callable[[], None]:
    copied = {name: values.clone() for name, values in state.items()}
    return copied.clear


PEERS: dict[str, Callable[[dict[str, Tensor], Path], Callable[[], None]]] = {
    "a copy in memory, nothing written": copy_only,
    "torch.save": lambda state, folder: save_plainly(state, folder, is_synced=False),
    "torch.save, fsync": lambda state, folder: save_plainly(state, folder, is_synced=True),
    "torch.distributed.checkpoint.async_save": save_by_dcp,
}


def run_peer(args: argparse.Namespace) -> None:
    """One of the two processes; the first prints (stall, whole) of each save of each peer."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    state = state_of(rank, args.model)
    found: dict[str, list[list[float]]] = {}
    for name, save in PEERS.items():
        for turn in range(args.checkpoints + 1):
            folder = args.folder / f"{name.replace(' ', '_')}-{turn}"
            folder.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            start_s = time.perf_counter()
            finish = save(state, folder)
            stalled = time.perf_counter() - start_s
            finish()
            times = torch.tensor([stalled, time.perf_counter() - start_s])
            dist.all_reduce(times, dist.ReduceOp.MAX)
            found.setdefault(name, []).append(times.tolist())
    if rank == 0:
        print(json.dumps({name: times[1:] for name, times in found.items()}), flush=True)
    dist.destroy_process_group()


def measure_peers(args: argparse.Namespace, folder: Path) -> dict[str, list[list[float]]]:
    command = [sys.executable, __file__, "--peer", "--model", args.model]
    command += ["--checkpoints", str(args.checkpoints), "--folder", str(folder)]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT), "WORLD_SIZE": str(WORKERS)}
    environment = {**os.environ, **world, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORKERS)
    ]
    outputs = [process.communicate()[0] for process in processes]
    found: dict[str, list[list[float]]] = json.loads(outputs[0].splitlines()[-1])
    return found


def report_of(args: argparse.Namespace, folder: Path) -> str:
    stalls, lost, (num_bytes,), (typical_s,) = train_with_checkpoints(args, folder)
    median, share = statistics.median(stalls), num_bytes / WORKERS / GIB
    huge = sum(parameter_counts("ViT-H/14").values()) * len(KINDS) * 4 / GIB
    lines = [
        f"{args.model}, fp32, Adam and average, ZeRO 1 on {WORKERS} workers: "
        f"{num_bytes / GIB:.2f} GiB per checkpoint, {share:.2f} GiB per worker; median step "
        f"{typical_s:.2f} s.",
        "",
        f"- stall: {median:.3f} s, the median of {' '.join(f'{s:.3f}' for s in stalls)}",
        f"- share of {CADENCE_S} s: {median / CADENCE_S:.3%}, the worst "
        f"{max(stalls) / CADENCE_S:.3%} (bar {BAR:.0%})",
        f"- per GiB of a worker's part: {median / share:.3f} s",
        f"- reckoned from that for ViT-H/14 on one worker, {huge:.2f} GiB: "
        f"{huge * median / share:.1f} s, {huge * median / share / CADENCE_S:.2%}",
        f"- time lost in all, steps slowed by the writing included: "
        f"{statistics.median(lost):.2f} s, the median of {' '.join(f'{s:.2f}' for s in lost)}; "
        f"{statistics.median(lost) / CADENCE_S:.3%} of {CADENCE_S} s",
        "",
        *header("how | training stands still, s | theirs / ours | until written, s"),
        f"| vit_ray, in a training | {median:.3f} | 1.0 | beside the training |",
    ]
    for name, times in measure_peers(args, folder / "peers").items():
        stalled, whole = (statistics.median(column) for column in zip(*times, strict=True))
        lines.append(f"| {name} | {stalled:.3f} | {stalled / median:.2f} | {whole:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-B/16")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--every", type=int, default=12, help="steps")
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        run_peer(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        report = report_of(args, Path(temporary))
    head = f"# checkpoint_stall: {machine()}, torch {torch.__version__}"
    finish(f"{head}\n\n{report}", args.out)


if __name__ == "__main__":
    main()
