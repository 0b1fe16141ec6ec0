"""Runs as MLflow has them: the only source of every report."""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from mlflow.entities import Experiment, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from vit_ray.addresses import LOCAL_SERVER, require_store
from vit_ray.config.recorded_recipe import (
    INIT_RUN,
    PARENT_TAG,
    RUN_FOLDER,
    recorded_before,
    tags_of,
)
from vit_ray.config.resume_compatibility import LENGTH, TAGGED, deciding_keys, is_trained
from vit_ray.config.secrets import redact
from vit_ray.measure.best_evaluation import with_best
from vit_ray.metric_names import (
    DEV_GROUP,
    DEV_LOSS,
    EVAL_AVERAGED_TOP1,
    EVAL_GROUP,
    EVAL_TOP1,
    RESULT_EVALUATIONS,
    STUDY_EXAFLOPS,
    STUDY_TRAIN_IMAGES,
    TRANSFER_GROUP,
    TRANSFER_MEAN_TOP1,
)
from vit_ray.mlflow_internals import (
    VIEW,
    VIEW_TAG,
    runs_page,
)
from vit_ray.model_aliases import model_family
from vit_ray.report.copied_store import files_elsewhere
from vit_ray.report.figures.histories import Curve, curves, is_finite
from vit_ray.report.statistics.groups import (
    COMMIT,
    EXAFLOPS,
    FEW_SHOT_SETS,
    MEASURED_ON,
    PRETRAINING,
    TEST_SET,
    TRAINING_IMAGES,
    TRAINING_SET,
    WEIGHTS,
    Group,
)

TRAININGS: Final = ("", "pretrain", "finetune", "sweep_trial", "study_cell")
"""Kinds of runs that train; other programs' runs have no kind."""
IMAGES_KEY: Final = STUDY_TRAIN_IMAGES
"""Metric: number of different images in a training."""
_COMMIT: Final = 10
"""Digits shown of a git commit."""
_DIGEST: Final = 32
"""Characters of a data set's fingerprint that MLflow keeps."""
DEV: Final = "dev split"
"""Prefix for images held out of the training set."""
RUN_ID = re.compile(r"[0-9a-f]{32}")
TRANSFER: Final = re.compile(rf"{TRANSFER_GROUP}(.+)_top1")
"""Metric of a cell: accuracy on a task after fine-tuning."""
MEAN_TRANSFER: Final = TRANSFER_MEAN_TOP1
MAX_POINTS_A_CHART: Final = 12_000
"""With more points in total, a browser draws for seconds."""
MAX_POINTS: Final = 300
"""Most points of a curve on a page."""
MIN_POINTS: Final = 40
_STEP_FOLDER: Final = re.compile(r"/step-\d{8,}$")
_SETS: Final = {
    TRAINING_SET: ("training", "data.train"),
    TEST_SET: ("evaluation", "data.eval"),
    FEW_SHOT_SETS[0]: ("few-shot training", "evaluate.few_shot_train"),
    FEW_SHOT_SETS[1]: ("few-shot evaluation", "evaluate.few_shot_test"),
}
"""Context of a data set in MLflow, and the key of its path."""
_VERSION: Final = re.compile(r"v?\d[\d._-]*")
_SPLITS: Final = {"train", "training", "train800", "train800val200", "test", "validation", "val"}
"""Folder names that say which part of a data set they hold, not which set it is."""


@dataclass(frozen=True)
class DataSet:
    """A data set that MLflow has with a run."""

    use: str
    """Such as `training`."""
    name: str
    digest: str
    source: str
    facts: Mapping[str, Any]
    """Such as `num_images` and `num_classes`."""


