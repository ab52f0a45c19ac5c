"""Every layout has the gradients of one process: per tensor, at every step, in fp32 and fp64."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpuctl.agent.worker import RankEnv, Worker
from gpuctl.core.parallel import ParallelDims
from gpuctl.core.training import DataConfig, ModelConfig, OptimConfig, TrainingConfig
from gpuctl.trainer.loop import Trainer
from gpuctl.trainer.parallel import DataParallel
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import MaskedRandom, Trace, relative_difference, train_plainly

STEPS = 3
# odd everywhere: no size divides by the number of ranks or the buckets' alignment
MODEL = ModelConfig(vocab_size=61, dim=36, num_layers=2, num_heads=6, num_kv_heads=2, ffn_dim=50)
CONFIG = TrainingConfig(
    preset=None,
    model=MODEL,
    data=DataConfig(kind="random"),
    # a small rate and a large eps: Adam divides gradients by their own size, so that where they are as small
    # as rounding it would make whole steps of rounding, and two right runs would part
    optim=OptimConfig(lr=1e-3, eps=1e-5, warmup_steps=2, clip_norm=0.5),
    steps=STEPS,
    seq_len=17,
    global_batch=7,
    micro_batch=2,
)
# relative 2-norm of a whole gradient tensor: a few times the rounding of sums of some thousand terms
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}
DTYPE = {"fp32": torch.float32, "fp64": torch.float64}


def make_trainer(rank: int, world_size: int, config: TrainingConfig, zero: int, masked: bool) -> Trainer:
    env = RankEnv(rank, rank, world_size, world_size, 0, "127.0.0.1", 0, 0, "test")
    dims = ParallelDims(dp=world_size, zero=zero)
    trainer = Trainer(config, dims, Worker(env, None, None), torch.device("cpu"), "gloo")
    trainer.data = MaskedRandom(config.seq_len, config.model.vocab_size, config.seed, masked=masked)
    return trainer


def full_gradients(engine: DataParallel, ratio: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put the owned parts of all ranks together again."""
    gradients = {}
    for bucket in engine.buckets:
        flat = engine.owned_grad(bucket)
        if engine.zero and engine.dp > 1:
            parts = [torch.empty_like(flat) for _ in range(engine.dp)]
            dist.all_gather(parts, flat.contiguous())
            flat = torch.cat(parts)
        for member in bucket.members:
            value = flat[member.offset : member.end].view(member.parameter.shape)
            gradients[member.name] = value * ratio
    return gradients


def train_distributed(
    rank: int, world_size: int, config: TrainingConfig, zero: int, masked: bool, broken: str | None = None
) -> Trace:
    trainer = make_trainer(rank, world_size, config, zero, masked)
    trace = Trace()
    step = trainer.engine.step

    def watch(scale: torch.Tensor, lr: float) -> None:
        valid = trainer_stats["valid"]
        trace.gradients.append(full_gradients(trainer.engine, config.global_batch * config.seq_len / valid))
        step(scale, lr)

    trainer_stats: dict[str, torch.Tensor] = {}
    squared_norm = trainer.engine.squared_norm

    def count() -> torch.Tensor:
        trainer_stats["valid"] = count_valid(trainer, config)
        return squared_norm()

    trainer.engine.step = watch  # type: ignore[method-assign]
    trainer.engine.squared_norm = count  # type: ignore[method-assign]
    if broken is not None:
        break_engine(trainer, broken, rank)
    for _ in range(STEPS):
        numbers = trainer.one_step()
        loss_sum, valid, _, norm = numbers.read()
        trace.losses.append(loss_sum / valid)
        trace.norms.append(norm)
    trainer.engine.wait_for_weights()
    named = {m.name: m.parameter for b in trainer.engine.buckets for m in b.members}
    trace.parameters = {name: p.detach().clone() for name, p in named.items()}
    return trace


def count_valid(trainer: Trainer, config: TrainingConfig) -> torch.Tensor:
    first = trainer.step * config.global_batch
    samples = [trainer.data.sample(first + i) for i in range(config.global_batch)]
    return torch.tensor(float(sum((s.targets >= 0).sum() for s in samples)), dtype=torch.float64)


def break_engine(trainer: Trainer, broken: str, rank: int) -> None:
    """Break one thing on purpose: a comparison that does not notice is worth nothing."""
    reducer: Any = trainer.engine._reducer
    if broken == "divide twice":
        finish = reducer.finish
        reducer.finish = lambda bucket, grad: finish(bucket, grad) / trainer.dims.dp
    elif broken == "skip a reduction":
        start = reducer.start

        def skip(bucket: Any, grad: torch.Tensor) -> Any:
            return start(bucket, grad.clone() if bucket.index == 1 and not reducer.is_sharded else grad)

        reducer.start = skip
    elif broken == "stale weights":
        trainer.engine._reducer = type("NoGather", (), {  # the weights are never gathered again
            "is_sharded": False, "start": reducer.start, "finish": reducer.finish})()  # fmt: skip
    elif broken == "local valid tokens":
        all_reduce = dist.all_reduce

        def forget(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.dtype == torch.float64 and tensor.numel() == 3:
                return None
            return all_reduce(tensor, *args, **kwargs)

        dist.all_reduce = forget


def worst_gradient(found: Trace, wanted: Trace) -> float:
    return max(
        relative_difference(mine[name], theirs[name])
        for mine, theirs in zip(found.gradients, wanted.gradients, strict=True)
        for name in theirs
    )


def compare(found: Trace, wanted: Trace, tolerance: float) -> None:
    assert worst_gradient(found, wanted) <= tolerance
    for name in wanted.parameters:
        # Adam divides by the root of tiny second moments: parameters may differ by more than gradients
        assert relative_difference(found.parameters[name], wanted.parameters[name]) <= 100 * tolerance, name
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=tolerance)


