"""Everything that is claimed for one GPU, in one report: tests, speed, MFU and overhead.

    python benchmarks/gpu.py --parts test peers [--out FILE.md]
    python benchmarks/gpu.py --parts job cores [--photographs FOLDER] [--out FILE.md]
    python benchmarks/gpu.py --tiny ...

`peers` and `sizes` need torch and this checkout alone; the others this project's packages, too. No
part needs the internet. The parts run in this order, each in processes of its own, in bf16 at 224
px:

- `test`: `tests/gpu` with all messages, as `make test-gpu` runs it
- `peers`: our model against transformers and timm, compiled, same batch (`model_step.py`)
- `job`: whole jobs under ZeRO 0 and 1 against a bare torch loop, compiled (`train_step.py`)
- `cores`: the stream on 2, 4, 8 and 16 cores, crops of the JPEG files below `--photographs`, or of
  noise (`data_stream.py`)
- `sizes`: inference by input size, Figure 12 of the paper (`input_sizes.py`)

A library that is missing is a row that names it, and what fails is one that says why. All parts
together have `--total-s`, and each leaves later ones what they need. Of a part that is cut off or
fails the last table that it printed counts. The report is written after every part. The exit code
is 1 if a part failed, was cut off or had no time. Without a GPU, `--tiny` shows that the scripts
run.
"""

import argparse
import importlib.metadata
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PEER, ENGINE, JOB = "its rows beside our model", "tests and whole jobs", "whole jobs"
LIBRARIES = {  # distribution -> what its absence leaves out
    "timm": PEER,
    "transformers": PEER,
    **dict.fromkeys(["deepspeed", "numpy", "pydantic", "pyarrow", "fsspec", "safetensors"], ENGINE),
    **dict.fromkeys(["ray", "mlflow", "opencv-python-headless"], JOB),
    "torchvision": "its row beside that",
    "triton": "all that is compiled",
}
# What is compiled is kept for the sections that follow; a home may be missing, or be read-only.
CACHES = {
    name: str(Path(tempfile.gettempdir()) / f"vit_ray_gpu_{os.getuid()}" / name.lower())
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
}
INTERRUPTED_S, KILLED_S = 8.0, 15.0
ERROR_LINES = 40
NO_GPU = (
    "**No GPU here.** The figures below are a CPU's and show only that the scripts run: MFU "
    "is left out, and ratios between implementations mean nothing for a GPU."
)


class Limits(NamedTuple):
    """Seconds of one section of a part."""

    kept_s: float
    """What earlier parts leave it."""
    least_s: float
    """With less it is not begun."""
    most_s: float


# What is kept for all parts of one of the calls above fits `--total-s`. A model's: 15 to start,
# half a minute of compiling and trying, 20 of rounds. A job takes 28 to 50 to start (H200,
# 2026-11-26).
LIMITS = {
    "test": Limits(110, 10, 150),
    "peers": Limits(65, 30, 110),
    "job": Limits(170, 60, 240),
    "cores": Limits(140, 60, 180),
    "sizes": Limits(30, 10, 90),
}
FULL = {
    "models": ["ViT-B/16", "ViT-L/16", "ViT-H/14"],
    "batch": [1024, 512, 128],
    "trainer_model": "ViT-L/16",
    "trainer_batch": 128,
    "rounds": 3,
    "total_s": 335.0,
    "steps": 40,
    "seconds": 10,
    "mib": 256,
    "cores": [2, 16, 8, 4],
}
TINY = {
    "models": ["ViT-Ti/16"],
    "batch": [2],
    "trainer_model": "ViT-Ti/16",
    "trainer_batch": 2,
    "rounds": 1,
    "total_s": 900.0,
    "steps": 2,
    "seconds": 1,
    "mib": 2,
    "cores": [1, 2],
}


class Section(NamedTuple):
    """One script's part of the report."""

    part: str
    title: str
    command: list[str]
    """Of Python."""


def sections(args: argparse.Namespace) -> Iterator[Section]:
    """The most valuable first."""
    command = ["-m", "pytest", "-o", "addopts=", "-vv", "-rs", "--color=no", "tests/gpu"]
    yield Section("test", "What only a GPU can show", command)
    model_step = ["benchmarks/model_step.py", "--modes", "compiled", "--dtype", "bfloat16"]
    model_step += ["--rounds", str(args.rounds)]
    for model, batch in zip(args.models, args.batch, strict=True):
        command = [*model_step, "--models", model, "--batch", str(batch)]
        yield Section("peers", f"{model}: the model's step, compiled, against its peers", command)
    trainer, batch = args.trainer_model, str(args.trainer_batch)
    # One round: a row is a median already, and half a minute of it is the start of its process.
    command = ["benchmarks/train_step.py", "--model", trainer, "--batch", batch, "--compile"]
    command += ["--precision", "bf16", "--rounds", "1", "--steps", str(args.steps)]
    command += ["--rows", "bare", "zero0", "zero1", "--row-s", "100"]
    yield Section("job", f"{trainer}: whole jobs, compiled, against a bare torch loop", command)
    command = ["benchmarks/data_stream.py", *([args.photographs] if args.photographs else [])]
    command += ["--rounds", "1", "--seconds", str(args.seconds), "--mib", str(args.mib)]
    command += ["--contenders", "vit_ray stream", "--cores", *map(str, args.cores)]
    yield Section("cores", "The stream by cores, 224 px crops of JPEG files", command)
    command = ["benchmarks/input_sizes.py", "--models", *args.models, "R50x1"]
    command += ["--most", str(max(args.batch))]
    yield Section("sizes", "Inference by input size, eager (Figure 12)", command)


