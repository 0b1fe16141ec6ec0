"""The recipe: every key of every command, with default, unit and check, in one frozen tree.

Other packages take the section that they need; a recipe is not changed after loading. A run is
resumed only if no key has changed that decides the training.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from vit_ray.addresses import absolute_path, absolute_uri, redacted, with_texts
from vit_ray.config.command_sections import (
    BenchmarkConfig,
    ConvertConfig,
    DeduplicateConfig,
    ExportConfig,
    InspectConfig,
    PaperConfig,
    PlanConfig,
    StudyConfig,
    SubsetConfig,
    SweepConfig,
    VerifyConfig,
    VtabConfig,
)
from vit_ray.config.schema import (
    NAME,
    NO_CREDENTIALS,
    Key,
    NotNegative,
    OnResume,
    Place,
    Section,
    is_list,
    keys_of,
    nearest_key,
    one_line,
    section_type,
    validated,
    value_text,
)
from vit_ray.config.training_sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    StorageConfig,
    TrackingConfig,
    TrainConfig,
    WorkersConfig,
)
from vit_ray.own_parts import trust_named


class Training(Section):
    """Everything that decides a training: what its checkpoints and its run in MLflow record."""

    name: str = Field(min_length=1, pattern=NAME)
    """Run name: names the folder of its checkpoints; the same name resumes the run."""
    seed: Annotated[NotNegative, Field(lt=2**63), OnResume.FIXED] = 0
    """Seed of initial weights, order, augmentation and dropout."""
    output: Annotated[Place, OnResume.FREE] = "runs"
    """Folder or `s3://` prefix for the checkpoints of all runs."""
    resume: Annotated[bool | Literal["auto", "from_zero", "changed"], OnResume.FREE] = "auto"
    """If a run of this name exists: `auto` continues it, `true` requires it, `false` refuses it;
    `from_zero` starts at step 0 a run without a checkpoint that can be used, and refuses others;
    `changed` is `auto`, but also continues with a changed recipe."""
    init_from: Annotated[Place | None, OnResume.CONFIRM] = None
    """Weights to start from: a run folder, a checkpoint, a `.npz` or `.safetensors` file, or a
    Hugging Face folder, local or `s3://`; or `hf://OWNER/NAME` on the Hugging Face hub, which also
    has timm's models."""
    model: Annotated[ModelConfig, OnResume.FIXED] = ModelConfig()
    data: Annotated[DataConfig, OnResume.CONFIRM] = DataConfig()
    optim: Annotated[OptimConfig, OnResume.CONFIRM] = OptimConfig()
    train: Annotated[TrainConfig, OnResume.CONFIRM] = TrainConfig()
    checkpoint: Annotated[CheckpointConfig, OnResume.FREE] = CheckpointConfig()
    evaluate: Annotated[EvalConfig, OnResume.CONFIRM] = EvalConfig()
    workers: Annotated[WorkersConfig, OnResume.FREE] = WorkersConfig()
    tracking: Annotated[TrackingConfig, OnResume.FREE] = TrackingConfig()
    storage: Annotated[StorageConfig, OnResume.FREE] = StorageConfig()
    paper: Annotated[PaperConfig, OnResume.FREE] = PaperConfig()


