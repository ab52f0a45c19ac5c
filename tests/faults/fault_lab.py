"""Two nodes of two ranks on this machine, launched by a client process, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from fault_client import spec_of

import gpuctl
from gpuctl.agent import identity
from gpuctl.agent.bridge import read_record
from gpuctl.agent.locks import DIRECTORY
from gpuctl.agent.paths import RunDir
from gpuctl.core.cluster import Failure
from gpuctl.core.codec import to_json
from gpuctl.core.hardware import Vendor
from gpuctl.core.parallel import ParallelDims
from gpuctl.core.plan import EnvVar, NodePlan, Plan, PlannedGpu, Program
from gpuctl.core.run import RunRecord, make_run_id
from gpuctl.services.bundle import node_bundle
from gpuctl.transports import Connection, connect

T = TypeVar("T")
HERE = Path(__file__).parent
#: 10 in the nightly suite.
ROUNDS = int(os.environ.get("GPUCTL_FAULT_ROUNDS", "3"))
SEED = int(os.environ.get("GPUCTL_FAULT_SEED", "0")) or random.randrange(1 << 30)
MEDIAN_S, WORST_S = 1.0, 2.0
FAILURE = Failure(suspect_s=3.0, dead_s=5.0, grace_s=5.0)


def until(what: Callable[[], T], timeout_s: float, why: str = "") -> T:
    """Return the first true answer; fail after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = what()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {why}"
        time.sleep(0.01)


def processes_of(run_id: str) -> dict[int, str]:
    """Return pid -> name of every process on the machine that was started for ``run_id``."""
    wanted = f"GPUCTL_RUN_ID={run_id}".encode()
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 (a thousand entries, many times a second)
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{entry}/comm") as name:
                found[int(entry)] = name.read().strip()
        except OSError:
            continue
    return {pid: name for pid, name in found.items() if (s := identity.read_stat(pid)) and not s.is_dead}


def script(directory: Path, code: str, *arguments: str) -> Program:
    """Write a user's script and return the program that runs it."""
    (directory / "user_script.py").write_text(code)
    return Program(kind="script", argv=("user_script.py", *arguments))


def make_plan(directory: Path, program: Program, *, num_nodes: int = 2, ranks_per_node: int = 2) -> Plan:
    """Return the plan of CPU nodes on this machine, each with a state directory of its own.

    Scripts run in ``directory``.
    """
    extra = EnvVar("PYTHONPATH", str(HERE), "the tests' program", "test")
    nodes = tuple(
        NodePlan(
            node_rank=i,
            host=f"n{i}",
            address="127.0.0.1",
            interface="lo",
            transport="local",
            vendor=Vendor.CPU,
            gpus=tuple(PlannedGpu(j) for j in range(ranks_per_node)),
            ranks=tuple(range(i * ranks_per_node, (i + 1) * ranks_per_node)),
            python=sys.executable,
            workdir=str(directory),
            state_dir=str(directory / f"n{i}"),
            env=(extra,),
        )
        for i in range(num_nodes)
    )
    return Plan(
        run_id=make_run_id("fault", datetime.now(), secrets.token_hex(2)),
        name="fault",
        cluster="faults",
        program=program,
        dims=ParallelDims(dp=num_nodes * ranks_per_node),
        nodes=nodes,
        backend="gloo",
        failure=FAILURE,
        bundle_sha256=node_bundle().sha256,
    )


def bundled(mode: str = "ring", *, preload: tuple[str, ...] = (), **config: Any) -> Program:
    """Return the tests' program, forked from the fork server."""
    return Program(kind="bench", module="fault_program", preload=preload, config={"mode": mode, **config})


