"""What the ranks of the fault tests run: steps until stopped, with strays beside them.

``config``: mode ``idle`` (steps, no communication) or ``ring`` (every step waits for a token from the
rank before: who loses its neighbour hangs or fails, as in a collective); ``is_deaf``: TERM
is ignored; ``raise_at``, ``exit_at``, ``crash_at``, ``eat_at`` {rank: step}; ``orphans``.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from gpuctl.agent.worker import Worker

STRAYS = "setsid sleep 600 & (setsid sleep 600 &) & (sleep 600 &)"
STEP_S = 0.02


def run(config: Mapping[str, Any], worker: Worker) -> None:
    """Step until asked to stop (or for ever)."""
    subprocess.run(["sh", "-c", STRAYS], check=True)
    if config.get("is_deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ring = {"ring": _Ring, "gloo": _Gloo}[config["mode"]](worker) if config["mode"] != "idle" else None
    step = 0
    while not worker.stop_requested:
        step += 1
        _misbehave(config, str(worker.env.rank), step)
        if ring is not None:
            ring.turn()
        worker.phase("step", step)
        if step == 1:
            worker.event("stepping")
        if worker.env.rank == 0:
            worker.step({"step": step, "loss": 1.0 / step})
            print(f"step {step}", flush=True)
        time.sleep(STEP_S)
    worker.done(steps=step)


def _misbehave(config: Mapping[str, Any], rank: str, step: int) -> None:
    """Do what the test wants of this rank at this step."""
    if config.get("raise_at", {}).get(rank) == step:
        raise ValueError(f"on purpose at step {step} [/x]")
    if config.get("exit_at", {}).get(rank) == step:
        sys.exit(0)
    if config.get("crash_at", {}).get(rank) == step:
        exec(config["crash"])
    if config.get("eat_at", {}).get(rank) == step:
        bytearray(1 << 30)
    if step == 1 and rank == "1":
        for _ in range(config.get("orphans", 0)):
            subprocess.Popen(["sh", "-c", "(sleep 0.01 &)"]).wait()


class _Ring:
    """Every rank connects to rank 0's listener and waits there for its turn."""

    def __init__(self, worker: Worker) -> None:
        env = worker.env
        self._peers: list[socket.socket] = []
        if env.rank == 0:
            assert worker.listener_fd is not None
            listener = socket.socket(fileno=worker.listener_fd)
            listener.setblocking(True)
            self._peers = [listener.accept()[0] for _ in range(env.world_size - 1)]
        else:
            self._peers = [_connect(env.master_addr, env.master_port)]
        self._is_root = env.rank == 0

    def turn(self) -> None:
        """Root hears from everyone and answers everyone: nobody passes without all."""
        if not self._is_root:
            self._peers[0].sendall(b"x")
            self._take(self._peers[0])
            return
        for peer in self._peers:
            self._take(peer)
        for peer in self._peers:
            peer.sendall(b"x")

    def _take(self, peer: socket.socket) -> None:
        if not peer.recv(1):
            raise ConnectionResetError("Connection closed by peer")


class _Gloo:
    """Real all-reduces of torch over Gloo."""

    def __init__(self, worker: Worker) -> None:
        import torch

        from gpuctl.collectives import group

        group.join(worker, backend="gloo", timeout_s=60.0)
        self._tensor = torch.ones(1000)

    def turn(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self._tensor)


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address, port), timeout=None)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
