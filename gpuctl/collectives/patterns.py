"""Data whose collective has one exactly representable answer, so that the check has no tolerance.

The idea is nccl-tests' ``verifiable.cu``: a function of (rank, element) such that no partial sum
in any order leaves the mantissa. Two families:

* *tagged*: the value tells who sent it and into which slot; for what is moved, min and max.
* *terms*: small integers of both signs whose sum over ranks fits the mantissa; for sums. Beyond
  the number of ranks that fit, a different few ranks contribute to each element.

Index tensors are int64 positions in the buffer; values come back as int64 (float64 for avg).
"""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA_LIMIT = {
    "bfloat16": 1 << 8,
    "float16": 1 << 11,
    "float32": 1 << 24,
    "float64": 1 << 53,
    "int8": 127,
    "uint8": 255,
    "int32": (1 << 31) - 1,
    "int64": (1 << 63) - 1,
}
"""Integers up to here are exact in the type (IEEE 754 significands; bf16 has 8 bits)."""

_PRIMES = (65521, 16381, 4093, 2039, 1021, 509, 251, 127, 61, 31, 13, 7, 5, 3)
_ELEMENT_STRIDE = 37
_TAG_STRIDE = 19
"""Coprime with every prime above: a shift by one element or one rank changes every value."""


def tagged(tag: Tensor | int, idx: Tensor, dtype: str) -> Tensor:
    """Return values that identify ``tag`` and the position, exact in ``dtype``."""
    return _wave(tag, idx, _modulus(MANTISSA_LIMIT[dtype]), dtype)


def terms(rank: int, num_ranks: int, idx: Tensor, *, op: str, dtype: str) -> Tensor:
    """Return what ``rank`` contributes to a reduction with ``op``."""
    if op in ("min", "max"):
        return tagged(rank, idx, dtype)
    if op == "prod":
        return _factors(rank, num_ranks, idx, dtype)
    if op == "avg":
        turn = (idx + rank) % num_ranks
        return torch.where(turn < 2, 1 + (idx * _ELEMENT_STRIDE + rank) % 61, 0)
    return _summands(rank, num_ranks, idx, dtype)


def reduced(num_ranks: int, idx: Tensor, *, op: str, dtype: str) -> Tensor:
    """Return the reduction of every rank's :func:`terms`."""
    total = terms(0, num_ranks, idx, op=op, dtype=dtype)
    for rank in range(1, num_ranks):
        other = terms(rank, num_ranks, idx, op=op, dtype=dtype)
        if op in ("min", "max"):
            total = torch.minimum(total, other) if op == "min" else torch.maximum(total, other)
        else:
            total = total * other if op == "prod" else total + other
    return total.double() / num_ranks if op == "avg" else total


def _summands(rank: int, num_ranks: int, idx: Tensor, dtype: str) -> Tensor:
    limit = MANTISSA_LIMIT[dtype]
    modulus = _modulus(2 * limit // num_ranks)
    value = _wave(rank, idx, modulus, dtype)
    largest = modulus - 1 if dtype == "uint8" else modulus // 2
    contributors = limit // largest
    if contributors >= num_ranks:
        return value
    return torch.where((idx + rank) % num_ranks < contributors, value, 0)


def _factors(rank: int, num_ranks: int, idx: Tensor, dtype: str) -> Tensor:
    """One factor of two an element at a rank that turns, and signs: no product overflows."""
    factor = torch.where((idx + rank) % num_ranks == 0, 2, 1)
    if dtype == "uint8":
        return factor
    return torch.where((idx * _ELEMENT_STRIDE + rank * _TAG_STRIDE) % 3 == 0, -factor, factor)


def _wave(tag: Tensor | int, idx: Tensor, modulus: int, dtype: str) -> Tensor:
    value = (idx * _ELEMENT_STRIDE + tag * _TAG_STRIDE) % modulus
    return value if dtype == "uint8" else value - modulus // 2


def _modulus(limit: int) -> int:
    """Return the largest prime of the table within ``limit``, or the smallest there is."""
    return next((prime for prime in _PRIMES if prime <= limit), _PRIMES[-1])