@dataclass(frozen=True)
class RecordedRun:
    """One MLflow run, read once."""

    run: Run
    tasks: frozenset[str] = frozenset()
    """Keys of the transfers that any run of the study has."""
    origin: "RecordedRun | None" = None
    """The training whose weights it started from, if known."""
    tuned: tuple["RecordedRun", ...] = ()
    """Trainings that started from its weights."""
    parent_name: str = ""
    """Name of the run that it is a child of; empty if there is none in its experiment."""

    @property
    def run_id(self) -> str:
        return str(self.run.info.run_id)

    @property
    def name(self) -> str:
        return str(self.run.info.run_name or self.run_id)

    @property
    def status(self) -> str:
        """`FINISHED`, `RUNNING`, `FAILED`, `KILLED` or `SCHEDULED`."""
        return str(self.run.info.status)

    @property
    def params(self) -> dict[str, str]:
        """The deciding keys of the recipe, dotted; paths and what is measured are tags."""
        tags = {key: value for key, value in self.tags.items() if key in TAGGED}
        return {**tags, **self.run.data.params}

    @property
    def commit(self) -> str:
        """Git commit of the code, or `unknown`."""
        return self.tags.get("vit_ray.git_commit", "unknown")

    @property
    def short_commit(self) -> str:
        """As shown to readers; with `+` if files had changed."""
        return self.commit.rstrip("+")[:_COMMIT] + "+" * self.commit.endswith("+")

    @property
    def tags(self) -> dict[str, str]:
        return tags_of(self.run.data.tags)

    @cached_property
    def recorded(self) -> dict[str, float]:
        """Last value of every key that has one; `dev/...` is for images held out of the training
        set.

        An evaluation's values are the best if the run keeps the best; the last are `eval/last_top1`
        etc.

        `transfer/mean_top1` is the mean over `tasks`, for a run that has all of them.
        """
        finite = {key: value for key, value in self.run.data.metrics.items() if is_finite(value)}
        held = with_best(finite)
        if len(self.tasks) > 1 and self.tasks <= held.keys():
            held[MEAN_TRANSFER] = statistics.fmean(held[key] for key in self.tasks)
        return held

    @cached_property
    def metrics(self) -> dict[str, float]:
        """As `recorded`, and `dev/...` as `eval/...` if there is none, see `is_on_dev`."""
        on_dev = {
            re.sub(f"^{DEV_GROUP}", EVAL_GROUP, key): value for key, value in self.recorded.items()
        }
        return {**on_dev, **self.recorded}

    def number(self, key: str) -> float | None:
        """Value of a metric, or of a key of the recipe if it is a finite number."""
        if "/" in key:
            return self.metrics.get(key)
        try:
            value = float(self.params[key])
        except (KeyError, ValueError):
            return None
        return value if is_finite(value) else None

    def is_on_dev(self, key: str) -> bool:
        """Whether the value of a key is for images held out of the training set, not a test set."""
        return key not in self.recorded and key in self.metrics

    @property
    def is_trial(self) -> bool:
        """Whether it was trained to select a learning rate, and measured on a dev split."""
        return self.tags.get("vit_ray.sweep_stage") == "sweep_trial"

    def is_tested(self, key: str) -> bool:
        """Whether this accuracy is for a test set, not for held-out training images."""
        return not self.is_trial and not self.is_on_dev(key)

    @property
    def training_set(self) -> str:
        """Path of the data it was trained on; empty if unknown."""
        return self.params.get("data.train", "")

    @property
    def training_name(self) -> str:
        """Name of the data that it was trained on."""
        return set_name(self.training_set)

    @property
    def test_sets(self) -> list[tuple[int, int]]:
        """Numbers of images and of classes of its evaluation set, as far as recorded."""
        return self._sizes("evaluation")

    def _sizes(self, use: str) -> list[tuple[int, int]]:
        return [
            (one.facts["num_images"], one.facts["num_classes"])
            for one in self.data_sets
            if one.use == use and {"num_images", "num_classes"} <= one.facts.keys()
        ]

    @cached_property
    def data_sets(self) -> list[DataSet]:
        """Data sets that it was trained and evaluated on, as recorded."""
        inputs = getattr(self.run, "inputs", None)
        found = []
        for one in inputs.dataset_inputs if inputs else []:
            uses = [tag.value for tag in one.tags if tag.key == "mlflow.data.context"]
            facts, held = _json(one.dataset.profile or ""), one.dataset
            facts = facts if isinstance(facts, dict) else {}
            use, source = uses[0] if uses else "", str(held.source)
            place = _json(source)  # ours: {"uri": ...}
            place = str(place.get("uri", source)) if isinstance(place, dict) else source
            found.append(DataSet(use, held.name, str(held.digest), place, facts))
        return found

    def num_tested(self, key: str) -> int | None:
        """Images behind an accuracy of an evaluation, if a single set was evaluated."""
        if "top" not in key or not key.startswith((EVAL_GROUP, DEV_GROUP)):
            return None  # a loss, for example
        sets = self.test_sets
        if key.startswith(DEV_GROUP):  # without a test set, held-out images are the evaluation set
            is_tested = key.replace(DEV_GROUP, EVAL_GROUP, 1) in self.recorded
            sets = self._sizes("held-out evaluation") or ([] if is_tested else sets)
        return sets[0][0] if len(sets) == 1 else None

    @property
    def elapsed_s(self) -> float | None:
        """Seconds from start to end; None while it runs."""
        start_ms, end_ms = self.run.info.start_time, self.run.info.end_time
        return (end_ms - start_ms) / 1000 if start_ms and end_ms else None

    @property
    def kind(self) -> str:
        """The command that made the run, such as `study_cell`; empty if it was not one of ours."""
        return self.tags.get("vit_ray.kind", "")

    @property
    def parent_id(self) -> str | None:
        return self.tags.get(PARENT_TAG)

    @property
    def label(self) -> str:
        """Row name in a study; elsewhere the model's or the run's name."""
        return self.tags.get("vit_ray.study_label") or self.params.get("model.name") or self.name

    @cached_property
    def group(self) -> Group:
        """What was trained and tested, without the seed; without a recipe, a separate group."""
        if not any(is_trained(key) for key in self.params):
            return Group.of({"run": self.run_id}, {})
        flat = recorded_before(self.run.data.params, self.tags)
        values = deciding_keys(flat)
        if not self.kind:  # from another program, any of whose keys may decide
            values |= {key: text for key, text in self.params.items() if key != "seed"}
        if "model.name" not in self.params:
            values["model.name"] = self.tags.get("vit_ray.study_label", "None")
        names = {}
        for key, (context, place) in _SETS.items():
            path = flat.get(place, "None")
            fingerprints = sorted(s.digest[:_DIGEST] for s in self.data_sets if s.use == context)
            if context == "training" and (known := self.tags.get("vit_ray.data_fingerprint")):
                fingerprints = [known[:_DIGEST]]
            values[key] = " ".join(fingerprints) or path
            if path != "None":
                names[values[key]] = set_name(path)
        images = self.recorded.get(IMAGES_KEY)
        values[TRAINING_IMAGES] = "None" if images is None else f"{images:.0f}"
        if all(flat.get(key, "None") == "None" for key in LENGTH):
            values[EXAFLOPS] = f"{self.recorded.get(STUDY_EXAFLOPS)}"
        if RESULT_EVALUATIONS in self.recorded:
            values["result"] = "best evaluation"
            values["evaluate.every_steps"] = flat["evaluate.every_steps"]
        if self._is_measured_on_dev:
            values[MEASURED_ON] = DEV
        values[COMMIT] = self.commit
        names[values[COMMIT]] = self.short_commit
        if self.origin is not None:
            values |= {PRETRAINING + key: text for key, text in self.origin.group.items}
            names |= self.origin.group.names
        else:
            unknown = "not recorded" if self.kind == "finetune" else "None"
            values[WEIGHTS] = self.params.get("init_from", unknown)
        return Group.of(values, names)

    @property
    def seed(self) -> tuple[str, ...]:
        """Its own seed and its pre-training's: the only difference between runs of one group.

        A run without a seed is a group by itself.
        """
        flat = recorded_before(self.run.data.params, self.tags)
        own = flat["seed"] if "seed" in self.params else self.run_id
        return (own, *(self.origin.seed if self.origin else ()))

    @property
    def best_of_tests(self) -> int | None:
        """Number of test-set evaluations from which the best was selected; None: not selected.

        The last evaluation is not selected, nor is one that held-out training images selected.
        """
        count = self.recorded.get(RESULT_EVALUATIONS)
        if count is None or DEV_LOSS in self.recorded or self._is_measured_on_dev:
            return None
        return int(count)

    @property
    def _is_measured_on_dev(self) -> bool:
        keys = (EVAL_TOP1, EVAL_AVERAGED_TOP1)
        return self.is_trial or any(self.is_on_dev(key) for key in keys)

    def in_all(self, key: str) -> float | None:
        """Sum of a cost over the training and those whose weights it started from; None: unknown.

        Args:
            key: such as `study/exaflops`.
        """
        own = self.recorded.get(key)
        if self.params.get("init_from", "None") in ("None", ""):
            return own
        before = self.origin.in_all(key) if self.origin else None
        return None if own is None or before is None else own + before

    @cached_property
    def family(self) -> str:
        """`ViT`, `Hybrid`, `ResNet`, `Axial` or `Other`, by the model's name."""
        return model_family(self.params.get("model.name", ""))


