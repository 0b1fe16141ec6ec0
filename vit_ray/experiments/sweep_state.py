"""What a sweep's folder keeps about its trials, from which the next driver continues.

Ray Tune does not keep a scheduler's state (`TuneController.__getstate__` leaves it out, Ray 2.60),
and a new Tuner is made each time. So the next driver fills ASHA's rungs from the folder, so that
decisions are final; diverged trials are not tried again; and a search gets its finished points.
"""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Final

from ray import tune
from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler
from ray.tune.search import create_searcher

from vit_ray.config import Recipe
from vit_ray.config.command_sections import SweepConfig
from vit_ray.config.resume_compatibility import is_trained
from vit_ray.experiments.search_space import Point, point_name, rounded
from vit_ray.storage import Location

RUNGS: Final = "rungs.json"
DIVERGED: Final = "diverged.json"
POINTS: Final = "points.json"
_METRIC: Final = "top1"
_MOST_DRAWS: Final = 100


class Kept:
    """A value in a JSON file, written by the one driver that holds the sweep's lock."""

    def __init__(self, folder: Location, name: str, empty: Any) -> None:
        """`empty`: value if there is no file."""
        self._file = folder.child(name)
        self.value = json.loads(self._file.read()) if self._file.exists() else empty

    def write(self) -> None:
        self._file.write(json.dumps(self.value, indent=1).encode())


def trial_key(recipe: Recipe) -> str:
    """A key for exactly this recipe: its name, and a digest of all that decides its result."""
    flat = {key: value for key, value in recipe.flat().items() if is_trained(key)}
    digest = hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()[:16]
    return f"{recipe.name} {digest}"


@dataclass(frozen=True)
class RungResult:
    """What one trial reached at one rung, and whether it continued."""

    trial: str
    step: int
    top1: float
    goes_on: bool


def grace_steps(config: SweepConfig, max_steps: int) -> int:
    """Steps up to the first rung: as in the recipe, or two reductions before the longest trial's
    end.

    Raises:
        ValueError: the first rung is not before the end.
    """
    steps = config.grace_steps or max(1, math.ceil(max_steps / config.reduction_factor**2))
    if steps >= max_steps:
        raise ValueError(
            f"sweep.grace_steps={steps} must be smaller than the trial length ({max_steps} steps), "
            "or no trial would be stopped; use less, or sweep.scheduler=none"
        )
    return steps


def rung_steps(config: SweepConfig, total_steps: int, max_steps: int) -> tuple[int, ...]:
    """Steps before its end at which a trial is evaluated.

    Args:
        total_steps: of the trial.
        max_steps: of the longest trial.
    """
    rungs = []
    step = float(grace_steps(config, max_steps)) if config.scheduler == "asha" else math.inf
    while step < total_steps:
        # The first whole step at which Ray's scheduler sees that the rung is reached.
        rungs.append(math.ceil(step))
        step *= config.reduction_factor
    return tuple(dict.fromkeys(rung for rung in rungs if rung < total_steps))


