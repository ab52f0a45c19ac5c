"""Contract of the fork server on a GPU: it has imported torch and touched no driver; its ranks may.

python -m pytest tests/gpu/test_gpu_forkserver.py
"""

# ruff: noqa: PTH208, PTH115 (descriptors are read through /proc)

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from pathlib import Path

import pytest

import gpuctl
from gpuctl.agent.forkclient import Exited, Forked, ForkServer, ImportFailed, Ready

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
PROGRAM = """
import json, time
import torch
def run(config, worker):
    before = {"initialized": torch.cuda.is_initialized(), "bad_fork": torch.cuda._is_in_bad_fork()}
    start = time.perf_counter()
    total = torch.arange(1000, device="cuda").sum().item()
    matrix = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    product = (matrix @ matrix).float().norm().item()
    took_s = time.perf_counter() - start
    print(json.dumps({**before, "total": total, "product": product > 0, "took_s": took_s}))
    worker.done()
"""


def wait_for(server: ForkServer, events: list, kind: type, count: int, timeout_s: float) -> list:
    deadline = time.monotonic() + timeout_s
    while sum(isinstance(event, kind) for event in events) < count:
        assert time.monotonic() < deadline, events
        select.select([server.fileno()], [], [], 0.1)
        events += server.read_events()
        assert not any(isinstance(event, ImportFailed) for event in events), events
    return [event for event in events if isinstance(event, kind)]


def open_devices(pid: int) -> list[str]:
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return [link for link in links if link.startswith(DEVICES)]


def test_the_server_touches_no_driver_and_every_rank_reaches_the_gpu(tmp_path):
    (tmp_path / "gpu_program.py").write_text(PROGRAM)
    root = Path(gpuctl.__file__).parents[1]
    search = os.pathsep.join([str(root), str(tmp_path), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": search, "PYTHONUNBUFFERED": "1"}
    log = os.open(tmp_path / "server.log", os.O_WRONLY | os.O_CREAT)
    server = ForkServer.start([sys.executable], env, ["torch"], cwd=str(tmp_path), stderr_fd=log)
    events: list = []
    try:
        wait_for(server, events, Ready, 1, 120)
        assert not open_devices(server.pid)
        outputs, channels = [], []
        for rank in (1, 0):
            read, write = os.pipe()
            ours, theirs = socket.socketpair()
            outputs.append(read)
            channels.append(ours)
            place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            server.fork(
                rank,
                env={**env, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
                module="gpu_program",
                config={},
                cwd=str(tmp_path),
                stdout_fd=write,
                stderr_fd=write,
                channel_fd=theirs.fileno(),
            )
            os.close(write)
            theirs.close()
        wait_for(server, events, Forked, 2, 10)
        exits = wait_for(server, events, Exited, 2, 120)
        texts = [os.fdopen(read).read() for read in outputs]
        assert [end.status for end in exits] == [0, 0], texts
        for text in texts:
            facts = json.loads(text.splitlines()[-1])
            assert not facts["initialized"] and not facts["bad_fork"]
            assert facts["total"] == 499500 and facts["product"]
            print(f"first CUDA work in a forked rank: {facts['took_s']:.2f} s")
        assert not open_devices(server.pid)
    finally:
        server.close()
        os.close(log)
