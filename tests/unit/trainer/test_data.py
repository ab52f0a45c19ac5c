"""Samples are a pure function of (seed, index), and the batch rule shares them out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.core.training import DataConfig
from gpuctl.trainer.data import micro_batches, num_micro_batches, open_dataset, share_of


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 8))
def test_shares_cover_a_batch_once_and_differ_by_one_at_most(dp: int, batch: int, micro: int) -> None:
    shares = [share_of(rank, dp, batch) for rank in range(dp)]
    assert [i for share in shares for i in share] == list(range(batch))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    counts = [len(micro_batches(share, micro)) for share in shares]
    assert max(counts) == num_micro_batches(dp, batch, micro)


def test_every_window_comes_once_an_epoch_in_an_order_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(200)) * 2)
    config = DataConfig(path=str(tmp_path / "text"))
    data, again = (open_dataset(config, seq_len=16, vocab_size=256, seed=3) for _ in range(2))
    windows = (400 - 1) // 16
    first = [tuple(data.sample(i).tokens) for i in range(windows)]
    second = [tuple(data.sample(windows + i).tokens) for i in range(windows)]
    assert sorted(first) == sorted(second) and first != second
    sample = again.sample(5)
    assert tuple(sample.tokens) == first[5]
    assert np.array_equal(sample.tokens[1:], sample.targets[:-1])


@pytest.mark.parametrize("size, vocab", [(10, 256), (400, 100)])
def test_data_that_does_not_fit_is_refused(tmp_path: Path, size: int, vocab: int) -> None:
    (tmp_path / "text").write_bytes(b"\xf0" * size)
    with pytest.raises(ValueError):
        open_dataset(DataConfig(path=str(tmp_path / "text")), seq_len=16, vocab_size=vocab, seed=0)