CASES = [
    # world, zero, dtype, global batch, micro batch (accumulation 1, 2, 4; a rank without a micro-batch)
    pytest.param(2, 0, "fp64", 8, 4, id="ddp-2-accumulate-1"),
    pytest.param(2, 1, "fp64", 8, 2, id="zero1-2-accumulate-2"),
    pytest.param(2, 2, "fp64", 8, 1, id="zero2-2-accumulate-4"),
    pytest.param(3, 0, "fp64", 7, 2, id="ddp-3-uneven"),
    pytest.param(3, 1, "fp64", 7, 2, id="zero1-3-uneven"),
    pytest.param(3, 2, "fp64", 7, 2, id="zero2-3-uneven"),
    pytest.param(4, 0, "fp64", 3, 2, id="ddp-4-a-rank-without-samples"),
    pytest.param(4, 1, "fp64", 3, 2, id="zero1-4-a-rank-without-samples"),
    pytest.param(4, 2, "fp64", 5, 1, id="zero2-4-ranks-with-fewer"),
    pytest.param(2, 0, "fp32", 8, 4, id="ddp-2-fp32"),
    pytest.param(3, 1, "fp32", 7, 2, id="zero1-3-fp32"),
    pytest.param(4, 2, "fp32", 5, 1, id="zero2-4-fp32"),
    pytest.param(1, 2, "fp64", 4, 2, id="zero2-alone"),
]


@pytest.mark.parametrize("world_size, zero, dtype, global_batch, micro_batch", CASES)
def test_gradients_are_those_of_one_process(
    world_size: int, zero: int, dtype: str, global_batch: int, micro_batch: int
) -> None:
    seed = random.randrange(1 << 30)
    config = replace(CONFIG, seed=seed, dtype=dtype, global_batch=global_batch, micro_batch=micro_batch)
    print(f"seed {seed}")
    wanted = reference_of(config, masked=True)
    found = run_ranks(world_size, train_distributed, config, zero, True)[0]
    compare(found, wanted, TOLERANCE[dtype])


def reference_of(config: TrainingConfig, *, masked: bool) -> Trace:
    data = MaskedRandom(config.seq_len, config.model.vocab_size, config.seed, masked=masked)
    return train_plainly(config, data, DTYPE[config.dtype], STEPS)


@pytest.mark.parametrize("zero", [0, 2])
def test_tied_embeddings_have_one_gradient(zero: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    config = replace(CONFIG, seed=seed, dtype="fp64", model=replace(MODEL, tied_embeddings=True))
    found = run_ranks(2, train_distributed, config, zero, True)[0]
    compare(found, reference_of(config, masked=True), TOLERANCE["fp64"])


def test_zero1_and_zero2_are_equal_bit_for_bit_without_accumulation() -> None:
    config = replace(CONFIG, seed=random.randrange(1 << 30), dtype="fp32", global_batch=6, micro_batch=2)
    first, second = (run_ranks(3, train_distributed, config, zero, True)[0] for zero in (1, 2))
    assert first.losses == second.losses and first.norms == second.norms
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name]), name


def test_every_rank_ends_with_the_same_weights() -> None:
    config = replace(CONFIG, seed=random.randrange(1 << 30), dtype="fp32")
    traces = run_ranks(3, train_distributed, config, 2, True)
    for name, value in traces[0].parameters.items():
        assert all(torch.equal(value, other.parameters[name]) for other in traces[1:]), name


@pytest.mark.parametrize(
    "broken, zero",
    [
        ("divide twice", 0),
        ("divide twice", 2),
        ("skip a reduction", 0),
        ("stale weights", 1),
        ("local valid tokens", 0),
    ],
)
def test_the_comparison_notices_what_is_broken(broken: str, zero: int) -> None:
    config = replace(CONFIG, seed=random.randrange(1 << 30), dtype="fp64")
    found = run_ranks(2, train_distributed, config, zero, True, broken)[0]
    with pytest.raises(AssertionError):
        compare(found, reference_of(config, masked=True), TOLERANCE["fp32"])


def test_the_chunked_loss_is_the_plain_one() -> None:
    torch.manual_seed(random.randrange(1 << 30))
    hidden = torch.randn(23, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(31, 12, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 31, (23,))
    targets[[0, 5, 22]] = -100
    from gpuctl.trainer.model import ChunkedCrossEntropy

    plain = torch.nn.functional.cross_entropy(
        hidden @ weight.t(), targets, ignore_index=-100, reduction="sum"
    )
    wanted = torch.autograd.grad(plain * 0.25, (hidden, weight))
    chunked = ChunkedCrossEntropy.apply(hidden, weight, targets, 5)
    found = torch.autograd.grad(chunked * 0.25, (hidden, weight))
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-13)
    for mine, theirs in zip(found, wanted, strict=True):
        assert relative_difference(mine, theirs) < 1e-13