class Run:
    """One launch: the client process, its events, the run's processes and directories."""

    def __init__(
        self,
        plan: Plan,
        *,
        is_detached: bool = False,
        prefix: Sequence[str] = (),
        namespaces: Sequence[str] = (),
    ) -> None:
        self.plan = plan
        self.is_detached = is_detached
        self.events: list[dict[str, Any]] = []
        request = json.dumps(
            {"plan": to_json(plan), "is_detached": is_detached, "namespaces": list(namespaces)}
        )
        for node in plan.nodes:
            assert node.state_dir is not None
            Path(node.state_dir).mkdir(exist_ok=True)
        env = {**os.environ, "PYTHONPATH": str(Path(gpuctl.__file__).parents[1])}
        self.client = subprocess.Popen(
            [*prefix, sys.executable, str(HERE / "fault_client.py"), request],
            env=env,
            stdout=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def run_id(self) -> str:
        return self.plan.run_id

    def _read(self) -> None:
        assert self.client.stdout is not None
        for line in self.client.stdout:
            self.events.append(json.loads(line))

    def event(self, name: str, timeout_s: float = 20.0) -> dict[str, Any]:
        """Return the first event ``name``."""

        def found() -> dict[str, Any] | None:
            return next((e for e in list(self.events) if e.get("event") == name), None)

        return until(found, timeout_s, f"no {name} in {self.events[-5:]}")  # type: ignore[return-value]

    def wait_until_stepping(self) -> None:
        """Return when all ranks have made a step."""

        def all_step() -> bool:
            is_over = not self.is_detached and self.client.poll() is not None
            assert not is_over, f"the launch ended: {self.events}"
            return self.events_written().count('"stepping"') == self.plan.world_size

        until(all_step, 30.0, f"no steps: {self.events}")

    def events_written(self) -> str:
        """Return what the lead has written down of the run's events."""
        try:
            return self.run_dir(0).events.read_text()
        except FileNotFoundError:
            return ""

    def step(self) -> int:
        """Return the last step the client was told of."""
        return max((int(e["step"]) for e in list(self.events) if e.get("event") == "step"), default=0)

    def log(self, rank: int, stream: str, generation: int = 0) -> bytes:
        """Return a rank's log file as it is so far."""
        node = self.plan.node_of(rank)
        try:
            return self.run_dir(node.node_rank).log(generation, rank, stream).read_bytes()
        except FileNotFoundError:
            return b""

    def log_head(self, rank: int, num_bytes: int) -> bytes:
        """Return the first bytes of a rank's stdout, however large it has become."""
        with self.run_dir(self.plan.node_of(rank).node_rank).log(0, rank, "out").open("rb") as file:
            return file.read(num_bytes)

    def open_modes(self) -> list[Path]:
        """Return every file and directory of the run that somebody else could read or write."""
        paths = [p for i in range(len(self.plan.nodes)) for p in self.run_dir(i).path.rglob("*")]
        return [p for p in paths if not p.is_symlink() and p.stat().st_mode & 0o077]

    def processes(self) -> dict[int, str]:
        return processes_of(self.run_id)

    def pids(self, name: str) -> list[int]:
        """Return the pids of the processes called ``name`` (gpuctl:r0, gpuctl:agent, ...)."""
        return [pid for pid, comm in self.processes().items() if comm == name]

    def agent_of(self, node_rank: int) -> int:
        """Return the pid of a node's agent."""
        record = self.record(node_rank)
        assert record is not None and record.agent_pid is not None
        return record.agent_pid

    def run_dir(self, node_rank: int) -> RunDir:
        home = Path(str(self.plan.nodes[node_rank].state_dir)) / f"gpuctl-{os.getuid()}"
        return RunDir(home / "runs" / self.run_id / f"node-{node_rank}")

    def record(self, node_rank: int) -> RunRecord | None:
        """Return what the node itself says of the run."""
        return read_record(self.run_dir(node_rank))

    def connections(self) -> dict[str, Connection]:
        return {node.host: connect(spec_of(node)) for node in self.plan.nodes}

    def wait_until_gone(self, since: float, timeout_s: float = 12.0) -> float:
        """Return how long after ``since`` the run's last process on this machine was gone."""
        until(lambda: not self.processes(), timeout_s, f"still there: {self.processes()}")
        return time.monotonic() - since

    def wait_for_client(self, since: float, timeout_s: float = 12.0) -> float:
        """Return how long after ``since`` the command was back."""
        self.client.wait(timeout_s)
        self._reader.join(5)
        return time.monotonic() - since

    def close(self) -> None:
        """End whatever a failed test left."""
        if self.client.poll() is None:
            self.client.kill()
            self.client.wait()
        if self.client.stdout is not None:
            self._reader.join(5)
            self.client.stdout.close()
        for _ in range(100):
            left = self.processes()
            for pid in left:
                process = identity.identify(pid)
                if process is not None:
                    identity.send_signal(process, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.01)
        self._remove_locks()

    def _remove_locks(self) -> None:
        """Remove the lock files of nodes that exist for one test only."""
        for path in DIRECTORY.iterdir() if DIRECTORY.is_dir() else ():
            with contextlib.suppress(OSError):
                if self.run_id.encode() in path.read_bytes():
                    path.unlink()


@contextmanager
def running(directory: Path, program: Program, *, is_detached: bool = False) -> Iterator[Run]:
    """Yield a run whose ranks all step; whatever is left at the end fails the test, and is ended."""
    run = Run(make_plan(directory, program), is_detached=is_detached)
    try:
        if is_detached:
            assert run.event("outcome", 30)["state"] == "running"
        run.wait_until_stepping()
        yield run
        assert not run.processes()
        assert not run.open_modes()
    finally:
        run.close()


def repeat(fault: Callable[[random.Random], float], rounds: int = ROUNDS) -> None:
    """Make a fault ``rounds`` times and hold the times against the bounds."""
    print(f"GPUCTL_FAULT_SEED={SEED}")
    dice = random.Random(SEED)
    times = [fault(dice) for _ in range(min(rounds, ROUNDS))]
    assert statistics.median(times) <= MEDIAN_S, times
    assert max(times) <= WORST_S, times


def expect_failed(run: Run, since: float, exit_code: int = 1) -> dict:
    """Wait until command and processes are gone; return the one ``failed`` event."""
    run.wait_for_client(since)
    run.wait_until_gone(since)
    failed = [event for event in run.events if event["event"] == "failed"]
    assert len(failed) == 1, run.events
    assert run.client.returncode == exit_code
    return failed[0]
