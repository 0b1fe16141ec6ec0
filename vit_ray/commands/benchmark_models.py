"""The command that measures models: images per second and the largest batch, by input size."""

from vit_ray.commands.printed_tables import print_rows
from vit_ray.config import Recipe
from vit_ray.launch.model_benchmark import benchmark_of, benchmarked_models, model_recipes
from vit_ray.models.flops import forward_macs
from vit_ray.train.memory.model_speed import NUM_CLASSES


def benchmark_models(recipe: Recipe) -> int:
    """Measure, print and record; exit code 1 if a model failed."""
    recipe = recipe.with_absolute_paths()
    has_failed = False
    for row in benchmarked_models(recipe):
        has_failed |= bool(row.error)
        if row.error:
            print(f"{row.label}: failed: {row.error}", flush=True)
            continue
        rows = []
        for one in row.speeds:
            best = one.fastest
            least = "" if one.ended_by == "memory" else f" or more ({one.ended_by})"
            speed = (
                ("-", "-") if best is None else (f"{best.images_per_s:.4g}", str(best.batch_size))
            )
            rows.append((one.mode, str(one.image_size), *speed, f"{one.largest_batch}{least}"))
        columns = ("mode", "input px", "images/s", "at batch", "largest batch")
        print_rows(f"{row.label} on {row.device}", columns, rows)
    print(f"recorded in {recipe.tracking.uri}, experiment {recipe.tracking.experiment}")
    return 1 if has_failed else 0


def describe_benchmark(recipe: Recipe) -> str:
    """What would be measured, with the multiply-adds of each model at each input size."""
    config = benchmark_of(recipe)
    lines = [f"measured in {' and '.join(config.modes)}; billions of multiply-adds by input size:"]
    for label, one in model_recipes(recipe).items():
        sizes = dict.fromkeys(map(one.model.side_in_whole_patches, config.image_sizes))
        name, options = one.model.name, one.model.options()
        macs = {size: forward_macs(name, NUM_CLASSES, size, **options) for size in sizes}
        lines.append(f"{label}: " + ", ".join(f"{s} px {n / 1e9:.3g}" for s, n in macs.items()))
    return "\n".join(lines)
