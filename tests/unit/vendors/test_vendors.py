"""Vendor parsers on recorded outputs, and what a node's ranks get from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl.core.hardware import NodeFacts, Vendor
from gpuctl.vendors import ToolAnswer, node_env, vendor_module

FIXTURES = Path(__file__).parents[2] / "fixtures"


def rocm(name: str) -> ToolAnswer:
    return ToolAnswer((FIXTURES / "rocm-json" / name).read_text())


def test_six_mi100_are_six_gpus() -> None:
    found = vendor_module(Vendor.AMD).read({"rocm": rocm("mi100x6-rocm5.7.1.json")})
    assert found.gpus is not None and [gpu.index for gpu in found.gpus] == list(range(6))
    assert {gpu.memory_total_bytes for gpu in found.gpus} == {34342961152}
    assert found.driver_version == "6.2.4" and {gpu.uuid for gpu in found.gpus} == {None}


def test_an_integrated_gpu_is_told_from_the_card_beside_it() -> None:
    found = vendor_module(Vendor.AMD).read({"rocm": rocm("apu680m-plus-rx7900xt.json")})
    assert found.gpus is not None
    assert [(gpu.memory_total_bytes, gpu.is_integrated) for gpu in found.gpus] == [
        (536870912, True),
        (25753026560, False),
    ]


NVIDIA_CORE = (
    "0, GPU-00000000-0000-0000-0000-000000000000, NVIDIA H100 80GB HBM3, 00000000:00:09.0, 81559, 590.48.01"
)
NVIDIA_EXTRA = "0, 9.0, Disabled, 81081, 0, 41, 69.85, 700.00"


def test_an_h100s_rows_are_read() -> None:
    answers = {"nvidia": ToolAnswer(NVIDIA_CORE), "nvidia_extra": ToolAnswer(NVIDIA_EXTRA)}
    found = vendor_module(Vendor.NVIDIA).read(answers)
    assert found.gpus is not None and found.driver_version == "590.48.01"
    gpu = found.gpus[0]
    assert (gpu.arch, gpu.memory_total_bytes, gpu.power_limit_w) == ("sm_90", 81559 << 20, 700.0)


def test_what_cannot_be_told_is_none_and_not_zero() -> None:
    row = "0, [N/A], NVIDIA GB10, 0000000F:01:00.0, [N/A], 580.95.05"
    found = vendor_module(Vendor.NVIDIA).read({"nvidia": ToolAnswer(row)})
    assert found.gpus is not None and found.gpus[0].memory_total_bytes is None and found.gpus[0].uuid is None


@pytest.mark.parametrize(
    "answer, kind, gpus",
    [
        (ToolAnswer("No devices were found", exit_code=6), "no-devices", ()),
        (ToolAnswer("", exit_code=124), "tool-timeout", None),
        (ToolAnswer("NVML: Driver/library version mismatch", exit_code=18), "driver-mismatch", None),
    ],
)
def test_a_failed_tool_has_a_kind(answer: ToolAnswer, kind: str, gpus: tuple[()] | None) -> None:
    found = vendor_module(Vendor.NVIDIA).read({"nvidia": answer})
    assert [problem.kind for problem in found.problems] == [kind] and found.gpus == gpus


@given(st.text(max_size=400), st.integers(0, 255))
def test_no_parser_raises_on_any_text(text: str, code: int) -> None:
    for vendor in (Vendor.NVIDIA, Vendor.AMD):
        module = vendor_module(vendor)
        module.read({query.section: ToolAnswer(text, text, code) for query in module.queries})


@given(st.data())
def test_no_mutation_of_a_recording_raises(data: st.DataObject) -> None:
    text = json.dumps(json.loads(rocm("mi100x6-rocm5.7.1.json").stdout))
    cut = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.text(max_size=10))
    vendor_module(Vendor.AMD).read({"rocm": ToolAnswer(text[:cut] + junk + text[cut:])})
    row = data.draw(st.text(alphabet=NVIDIA_CORE, max_size=120))
    vendor_module(Vendor.NVIDIA).read({"nvidia": ToolAnswer(row), "nvidia_extra": ToolAnswer(row)})


def test_every_variable_has_a_reason_and_one_mask_selects() -> None:
    facts = NodeFacts("a")
    amd = vendor_module(Vendor.AMD).read({"rocm": rocm("mi100x6-rocm5.7.1.json")}).gpus
    assert amd is not None
    env = {v.name: v for v in node_env(Vendor.AMD, facts, "eth0", amd[:2])}
    assert all(v.why and v.source for v in env.values())
    assert env["HIP_VISIBLE_DEVICES"].value == "0,1"
    assert env["ROCR_VISIBLE_DEVICES"].is_unset and env["CUDA_VISIBLE_DEVICES"].is_unset
    assert env["NCCL_SOCKET_IFNAME"].value == "=eth0" and env["GLOO_SOCKET_IFNAME"].value == "eth0"
