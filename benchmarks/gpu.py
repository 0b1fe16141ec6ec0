"""Everything that is claimed for one GPU, in one report: speed, MFU, overhead and memory.

    python benchmarks/gpu.py [--out FILE.md] [--batch 16 32 64 128 256 512 1024]
        [--models ViT-B/16 ViT-L/16 ViT-H/14] [--trainer-model ViT-L/16] [--trainer-batch 128]
        [--rounds 3]
        [--parts model switches activations trainer sizes memory] [--total-s 570]

Needs torch and this checkout, and no installation, internet or data. It drives, each in processes
of its own, in bf16 at 224 px: `model_step.py` (our model, compiled, against transformers and timm,
each at the fastest micro-batch of those of `--batch` that were tried compiled: the three next to
the one that is fastest eager), `step_switches.py` (what torch has to make the step of the last
model faster, compiled, against the step as it is), `activation_memory.py` (predicted against
measured memory), `train_step.py` (the whole step of a job, compiled, against a bare torch loop;
the engine under ZeRO 1 to 3, eager; then its memory), and `input_sizes.py` (inference by input
size, Figure 12 of the paper).
Each script says what it holds in bf16; it is the same for all rows of a ratio with a bar. What
needs a library that is not there is a row that names it, and what fails is one that says why. The
bars beside the figures are for one H200. What matters most comes first. All sections together have
`--total-s`, and each is certain of some of it: time that one does not use goes to the next. Of one
that is cut off or fails the last table that it printed counts. The report is written after every
section, so that one cut short is worth keeping.
Without a GPU it shows that the scripts run, and says so: use `--models ViT-Ti/16
--trainer-model ViT-Ti/16 --batch 1 2 --trainer-batch 1 --rounds 1` then.
"""

import argparse
import importlib.metadata
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

HERE = Path(__file__).resolve().parent
PEER, ENGINE, JOB = "its rows beside our model", "all rows with DeepSpeed", "the whole job"
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
KILLED_S = 15.0
# The first line of an error: torch's have several, and warnings of its libraries may follow.
ERROR = re.compile(r"^(?:\[rank\d+\]: )?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)
NO_GPU = (
    "**No GPU here.** The figures below are a CPU's and show only that the scripts run: MFU, "
    "measured memory and the bars of an H200 are left out, and ratios between implementations "
    "mean nothing for a GPU."
)


# Seconds of one section of each part, at least and at most. All that are certain fit `--total-s`.
# A model's: 15 to start, a minute of compiling and trying, 20 of rounds.
LEAST_S = {
    "model": 95, "switches": 70, "activations": 25, "trainer": 50, "sizes": 30, "memory": 20,
}  # fmt: skip
MOST_S = {
    "model": 150, "switches": 150, "activations": 60, "trainer": 170, "sizes": 90, "memory": 75,
}  # fmt: skip


class Section(NamedTuple):
    """One script's part of the report."""

    part: str
    title: str
    command: list[str]


def sections(args: argparse.Namespace) -> Iterator[Section]:
    """The most valuable first."""
    rounds = ["--rounds", str(args.rounds)]
    for model in args.models:
        command = ["model_step.py", "--models", model, "--modes", "compiled", *rounds]
        command += ["--batch", *map(str, args.batch), "--dtype", "bfloat16"]
        yield Section("model", f"{model}: the model's step, compiled, against its peers", command)
    # Several of them lie in memory together, with their moments.
    command = ["step_switches.py", "--model", args.models[-1], *rounds]
    command += ["--batch", str(min(64, max(args.batch)))]
    title = f"{args.models[-1]}: switches of torch, compiled, against the step as it is"
    yield Section("switches", title, command)
    most = str(min(256, max(args.batch)))
    command = ["activation_memory.py", "--models", *args.models, "--batch", most]
    yield Section("activations", "Memory of forward and backward pass, eager", command)
    # One round: a row is a median already, and half a minute of it is the start of its process.
    trainer = ["--batch", str(args.trainer_batch), "--precision", "bf16", "--rounds", "1"]
    trainer += ["--row-s", "75"]  # of a section with more time, not all for one that hangs
    command = ["train_step.py", "--model", args.trainer_model, *trainer, "--compile"]
    command += ["--rows", "bare", "zero0", "job", "zero1", "autocast"]
    title = f"{args.trainer_model}: the whole step of a job, compiled, against a bare loop"
    yield Section("trainer", title, command)
    command = ["train_step.py", "--model", args.trainer_model, *trainer]
    command += ["--rows", "bare", "zero0", "zero1", "zero2", "zero3"]
    title = f"{args.trainer_model}: what ZeRO costs on one GPU, eager, against a bare loop"
    yield Section("trainer", title, command)
    command = ["input_sizes.py", "--models", *args.models, "R50x1", "--most", str(max(args.batch))]
    yield Section("sizes", "Inference by input size, eager (Figure 12)", command)
    for model in args.models:
        command = ["train_step.py", "--model", model, *trainer, "--rows", "zero0", "zero1"]
        command += ["--steps", "3"]
        yield Section("memory", f"{model}: memory of the whole engine, eager", command)


def granted_s(parts: Sequence[str], left_s: float) -> float:
    """Seconds that the first of some sections may take: what the others are not certain of.

    Where even that is short, all get less by the same share.

    Args:
        parts: of the section and of all that follow it.
        left_s: for all of them.
    """
    certain_s = [LEAST_S[part] for part in parts]
    share = min(1.0, left_s / sum(certain_s))
    return min(MOST_S[parts[0]], left_s - share * sum(certain_s[1:]))


def run_section(command: list[str], limit_s: float) -> str:
    """The last table that a script printed, and what went wrong.

    Args:
        command: a script of this folder, and its arguments.
        limit_s: after so long it is ended, with the processes that it started.
    """
    paths = [str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **CACHES,
        "HF_HUB_OFFLINE": "1",  # nothing is fetched, and nothing waits for a network
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",  # a warning is not what went wrong
    }
    script = [sys.executable, "-u", str(HERE / command[0]), *command[1:]]
    start_s = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            script, env=environment, stdout=out, stderr=err, start_new_session=True
        )
        is_cut = not _ends_within(process, limit_s)
        printed, errors = _content(out), _content(err)
    shown = f"`python benchmarks/{' '.join(command)}` ({time.monotonic() - start_s:.0f} s)"
    table = _last_table(printed)
    until_then = "until then:" if table else "no table yet."
    if is_cut:
        shown += f"\n\nCut off after {limit_s:.0f} s; {until_then}"
    elif process.returncode or not table:
        code = f"exit code {process.returncode}"
        error = (ERROR.findall(errors) or errors.splitlines() or [code])[-1]
        shown += f"\n\nEnded by `{error[:300]}`; {until_then}"
    return f"{shown}\n\n{table}\n"


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def _ends_within(process: "subprocess.Popen[bytes]", limit_s: float) -> bool:
    """Whether it ended by itself; what it started, and left, is ended in any case."""
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
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
    import torch  # here and not above, so that its seconds count

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        *(gpu_lines(device) if torch.cuda.is_available() else [NO_GPU, *unseen_gpu()]),
        "",
        f"{device}, {os.cpu_count()} CPU cores; Python {platform.python_version()}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "",
        f"C compiler, without which Triton compiles nothing: {c_compiler() or 'none'}",
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
    sys.path.append(str(HERE.parent))  # where this project is not installed
    from vit_ray.measure.devices import peak_flops

    peak = peak_flops(device, "bf16")
    if peak is None:
        return [f"**The peak rate of {device} is not known: MFU is left out.**"]
    return [f"MFU is of {peak / 1e12:.0f} TFLOP/s, dense bf16 by the maker's data sheet."]


