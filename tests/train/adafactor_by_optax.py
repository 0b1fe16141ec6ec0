"""Updates of Adafactor by optax with big_vision's arguments: writes `adafactor_by_optax.json`.

    pip install optax==0.2.8 && python tests/train/adafactor_by_optax.py

Shapes and names are those of the published layout of a ViT, with two kernels of convolutions. What
is kept is a sample of each parameter's elements, counted in that layout: tests need no optax.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

KEPT = Path(__file__).with_suffix(".json")
STEPS, SAMPLED = 4, 25
BLOCK = "Transformer/encoderblock_0"
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding/kernel": (4, 4, 3, 64),
    "embedding/bias": (64,),
    "cls": (1, 1, 64),
    "Transformer/posembed_input/pos_embedding": (1, 37, 64),
    f"{BLOCK}/LayerNorm_0/scale": (64,),
    f"{BLOCK}/LayerNorm_0/bias": (64,),
    **{f"{ATTENTION}/{name}/kernel": (64, 2, 32) for name in ("query", "key", "value")},
    **{f"{ATTENTION}/{name}/bias": (2, 32) for name in ("query", "key", "value")},
    f"{ATTENTION}/out/kernel": (2, 32, 64),
    f"{ATTENTION}/out/bias": (64,),
    f"{BLOCK}/LayerNorm_2/scale": (64,),
    f"{BLOCK}/LayerNorm_2/bias": (64,),
    f"{BLOCK}/MlpBlock_3/Dense_0/kernel": (64, 96),
    f"{BLOCK}/MlpBlock_3/Dense_0/bias": (96,),
    f"{BLOCK}/MlpBlock_3/Dense_1/kernel": (96, 64),
    f"{BLOCK}/MlpBlock_3/Dense_1/bias": (64,),
    "Transformer/encoder_norm/scale": (64,),
    "Transformer/encoder_norm/bias": (64,),
    "head/kernel": (64, 40),
    "head/bias": (40,),
}
CONVOLUTIONS = {"patches of 32": (32, 32, 3, 64), "3 x 3": (3, 3, 40, 48)}


def gradient(name: str, shape: tuple[int, ...], step: int) -> np.ndarray:
    """float32, of sizes that differ by a factor of 50 along all axes."""
    places = np.indices(shape).reshape(len(shape), -1)
    sizes = sum(np.sin((axis + 1.3) * 0.7 * place) for axis, place in enumerate(places))
    signs = np.sin(1.7 * np.arange(math.prod(shape)) + 0.9 * step + len(name))
    return (0.01 * signs * np.exp(sizes)).astype(np.float32).reshape(shape)


def sampled(count: int) -> np.ndarray:
    """Indices of the elements that are kept of so many."""
    return np.unique(np.linspace(0, count - 1, SAMPLED).astype(int))


def updates(momentum: str) -> dict[str, list[list[float]]]:
    """By parameter: what each step subtracts at a rate of 1, of the sampled elements."""
    import jax.numpy as jnp
    import optax

    rms = optax.scale_by_factored_rms(
        factored=True,
        decay_rate=0.8,
        step_offset=0,
        min_dim_size_to_factor=32,
        epsilon=1e-30,
        decay_rate_fn=lambda step, exponent: jnp.minimum(
            0.999, 1.0 - (jnp.array(step, jnp.float32) + 1.0) ** -exponent
        ),
    )
    ema = optax.ema(0.9, debias=False, accumulator_dtype=getattr(jnp, momentum))
    chain = optax.chain(rms, ema)
    shapes = SHAPES | CONVOLUTIONS
    weights: Any = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    state = chain.init(weights)
    found: dict[str, list[list[float]]] = {name: [] for name in shapes}
    for step in range(STEPS):
        slopes = {name: jnp.array(gradient(name, s, step)) for name, s in shapes.items()}
        moved, state = chain.update(slopes, state, weights)
        for name, values in moved.items():
            flat = np.asarray(values, np.float32).ravel()
            found[name].append([float(f"{v:.7g}") for v in flat[sampled(flat.size)]])
    return found


if __name__ == "__main__":
    KEPT.write_text(json.dumps({kind: updates(kind) for kind in ("float32", "bfloat16")}) + "\n")