def granted_s(parts: Sequence[str], left_s: float) -> float:
    """Seconds that the first of some sections may take; 0 if they are too few to begin it.

    Args:
        parts: of the section and of all that follow it.
        left_s: for all of them.
    """
    kept_s, least_s, most_s = LIMITS[parts[0]]
    later_s = sum(LIMITS[part].kept_s for part in parts[1:])
    limit_s = min(left_s, most_s, max(kept_s, left_s - later_s))
    return limit_s if limit_s >= least_s else 0.0


def run_section(section: Section, limit_s: float) -> tuple[str, bool]:
    """What a script found, and what went wrong; whether nothing did.

    Args:
        section: whose script runs; of `test` all that it printed counts, else its last table.
        limit_s: after so long it is ended, with the processes that it started.
    """
    if not limit_s:
        return "Not run: no time was left.\n", False
    command, is_test = section.command, section.part == "test"
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **CACHES,
        "HF_HUB_OFFLINE": "1",  # nothing is fetched, and nothing waits for a network
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",  # a warning is not what went wrong
        **({"DS_ACCELERATOR": "cuda" if has_gpu() else "cpu"} if is_test else {}),
    }
    script = [sys.executable, "-u", *command]
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            script, cwd=ROOT, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        is_cut = not _ends_within(process, limit_s)
        printed, errors = _content(out), _content(err)
    shown = f"`python {shlex.join(command)}` ({time.monotonic() - start_s:.0f} s)"
    found = f"```\n{printed}\n```" if is_test else _last_table(printed)
    until_then = "until then:" if found else "no table yet."
    has_failed = bool(process.returncode) or not found
    if is_cut:
        shown += f"\n\nCut off after {limit_s:.0f} s; {until_then}"
    elif has_failed:
        from benchmarks.result import last_error  # by the path that `main` has added

        error = last_error(errors) or f"exit code {process.returncode}"
        shown += f"\n\nEnded by `{error[:300]}`; {until_then}"
    if is_cut or has_failed:  # a GPU is there for minutes: what went wrong must be known after it
        last_lines = "\n".join(errors.splitlines()[-ERROR_LINES:])
        found += f"\n\n```\n{last_lines}\n```"
    return f"{shown}\n\n{found}\n", not is_cut and not has_failed


def has_gpu() -> bool:
    import torch  # here and not above, so that its seconds count

    return torch.cuda.is_available()


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def _ends_within(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Whether it ended by itself; what it started, and left, is ended in any case."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then shows the failures that it has
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERRUPTED_S)
        return False
    finally:
        with suppress(ProcessLookupError):  # there is nothing left
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a driver that hangs must not hold the rest
            process.wait(KILLED_S)


def _last_table(printed: str) -> str:
    """The last run of lines of a Markdown table."""
    blocks = [block for block in printed.split("\n\n") if "|---|" in block]
    return "\n".join(line for line in blocks[-1].splitlines() if line[:1] == "|") if blocks else ""


def environment_table() -> str:
    """Device, versions, and what the missing libraries leave out."""
    import torch

    device = torch.cuda.get_device_name() if has_gpu() else "CPU"
    lines = [
        *(gpu_lines(device) if has_gpu() else [NO_GPU]),
        "",
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


def gpu_lines(device: str) -> list[str]:
    """What MFU is a share of."""
    from vit_ray.measure.devices import peak_flops

    peak = peak_flops(device, "bf16")
    if peak is None:
        return [f"**The peak rate of {device} is not known: MFU is left out.**"]
    return [f"MFU is of {peak / 1e12:.0f} TFLOP/s, dense bf16 by the maker's data sheet."]


def arguments() -> argparse.Namespace:
    """Of the command; what has no option is by `FULL` or `TINY`."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--models", nargs="+")
    made.add_argument("--batch", type=int, nargs="+", help="of each model, for the model alone")
    made.add_argument("--trainer-model")
    made.add_argument("--trainer-batch", type=int)
    made.add_argument("--rounds", type=int)
    made.add_argument("--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    made.add_argument("--photographs", type=os.path.abspath, help="JPEG files")
    made.add_argument("--total-s", type=float, help="of all parts together")
    made.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in minutes")
    made.add_argument("--out", type=Path, help="unset: a file in runs/")
    made.set_defaults(**(TINY if made.parse_args().tiny else FULL))
    args = made.parse_args()
    name = f"runs/gpu_{'_'.join(args.parts)}_{time.strftime('%Y-%m-%d_%H%M')}.md"
    args.out = args.out or Path(name)
    here = len(os.sched_getaffinity(0))
    args.cores = [count for count in args.cores if count <= here]
    return args


def write(path: Path, report: str) -> None:
    """Where it can be: what is printed has all of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report)
    except OSError as error:
        print(f"\nNot written: {error}", file=sys.stderr, flush=True)


def main() -> None:
    args, has_failed = arguments(), False
    sys.path.append(str(ROOT))  # where this project is not installed
    end_s = time.monotonic() + args.total_s - INTERRUPTED_S - KILLED_S
    report = f"# One GPU: {time.strftime('%Y-%m-%d')}\n\n{environment_table()}"
    print(report, flush=True)
    chosen = [section for section in sections(args) if section.part in args.parts]
    for number, section in enumerate(chosen):
        parts = [later.part for later in chosen[number:]]
        text, is_whole = run_section(section, granted_s(parts, end_s - time.monotonic()))
        has_failed |= not is_whole
        shown = f"\n## {section.title}\n\n{text}"
        print(shown, flush=True)
        report += shown
        write(args.out, report)
    if has_failed:
        raise SystemExit(1)


def _stop(*_: object) -> None:
    raise SystemExit("stopped")  # by way of what ends the section that runs


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    main()
