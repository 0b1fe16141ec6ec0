"""A real job on class folders: Ray, the stream, checkpoints and MLflow, from scratch.

    python benchmarks/job.py IMAGES [--seconds 300] [--epochs 40] [--out FILE.md] [key=value ...]

IMAGES is {train,test}/CLASS/*, such as those of CIFAR-10. Both splits are converted, then the
recipe `cifar10` is trained with the given changes. After `--seconds`, start and conversion counted,
the training is stopped by SIGTERM: it writes a checkpoint, and its last evaluation counts. All
figures are from its run in MLflow.
"""

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from mlflow import MlflowClient

from benchmarks.result import finish, header, machine

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "cifar10"
SAVED_S = 30.0
"""For the last checkpoint and the end of the record."""
LEAST_S = 30.0
Curves = dict[str, dict[int, float]]
"""Values by metric and step, in the order of steps."""


def command(job: str, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "jobs" / f"{job}.py"), *arguments]


def convert(source: Path, destination: str) -> None:
    """Class folders to a data set."""
    places = [f"convert.source={source}", f"convert.destination={destination}"]
    subprocess.run(command("convert", RECIPE, *places), check=True, stdout=sys.stderr)


def pretrain(recipe: str, folder: str, changes: list[str], limit_s: float | None = None) -> Curves:
    """All metrics of a training, which is stopped after `limit_s`.

    Raises:
        CalledProcessError: it failed.
    """
    places = [f"output={folder}/runs", f"tracking.uri=sqlite:///{folder}/mlflow.db"]
    arguments = command("pretrain", recipe, *places, *changes)
    process = subprocess.Popen(arguments, stdout=sys.stderr)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SAVED_S)
        process.kill()
    else:
        if code:
            raise subprocess.CalledProcessError(code, arguments)
    return curves(f"sqlite:///{folder}/mlflow.db")


def curves(uri: str) -> Curves:
    """Of the only run of a store."""
    client = MlflowClient(uri)
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    found = {}
    for key in run.data.metrics:
        points = client.get_metric_history(run.info.run_id, key)
        found[key] = dict(sorted((point.step, point.value) for point in points))
    return found


def table(found: Curves, total_s: float) -> str:
    """Of the lines after the first, which is of one step alone."""
    rates, waits = (
        list(found[name].values()) for name in ("train/images_per_s", "data/wait_fraction")
    )
    rates, waits = rates[1:] or rates, waits[1:] or waits
    top1 = [f"{value:.1%} (step {step})" for step, value in found.get("eval/top1", {}).items()]
    cells = [(top1 or ["not evaluated"])[-1], str(max(found["train/loss"]))]
    cells += [f"{statistics.median(rates):.0f}", f"{statistics.mean(waits):.1%}", f"{total_s:.0f}"]
    lines = header("top-1 on test | steps | images/s | waits for data | s, start to end")
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("images", type=Path)
    parser.add_argument("changes", nargs="*", metavar="key=value")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--epochs", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_intermixed_args()  # changes may stand after options
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test"):
            convert(args.images / split, f"{folder}/{split}")
        changes = [f"data.train={folder}/train", f"data.eval={folder}/test"]
        changes += [f"optim.epochs={args.epochs}", *args.changes]
        left_s = args.seconds - (time.monotonic() - start_s)
        if left_s < LEAST_S:
            raise SystemExit(f"error: {left_s:.0f} of {args.seconds:.0f} s are left to train")
        found = pretrain(RECIPE, folder, changes, left_s)
    shown = " ".join([RECIPE, f"optim.epochs={args.epochs:g}", *args.changes])
    measured = table(found, time.monotonic() - start_s)
    finish(f"# job: {machine()}; {shown}\n\n{measured}", args.out)


if __name__ == "__main__":
    main()
