"""How much more training images help, and which family they help more: Figure 4."""

import itertools
import statistics
from collections.abc import Sequence

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
    found: dict[tuple[Group, float, float], list[tuple[RecordedRun, Group, list[float]]]] = {}
    for group, amounts in lines.items():
        few, most = min(amounts), max(amounts)
        before = {run.seed: run.metrics[key] for run in amounts[few]}
        gains = [r.metrics[key] - before[r.seed] for r in amounts[most] if r.seed in before]
        if few < most and len(gains) > 1 and "optim.epochs" not in group.values:
            alike = group.only((*LENGTH, "train.global_batch_size").__contains__), few, most
            found.setdefault(alike, []).append((amounts[most][0], group, gains))
    sentences = []
    for (_, few, most), models in found.items():
        alike_models: dict[tuple[bool, str], list[Group]] = {}
        for run, group, _ in models:
            alike_models.setdefault((run.family == BASELINE, run.label), []).append(group)
        rest: dict[Group, str] = {}
        for groups in alike_models.values():  # what distinguishes models with the same label
            rest |= {g: f" ({text})" if text else "" for g, text in differences(groups).items()}
        for (vit, its, of_vit), (other, others, of_other) in itertools.product(models, models):
            if vit.family != BASELINE or other.family == BASELINE:
                continue
            tested_gain = of_difference(of_other, of_vit)
            assert tested_gain is not None  # there are two seeds on either side
            gain = tested_gain.estimate
            sentences.append(
                f"{name}, {length_of(vit)}, from {few:,.0f} to {most:,.0f} training images: "
                f"{vit.label}{rest[its]} gains {percent(statistics.fmean(of_vit))} "
                f"points and {other.label}{rest[others]} "
                f"{percent(statistics.fmean(of_other))}, a difference of {percent(gain.value)} "
                f"(95 %: {percent(gain.low)} to {percent(gain.high)}, {len(of_vit)} and "
                f"{len(of_other)} seeds)."
            )
    return sentences
