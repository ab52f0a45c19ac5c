"""The training config and the model presets: what ``plan``, ``memory.py`` and the trainer read.

Plain dataclasses; the client validates them (pydantic's TypeAdapter), nodes only decode them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder (RMSNorm, RoPE, GQA, SwiGLU)."""

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 384
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied_embeddings: bool = False


PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(),  # 0.5 M parameters: a laptop trains it
    "small": ModelConfig(dim=384, num_layers=6, num_heads=6, num_kv_heads=2, ffn_dim=1024),  # 9.6 M
    # GPT-2's shape (Radford et al. 2019), the FFN narrowed to 2/3 because SwiGLU has a third matrix
    "gpt2-124m": ModelConfig(50257, 768, 12, 12, 12, 2048, tied_embeddings=True),
    "llama-1b": ModelConfig(32768, 2048, 16, 32, 8, 8192),  # 1.107 B
    "llama3-8b": ModelConfig(128256, 4096, 32, 32, 8, 14336, rope_theta=500_000.0),
    "llama3-70b": ModelConfig(128256, 8192, 80, 64, 8, 28672, rope_theta=500_000.0),
}


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from; ``digest`` is compared across nodes before any rank starts."""

    kind: Literal["text", "jsonl", "tokens", "random"] = "text"
    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with a cosine schedule."""

    lr: float = 3e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 5
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0


@dataclass(frozen=True)
class TrainingConfig:
    """Everything the bundled trainer needs besides its rank and the mesh."""

    preset: str | None = "tiny"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    steps: int = 50
    seq_len: int = 128
    global_batch: int = 24
    micro_batch: int = 4
    dtype: Literal["auto", "fp32", "bf16", "fp16", "fp64"] = "auto"
    seed: int = 0
    compile: bool | None = None
    out: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
