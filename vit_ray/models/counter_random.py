"""Counter-based random numbers: a pure function of keys, without state.

As Salmon et al. (SC 2011), so that a sample gets the same numbers whatever batch,
worker or device it meets: SplitMix64 (Steele et al., OOPSLA 2014) over 64-bit keys, in integer
operations that torch runs on any device and that its compiler fuses into their user.
"""

import torch
from torch import Tensor


def sample_keys(samples: Tensor, *words: int) -> Tensor:
    """A key for each sample, int64 (B,), from its number and the words (seed, step, ...).

    Args:
        samples: int64 (B,), global numbers of the images.
        *words: what else decides, in this order; at least one.
    """
    key = 0
    for word in words:
        key = _mixed(key + word + _GOLDEN)
    return _mix(samples.long() * _GOLDEN + _signed(key))


def numbered_keys(keys: Tensor, number: int) -> Tensor:
    """Keys for the `number`-th use of the same samples: one layer of many, one place in a layer."""
    return _mix(keys ^ _signed(_mixed((number + 1) * _GOLDEN)))


def line_keys(keys: Tensor, count: int) -> Tensor:
    """A key for each of `count` lines of each sample: (B,) to (B * count,), lines together."""
    return random_words(keys, count).flatten()


def random_words(keys: Tensor, count: int) -> Tensor:
    """`count` words of 64 random bits for each key: int64 (B, count), of either sign."""
    return _mix(keys[:, None] + torch.ops.vit_ray.golden_multiples(keys, count))


def random_uint16(keys: Tensor, count: int) -> Tensor:
    """`count` random numbers from -2^15 to 2^15 - 1 for each key: int16 (B, count).

    Four to a word, which is a quarter of the work.
    """
    return random_words(keys, -(-count // 4)).view(torch.int16)[:, :count]


def _signed(word: int) -> int:
    """A 64-bit constant as torch's int64 writes it."""
    return word - 2**64 if word >= 2**63 else word


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _golden_multiples(keys: Tensor, count: int) -> Tensor:
    """The first `count` multiples of the golden ratio modulo 2^64: int64 (count,) on keys' device.

    An operation of its own, so that compiled code reads the products from memory. Inductor would
    fold them into the loop's index: in C++ that overflow is undefined, and g++ 12 drops the loop's
    bound and writes past the end of the output.
    """
    return torch.arange(1, count + 1, device=keys.device) * _GOLDEN


torch.library.define("vit_ray::golden_multiples", "(Tensor keys, SymInt count) -> Tensor")
# `torch.library.custom_op` would cost each call some hundred microseconds of the host.
torch.library.impl("vit_ray::golden_multiples", "CompositeExplicitAutograd", _golden_multiples)


@torch.library.register_fake("vit_ray::golden_multiples")
def _(keys: Tensor, count: int) -> Tensor:
    return keys.new_empty(count)


def _mix(words: Tensor) -> Tensor:
    """A bijection of 64-bit words in which every bit depends on all bits."""
    words = (words ^ _shift_right(words, 30)) * _MIX_1
    words = (words ^ _shift_right(words, 27)) * _MIX_2
    mixed: Tensor = words ^ _shift_right(words, 31)
    return mixed


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift in zeros; int64's own shift copies the sign."""
    shifted: Tensor = (words >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _mixed(word: int) -> int:
    """As `_mix`, of a number that the host knows, as 64 bits without a sign.

    In Python: a tensor would have to be copied to the device, for which the host waits.
    """
    word %= 2**64
    word = (word ^ word >> 30) * _MIX_1 % 2**64
    word = (word ^ word >> 27) * _MIX_2 % 2**64
    return word ^ word >> 31
