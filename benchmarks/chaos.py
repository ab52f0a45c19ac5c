"""Random schedules of faults on two nodes of two ranks: orphans, false deaths and hangs are counted.

    python benchmarks/chaos.py --rounds 200 [--seed N] [--json FILE]

Each schedule makes 3 to 6 faults at random moments, on a looping or an idle run with strays beside its
ranks. Some faults must end the run (a rank, an agent, a fork server killed), some must not (the client or
a guardian killed, an agent that stands still for less than dead_s, strangers on the lead's port). After each
schedule: no process of the run is left two seconds after its last fault, the command is back, every node has
a final record, and a run that was only disturbed still steps. The seed repeats a schedule's faults; where
they hit depends on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "faults"))

from fault_lab import FAILURE, WORST_S, Run, bundled, make_plan

WINDOW_S = 2.5
STANDSTILL_S = (0.1, 2.0)


@dataclass
class Verdict:
    """What became of one schedule. ``problems`` is empty when all was as it must be."""

    seed: int
    faults: list[str]
    is_fatal: bool
    end_s: float | None = None
    problems: list[str] = field(default_factory=list)


def kill_rank(run: Run, dice: random.Random) -> bool:
    return hit(run.pids(f"gpuctl:r{dice.randrange(4)}"), signal.SIGKILL)


def kill_agent(run: Run, dice: random.Random) -> bool:
    return hit([run.agent_of(dice.randrange(2))], signal.SIGKILL)


def kill_fork_server(run: Run, dice: random.Random) -> bool:
    return hit(shuffled(run.pids("gpuctl:fork"), dice), signal.SIGKILL)


def term_agent(run: Run, dice: random.Random) -> bool:
    return hit([run.agent_of(dice.randrange(2))], signal.SIGTERM)


def kill_guardian(run: Run, dice: random.Random) -> bool:
    return hit(shuffled(run.pids("gpuctl:guard"), dice), signal.SIGKILL)


def kill_client(run: Run, _dice: random.Random) -> bool:
    return hit([run.client.pid] if run.client.poll() is None else [], signal.SIGKILL)


def kill_strays(run: Run, dice: random.Random) -> bool:
    return hit(shuffled(run.pids("sleep"), dice)[:1], signal.SIGKILL)


def stop_rank_for_a_while(run: Run, dice: random.Random) -> bool:
    return stand_still(run.pids(f"gpuctl:r{dice.randrange(4)}"), dice)


def stop_agent_for_a_while(run: Run, dice: random.Random) -> bool:
    return stand_still([run.agent_of(dice.randrange(2))], dice)


def ask_for_stacks(run: Run, dice: random.Random) -> bool:
    return hit(run.pids(f"gpuctl:r{dice.randrange(4)}"), signal.SIGUSR1)


def knock(run: Run, dice: random.Random) -> bool:
    """Send random bytes to whatever TCP port of this machine the lead's agent listens on."""
    from test_starts import listening_port

    with contextlib.suppress(OSError, AssertionError):
        port = listening_port(run.agent_of(0))
        with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
            stranger.sendall(dice.randbytes(dice.choice([1, 100, 10_000])))
    return True


Fault = Callable[[Run, random.Random], bool]
FATAL: tuple[Fault, ...] = (kill_rank, kill_agent, kill_fork_server, term_agent)
HARMLESS: tuple[Fault, ...] = (
    kill_guardian,
    kill_client,
    kill_strays,
    stop_rank_for_a_while,
    stop_agent_for_a_while,
    ask_for_stacks,
    knock,
)


def hit(pids: list[int], number: int) -> bool:
    """Signal the first of ``pids``; False when there is none any more."""
    for pid in pids[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
    return False


def stand_still(pids: list[int], dice: random.Random) -> bool:
    if not hit(pids, signal.SIGSTOP):
        return False
    time.sleep(dice.uniform(*STANDSTILL_S))
    hit(pids, signal.SIGCONT)
    return True


def shuffled(pids: list[int], dice: random.Random) -> list[int]:
    return dice.sample(pids, len(pids))


def schedule(seed: int, directory: Path) -> Verdict:
    """Launch a run, make the faults of ``seed``, look at what is left."""
    dice = random.Random(seed)
    count = dice.randint(3, 6)
    # a third of the schedules must not end the run at all
    pool = HARMLESS if dice.random() < 1 / 3 else (*FATAL, *HARMLESS)
    faults = [dice.choice(pool) for _ in range(count)]
    moments = sorted(dice.uniform(0, WINDOW_S) for _ in faults)
    verdict = Verdict(seed, [], is_fatal=False)
    run = Run(make_plan(directory, bundled(dice.choice(["ring", "idle"]))))
    try:
        run.wait_until_stepping()
        began = time.monotonic()
        for fault, moment in zip(faults, moments, strict=True):
            time.sleep(max(0.0, began + moment - time.monotonic()))
            if fault(run, dice):
                verdict.faults.append(fault.__name__)
                verdict.is_fatal |= fault in FATAL
        judge(run, verdict)
    except AssertionError as exc:
        verdict.problems.append(str(exc)[:300])
    finally:
        run.close()
    return verdict


def judge(run: Run, verdict: Verdict) -> None:
    """Hold what is left against what must be."""
    now = time.monotonic()
    if not verdict.is_fatal:
        steps = run.events_written().count('"loss"')
        time.sleep(0.5)
        if run.events_written().count('"loss"') <= steps or len(run.pids("gpuctl:agent")) != 2:
            verdict.problems.append("a false death, or a hang: it was only disturbed")
        now = time.monotonic()
        hit([run.agent_of(0)], signal.SIGTERM)
    try:
        verdict.end_s = run.wait_until_gone(now, FAILURE.dead_s + WORST_S)
        run.wait_for_client(now)
    except AssertionError:
        verdict.problems.append(f"orphans: {sorted(run.processes().values())}")
    if verdict.end_s is not None and verdict.end_s > WORST_S:
        verdict.problems.append(f"{verdict.end_s:.1f} s to the last process")
    records = [run.record(node) for node in (0, 1)]
    verdict.problems += [
        f"n{i} has no final record" for i, r in enumerate(records) if r is None or not r.state.is_final
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="gpuctl-chaos-") as directory:
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            verdict = schedule(seed, Path(directory))
            verdicts.append(verdict)
            print(f"{seed}: {', '.join(verdict.faults)}: {'; '.join(verdict.problems) or 'ok'}", flush=True)
    ends = sorted(v.end_s for v in verdicts if v.end_s is not None)
    bad = [v for v in verdicts if v.problems]
    if ends:
        middle = statistics.median(ends)
        print(f"from the last fault to the last process: median {middle:.2f} s, worst {ends[-1]:.2f} s")
    made = Counter(name for verdict in verdicts for name in verdict.faults)
    print(f"{len(bad)} of {len(verdicts)} schedules with a problem; {made.total()} faults: {dict(made)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
