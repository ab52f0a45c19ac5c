"""The launching client as a process of its own, so that it can be interrupted and killed.

``fault_client.py JSON``: {plan, is_detached, namespaces}; prints the events as JSON lines, then the outcome.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from typing import Any

from wires import InNamespace

from gpuctl.core.cluster import NodeSpec
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.plan import NodePlan, Plan
from gpuctl.errors import GpuctlError
from gpuctl.services.bundle import node_bundle
from gpuctl.services.launch import Interrupts, Listener, Reach, launch
from gpuctl.transports import Connection, connect


def spec_of(node: NodePlan) -> NodeSpec:
    """Return the cluster file's word on a planned node."""
    return NodeSpec(node.host, transport=node.transport, python=node.python, state_dir=node.state_dir)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def say_line(rank: int, stream: str, line: bytes) -> None:
    """Say what was shown; only the start of a long line, for the test's own sake."""
    say(event="log", rank=rank, stream=stream, line=line[:200].hex(), size=len(line))


def main(text: str) -> int:
    request = json.loads(text)
    plan = replace(from_json(Plan, request["plan"]), bundle_sha256=node_bundle().sha256)
    interrupts = Interrupts()
    signal.signal(signal.SIGINT, lambda *_: interrupts.press())

    def connection(node_rank: int) -> Connection:
        plain = connect(spec_of(plan.nodes[node_rank]))
        names = request["namespaces"]
        return InNamespace(plain, names[node_rank]) if names else plain

    reach = Reach({node.node_rank: connection(node.node_rank) for node in plan.nodes}, connection)
    listener = Listener(on_event=lambda event: say(**event), on_log=say_line)
    try:
        outcome = launch(
            plan, reach, listener=listener, interrupts=interrupts, is_detached=request["is_detached"]
        )
    except GpuctlError as exc:
        say(event="error", message=exc.message, cause=exc.cause)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130
    say(event="outcome", **to_json(outcome))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
