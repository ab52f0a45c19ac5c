"""A rank's side: who it is, its channel to the agent, and what every bundled program does first.

Bundled programs (trainer, bench) get a :class:`Worker`. Under an agent it speaks frames over the
socket pair in ``GPUCTL_CHANNEL_FD``; without one (torchrun, a test) it prints its events as JSON
lines on stdout, so that the same program can be run by hand.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuctl.agent.frames import Decoder, Frame, encode
from gpuctl.errors import ProtocolError

CHANNEL_FD = "GPUCTL_CHANNEL_FD"
LISTENER_FD = "GPUCTL_LISTENER_FD"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@dataclass(frozen=True)
class RankEnv:
    """The rank's place in the run, from torchrun's environment contract."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    restart_count: int
    run_id: str


def rank_env(environ: Mapping[str, str]) -> RankEnv:
    """Read the environment contract; raises KeyError or ValueError when it is not there."""
    return RankEnv(
        rank=int(environ["RANK"]),
        local_rank=int(environ["LOCAL_RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        node_rank=int(environ.get("GROUP_RANK", environ.get("NODE_RANK", "0"))),
        master_addr=environ["MASTER_ADDR"],
        master_port=int(environ["MASTER_PORT"]),
        restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        run_id=environ.get("GPUCTL_RUN_ID", environ.get("TORCHELASTIC_RUN_ID", "none")),
    )


class Worker:
    """What a bundled program tells its agent and hears from it. Safe to use from threads."""

    def __init__(self, env: RankEnv, channel: socket.socket | None, listener_fd: int | None) -> None:
        self.env = env
        self.listener_fd = listener_fd
        """The listening socket of the store, already bound to the private address: rank 0 only."""
        self.stop_requested = False
        """Set by SIGTERM; ranks all-reduce it at a step boundary, then save and leave."""
        self._channel = channel
        self._decoder = Decoder()
        self._inbox: list[Frame] = []
        self._send_lock = threading.Lock()
        self._receive_lock = threading.Lock()

    def phase(self, name: str, step: int | None = None) -> None:
        """Say what the rank does now: store, init, first_step, step, save."""
        self._send(Frame("beat", {"phase": name, "step": step}))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Report a finished step; ``metrics`` holds ``step`` and the keys of the step event."""
        self.event("step", **metrics)

    def event(self, name: str, /, **fields: Any) -> None:
        """Report an event (step, checkpoint, warning, result) with JSON fields."""
        self._send(Frame("event", {"event": name, **fields}))

    def done(self, **summary: Any) -> None:
        """Report success: a bundled rank that exits without it has failed."""
        self._send(Frame("event", {"event": "rank_done", **summary}))

    def send(self, frame: Frame) -> None:
        """Send a raw frame (comm_id, saved, commit, put_blob); dropped without an agent."""
        if self._channel is not None:
            self._send(frame)

    def receive(self, type_: str, timeout_s: float) -> Frame:
        """Return the next frame of ``type_`` from the agent; raises TimeoutError.

        Frames of other types that arrive meanwhile stay in the inbox.
        """
        deadline = time.monotonic() + timeout_s
        with self._receive_lock:
            while True:
                for i, frame in enumerate(self._inbox):
                    if frame.type == type_:
                        return self._inbox.pop(i)
                self._fill_inbox(type_, deadline)

    def poll(self, type_: str) -> Frame | None:
        """Return a frame of ``type_`` if one is there already."""
        if self._channel is None:
            return None
        try:
            return self.receive(type_, 0.0)
        except TimeoutError:
            return None

    def _fill_inbox(self, type_: str, deadline: float) -> None:
        if self._channel is None:
            raise TimeoutError(f"no agent to send {type_}")
        ready, _, _ = select.select([self._channel], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"the agent sent no {type_}")
        data = self._channel.recv(1 << 16)
        if not data:
            raise ProtocolError("the agent closed the channel")
        self._inbox.extend(self._decoder.feed(data))

    def _send(self, frame: Frame) -> None:
        if self._channel is None:
            line = json.dumps({"rank": self.env.rank, **frame.fields})
            print(line, flush=True)
            return
        with self._send_lock:
            self._channel.sendall(encode(frame))


def make_worker(environ: Mapping[str, str]) -> Worker:
    """Build the Worker of this process from its environment and take its signals."""
    channel = None
    if CHANNEL_FD in environ:
        channel = socket.socket(fileno=int(environ[CHANNEL_FD]))
        channel.setblocking(True)
    listener = int(environ[LISTENER_FD]) if LISTENER_FD in environ else None
    return Worker(rank_env(environ), channel, listener)


def install_signals(worker: Worker) -> None:
    """SIGTERM asks for a stop at the next step boundary; SIGUSR1 writes all stacks to stderr."""

    def request_stop(_signum: int, _frame: object) -> None:
        worker.stop_requested = True

    signal.signal(signal.SIGTERM, request_stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the client's to handle
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)


def run_program(run: Callable[[Mapping[str, Any], Worker], None], config: Mapping[str, Any]) -> int:
    """Run a bundled program in this rank and return its exit code.

    An exception is written to TORCHELASTIC_ERROR_FILE in torch elastic's format and to stderr.
    """
    worker = make_worker(os.environ)
    install_signals(worker)
    try:
        run(config, worker)
    except BaseException as exc:  # the rank's boundary: whatever it is becomes its exit
        if isinstance(exc, SystemExit) and exc.code in (None, 0):
            return 0
        write_error_file(exc, os.environ.get(ERROR_FILE))
        traceback.print_exc()
        return exc.code if isinstance(exc, SystemExit) and isinstance(exc.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def write_error_file(exc: BaseException, path: str | None) -> None:
    """Write ``exc`` as torch elastic's error.json (torch.distributed.elastic error_handler)."""
    if not path:
        return
    stack = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    message = {
        "message": f"{type(exc).__name__}: {exc}",
        "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))},
    }
    try:
        with open(path, "w") as file:
            json.dump({"message": message}, file)
    except OSError as problem:
        print(f"gpuctl: could not write {path}: {problem}", file=sys.stderr)
