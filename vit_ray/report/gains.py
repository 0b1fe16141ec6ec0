"""How much more training images help, and which family they help more: Figure 4."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from vit_ray.config.resume_compatibility import LENGTH
from vit_ray.report.figures.chart_list import length_of
from vit_ray.report.runs import IMAGES_KEY, RecordedRun
from vit_ray.report.statistics.accuracies import BASELINE, accuracies_of, by_sets, title_of
from vit_ray.report.statistics.groups import TRAINING_IMAGES, Group, differences
from vit_ray.report.statistics.intervals import of_difference
from vit_ray.report.statistics.seeds import by_group
from vit_ray.report.tables import percent


def gain_sentences(runs: Sequence[RecordedRun]) -> list[str]:
    """Gains from the fewest to the most images, of a ViT minus those of each other family's model.

    For models with at least two seeds at both ends, trained the same except for the images, and for
    equal numbers of images seen: not for lengths in epochs, which give more images more compute. A
    gain is that of one seed, from its own training on fewer images; the interval is Welch's.
    """
    return [
        sentence
        for key in accuracies_of(runs)[:3]
        for whose, members in by_sets(runs, key)
        for sentence in _of_one_accuracy(members, key, title_of(key) + whose)
    ]


def _of_one_accuracy(runs: Sequence[RecordedRun], key: str, name: str) -> list[str]:
    tested = [
        run
        for run in runs
        if run.status == "FINISHED" and run.is_tested(key) and IMAGES_KEY in run.metrics
    ]
    lines: dict[Group, dict[float, list[RecordedRun]]] = {}
    for group, members in by_group(tested).items():
        amounts = lines.setdefault(group.without("data.fraction", TRAINING_IMAGES), {})
        amounts[members[0].metrics[IMAGES_KEY]] = members
    found: dict[tuple[Group, float, float], list[_Gains]] = {}
    for group, amounts in lines.items():
        few, most = min(amounts), max(amounts)
        before = {run.seed: run.metrics[key] for run in amounts[few]}
        gains = [r.metrics[key] - before[r.seed] for r in amounts[most] if r.seed in before]
        if few < most and len(gains) > 1 and "optim.epochs" not in group.values:
            alike = group.only((*LENGTH, "train.global_batch_size").__contains__), few, most
            found.setdefault(alike, []).append(_Gains(amounts[most][0], group, gains))
    sentences = []
    for (_, few, most), models in found.items():
        vits = [one for one in models if one.run.family == BASELINE]
        others = [one for one in models if one.run.family != BASELINE]
        rest = {**_differences(vits), **_differences(others)}
        for vit, other in itertools.product(vits, others):
            tested_gain = of_difference(other.gains, vit.gains)
            assert tested_gain is not None  # there are two seeds on either side
            gain = tested_gain.estimate
            sentences.append(
                f"{name}, {length_of(vit.run)}, from {few:,.0f} to {most:,.0f} training images: "
                f"{vit.run.label}{rest[vit.group]} gains {percent(statistics.fmean(vit.gains))} "
                f"points and {other.run.label}{rest[other.group]} "
                f"{percent(statistics.fmean(other.gains))}, a difference of {percent(gain.value)} "
                f"(95 %: {percent(gain.low)} to {percent(gain.high)}, {len(vit.gains)} and "
                f"{len(other.gains)} seeds)."
            )
    return sentences


@dataclass(frozen=True)
class _Gains:
    run: RecordedRun
    group: Group
    gains: list[float]


def _differences(models: Sequence[_Gains]) -> dict[Group, str]:
    """What distinguishes models with the same label."""
    found: dict[Group, str] = {}
    for label in {one.run.label for one in models}:
        mine = [one.group for one in models if one.run.label == label]
        found |= {group: f" ({text})" if text else "" for group, text in differences(mine).items()}
    return found