class RememberedSearch:
    """Points that a searcher of Ray Tune proposes one after another.

    Points proposed to earlier drivers are tried first; the searcher gets their results.
    """

    def __init__(self, config: SweepConfig, folder: Location) -> None:
        """`folder`: of the sweep."""
        self._space = dict[str, Any](config.space or {})
        self._kept = Kept(folder, POINTS, [])
        of_space = [one for one in self._kept.value if self._has(one["point"])]
        self.points: list[Point] = [one["point"] for one in of_space]
        """Points of earlier drivers; points outside this space are left out."""
        known = [one for one in of_space if one[_METRIC] is not None]
        self._searcher: Any = create_searcher(
            config.search,
            points_to_evaluate=[one["point"] for one in known],
            evaluated_rewards=[one[_METRIC] for one in known],
            # Do not repeat the draws that have led to known points.
            seed=config.seed + len(self._kept.value),
        )
        logging.getLogger(config.search).setLevel(logging.WARNING)
        domains = {}
        for key, values in self._space.items():
            if isinstance(values, list):
                domains[key] = tune.choice(values)
            else:
                ((kind, (low, high)),) = values.items()
                draw = tune.loguniform if kind == "log_uniform" else tune.uniform
                domains[key] = draw(low, high)
        self._searcher.set_search_properties(_METRIC, "max", domains)
        self._drawn: dict[str, str] = {}
        """Names of points to numbers of the searcher's trials."""

    def draw(self) -> Point:
        """The next point, different from those before it.

        Raises:
            ValueError: the searcher proposes nothing new.
        """
        names = {point_name(point) for point in self.points}
        for number in map(str, range(_MOST_DRAWS)):
            trial = f"{len(self.points)} {number}"
            proposed = self._searcher.suggest(trial)
            point = {key: proposed[key] for key in self._space}
            for key, values in self._space.items():
                if not isinstance(values, list):  # rounded, to be read and repeated
                    ((low, high),) = values.values()
                    point[key] = min(max(rounded(point[key]), low), high)
            if point_name(point) not in names:
                self._drawn[point_name(point)] = trial
                self.points.append(point)
                self._kept.value.append({"point": point, _METRIC: None})
                self._kept.write()
                return point
            self._searcher.on_trial_complete(trial, error=True)
        raise ValueError(
            f"sweep.search: no new point in {_MOST_DRAWS} proposals; widen "
            "sweep.space, or lower sweep.num_trials"
        )

    def note(self, point: Point, top1: float | None) -> None:
        """Report a point's result; None if its trial failed."""
        (kept,) = (one for one in self._kept.value if one["point"] == point)
        trial = self._drawn.pop(point_name(point), None)
        if trial is not None:
            metrics = None if top1 is None else {_METRIC: top1}
            self._searcher.on_trial_complete(trial, metrics, error=top1 is None)
        elif top1 is not None and kept[_METRIC] is None:  # an earlier driver's
            self._searcher.add_evaluated_point(dict(point), top1)
        kept[_METRIC] = top1
        self._kept.write()

    def _has(self, point: Point) -> bool:
        def is_of(value: Any, values: Any) -> bool:
            if isinstance(values, list):
                return value in values
            ((low, high),) = values.values()
            return bool(low <= value <= high)

        return point.keys() == self._space.keys() and all(
            is_of(value, self._space[key]) for key, value in point.items()
        )


class RememberedAsha:
    """Decisions of Ray Tune's `AsyncHyperBandScheduler` that outlive the driver.

    The last outcome of a trial also fills a rung, and stops nothing.
    """

    def __init__(
        self, config: SweepConfig, folder: Location, trials: Sequence[str], max_steps: int
    ) -> None:
        """
        Args:
            folder: of the sweep.
            trials: keys of its trials; those of others fill no rung.
            max_steps: of the longest trial.
        """
        self._kept = Kept(folder, RUNGS, [])
        self.results = [RungResult(**one) for one in self._kept.value]
        self._asha = AsyncHyperBandScheduler(
            time_attr="step",
            metric="top1",
            mode="max",
            max_t=max_steps,
            grace_period=grace_steps(config, max_steps),
            reduction_factor=config.reduction_factor,
        )
        self._added: set[str] = set()
        for known in self.results:
            if known.trial in trials:
                self._asha_goes_on(known.trial, known.step, known.top1)

    def find(self, trial: str, step: int) -> RungResult | None:
        """What the trial reached at a rung; None if it has not reached it."""
        found = (one for one in self.results if (one.trial, one.step) == (trial, step))
        return next(found, None)

    def goes_on(self, trial: str, step: int, top1: float, *, is_over: bool) -> bool:
        """Whether the trial continues, as decided before, or as decided now."""
        known = self.find(trial, step)
        if known is None:
            goes_on = self._asha_goes_on(trial, step, top1) or is_over
            known = RungResult(trial, step, top1, goes_on)
            self.results.append(known)
            self._kept.value = [asdict(one) for one in self.results]
            self._kept.write()
        return known.goes_on

    def _asha_goes_on(self, trial: str, step: int, top1: float) -> bool:
        its: Any = SimpleNamespace(trial_id=trial)  # all that ASHA needs of a trial
        none: Any = None
        if trial not in self._added:
            self._added.add(trial)
            self._asha.on_trial_add(none, its)
        decision = self._asha.on_trial_result(none, its, {"step": step, "top1": top1})
        return bool(decision == TrialScheduler.CONTINUE)
