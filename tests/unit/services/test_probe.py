"""The probe on this machine, with real shells, and with a vendor tool that hangs."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from gpuctl.core.cluster import NodeSpec
from gpuctl.core.hardware import Vendor
from gpuctl.errors import CheckFailed, ProtocolError
from gpuctl.services.plan import _vendor
from gpuctl.services.probe import parse_probe, probe_node
from gpuctl.transports import connect

SPEC = NodeSpec("localhost", transport="local", python=sys.executable)


def test_this_machine_is_seen_as_it_is() -> None:
    facts = probe_node(connect(SPEC), SPEC, ["127.0.0.1"], 20.0)
    assert facts.software is not None and facts.software.python == sys.executable
    assert facts.uid == os.getuid() and facts.boot_id
    assert any(nic.is_loopback and "127.0.0.1" in nic.addresses for nic in facts.nics or ())
    assert facts.disk is not None and facts.disk.free_bytes
    assert abs(facts.clock_offset_s or 0) < 5


def test_a_hung_vendor_tool_costs_its_deadline_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 6611\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    began = time.monotonic()
    facts = probe_node(connect(SPEC), SPEC, [], 20.0)
    assert 7.0 < time.monotonic() - began < 15.0
    assert [p.kind for p in facts.problems] == ["tool-timeout"]
    assert _sleepers() == []
    if facts.gpu_count_by_os is None:
        assert facts.vendor is None and facts.gpus is None
        with pytest.raises(CheckFailed):
            _vendor(SPEC, facts)


def _sleepers() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"6611" in words:
                found.append(entry.name)
    return found


def test_a_reply_that_was_cut_off_says_so() -> None:
    with pytest.raises(ProtocolError):
        parse_probe(SPEC, "motd\n@@abc begin id 0\nhostname=x\n", "abc", 0.0)


def test_a_vendor_that_is_written_down_is_believed() -> None:
    facts = probe_node(connect(SPEC), SPEC, [], 20.0)
    assert _vendor(NodeSpec("a", vendor=Vendor.CPU), facts) is Vendor.CPU
