"""The main command in small: digits to parquet, pre-training, a sweep, and from scratch."""

import tempfile
import time
from pathlib import Path

from vit_ray.addresses import PLACEHOLDER
from vit_ray.commands.experiments import print_sweep
from vit_ray.commands.plan import data_facts
from vit_ray.commands.tracking_store import report
from vit_ray.commands.train import interval_note, print_figures, print_result
from vit_ray.config import Recipe, load_recipe
from vit_ray.config.command_sections import ConvertConfig
from vit_ray.data import open_dataset
from vit_ray.data.convert.conversion import convert
from vit_ray.data.convert.digits import write_digits
from vit_ray.data.dataset import MANIFEST_FILE
from vit_ray.experiments.sweep import run_sweep
from vit_ray.launch.connection import connect
from vit_ray.launch.run import RunResult, train
from vit_ray.metric_names import EVAL_AVERAGED_TOP1, EVAL_TOP1
from vit_ray.storage import locate

SWEEP_RECIPE, SCRATCH_RECIPE = "digits_sweep", "digits_scratch"


def run_quickstart(recipe: Recipe) -> int:
    """Convert, pre-train, sweep, train from scratch, compare; finished parts are not repeated."""
    start_s = time.monotonic()
    recipe = recipe.with_absolute_paths()
    tracking = {"tracking": recipe.tracking.model_dump(mode="json")}
    sweep, scratch = (
        load_recipe(name, tracking).with_changes(
            output=recipe.output, data={"train": recipe.data.train, "eval": recipe.data.eval}
        )
        for name in (SWEEP_RECIPE, SCRATCH_RECIPE)
    )
    sweep = sweep.with_changes(init_from=f"{recipe.output}/{recipe.name}")
    # What is wrong with a key is said before the digits are written.
    sets = [locate(str(place)) for place in (recipe.data.train, recipe.data.eval)]
    is_converted = all(one.child(MANIFEST_FILE).exists() for one in sets)
    data_facts(recipe if is_converted else _unconverted(recipe))
    connect(recipe)
    is_local = "://" not in recipe.output
    with tempfile.TemporaryDirectory() as temporary:
        _convert_digits(recipe, Path(recipe.output if is_local else temporary) / "digits_images")
    code = _train_and_compare(recipe, sweep, scratch)
    print(f"Total time: {time.monotonic() - start_s:.0f} s")
    return code


def _unconverted(recipe: Recipe) -> Recipe:
    """The recipe with the counts of the digits, which opens no set: one may be there in part."""
    data = {"train": PLACEHOLDER, "eval": None}
    return recipe.with_changes(data=data, plan={"num_images": 1497, "num_classes": 10})


def _convert_digits(recipe: Recipe, images: Path) -> None:
    """Write the pictures, and of each split the data set, unless it is there."""
    for split, destination in (("train", recipe.data.train), ("test", recipe.data.eval)):
        assert destination is not None, "checked before"
        if locate(destination).child(MANIFEST_FILE).exists():
            continue
        write_digits(images)  # again, if it was interrupted: the files are the same
        config = ConvertConfig(source=str(images / split), destination=destination)
        converted = convert(config, recipe.seed)
        print(f"{destination}: {converted.num_images} digits in {converted.num_shards} shard(s)")


def _train_and_compare(recipe: Recipe, sweep: Recipe, scratch: Recipe) -> int:
    """Train everything and write one page of all runs; returns the first non-zero exit code."""
    pretrained = train(recipe)
    if code := print_result(pretrained):
        return code
    swept = run_sweep(sweep)
    if (code := print_sweep(swept)) or swept is None:
        return code
    alone = train(scratch)
    if code := print_result(alone):
        return code
    places = {
        f"pre-trained, {_length(recipe, pretrained)}": _top1(pretrained),
        f"fine-tuned, {_length(scratch, alone)}": swept.mean,
        f"from scratch, {_length(scratch, alone)}": _top1(alone),
    }
    count = open_dataset(str(recipe.data.eval)).num_images
    figures = {name: f"{top1:.2%}{interval_note(top1, count)}" for name, top1 in places.items()}
    print_figures("Top-1 accuracy on the test set", figures)
    if swept.parent_run_id is not None:
        written = report(recipe, keep_with=swept.parent_run_id)
        print(f"report of all runs: {written.page}")
    return 0


def _length(recipe: Recipe, result: RunResult) -> str:
    return f"{result.total_steps} steps at {recipe.model.image_size} px"


def _top1(result: RunResult) -> float:
    top1 = result.metrics.get(EVAL_AVERAGED_TOP1, result.metrics.get(EVAL_TOP1))
    if top1 is None:
        raise ValueError(
            f"run {result.name} has no accuracy; its events say why; run the command again"
        )
    return top1
