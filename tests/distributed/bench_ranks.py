"""The bench program in real processes, with this test as their agent: frames in, comm_id relayed."""

from __future__ import annotations

import multiprocessing
import os
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Any

from gpuctl.agent.frames import Decoder, encode
from gpuctl.agent.worker import CHANNEL_FD, LISTENER_FD

DEADLINE_S = 120.0


class BenchRun:
    """What came out: events by rank in order, exit codes, and everything written to stderr."""

    def __init__(self, events: list[list[dict[str, Any]]], codes: list[int | None], stderr: str) -> None:
        self.events = events
        self.codes = codes
        self.stderr = stderr

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [event for event in self.events[0] if event["event"] == "result"]

    def first(self, name: str) -> dict[str, Any]:
        return next(event for event in self.events[0] if event["event"] == name)


def run_bench(
    num_ranks: int, config: dict[str, Any], folder: Path, *, environ: dict[str, str] | None = None
) -> BenchRun:
    """Run ``config`` on ``num_ranks`` Gloo ranks and return what they reported; ends every process.

    Ranks are forked from a server that has imported torch, as gpuctl's own are.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "gpuctl.collectives.bench"])
    listener = socket.create_server(("127.0.0.1", 0))
    pairs = [socket.socketpair() for _ in range(num_ranks)]
    stderr = folder / "stderr"
    stderr.touch()
    processes = []
    try:
        for rank, (_, theirs) in enumerate(pairs):
            env = _environment(rank, num_ranks, listener.getsockname()[1], environ or {})
            arguments = (config, env, theirs, listener if rank == 0 else None, str(stderr))
            processes.append(context.Process(target=_enter, args=arguments))
            processes[-1].start()
            theirs.close()
        listener.close()
        events = _serve([ours for ours, _ in pairs])
        for process in processes:
            process.join(30)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return BenchRun(events, codes, stderr.read_text())


def _environment(rank: int, num_ranks: int, port: int, more: dict[str, str]) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }


def _enter(
    config: dict[str, Any],
    env: dict[str, str],
    channel: socket.socket,
    listener: socket.socket | None,
    stderr: str,
) -> None:
    import torch

    from gpuctl.agent.worker import run_program
    from gpuctl.collectives import bench

    torch.set_num_threads(1)
    output = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    os.environ[CHANNEL_FD] = str(channel.detach())
    if listener is not None:
        os.environ[LISTENER_FD] = str(listener.detach())
    sys.exit(run_program(bench.run, config))


def _serve(channels: list[socket.socket]) -> list[list[dict[str, Any]]]:
    """Read every channel until all are closed, sending each comm_id to all as the lead does."""
    events: list[list[dict[str, Any]]] = [[] for _ in channels]
    decoders = [Decoder() for _ in channels]
    deadline = time.monotonic() + DEADLINE_S
    with selectors.DefaultSelector() as selector:
        for rank, channel in enumerate(channels):
            selector.register(channel, selectors.EVENT_READ, rank)
        while selector.get_map():
            assert time.monotonic() < deadline, "the ranks did not end"
            for key, _ in selector.select(1.0):
                _read(key.data, channels, decoders, events, selector)
    return events


def _read(
    rank: int,
    channels: list[socket.socket],
    decoders: list[Decoder],
    events: list[list[dict[str, Any]]],
    selector: selectors.BaseSelector,
) -> None:
    try:
        data = channels[rank].recv(1 << 16)
    except ConnectionResetError:
        data = b""
    if not data:
        selector.unregister(channels[rank])
        return
    for frame in decoders[rank].feed(data):
        if frame.type == "comm_id":
            for channel in channels:
                channel.sendall(encode(frame))
        elif frame.type == "event":
            events[rank].append(frame.fields)
