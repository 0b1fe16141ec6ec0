"""What is claimed for one GPU, in one report: tests, speed beside peers, reading, input sizes.

    python -m benchmarks.gpu [--parts test peers cores sizes] [--total-s 335]
        [--photographs FOLDER] [--out FILE.md]
    python -m benchmarks.gpu --tiny ...      # sizes that a CPU runs in minutes

`peers` and `sizes` need torch and this checkout alone; the others this project's packages, too. No
part needs the internet. The parts, in this order, in bf16 at 224 px:

- `test`: `tests/gpu` with all messages, as `make test-gpu` runs it
- `peers`: our model against transformers and timm, compiled, same batch (`model_step.py`)
- `cores`: the stream on 2, 4, 8 and 16 cores, crops of the JPEG files below `--photographs`, or of
  noise (`data_stream.py`)
- `sizes`: inference by input size, Figure 12 of the paper (`input_sizes.py`)

Each script is a process of its own, and may take an equal share of what is left of `--total-s`. Of
one that is cut off or fails the last table that it printed counts, with its last lines. The report
is written after every script. The exit code is 1 if one failed or was cut off.
"""

import argparse
import importlib.metadata
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch

from benchmarks.result import finish, machine
from vit_ray.measure.devices import peak_flops

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("test", "peers", "cores", "sizes")
INTERRUPTED_S, KILLED_S = 8.0, 15.0
LAST_LINES = 40
MODELS = {"ViT-B/16": 1024, "ViT-L/16": 512, "ViT-H/14": 128}
"""And the batch of each."""
LIBRARIES = (
    "timm", "transformers", "deepspeed", "numpy", "pyarrow", "ray", "mlflow", "triton",
    "opencv-python-headless", "nvidia-ml-py",
)  # fmt: skip


def sections(args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Title and command, of Python, of every script."""
    models = {"ViT-Ti/16": 2} if args.tiny else MODELS
    rounds, seconds, mib = ("1", "1", "2") if args.tiny else ("3", "10", "256")
    if "test" in args.parts:
        pytest = ["-m", "pytest", "-o", "addopts=", "-vv", "-rs", "--color=no", "tests/gpu"]
        yield "What only a GPU can show", pytest
    for model, batch in models.items() if "peers" in args.parts else ():
        command = ["benchmarks/model_step.py", "--modes", "compiled", "--dtype", "bfloat16"]
        command += ["--rounds", rounds, "--models", model, "--batch", str(batch)]
        yield f"{model}: the model's step, compiled, against its peers", command
    if "cores" in args.parts:
        here = len(os.sched_getaffinity(0))
        counts = (1, 2) if args.tiny else (2, 4, 8, 16)
        cores = [str(count) for count in counts if count <= here]
        command = ["benchmarks/data_stream.py", *([args.photographs] if args.photographs else [])]
        command += ["--rounds", "1", "--seconds", seconds, "--mib", mib]
        command += ["--contenders", "vit_ray stream", "--cores", *cores]
        yield "The stream by cores, 224 px crops of JPEG files", command
    if "sizes" in args.parts:
        most = str(max(models.values()))
        command = ["benchmarks/input_sizes.py", "--models", *models, "R50x1", "--most", most]
        yield "Inference by input size, eager (Figure 12)", command


def run_section(command: list[str], limit_s: float) -> tuple[str, bool]:
    """What a script printed, its last table if it has any, and whether it ended well.

    Args:
        limit_s: after so long it is ended, with the processes that it started.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        failure = _failure(command, limit_s, out)
        out.seek(0)
        printed = out.read()
    tables = [block for block in printed.split("\n\n") if "|---|" in block]
    found = tables[-1].strip() if tables else f"```\n{printed.strip()}\n```"
    if failure:
        last = "\n".join(printed.splitlines()[-LAST_LINES:]) if tables else "see above"
        found += f"\n\n{failure}:\n\n```\n{last}\n```"
    took = f"{time.monotonic() - start_s:.0f} s"
    return f"`python {shlex.join(command)}` ({took})\n\n{found}\n", not failure


def _failure(command: list[str], limit_s: float, out: IO[str]) -> str:
    """Run a script of Python to its end; what went wrong, or nothing."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu",
        "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore",
        **os.environ, "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-u", *command], cwd=ROOT, env=environment, stdout=out,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    is_cut = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_cut = True
        process.send_signal(signal.SIGINT)  # pytest then shows the failures that it has
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_S)
    finally:  # after Ctrl-C and SIGTERM too, nothing of it stays on the GPU
        with suppress(ProcessLookupError):  # there is nothing left
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)
    if is_cut:
        return f"Cut off after {limit_s:.0f} s"
    return f"Ended with exit code {process.returncode}" if process.returncode else ""


def heading() -> str:
    """The machine, the versions, and what MFU is a share of."""
    text = f"# One GPU: {machine()}\n\ntorch {torch.__version__}, CUDA {torch.version.cuda}\n"
    installed = {str(one.name).lower(): one.version for one in importlib.metadata.distributions()}
    rows = [f"| {name} | {installed.get(name, 'missing')} |\n" for name in LIBRARIES]
    text += "\n| library | version |\n|---|---|\n" + "".join(rows)
    if not torch.cuda.is_available():
        return f"{text}\n**No GPU here.** The figures show only that the scripts run.\n"
    peak = peak_flops(name := torch.cuda.get_device_name(), "bf16")
    share = f"MFU is of {peak / 1e12:.0f} TFLOP/s" if peak else "its peak is not known: no MFU"
    return f"{text}\n{name}; {share}, dense bf16 by the maker's data sheet.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--photographs", type=os.path.abspath, help="JPEG files")
    parser.add_argument("--total-s", type=float, default=335, help="of all parts together")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in minutes")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu.md"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # as Ctrl-C: ends the script
    end_s = time.monotonic() + args.total_s - INTERRUPTED_S - KILLED_S
    report, has_failed, chosen = heading(), False, list(sections(args))
    for number, (title, command) in enumerate(chosen):
        share_s = (end_s - time.monotonic()) / (len(chosen) - number)
        text, is_whole = run_section(command, max(1.0, share_s))
        has_failed |= not is_whole
        report += f"\n## {title}\n\n{text}"
        finish(report, args.out)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
