"""Nodes in network namespaces around a hub, so that their links can be cut, slowed and healed. Root only.

Nothing of the machine's own network is touched: the hub is a bridge in a namespace of its own.
"""

from __future__ import annotations

import secrets
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuctl.core.cluster import NodeSpec
from gpuctl.transports import Completed, Connection, Stream


class Wires:
    """The links of ``num_nodes`` nodes; node i has the address ``10.99.0.(i+1)``."""

    def __init__(self, num_nodes: int) -> None:
        token = secrets.token_hex(3)
        self.hub = f"gpuctl-{token}-hub"
        self.nodes = [f"gpuctl-{token}-{i}" for i in range(num_nodes)]

    def make(self) -> None:
        """Make the namespaces and links; raises CalledProcessError where that is not allowed."""
        ip("netns", "add", self.hub)
        ip("-n", self.hub, "link", "add", "hub", "type", "bridge")
        ip("-n", self.hub, "link", "set", "hub", "up")
        for i, name in enumerate(self.nodes):
            ip("netns", "add", name)
            ip(
                "link",
                "add",
                f"v{i}",
                "netns",
                self.hub,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                name,
            )
            ip("-n", self.hub, "link", "set", f"v{i}", "master", "hub", "up")
            ip("-n", name, "address", "add", f"{self.address(i)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in (*self.nodes, self.hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def address(self, node: int) -> str:
        return f"10.99.0.{node + 1}"

    def cut(self, node: int) -> None:
        """Drop everything from and to ``node`` without a word to either side."""
        ip("-n", self.hub, "link", "set", f"v{node}", "nomaster")

    def heal(self, node: int) -> None:
        ip("-n", self.hub, "link", "set", f"v{node}", "master", "hub")

    def mute(self, node: int, way: str) -> None:
        """Drop what goes ``to_node`` or ``from_node`` only: a queue without room."""
        self._queue(node, way, "pfifo", "limit", "0")

    def slow(self, node: int) -> None:
        """Delay both ways and lose some; raises CalledProcessError where the kernel has no netem."""
        for way in ("to_node", "from_node"):
            self._queue(node, way, "netem", "delay", "150ms", "loss", "5%")

    def straighten(self, node: int) -> None:
        """Undo :meth:`mute` and :meth:`slow`."""
        for way in ("to_node", "from_node"):
            self._queue(node, way, "pfifo", "limit", "1000")

    def _queue(self, node: int, way: str, *how: str) -> None:
        namespace, device = (self.hub, f"v{node}") if way == "to_node" else (self.nodes[node], "eth0")
        command = ["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *how]
        subprocess.run(command, capture_output=True, check=True)


@contextmanager
def wired(num_nodes: int) -> Iterator[Wires]:
    """Yield the wires of so many nodes and remove them afterwards."""
    wires = Wires(num_nodes)
    try:
        wires.make()
        yield wires
    finally:
        wires.remove()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)


class InNamespace:
    """A connection whose commands run in a network namespace."""

    def __init__(self, inner: Connection, name: str) -> None:
        self.node: NodeSpec = inner.node
        self._inner = inner
        self._prefix = f"exec nsenter --net=/run/netns/{name} /bin/sh -c "

    def run(self, command: str, **options: Any) -> Completed:
        return self._inner.run(self._prefix + shlex.quote(command), **options)

    def open(self, command: str) -> Stream:
        return self._inner.open(self._prefix + shlex.quote(command))

    def close(self) -> None:
        self._inner.close()
