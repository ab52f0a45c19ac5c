"""Layouts: names become degrees, ranks become coordinates, and what cannot be says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.core.parallel import Coordinate, ParallelDims, coordinate_of, rank_of, resolve_dims
from gpuctl.core.training import ModelConfig
from gpuctl.errors import DoesNotFit, UsageError

MODEL = ModelConfig()
DEGREES = st.integers(1, 5)


@given(DEGREES, DEGREES, DEGREES, st.data())
def test_a_coordinate_leads_back_to_its_rank(pp: int, dp: int, tp: int, data: st.DataObject) -> None:
    dims = ParallelDims(pp=pp, dp=dp, tp=tp)
    rank = data.draw(st.integers(0, dims.world_size - 1))
    assert rank_of(coordinate_of(rank, dims), dims) == rank


def test_tensor_parallel_peers_are_neighbours_and_pipeline_stages_far_apart() -> None:
    dims = ParallelDims(pp=2, dp=3, tp=4)
    assert coordinate_of(1, dims) == Coordinate(pp=0, dp=0, tp=1)
    assert coordinate_of(4, dims) == Coordinate(pp=0, dp=1, tp=0)
    assert coordinate_of(12, dims) == Coordinate(pp=1, dp=0, tp=0)


@pytest.mark.parametrize(
    "name, zero", [("ddp", 0), ("zero1", 1), ("zero2", 2), ("ZeRO-2", 2), ("zero_1", 1), ("DDP", 0)]
)
def test_a_strategy_shares_the_batch_over_every_rank(name: str, zero: int) -> None:
    dims = resolve_dims(name, 6, tp=None, pp=None, zero=None, model=MODEL)
    assert dims == ParallelDims(dp=6, zero=zero)


@pytest.mark.parametrize("name, hint", [("zer2", "zero2"), ("DPP", "ddp"), ("Zero11", "zero1")])
def test_a_misspelt_strategy_is_asked_back(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_dims(name, 2, tp=None, pp=None, zero=None, model=MODEL)
    assert caught.value.message == f"no strategy {name}"
    assert caught.value.hint == f"did you mean `-s {hint}`?"


def test_a_stage_that_contradicts_the_strategy_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_dims("ddp", 2, tp=None, pp=None, zero=2, model=MODEL)
    assert caught.value.message == "--zero 2 contradicts -s ddp, which is stage 0"
    assert caught.value.hint == "`-s zero2`"
    assert resolve_dims("zero2", 2, tp=1, pp=1, zero=2, model=MODEL).zero == 2


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": None}, {"tp": None, "pp": 2}])
def test_degrees_that_do_not_work_yet_are_refused(degrees: dict[str, int | None]) -> None:
    with pytest.raises(UsageError, match="not there yet"):
        resolve_dims("zero2", 4, zero=None, model=MODEL, **degrees)


@pytest.mark.parametrize(
    "model, reason",
    [
        (replace(MODEL, dim=130), "dim 130 does not divide over 4 heads of even size"),
        (replace(MODEL, num_kv_heads=3), "4 heads cannot share 3 key/value heads evenly"),
    ],
)
def test_a_model_that_has_no_such_heads_does_not_fit(model: ModelConfig, reason: str) -> None:
    with pytest.raises(DoesNotFit) as caught:
        resolve_dims("ddp", 2, tp=None, pp=None, zero=None, model=model)
    assert caught.value.message == reason
