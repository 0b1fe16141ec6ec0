"""A transfer on real images: from 8 classes of CIFAR-10 to handwritten digits.

    python benchmarks/transfer.py prepare IMAGES      # IMAGES/{train,test}/CLASS/*
    python benchmarks/transfer.py run [--result FILE] [key=value ...]

The first converts the images, and the digits of scikit-learn; the second pre-trains, fine-tunes and
prints the result. The recipes are in `jobs/recipes/transfer/`, and everything is written below
`transfer/` in the current folder. A step that was interrupted goes on when the command is given
again, and what is finished is not done again. Against fine-tuning by SGD, as the paper does it,
stands training from scratch by AdamW, as it pre-trains: same model, images, steps and seeds, each
with a sweep of its own.

Options behind the command change all recipes, such as `workers.num_workers=1`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.result import finish, header, machine
from vit_ray.commands.trainings import print_result, print_sweep
from vit_ray.config import Recipe, load_recipe
from vit_ray.data.convert.checks import convert_of
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.digits import write_digits
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.experiments.search_space import point_text
from vit_ray.experiments.sweep import SweepResult, run_sweep
from vit_ray.launch.connection import connect
from vit_ray.launch.run import RunResult, train
from vit_ray.outcomes import RunStoppedError
from vit_ray.storage import locate

STARTS = {
    "pre-trained on 8 classes, SGD": [],
    "from scratch, AdamW": [
        "name=transfer-digits-scratch",
        "init_from=null",
        "optim.name=adamw",
        "optim.learning_rate=1e-3",
        "optim.weight_decay=0.05",
        "sweep.learning_rates=[3e-4,1e-3,3e-3]",
    ],
}
"""Changes to the recipe of the digits, by start and optimizer."""
DIGITS = Path("transfer/images/digits")


def recipe_of(step: str, overrides: list[str]) -> Recipe:
    return load_recipe(f"transfer/{step}", overrides)


def prepare(images: Path) -> None:
    """Convert both splits of the 8 classes and of the digits."""
    write_digits(DIGITS)
    connect(recipe_of("pretrain", []))
    for step, folder in (("pretrain", images), ("digits", DIGITS)):
        recipe = recipe_of(step, [])
        for split, destination in (("train", recipe.data.train), ("test", recipe.data.eval)):
            assert isinstance(destination, str)
            if locate(destination).child(MANIFEST_FILE).exists():
                continue
            classes = convert_of(recipe).source.rpartition("/train")[2]
            changes = {"source": f"{folder}/{split}{classes}", "destination": destination}
            report = convert(convert_of(recipe).model_copy(update=changes), recipe.seed)
            print(f"{destination}: {report.num_images} of {len(report.label_histogram)} classes")


def run(overrides: list[str]) -> str:
    """All steps; returns the result as Markdown.

    Raises:
        RunStoppedError: somebody stopped a step; the same command continues that step.
    """
    base = recipe_of("pretrain", overrides)
    connect(base)
    sweeps: dict[str, SweepResult] = {}
    pretrained = train(base)
    if print_result(pretrained):
        raise RunStoppedError("stopped on request")
    for start, changes in STARTS.items():
        sweeps[start] = run_sweep(recipe_of("digits", [*changes, *overrides]))
        print_sweep(sweeps[start])
    return report(pretrained, sweeps)


def report(pretrained: RunResult, sweeps: dict[str, SweepResult]) -> str:
    """The table of accuracies, and the gain."""
    lines = [
        f"Pre-training: {pretrained.steps} steps, top-1 on the test images of its 8 classes "
        f"{pretrained.metrics['eval/top1']:.2%}.",
        "",
        *header("start | tried (dev top-1) | chosen | test top-1 by seed | mean +- deviation"),
    ]
    for start, result in sweeps.items():
        tried = ", ".join(
            f"{point_text(row.point).partition('=')[2]} ({_percent(row.outcome.top1)})"
            for row in result.rows
        )
        seeds = ", ".join(map(_percent, result.test_top1))
        mean = f"{_percent(result.mean)} +- {_percent(result.deviation)}"
        lines.append(f"| {start} | {tried} | {point_text(result.best)} | {seeds} | {mean} |")
    tuned, scratch = sweeps.values()
    verdict = "every fine-tuned seed is above every seed from scratch"
    if min(tuned.test_top1) <= max(scratch.test_top1):
        verdict = "the seeds of the two overlap"
    lines += ["", f"Gain: {100 * (tuned.mean - scratch.mean):+.2f} points; {verdict}."]
    return "\n".join(lines) + "\n"


def _percent(value: float | None) -> str:
    return "failed" if value is None else f"{value:.2%}"


def _heading() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    command = " ".join(sys.argv)
    return f"# A transfer on CIFAR-10 and digits: {machine()}, {gpu}\n\n    {command}\n\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("images", type=Path)
    running = commands.add_parser("run")
    running.add_argument("--result", type=Path, default=Path("transfer/result.md"))
    running.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.images)
        return 0
    try:
        text = run(options.overrides)
    except RunStoppedError:
        print("stopped on request; the same command goes on")
        return 3
    finish(_heading() + text, options.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
