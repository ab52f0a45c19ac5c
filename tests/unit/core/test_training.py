"""The presets have the sizes that their names and comments promise."""

from __future__ import annotations

import dataclasses

import pytest

from gpuctl.core.parallel import resolve_dims
from gpuctl.core.training import PRESETS, ModelConfig, TrainingConfig


def num_parameters(m: ModelConfig) -> int:
    """Count by hand: embedding, head unless tied, and q, k, v, out, three FFN matrices, two norms a layer."""
    head_dim = m.dim // m.num_heads
    attention = m.dim * head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    layer = attention + 3 * m.dim * m.ffn_dim + 2 * m.dim
    tables = m.vocab_size * m.dim * (1 if m.tied_embeddings else 2)
    return tables + m.num_layers * layer + m.dim


@pytest.mark.parametrize(
    "preset, millions",
    [
        ("tiny", 0.46),
        ("small", 9.6),
        ("gpt2-124m", 124),
        ("llama-1b", 1107),
        ("llama3-8b", 8030),
        ("llama3-70b", 70554),
    ],
)
def test_a_preset_has_its_size(preset: str, millions: float) -> None:
    assert num_parameters(PRESETS[preset]) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_laid_out(preset: str) -> None:
    dims = resolve_dims("zero2", 3, tp=None, pp=None, zero=None, model=PRESETS[preset])
    assert dims.world_size == 3


def test_the_defaults_are_those_of_the_contract() -> None:
    config = TrainingConfig()
    assert (config.preset, config.steps, config.seq_len, config.global_batch) == ("tiny", 50, 128, 24)
    assert (config.dtype, config.data.kind) == ("auto", "text")
    assert dataclasses.asdict(config.model) == dataclasses.asdict(PRESETS["tiny"])
