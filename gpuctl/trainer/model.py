"""A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (Touvron et al. 2023, Llama 2).

Shapes: B batch, S sequence, D model dim, H heads, K key/value heads, E head dim, F FFN dim, V vocabulary.
q, k and v are one matrix, gate and up another: fewer, larger matrix products.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from gpuctl.core.training import ModelConfig

#: Standard deviation of every matrix at the start (GPT-2; Radford et al. 2019).
INIT_STD = 0.02
#: Targets with this value do not count.
IGNORED = -100


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019), computed in fp32 (fp64 stays fp64)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        wide = x_BSD.to(torch.promote_types(x_BSD.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x_BSD.dtype) * self.weight


def rope_table(seq_len: int, head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """Return cos and sin of the rotary embedding (Su et al. 2021), shape (2, S, E/2), fp64."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device)
    angles = torch.outer(
        torch.arange(seq_len, dtype=torch.float64, device=device), theta ** (-steps / head_dim)
    )
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BSHE: torch.Tensor, rope_2SE: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + E/2), the layout of Hugging Face's Llama."""
    cos, sin = (part[None, :, None, :].to(x_BSHE.dtype) for part in rope_2SE)
    first, second = x_BSHE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.dim // config.num_heads
        self.qkv = nn.Linear(
            config.dim, (config.num_heads + 2 * config.num_kv_heads) * self.head_dim, bias=False
        )
        self.out = nn.Linear(config.num_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, rope_2SE: torch.Tensor) -> torch.Tensor:
        B, S, _ = x_BSD.shape
        heads = self.num_heads + 2 * self.num_kv_heads
        qkv = self.qkv(x_BSD).view(B, S, heads, self.head_dim)
        q, k, v = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)
        q, k = rotate(q, rope_2SE), rotate(k, rope_2SE)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        merged: torch.Tensor = self.out(out.transpose(1, 2).reshape(B, S, -1))
        return merged


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x_BSD).chunk(2, dim=-1)
        down: torch.Tensor = self.down(F.silu(gate) * up)
        return down


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BSD: torch.Tensor, rope_2SE: torch.Tensor) -> torch.Tensor:
        h_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope_2SE)
        out: torch.Tensor = h_BSD + self.ffn(self.ffn_norm(h_BSD))
        return out


class Decoder(nn.Module):
    """The model. ``enter(i)`` is called before stage i runs: 0 embedding, 1..L blocks, L+1 head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.enter: Callable[[int], None] = lambda stage: None
        self._rope: torch.Tensor | None = None

    def stages(self) -> list[tuple[str, list[tuple[str, nn.Parameter]]]]:
        """Return the stages in forward order with their parameters, each parameter once."""
        groups: list[tuple[str, list[str]]] = [("embedding", ["embedding."])]
        groups += [(f"blocks.{i}", [f"blocks.{i}."]) for i in range(len(self.blocks))]
        groups.append(("head", ["norm.", "head."]))
        named = list(self.named_parameters())
        return [
            (name, [(n, p) for n, p in named if n.startswith(tuple(prefixes))]) for name, prefixes in groups
        ]

    def initialise(self, seed: int) -> None:
        """Set every parameter from ``seed``: the same on every rank and in every layout."""
        generator = torch.Generator(device=self.head.weight.device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() < 2:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, self._std(name), generator=generator)

    def _std(self, name: str) -> float:
        # what is added to the residual stream shrinks with depth (GPT-2)
        is_residual = name.endswith(("attention.out.weight", "ffn.down.weight"))
        return INIT_STD / (2 * self.config.num_layers) ** 0.5 if is_residual else INIT_STD

    def loss_sum(
        self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor, chunk: int | None = None
    ) -> torch.Tensor:
        """Return the cross-entropy summed over valid targets (a scalar, fp32 or fp64).

        ``chunk``: tokens whose logits exist at once; None: all.
        """
        hidden = self.hidden(tokens_BS).flatten(0, 1)
        targets = targets_BS.flatten()
        if chunk is not None:
            loss: torch.Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, self.head.weight, targets, chunk
            )
            return loss
        logits = self.head(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide), targets, ignore_index=IGNORED, reduction="sum")

    def hidden(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return the last hidden state, normed, shape (B, S, D)."""
        self.enter(0)
        x_BSD = self.embedding(tokens_BS)
        rope = self._rope_for(tokens_BS.shape[1], x_BSD)
        for i, block in enumerate(self.blocks):
            self.enter(i + 1)
            x_BSD = block(x_BSD, rope)
        self.enter(len(self.blocks) + 1)
        out: torch.Tensor = self.norm(x_BSD)
        return out

    def _rope_for(self, seq_len: int, like: torch.Tensor) -> torch.Tensor:
        if self._rope is None or self._rope.shape[1] != seq_len or self._rope.dtype != like.dtype:
            head_dim = self.config.dim // self.config.num_heads
            table = rope_table(seq_len, head_dim, self.config.rope_theta, like.device)
            self._rope = table.to(like.dtype)
        return self._rope


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss together, a chunk of tokens at a time: the logits of a batch never exist at once.

    The gradients are made in the forward pass, while a chunk's logits are there, and only scaled in the
    backward pass (as in Liger Kernel's fused linear cross-entropy; Hsu et al. 2024).
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden_ND)
        d_weight = torch.zeros_like(weight_VD, dtype=wide)
        loss = torch.zeros((), dtype=wide, device=hidden_ND.device)
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits = hidden_ND[rows] @ weight_VD.t()
            chunk_loss, d_logits = _loss_and_gradient(logits, targets_N[rows])
            loss += chunk_loss
            d_hidden[rows] = d_logits @ weight_VD
            d_weight += d_logits.t() @ hidden_ND[rows]
        ctx.save_for_backward(d_hidden, d_weight.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, d_loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        d_hidden, d_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        return d_hidden * d_loss.to(d_hidden.dtype), d_weight * d_loss.to(d_weight.dtype), None, None


def _loss_and_gradient(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed loss of a chunk and its gradient by the logits, in their dtype."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid = targets != IGNORED
    safe = targets.clamp_min(0)[:, None]
    log_z = torch.logsumexp(wide, dim=-1, keepdim=True)
    loss = torch.where(valid, (log_z - wide.gather(1, safe)).squeeze(1), 0.0).sum()
    probability = torch.exp(wide - log_z)
    gradient = probability.scatter_add(1, safe, torch.full_like(log_z, -1.0))
    return loss, (gradient * valid[:, None]).to(logits.dtype)
