"""The data of the check: exact whatever the order of the sum, and different for every mistake."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpuctl.collectives.engine import combine  # noqa: E402
from gpuctl.collectives.operations import (  # noqa: E402
    LIBRARY,
    Buffers,
    Case,
    allocate,
    count_wrong,
    fill,
)
from gpuctl.collectives.patterns import MANTISSA_LIMIT, reduced, tagged, terms  # noqa: E402

COUNT = 2048


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("dtype", MANTISSA_LIMIT)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
def test_any_order_of_reduction_gives_the_expected_bits(op: str, dtype: str, num_ranks: int) -> None:
    idx = torch.arange(COUNT)
    expected = reduced(num_ranks, idx, op=op, dtype=dtype).to(getattr(torch, dtype))
    for order in (range(num_ranks), reversed(range(num_ranks))):
        parts = [terms(r, num_ranks, idx, op=op, dtype=dtype).to(getattr(torch, dtype)) for r in order]
        total = parts[0].clone()
        for part in parts[1:]:
            combine(total, part, op)
        assert torch.equal(total, expected)


@pytest.mark.parametrize("dtype", MANTISSA_LIMIT)
def test_a_shift_of_sender_or_element_changes_every_value(dtype: str) -> None:
    idx = torch.arange(COUNT)
    here = tagged(3, idx, dtype)
    assert (here != tagged(3, idx + 1, dtype)).all()
    assert (here != tagged(4, idx, dtype)).all()
    assert torch.equal(here.to(getattr(torch, dtype)).long(), here)


@pytest.mark.parametrize("name", LIBRARY)
def test_buffers_that_nobody_has_called_on_are_all_wrong(name: str) -> None:
    case = Case(rank=0, num_ranks=4, count=1000, op="sum", root=0, dtype="float32")
    buffers = allocate(LIBRARY[name], case, torch.device("cpu"))
    fill(LIBRARY[name], case, buffers)
    wrong = count_wrong(LIBRARY[name], case, buffers)
    # What the root of a broadcast has is right already.
    assert wrong == 0 if name == "broadcast" else wrong > 900


def test_one_flipped_element_is_one_wrong_element() -> None:
    case = Case(rank=1, num_ranks=4, count=1000, op="sum", root=0, dtype="bfloat16")
    row = LIBRARY["all_reduce"]
    right = row.expected(case, torch.arange(1000)).to(torch.bfloat16)
    buffers = Buffers(torch.empty(0), right)
    assert count_wrong(row, case, buffers) == 0
    right[777] += 1
    assert count_wrong(row, case, buffers) == 1
    right[3] = float("nan")
    assert count_wrong(row, case, buffers) == 2


def test_an_average_may_be_off_by_two_ulp_and_no_more() -> None:
    case = Case(rank=0, num_ranks=3, count=100, op="avg", root=0, dtype="float32")
    row = LIBRARY["all_reduce"]
    found = row.expected(case, torch.arange(100)).to(torch.float32)
    assert count_wrong(row, case, Buffers(torch.empty(0), found)) == 0
    assert count_wrong(row, case, Buffers(torch.empty(0), found * (1 + 1e-6))) > 0
