"""Counter-based random numbers: a pure function of keys, without state.

As in Salmon et al. (SC 2011), a sample gets the same numbers in any batch, on any worker or device.
SplitMix64 (Steele et al., OOPSLA 2014) over 64-bit keys, in integer operations that torch runs on
any device and that its compiler fuses into the consuming kernel.
"""

from typing import Any

import torch
from torch import Tensor


def sample_keys(samples: Tensor, *words: int) -> Tensor:
    """A key for each sample, int64 (B,), from its number and the words (seed, step, ...).

    Args:
        samples: int64 (B,), global numbers of the images.
        *words: further inputs, in this order; at least one.
    """
    key = 0
    for word in words:
        key = _mix(key + word + _GOLDEN)
    return _mix(samples.long() * _GOLDEN + _signed(key))


def numbered_keys(keys: Tensor | None, number: int) -> Tensor | None:
    """Keys for the `number`-th use of the same samples, such as a layer, or a step in a layer."""
    return None if keys is None else _mix(keys ^ _signed(_mix((number + 1) * _GOLDEN)))


def line_keys(keys: Tensor | None, count: int) -> Tensor | None:
    """A key for each of `count` lines of each sample: (B,) to (B * count,), sample by sample."""
    return None if keys is None else random_words(keys, count).flatten()


def random_words(keys: Tensor, count: int) -> Tensor:
    """`count` words of 64 random bits for each key: int64 (B, count), positive and negative."""
    return _mix(keys[:, None] + torch.ops.vit_ray.golden_multiples(keys, count))


def random_uint16(keys: Tensor, count: int) -> Tensor:
    """`count` random numbers from -2^15 to 2^15 - 1 for each key: int16 (B, count).

    Four numbers per word, a quarter of the work. Compiled code shifts each number out of its word:
    inductor cannot fuse the view, would write all words to memory, and fails on the GPU if a key
    has one word.
    """
    words = random_words(keys, -(-count // 4))
    if not torch.compiler.is_compiling():
        return words.view(torch.int16)[:, :count]
    shifts = torch.arange(0, 64, 16, device=keys.device)
    return (words[:, :, None] >> shifts).to(torch.int16).flatten(1)[:, :count]


def _signed(word: int) -> int:
    """The lower 64 bits of a number, as an int64."""
    return (word + 2**63) % 2**64 - 2**63


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _golden_multiples(keys: Tensor, count: int) -> Tensor:
    """The first `count` multiples of the golden ratio modulo 2^64: int64 (count,) on keys' device.

    A custom operation, so that compiled code reads the products from memory. Inductor would fold
    them into the loop's index: in C++ that overflow is undefined, and g++ 12 drops the loop's bound
    and writes past the end of the output.
    """
    return torch.arange(1, count + 1, device=keys.device) * _GOLDEN


torch.library.define("vit_ray::golden_multiples", "(Tensor keys, SymInt count) -> Tensor")
# `torch.library.custom_op` would cost about a hundred microseconds of host time per call.
torch.library.impl("vit_ray::golden_multiples", "CompositeExplicitAutograd", _golden_multiples)


@torch.library.register_fake("vit_ray::golden_multiples")
def _(keys: Tensor, count: int) -> Tensor:
    return keys.new_empty(count)


def _mix(words: Any) -> Any:
    """A bijection of 64-bit words in which every bit depends on all bits.

    `words` is a tensor, or a number on the host modulo 2^64: as a tensor, the number would have to
    be copied to the device, and the host would wait for the copy.
    """
    words = (words ^ _shift_right(words, 30)) * _MIX_1
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    return words ^ _shift_right(words, 31)


def _shift_right(words: Any, bits: int) -> Any:
    """Shift in zeros; int64's own shift copies the sign."""
    return (words >> bits) & (2 ** (64 - bits) - 1)
