"""Randomness without state: a number in [0, 1) that is a function of seed and position alone, in plain torch."""

from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) from int64 seeds and positions, float64.

    Two rounds of SplitMix64 (Steele, Lea and Flood, 2014), 53 bits of the result. int64 wraps around as uint64 does.
    """
    mixed = _mix(_mix(seeds) + positions * _signed(GOLDEN_GAMMA))
    return _shift(mixed, 11).double() * 2.0**-53


def _mix(value: Tensor) -> Tensor:
    value = value + _signed(GOLDEN_GAMMA)
    value = (value ^ _shift(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift(value, 27)) * _signed(0x94D049BB133111EB)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """To the right, zeros from the left."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