class Archive:
    """The runs that a report is about."""

    def __init__(self, uri: str, selection: str) -> None:
        """
        Args:
            uri: tracking server or SQLite address; nothing is written to it.
            selection: experiment name, or id of a run that is taken with its children.

        Raises:
            ValueError: there is no such experiment or run.
        """
        require_store(uri)
        os.environ.setdefault(
            "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"
        )  # a bar for each history
        client = MlflowClient(uri)
        self.is_server = uri.startswith(("http://", "https://"))
        self._client, self._uri = client, uri
        self.address = redact(uri).partition("?")[0].rstrip("/")
        self.parent: RecordedRun | None = None
        found: Experiment | None = None
        if RUN_ID.fullmatch(selection):
            try:
                self.parent = RecordedRun(client.get_run(selection))
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                raise ValueError(
                    f"report: MLflow has no run {selection}; give the id of one of its runs, or an "
                    "experiment"
                ) from None
            found = client.get_experiment(self.parent.run.info.experiment_id)
        elif (found := client.get_experiment_by_name(selection)) is None:
            known = sorted(e.name for e in client.search_experiments())
            raise ValueError(
                f"report: MLflow has no experiment {selection!r}; it has {', '.join(known)} "
                "(give one of these, or a run id)"
            )
        self.experiment = str(found.name)
        self._experiment_id = str(found.experiment_id)
        self._has_view = f"{VIEW_TAG}{VIEW}" in found.tags
        everything: list[RecordedRun] = []
        token: str | None = ""
        while token is not None:
            page = client.search_runs(
                [found.experiment_id], order_by=["attributes.start_time ASC"], page_token=token
            )
            everything += [RecordedRun(run) for run in page]
            token = page.token or None
        chosen = everything
        if self.parent:  # and its child runs, at any depth
            kept, size = {selection}, 0
            while len(kept) > size:
                size = len(kept)
                kept |= {run.run_id for run in everything if run.parent_id in kept}
            chosen = [run for run in everything if run.run_id in kept]
        names = {run.run_id: run.name for run in everything}
        chosen = [replace(run, parent_name=names.get(run.parent_id or "", "")) for run in chosen]
        self.runs = with_origins(with_tasks(chosen), everything)

    def curves(self, runs: Sequence[RecordedRun], key: str) -> dict[str, Curve]:
        """Run id to steps and values in order, for each run that has any.

        For a long curve these are recorded points spread evenly over its length, at most
        `MAX_POINTS` and fewer if many runs share the page, with the first and the last.
        """
        on_dev = re.sub(f"^{EVAL_GROUP}", DEV_GROUP, key)
        by_name: dict[str, list[RecordedRun]] = {}
        for run in runs:
            if name := next((n for n in (key, on_dev) if n in run.run.data.metrics), None):
                by_name.setdefault(name, []).append(run)
        count = sum(map(len, by_name.values()))
        most = max(MIN_POINTS, min(MAX_POINTS, MAX_POINTS_A_CHART // max(count, 1)))
        found: dict[str, Curve] = {}
        for name, members in by_name.items():
            found |= curves(self._client, [run.run_id for run in members], name, most)
        return found

    def file(self, run: RecordedRun, path: str) -> bytes | None:
        """Content of a file of a run's artifacts; None if it does not exist."""
        with TemporaryDirectory() as folder:
            try:
                if other := files_elsewhere(self._uri, str(run.run.info.artifact_uri)):
                    return (other.folder / path).read_bytes()
                held = self._client.download_artifacts(run.run_id, path, folder)
                return Path(held).read_bytes()
            except Exception:  # also of a bucket's library; the page is made without it
                return None

    def paths(self, run: RecordedRun, folder: str = "") -> list[str]:
        """Files and folders in a folder of a run's artifacts; empty if they cannot be listed."""
        try:
            if other := files_elsewhere(self._uri, str(run.run.info.artifact_uri)):
                names = sorted(one.name for one in (other.folder / folder).iterdir())
                return [str(PurePosixPath(folder, name)) for name in names]
            return [one.path for one in self._client.list_artifacts(run.run_id, folder or None)]
        except Exception:  # as in `file`
            return []

    def card(self, run: RecordedRun) -> str:
        """Where the model card of the run's logged model is: a page of the server, or a file."""
        outputs = getattr(run.run, "outputs", None)
        models = outputs.model_outputs if outputs else []
        if not models:
            return ""
        info, model_id = run.run.info, models[-1].model_id
        if self.is_server:
            return f"{self.address}/#/experiments/{info.experiment_id}/models/{model_id}"
        try:
            place = urlsplit(str(self._client.get_logged_model(model_id).artifact_location))
        except MlflowException:
            return ""
        card = Path(unquote(place.path)) / "artifacts" / "README.md"
        return str(card) if place.scheme in ("", "file") and card.is_file() else ""

    def link(self, run: RecordedRun) -> str:
        """Address of the run on the MLflow server's pages; empty without a server."""
        info = run.run.info
        path = f"/#/experiments/{info.experiment_id}/runs/{info.run_id}"
        return self.address + path if self.is_server else ""

    @property
    def opening(self) -> str:
        """Where each run's recipe, events and files are: as commands print it."""
        address, before = self.address, ""
        if not self.is_server:
            address, before = (
                LOCAL_SERVER,
                f"mlflow ui --backend-store-uri {self.address} and then ",
            )
        link = runs_page(address, self._experiment_id, has_view=self._has_view)
        return f"Recipe, events and files of each run are in MLflow: {before}{link}"


def set_name(path: str) -> str:
    """The last folder that is not a split, with the one above it if it is a version."""
    parts = [part for part in PurePosixPath(path).parts if part not in _SPLITS]
    if not parts:
        return "unknown data"
    return "/".join(parts[-2:]) if _VERSION.fullmatch(parts[-1]) else parts[-1]


def _json(text: str) -> Any:
    """Parsed; None if it is not JSON, as in a run of another program."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def with_tasks(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """The runs, each with the tasks of its study, because means need the same tasks."""
    tasks: dict[str | None, frozenset[str]] = {}
    for run in runs:
        keys = {key for key in run.run.data.metrics if TRANSFER.fullmatch(key)} - {MEAN_TRANSFER}
        tasks[run.parent_id] = tasks.get(run.parent_id, frozenset()) | keys
    return [replace(run, tasks=tasks[run.parent_id]) for run in runs]


def with_origins(
    runs: Sequence[RecordedRun], everything: Sequence[RecordedRun] = ()
) -> list[RecordedRun]:
    """The runs, each with the training whose weights it started from and those that started from
    its own.

    That training is found by its id, which the checkpoint has; for earlier records by the folder
    that the weights were taken from; and for runs that recorded none by the last part of that
    folder, if only one training has that name.

    Args:
        everything: all runs, to look up pre-trainings that are not among the runs.
    """
    by_id = {run.run_id: run for run in (*runs, *everything)}
    by_place: dict[str, list[RecordedRun]] = {}
    for run in by_id.values():
        if run.kind in TRAININGS:
            place = run.tags.get(RUN_FOLDER, "").rstrip("/") or run.name
            by_place.setdefault(place, []).append(run)

    def origin_of(run: RecordedRun) -> RecordedRun | None:
        if known := run.tags.get(INIT_RUN):
            return by_id.get(known)
        folder = _STEP_FOLDER.sub("", run.params.get("init_from", "None").rstrip("/"))
        if folder in ("", "None"):
            return None
        started = run.run.info.start_time or 0
        inside = [
            ((one.status == "FINISHED", begun), one)
            for one in by_place.get(folder, [])
            if (begun := one.run.info.start_time or 0) <= started and one.run_id != run.run_id
        ]
        if inside:
            return max(inside, key=lambda pair: pair[0])[1]
        named = [r for r in by_place.get(PurePosixPath(folder).name, []) if r.run_id != run.run_id]
        return named[0] if len({(one.group, one.seed) for one in named}) == 1 else None

    def linked(run: RecordedRun, above: frozenset[str] = frozenset()) -> RecordedRun:
        """The run with its origin, that with its own origin, and so on."""
        found, above = origin_of(run), above | {run.run_id}
        if found is None or found.run_id in above:
            return run
        return replace(run, origin=linked(found, above))

    with_own = [linked(run) for run in {run.run_id: run for run in runs}.values()]
    tuned: dict[str, list[RecordedRun]] = {}
    for run in with_own:
        if run.origin is not None:
            tuned.setdefault(run.origin.run_id, []).append(run)
    return [replace(run, tuned=tuple(tuned.get(run.run_id, ()))) for run in with_own]
