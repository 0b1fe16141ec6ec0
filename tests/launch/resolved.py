"""What a run is found to be, without data."""

from types import SimpleNamespace

from vit_ray.config import load_recipe


def resolved_run() -> SimpleNamespace:
    """7 steps on 90 of 100 images of 10 classes."""
    manifest = SimpleNamespace(
        path="/data/digits/train", fingerprint="f" * 64, num_images=100, num_classes=10, about={}
    )
    spec = SimpleNamespace(manifest=manifest, num_images=90)
    return SimpleNamespace(
        recipe=load_recipe("digits"), manifest=manifest, num_images=90, total_steps=7,
        streams={"train": spec, "eval": spec},
    )  # fmt: skip
