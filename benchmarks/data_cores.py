"""CPU cores that feed a GPU, by model: from a result of `data_stream.py` and the plan's FLOPs.

    python benchmarks/data_cores.py RESULT_OF_DATA_STREAM.md [--write docs/performance.md]

A GPU that computes at a share of its peak (MFU) trains this many images a second:
peak x MFU / (2 x multiply-adds of an image in a training step, `vit_ray.models.flops`). Each takes
the CPU milliseconds that `data_stream.py` measured for the whole stream (reading tasks, Ray's own
processes, the consumer), with crops that the host decodes, or sends as they are stored.
The product is cores of that machine. `--write` puts the table into a page between its comments.
"""

import argparse
import re
from pathlib import Path

from vit_ray.measure.devices import find_device
from vit_ray.models.flops import training_macs

MFU = 0.4
"""The default of `plan.mfu`."""
NUM_CLASSES = 1000
MODELS = ("ViT-B/16", "ViT-L/16", "ViT-H/14")
DEVICES = ("H100", "H200")
HOST, DEVICE = "vit_ray stream", "vit_ray stream, data.decode=device"
BEGIN, END = "<!-- table of benchmarks/data_cores.py -->", "<!-- end of the table -->"


def images_per_s(model: str, device: str) -> float:
    """What one GPU trains at `MFU` of its bf16 peak."""
    found = find_device(device)
    assert found is not None
    return MFU * found.bf16_flops / (2 * training_macs(model, NUM_CLASSES).hardware)


def cpu_ms_of(result: str, contender: str) -> float:
    """CPU milliseconds an image of a row of a result of `data_stream.py`."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.splitlines()]
    names = next(row for row in rows if row[:1] == ["contender"] and "CPU ms an image" in row)
    row = next(row for row in rows if row[:1] == [contender] and len(row) == len(names))
    return float(row[names.index("CPU ms an image")])


def processor_of(result: str) -> str:
    """The line that says when and where it was measured."""
    found = re.search(r"^(\d{4}-\d\d-\d\d, .+?), last-level cache", result, re.MULTILINE)
    assert found is not None, "the result does not tell its machine"
    return found[1]


def table(file: Path) -> str:
    """Markdown."""
    result = file.read_text()
    host, device = cpu_ms_of(result, HOST), cpu_ms_of(result, DEVICE)
    lines = [
        f"From `{file.name}` ({processor_of(result)}): {host:.2f} ms of a core for an image that "
        f"the host decodes, {device:.2f} ms for one that travels encoded; GPUs at {MFU:.0%} MFU in "
        "bf16.",
        "",
        "| model, 224 px | GPU | images/s of one GPU | cores, `data.decode=host` | cores, "
        "`data.decode=device` |",
        "|---|---|---|---|---|",
    ]
    for model in MODELS:
        rate = images_per_s(model, DEVICES[0])
        assert all(images_per_s(model, other) == rate for other in DEVICES)
        lines.append(
            f"| {model} | {' or '.join(DEVICES)} | {rate:,.0f} | {rate * host / 1000:.1f} | "
            f"{rate * device / 1000:.1f} |"
        )
    return "\n".join(lines)


def written(page: str, content: str) -> str:
    """The page with the table between its two comments."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{content}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    content = table(args.result)
    print(content)
    if args.write:
        args.write.write_text(written(args.write.read_text(), content))


if __name__ == "__main__":
    main()
