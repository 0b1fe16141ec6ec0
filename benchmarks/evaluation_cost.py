"""What evaluations during a training cost it, from the training's log.

    python benchmarks/evaluation_cost.py RUN_FOLDER/metrics.jsonl --batch 128 --images 10000

The training logs each step (`train.log_every_steps=1`). An evaluation lasts from the record of its
step to its own. Waits are those for images, of the steps after an evaluation and of all others.
"""

import argparse
import json
from pathlib import Path
from statistics import median, quantiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--batch", type=int, required=True, help="images of a step")
    parser.add_argument("--images", type=int, required=True, help="of an evaluation")
    given = parser.parse_args()

    step_s, wait_ms, ended_s, evaluated_s = (dict[int, float]() for _ in range(4))
    for line in given.log.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] != "metrics":
            continue
        step, values = record["step"], record["values"]
        if "data/wait_fraction" in values:
            step_s[step] = given.batch / values["train/images_per_s"]
            wait_ms[step] = 1000 * values["data/wait_fraction"] * step_s[step]
            ended_s[step] = record["time_ms"] / 1000
        if "eval/top1" in values:
            evaluated_s[step] = record["time_ms"] / 1000

    late = {step + k for step in evaluated_s for k in (1, 2, 3)} | {1, 2, 3}
    usual = [wait for step, wait in wait_ms.items() if step not in late]
    print(
        f"other steps: {1000 * median(step_s.values()):.1f} ms, wait {median(usual):.2f} ms "
        f"(95 of 100 below {quantiles(usual, n=20)[-1]:.2f})"
    )
    total_s = 0.0
    for step in sorted(ended_s.keys() & evaluated_s.keys()):
        took_s = evaluated_s[step] - ended_s[step]
        total_s += took_s
        next_ms = [f"{wait_ms[step + k]:.1f}" for k in (1, 2, 3) if step + k in wait_ms]
        print(
            f"evaluation after step {step}: {took_s:.2f} s, {given.images / took_s:,.0f} images/s; "
            f"waits of the next steps: {', '.join(next_ms) or 'none'} ms"
        )
    rate = given.batch * len(step_s) / sum(step_s.values())
    print(
        f"evaluations {total_s:.1f} s, steps {sum(step_s.values()):.1f} s at {rate:,.0f} images/s"
    )


if __name__ == "__main__":
    main()