def unseen_gpu() -> list[str]:
    """Why torch may have none where there is one."""
    if not shutil.which("nvidia-smi"):
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    return [
        "",
        "`nvidia-smi` is here all the same: see whether it lists a GPU, whether torch is built for "
        f"its driver (CUDA below), and CUDA_VISIBLE_DEVICES ({listed}).",
    ]


def c_compiler() -> str | None:
    """The one that Triton would call."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--models", nargs="+", default=["ViT-B/16", "ViT-L/16", "ViT-H/14"])
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    made.add_argument("--batch", type=int, nargs="+", default=sizes, help="for the model alone")
    made.add_argument("--trainer-model", default="ViT-L/16")
    made.add_argument("--trainer-batch", type=int, default=128, help="at most, for the trainer")

    made.add_argument("--rounds", type=int, default=3)
    parts = list(LEAST_S)
    made.add_argument("--parts", nargs="+", choices=parts, default=parts)
    made.add_argument("--total-s", type=float, default=570.0, help="of all sections together")
    made.add_argument("--out", type=Path)
    return made


def write(path: Path, report: str) -> None:
    """Where it can be: what is printed has all of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report)
    except OSError as error:
        print(f"\nNot written: {error}", file=sys.stderr, flush=True)


def main() -> None:
    args = parser().parse_args()
    end_s = time.monotonic() + args.total_s
    report = f"# One GPU: {time.strftime('%Y-%m-%d')}\n\n{environment_table()}"
    print(report, flush=True)
    chosen = [section for section in sections(args) if section.part in args.parts]
    for number, (_, title, command) in enumerate(chosen):
        parts = [section.part for section in chosen[number:]]
        limit_s = granted_s(parts, end_s - time.monotonic())
        text = run_section(command, limit_s) if limit_s > 0 else "Not run: no time was left.\n"
        section = f"\n## {title}\n\n{text}"
        print(section, flush=True)
        report += section
        if args.out:
            write(args.out, report)


def _stop(*_: object) -> None:
    raise SystemExit("stopped")  # by way of what ends the section that runs


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    main()