class Recipe(Training):
    """Everything that decides what a command does."""

    convert: ConvertConfig | None = None
    verify: VerifyConfig | None = None
    subset: SubsetConfig | None = None
    deduplicate: DeduplicateConfig | None = None
    sweep: SweepConfig | None = None
    study: StudyConfig | None = None
    vtab: VtabConfig | None = None
    plan: PlanConfig = PlanConfig()
    export: ExportConfig | None = None
    inspect: InspectConfig | None = None
    benchmark: BenchmarkConfig = BenchmarkConfig()

    def _check(self) -> None:
        for row in self.study.models if self.study else ():
            keys = {*(row.model.model_fields_set if row.model else ()), *dict(leaves(row.changes))}
            sets_size = keys & {"image_size", "model.image_size"}
            if row.model and not sets_size and row.model.image_size != self.model.image_size:
                raise ValueError(
                    f"study {row.label!r}: model has no image_size, and would get the default "
                    f"{row.model.image_size} where the recipe has "
                    f"{value_text(self.model.image_size)}: a row's model replaces the recipe's "
                    "model; give image_size, or put only what differs into changes"
                )

    def __hash__(self) -> int:
        return hash((self.name, self.seed, self.model))  # mappings have no hash

    def __setstate__(self, state: dict[Any, Any]) -> None:
        # The pickle is from another process of the same command, so its user trusts the modules.
        super().__setstate__(state)
        trust_named(self.model_dump(mode="json"))
        self.storage.use()

    @property
    def group_sizes(self) -> list[int]:
        """Worker counts that divide the global batch (with MixUp or CutMix, into pairs of images);
        all of `workers.sizes` if none of them does.
        """
        sizes = list(self.workers.sizes)
        batch, multiple = self.train.global_batch_size, self.train.pass_multiple
        return [n for n in sizes if batch % (n * multiple) == 0] or sizes

    @property
    def run_folder(self) -> str:
        return f"{self.output.rstrip('/')}/{self.name}"

    def check_measures(self) -> None:
        """
        Raises:
            ValueError: nothing can be measured with the recipe's evaluation sets.
        """
        is_masked = self.train.loss == "masked_patch"  # such a model has no classes
        has_test = self.data.eval is not None or self.data.held_out_fraction > 0
        if self.evaluate.few_shot_train is None and (is_masked or not has_test):
            reason = (
                "train.loss=masked_patch has no accuracy" if is_masked else "data.eval is not set"
            )
            raise ValueError(
                f"{reason}: nothing would be measured; give "
                f"{'' if is_masked else 'data.eval, a converted test set, or '}"
                "evaluate.few_shot_train and evaluate.few_shot_test for few-shot accuracy"
            )

    @property
    def keeps_best(self) -> bool:
        """Whether the result is the best evaluation instead of the last."""
        return self.checkpoint.keep_best or self.train.early_stopping is not None

    @property
    def chooses_on_dev(self) -> bool:
        """Whether the best evaluation is selected on held-out images, and not on `data.eval`."""
        return self.keeps_best and self.data.eval is not None and self.data.held_out_fraction > 0

    def recorded(self) -> dict[str, Any]:
        """Plain data of the training's keys, without secrets in addresses."""
        return dict(redacted(self.model_dump(mode="json", include=set(Training.model_fields))))

    def written(self, *sections: str) -> dict[str, Any]:
        """As `recorded`, and the given sections of commands, where they are set: a whole file."""
        of_commands = Recipe.model_fields.keys() - Training.model_fields.keys()
        names = {
            name
            for name in of_commands.intersection(sections)
            if getattr(self, name) != Recipe.model_fields[name].default
        }
        return self.recorded() | redacted(
            self.model_dump(mode="json", include=names, exclude_unset=True)
        )

    def flat(self) -> dict[str, str]:
        """Dotted keys to values as text, for MLflow's parameters."""
        return {key: value_text(value) for key, value in leaves(self.recorded())}

    def with_absolute_paths(self) -> Recipe:
        """The same with absolute local paths, because workers run in other folders."""
        return recipe_from_dict(
            in_folder(self.model_dump(mode="json"), os.getcwd()), where=f"recipe {self.name!r}"
        )

    def with_changes(self, **sections: Any) -> Recipe:
        """A checked copy. A dict changes only its keys in a section; any other value replaces it.

        Raises:
            ValueError: as `load_recipe`.
        """
        tree = self.model_dump(mode="json")
        for key, value in sections.items():
            are_keys = isinstance(tree.get(key), dict) and isinstance(value, dict)
            tree[key] = {**tree[key], **value} if are_keys else value
        return recipe_from_dict(tree, where=f"recipe {self.name!r}")


def recipe_from_dict(tree: dict[str, Any], where: str) -> Recipe:
    """A checked recipe from plain data.

    Raises:
        ValueError: as `load_recipe`; every problem is listed.
    """
    return validated(Recipe, tree, where)


