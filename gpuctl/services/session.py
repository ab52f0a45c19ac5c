"""A session: authenticated connections to the nodes of a cluster, opened at once, kept until closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from gpuctl.core.cluster import Cluster, NodeSpec, labels
from gpuctl.errors import GpuctlError
from gpuctl.transports import Connection, ConnectOptions, connect
from gpuctl.transports.fanout import GroupResult, NodeResult, fanout

CONNECT_S = 10.0


@dataclass
class Session:
    """Connections by label (the host; ``host#i`` when two logical nodes share one)."""

    cluster: Cluster
    connections: dict[str, Connection] = field(default_factory=dict)
    failures: dict[str, GpuctlError] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, NodeSpec]:
        """The nodes by label, in file order."""
        return dict(zip(labels([n.host for n in self.cluster.nodes]), self.cluster.nodes, strict=True))

    def reconnect(self, label: str) -> Connection:
        """Make a new connection to a node; the old one is closed."""
        old = self.connections.pop(label, None)
        if old is not None:
            old.close()
        self.connections[label] = connect(self.specs[label], self.options)
        return self.connections[label]

    @property
    def options(self) -> ConnectOptions:
        return ConnectOptions(timeout_s=CONNECT_S, host_keys=self.cluster.host_keys)

    def close(self) -> None:
        """Close every connection. Never raises."""
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_session(
    cluster: Cluster,
    *,
    is_partial: bool = False,
    on_result: Callable[[NodeResult[Connection]], None] | None = None,
) -> Session:
    """Connect to every node at once.

    ``is_partial``: nodes that cannot be reached are kept in ``failures`` instead of raised (status,
    logs, stop: the others' answers count). Raises one GpuctlError that names every failed node.
    """
    session = Session(cluster)
    group: GroupResult[Connection] = fanout(
        session.specs,
        lambda spec: connect(spec, session.options),
        timeout_s=CONNECT_S + 2.0,
        on_result=on_result,
    )
    session.connections.update(group.values())
    session.failures.update(group.failures)
    if session.failures and not (is_partial and session.connections):
        session.close()
        group.raise_for_failures("cannot connect")
    return session


def by_rank(session: Session) -> Mapping[int, Connection]:
    """Return the connections by node_rank (the position in the cluster)."""
    return {i: session.connections[label] for i, label in enumerate(session.specs)}
