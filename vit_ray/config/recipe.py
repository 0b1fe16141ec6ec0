"""The recipe: every knob of every job, with default, unit and check, in one frozen tree.

Other rooms take the section they need; nothing edits a recipe after it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vit_ray.config.command_sections import (
    BenchmarkConfig,
    BenchmarkModelsConfig,
    ConvertConfig,
    DeduplicateConfig,
    ExportConfig,
    ExtractConfig,
    InspectConfig,
    PaperConfig,
    PlanConfig,
    ReportConfig,
    StudyConfig,
    StudyModel,
    SubsetConfig,
    SweepConfig,
    VerifyConfig,
    VtabConfig,
)
from vit_ray.config.secrets import credentials_problem, redacted
from vit_ray.config.section import NotNegative, OnResume, Section
from vit_ray.config.training_sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    TrackingConfig,
    TrainConfig,
    TrainingSet,
    WorkersConfig,
)
from vit_ray.config.validation import is_list, validated, value_text


class Recipe(Section):
    """Everything that decides what a job does."""

    name: str = Field(min_length=1, pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$")
    """Run name: folder of its checkpoints, and how it is resumed."""
    seed: Annotated[NotNegative, Field(lt=2**63), OnResume.FIXED] = 0
    """Initial weights, order, augmentation and dropout; as torch's generators take it."""
    output: Annotated[str, OnResume.FREE] = "runs"
    """Folder or `s3://` prefix under which runs keep their checkpoints."""
    resume: Annotated[bool | Literal["auto", "from_zero", "changed"], OnResume.FREE] = "auto"
    """A run of this name exists: `auto` continues it, `true` demands it, `false` refuses it;
    `from_zero` is `auto`, but starts at step 0 where none of its checkpoints can be used;
    `changed` is `auto`, but goes on with a recipe that is not the one it was begun with."""
    init_from: Annotated[str | None, OnResume.CONFIRM] = None
    """Weights to start from: a run folder, a checkpoint, a `.npz` or `.safetensors` file, or a
    folder of Hugging Face, local or `s3://`; or `hf://OWNER/NAME` of its hub, timm's too."""
    init_resize: Annotated[Literal["bilinear", "bicubic"], OnResume.CONFIRM] = "bilinear"
    """How positions of `init_from` reach another resolution: as the paper's code, or as timm and
    transformers."""
    model: Annotated[ModelConfig, OnResume.FIXED] = ModelConfig()
    data: Annotated[DataConfig, OnResume.CONFIRM] = DataConfig()
    optim: Annotated[OptimConfig, OnResume.CONFIRM] = OptimConfig()
    train: Annotated[TrainConfig, OnResume.CONFIRM] = TrainConfig()
    checkpoint: Annotated[CheckpointConfig, OnResume.FREE] = CheckpointConfig()
    evaluate: Annotated[EvalConfig, OnResume.CONFIRM] = EvalConfig()
    workers: Annotated[WorkersConfig, OnResume.FREE] = WorkersConfig()
    tracking: Annotated[TrackingConfig, OnResume.FREE] = TrackingConfig()
    convert: ConvertConfig | None = None
    verify: VerifyConfig | None = None
    subset: SubsetConfig | None = None
    deduplicate: DeduplicateConfig | None = None
    sweep: SweepConfig | None = None
    study: StudyConfig | None = None
    vtab: VtabConfig | None = None
    plan: PlanConfig = PlanConfig()
    report: ReportConfig = ReportConfig()
    export: ExportConfig | None = None
    inspect: InspectConfig | None = None
    benchmark: BenchmarkConfig = BenchmarkConfig()
    benchmark_models: BenchmarkModelsConfig | None = None
    extract: ExtractConfig | None = None
    paper: PaperConfig = PaperConfig()

    @property
    def group_sizes(self) -> list[int]:
        """Worker counts that training may have: those that divide its batch; all if none does.

        Where images are mixed, those that divide it into pairs.
        """
        sizes = list(self.workers.sizes)
        batch, least = self.train.global_batch_size, self.train.least_pass
        return [n for n in sizes if batch % (n * least) == 0] or sizes

    @property
    def run_folder(self) -> str:
        """Where the run of this name keeps its checkpoints."""
        return f"{self.output.rstrip('/')}/{self.name}"

    @property
    def keeps_best(self) -> bool:
        """Whether the result is the best evaluation, and not the last."""
        return self.checkpoint.keep_best or self.train.early_stopping is not None

    @property
    def chooses_on_dev(self) -> bool:
        """Whether the best evaluation is chosen on held-out images, beside those of the test."""
        has_both = self.data.eval is not None and self.data.held_out_fraction > 0
        return self.keeps_best and has_both

    def recorded(self) -> dict[str, Any]:
        """Plain data of the whole recipe to keep or to show: without secrets of addresses."""
        return dict(redacted(self.model_dump(mode="json")))

    def flat(self) -> dict[str, str]:
        """Dotted keys to values as text, as MLflow's parameters take them."""
        return {key: value_text(value) for key, value in _leaves(self.recorded(), "")}

    def with_absolute_paths(self) -> Recipe:
        """The same with local paths made absolute: workers run in folders of their own."""
        few_shot = {key: getattr(self.evaluate, key) for key in ("few_shot_train", "few_shot_test")}
        return self.with_changes(
            output=_absolute(self.output),
            init_from=_absolute(self.init_from),
            data={
                "train": _absolute_sets(self.data.train),
                "eval": _absolute(self.data.eval),
                "cache_dir": _absolute(self.data.cache_dir),
            },
            evaluate={key: _absolute(path) for key, path in few_shot.items()},
            extract=_with_absolute(self.extract),
            tracking={"uri": _absolute_sqlite(self.tracking.uri)},
        )

    def with_changes(self, **sections: Any) -> Recipe:
        """A checked copy; a dict changes the named keys of a section, anything else replaces it.

        Raises:
            ValueError: as `load_recipe`.
        """
        tree = self.model_dump(mode="json")
        for key, value in sections.items():
            old = tree.get(key)
            tree[key] = (
                {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
            )
        return recipe_from_dict(tree, where=f"recipe {self.name!r}")


def recipe_from_dict(tree: dict[str, Any], where: str) -> Recipe:
    """A checked recipe from plain data.

    Raises:
        ValueError: as `load_recipe`; every problem is listed.
    """
    if problem := credentials_problem(tree):
        raise ValueError(f"{where}: {problem}")
    recipe = validated(Recipe, tree, where)
    if problem := _repeated(recipe):
        raise ValueError(f"{where}: {problem}")
    rows = recipe.study.models if recipe.study else ()
    if problem := _unlike_size(recipe, rows):
        raise ValueError(f"{where}: {problem}")
    models = [
        ("model", recipe.model),
        *((f"study {row.label!r}: model", row.model) for row in rows if row.model),
    ]
    for key, model in models:
        if problem := model.geometry_problem():
            raise ValueError(f"{where}: {key}.{problem}")
    return recipe


def _unlike_size(recipe: Recipe, rows: Sequence[StudyModel]) -> str | None:
    """Which row's model has the default size of images, and not the recipe's, unasked, or None."""
    size = recipe.model.image_size
    for row in rows:
        own = row.model
        if own is None or "image_size" in own.model_fields_set:
            continue
        if own.image_size != size and "model.image_size" not in dict(_leaves(row.changes, "")):
            return (
                f"study {row.label!r}: model has no image_size, and would have {own.image_size} "
                f"where the recipe has {value_text(size)}: a row's model is whole; give it, or "
                "name in changes what differs from the recipe's model"
            )
    return None


def _repeated(section: Section, prefix: str = "") -> str | None:
    """Which list has a value twice that stands for what is done once, or None.

    Not so a pair of values, and the stages of a ResNet. Sections in lists are told by their names.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        parts = value if isinstance(value, tuple) else (value,)
        values = [one.path.rstrip("/") if isinstance(one, TrainingSet) else one for one in parts]
        twice = [one for place, one in enumerate(values) if one in values[:place]]
        is_set = is_list(field.annotation) and name != "stages"
        if is_set and twice and not isinstance(twice[0], Section):
            told = f"{prefix}{name}={value_text(values)}"
            return f"{told} has {value_text(twice[0])} twice; list each once"
        for place, part in enumerate(parts):
            below = f"{prefix}{name}.{place}." if parts is value else f"{prefix}{name}."
            if isinstance(part, Section) and (problem := _repeated(part, below)):
                return problem
    return None


def _absolute(path: str | None) -> str | None:
    return path if path is None or "://" in path else str(Path(path).expanduser().absolute())


def _with_absolute(extract: ExtractConfig | None) -> dict[str, Any] | None:
    if extract is None:
        return None
    return {"data": _absolute(extract.data), "path": _absolute(extract.path)}


def _absolute_sets(train: str | tuple[TrainingSet, ...] | None) -> Any:
    if not isinstance(train, tuple):
        return _absolute(train)
    return [{"path": _absolute(one.path), "weight": one.weight} for one in train]


def _absolute_sqlite(uri: str) -> str:
    scheme = "sqlite:///"
    if not uri.startswith(scheme) or uri.startswith(f"{scheme}/"):
        return uri
    return scheme + str(Path(uri.removeprefix(scheme)).absolute())


def _leaves(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