# Compared like a key that is as fixed as the seed.
DATA_SET: Final = "the data set's fingerprint"
# Every key that takes a value, also a list of sections, in the order of the schema.
KEYS: Final = [
    key
    for key in keys_of(Recipe)
    if section_type(key.field.annotation) is None or is_list(key.field.annotation)
]
_MARKS: Final[dict[str, OnResume | None]] = {
    DATA_SET: OnResume.FIXED, **{key.name: key.on_resume for key in KEYS},
}  # fmt: skip
# Keys that decide what is measured, not the weights; the same set may have moved.
EVALUATED_SETS: Final = tuple(k for k, mark in _MARKS.items() if mark is OnResume.EVALUATED)
LENGTH: Final = tuple(k for k, mark in _MARKS.items() if mark is OnResume.LENGTH)


def on_resume(key: str) -> OnResume | None:
    """Whether a run may be resumed with another value; None for a key that no training reads."""
    return _MARKS.get(key)


@dataclass(frozen=True)
class Change:
    """A changed key that decides the training, with its values as text."""

    key: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} was {self.before} and is {self.now}"


def is_trained(key: str) -> bool:
    """Whether the key of a recipe decides the result of the training."""
    return on_resume(key) not in (None, OnResume.FREE)


def incompatible_changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """The deciding keys that differ, in the recipe's order; `auto` matches any earlier value.

    Args:
        before, now: `Recipe.flat`; a key that is not in both is ignored.
    """
    stops_early = [flat.get("train.early_stopping") for flat in (before, now)]
    # With early stopping, this interval decides when the run stops.
    ignored = "evaluate.every_steps" if "None" in stops_early else ""
    return [
        Change(key, before[key], value)
        for key, value in now.items()
        if is_trained(key) and key != ignored
        if value != "auto" and before.get(key, value) != value
    ]


def sections() -> dict[str, str]:
    """Every section and its meaning; the first, without a name, is the recipe itself."""
    return {key.section: one_line(key.schema.__doc__) for key in KEYS}


def keys_below(*prefixes: str) -> list[Key]:
    """The keys that are, or are below, one of the prefixes; without prefixes all."""
    below = tuple(f"{prefix}." for prefix in prefixes) or ""
    return [key for key in KEYS if f"{key.name}.".startswith(below)]


def known_key(key: str) -> str:
    """A valid key or section itself, else the most similar key, or itself if none is similar."""
    valid = [] if "." in key else list(Recipe.model_fields)
    return key if keys_below(key) else nearest_key(Recipe, key, valid) or key


def used_sections(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recorded recipe that inference needs."""
    keys = {"data": ("eval_augment",), "train": ("loss", "precision"), "evaluate": ("batch_size",)}
    return {"model": recipe.get("model", {})} | {
        section: {key: recipe[section][key] for key in names if key in recipe.get(section, {})}
        for section, names in keys.items()
    }


# Keys whose values are paths; `tracking.uri` is an address, which may have a path in it.
PLACES: Final = frozenset(
    key.name
    for key in KEYS
    if Place in get_args(key.field.annotation) or NO_CREDENTIALS in key.field.metadata
)
# Mappings in which the keys of a recipe stand.
_KEYS_PREFIX: Final = re.compile(r"^(study\.(models|transfer)\.changes|sweep\.space)\.")


def in_folder(tree: dict[str, Any], folder: str) -> Any:
    """Plain data of a recipe with its relative paths made absolute, below this absolute folder.

    Addresses stay, and so does a blank text, which the validation refuses.
    """

    def made_absolute(key: str, text: str) -> str:
        key = _KEYS_PREFIX.sub("", key)
        if key == "tracking.uri":
            return absolute_uri(text, folder)
        if key not in PLACES or "://" in text or not text.strip():
            return text
        path = absolute_path(text, folder)
        # A recipe that is no file is a shipped one.
        return text if key == "study.transfer.recipe" and not os.path.isfile(path) else path

    return with_texts(tree, made_absolute)


# Mappings that are one value.
_MAPPINGS: Final = ("tracking.tags", "sweep.space")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values from dotted or nested keys; tags and a sweep's space are one value."""
    for key, value in tree.items():
        if isinstance(value, dict) and f"{prefix}{key}" not in _MAPPINGS:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
