"""Everything that is claimed for one GPU, in one report: speed, MFU, overhead and memory.

    python benchmarks/gpu.py [--out FILE.md] [--batch 256] [--trainer-batch 128]
        [--models ViT-B/16 ViT-L/16 ViT-H/14] [--trainer-model ViT-L/16] [--rounds 3]
        [--parts model activations trainer memory]

Needs torch and this checkout, and no installation, internet or data. It drives, each in processes
of its own, in bf16 at 224 px: `model_step.py` (our model, compiled, against transformers and timm),
`activation_memory.py` (predicted against measured memory), and `train_step.py` (the whole step of a
job, compiled, against a bare torch loop; then the memory of the engine under ZeRO 0 and 1, eager).
Each script says what it holds in bf16; it is the same for all rows of a ratio with a bar. What
needs a library that is not there is a row that names it. The bars beside the figures are for one
H200. The report is written after every section, so that one cut short is worth keeping. Without a
GPU it shows that the scripts run, and says so: use `--models ViT-Ti/16 --trainer-model ViT-Ti/16
--batch 1 --trainer-batch 1 --rounds 1` then.
"""

import argparse
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
PEER, ENGINE, JOB = "its rows beside our model", "all rows with DeepSpeed", "the whole job"
LIBRARIES = {  # distribution -> what its absence leaves out
    "timm": PEER,
    "transformers": PEER,
    **dict.fromkeys(["deepspeed", "numpy", "pydantic", "pyarrow", "fsspec", "safetensors"], ENGINE),
    **dict.fromkeys(["ray", "mlflow", "opencv-python-headless"], JOB),
}
NO_GPU = (
    "**No GPU here.** The figures below are a CPU's and show only that the scripts run: MFU, "
    "measured memory and the bars of an H200 are left out, and ratios between implementations "
    "mean nothing for a GPU.\n\n"
)


def sections(args: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Part, title and command of every section."""
    rounds = ["--rounds", str(args.rounds)]
    for model in args.models:
        command = ["model_step.py", "--models", model, "--modes", "compiled", *rounds]
        command += ["--batch", str(args.batch), "--dtype", "bfloat16"]
        yield "model", f"{model}: the model's step, compiled, against its peers", command
    command = ["activation_memory.py", "--models", *args.models, "--batch", str(args.batch)]
    yield "activations", "Memory of forward and backward pass, eager", command
    trainer = ["--batch", str(args.trainer_batch), "--precision", "bf16"]
    command = ["train_step.py", "--model", args.trainer_model, *trainer, *rounds, "--compile"]
    title = f"{args.trainer_model}: the whole step of a job, compiled, against a bare loop"
    yield "trainer", title, command
    for model in args.models:
        command = ["train_step.py", "--model", model, *trainer, "--rows", "zero0", "zero1"]
        command += ["--rounds", "1", "--steps", "3"]
        yield "memory", f"{model}: memory of the whole engine, eager", command


def run_section(command: list[str]) -> str:
    """The last table that a script printed, or the last line of what went wrong."""
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",  # a warning is not what went wrong
    }
    script = [sys.executable, "-u", str(HERE / command[0]), *command[1:]]
    start_s = time.monotonic()
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    shown = f"`python benchmarks/{' '.join(command)}` ({time.monotonic() - start_s:.0f} s)"
    *_, table = done.stdout.strip().split("\n\n")
    if done.returncode == 0 and table:
        return f"{shown}\n\n{table}\n"
    error = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"{shown}\n\nNot run: `{error[:300]}`\n"


def environment_table() -> str:
    """Device, versions, and what the missing libraries leave out."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"{device}, {os.cpu_count()} CPU cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "",
        "| library | version |",
        "|---|---|",
    ]
    for name, cost in LIBRARIES.items():
        try:
            lines.append(f"| {name} | {importlib.metadata.version(name)} |")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"| {name} | missing: leaves out {cost} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["ViT-B/16", "ViT-L/16", "ViT-H/14"])
    parser.add_argument("--batch", type=int, default=256, help="at most, for the model alone")
    parser.add_argument("--trainer-model", default="ViT-L/16")
    parser.add_argument("--trainer-batch", type=int, default=128, help="at most, for the trainer")
    parser.add_argument("--rounds", type=int, default=3)
    parts = ["model", "activations", "trainer", "memory"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    note = "" if torch.cuda.is_available() else NO_GPU
    report = f"# One GPU: {time.strftime('%Y-%m-%d')}\n\n{note}{environment_table()}"
    print(report, flush=True)
    for part, title, command in sections(args):
        if part in args.parts:
            section = f"\n## {title}\n\n{run_section(command)}"
            print(section, flush=True)
            report += section
            if args.out:
                args.out.write_text(report)


if __name__ == "__main__":
    main()
