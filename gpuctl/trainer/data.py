"""Samples as a pure function of (seed, global sample index): resume needs one number, at any dp degree."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gpuctl.core.training import DataConfig

Tokens = npt.NDArray[np.int64]


class Sample(NamedTuple):
    """One sequence: ``tokens`` (S,) and what follows each: ``targets`` (S,), IGNORED where none counts."""

    tokens: Tokens
    targets: Tokens


class Dataset(Protocol):
    """What the loop needs of data."""

    def sample(self, index: int) -> Sample:
        """Return the sample with this global index."""


def shifted(window: Tokens) -> Sample:
    """Return the sample of S + 1 tokens in a row, all of which count."""
    return Sample(window[:-1], window[1:])


def open_dataset(config: DataConfig, *, seq_len: int, vocab_size: int, seed: int) -> Dataset:
    """Return the dataset of ``config``; ``config.path`` is a file on this node.

    Raises ValueError when the file is too short or its tokens do not fit the vocabulary.
    """
    if config.kind == "random":
        return RandomTokens(seq_len, vocab_size, seed)
    if config.path is None:
        raise ValueError(f"data.kind {config.kind} needs a file")
    path = Path(config.path)
    if config.kind == "tokens":
        tokens: npt.NDArray[np.generic] = np.memmap(path, dtype=np.uint16, mode="r")
    elif config.kind == "jsonl":
        tokens = np.frombuffer(b"\n".join(_texts(path)), dtype=np.uint8)
    else:
        tokens = np.memmap(path, dtype=np.uint8, mode="r")
    if config.kind != "tokens" and vocab_size < 256:
        raise ValueError(f"text is read as bytes: vocab_size must be 256 or more, not {vocab_size}")
    return Windows(tokens, seq_len, vocab_size, seed)


def _texts(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield str(json.loads(line)["text"]).encode("utf-8", "surrogatepass")
            except (ValueError, KeyError, TypeError) as exc:
                raise ValueError(f"{path.name}:{number}: not a JSON object with a text") from exc


class Windows:
    """Non-overlapping windows of a token file, in an order of its own in every epoch."""

    def __init__(self, tokens: npt.NDArray[np.generic], seq_len: int, vocab_size: int, seed: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.num_windows = (len(tokens) - 1) // seq_len
        if self.num_windows < 1:
            raise ValueError(f"the data has {len(tokens)} tokens, one sample needs {seq_len + 1}")
        self._order = functools.lru_cache(maxsize=2)(functools.partial(_permutation, seed, self.num_windows))

    def sample(self, index: int) -> Sample:
        epoch, position = divmod(index, self.num_windows)
        start = int(self._order(epoch)[position]) * self.seq_len
        window = np.asarray(self.tokens[start : start + self.seq_len + 1], dtype=np.int64)
        if window.max() >= self.vocab_size:
            raise ValueError(f"a token is {window.max()}, the vocabulary has {self.vocab_size}")
        return shifted(window)


def _permutation(seed: int, size: int, epoch: int) -> npt.NDArray[np.int64]:
    # Philox is counter-based: the epoch is a key of its own, not a state that was advanced
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)


class RandomTokens:
    """Uniform tokens, for benchmarks."""

    def __init__(self, seq_len: int, vocab_size: int, seed: int) -> None:
        self.seq_len, self.vocab_size, self.seed = seq_len, vocab_size, seed

    def sample(self, index: int) -> Sample:
        generator = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        return shifted(generator.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64))


def share_of(dp_rank: int, dp: int, global_batch: int) -> range:
    """Return the samples of a step that a dp rank takes: contiguous, sizes differ by at most one."""
    base, extra = divmod(global_batch, dp)
    first = dp_rank * base + min(dp_rank, extra)
    return range(first, first + base + (dp_rank < extra))


def micro_batches(share: range, micro_batch: int) -> list[range]:
    """Return ``share`` cut into micro-batches; the last may be smaller."""
    return [share[i : i + micro_batch] for i in range(0, len(share), micro_batch)]


def num_micro_batches(dp: int, global_batch: int, micro_batch: int) -> int:
    """Return the number of micro-batches of the rank that has most of them."""
    largest = -(-global_batch // dp)
    return -(-largest // micro_batch)
