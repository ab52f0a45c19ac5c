"""Which address and interface of a node its peers use: decided from facts, with the reason.

Pure. The kernel's own answer to "how do I reach that peer" comes first; names of interfaces only rule
out what cannot be right (a bridge that has the same address on every host).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpuctl.core.cluster import NodeSpec
from gpuctl.core.hardware import Nic, NodeFacts
from gpuctl.errors import CheckFailed

#: Bridges, tunnels and container networks: never the way to another machine by themselves.
VIRTUAL_PREFIXES = (
    "docker",
    "br-",
    "veth",
    "virbr",
    "cni",
    "flannel",
    "cali",
    "lxc",
    "lxd",
    "podman",
    "kube",
)


@dataclass(frozen=True)
class Choice:
    """Where peers reach a node."""

    address: str
    interface: str | None
    why: str


def choose_address(spec: NodeSpec, facts: NodeFacts, all_facts: Sequence[NodeFacts]) -> Choice:
    """Return the address of one node for its peers.

    Order: the cluster file's ``address``; loopback when the node is alone or all are one machine; the
    source address of the route to the peers; the node's end of the SSH connection. Raises CheckFailed
    when none is left.
    """
    if spec.address is not None:
        return Choice(spec.address, _interface_of(facts, spec.address), f"`address:` in {spec.origin}")
    if len(all_facts) == 1:
        return Choice("127.0.0.1", "lo", "one node: nothing leaves it")
    if is_loopback(spec.host):
        return Choice(spec.host, "lo", "every node is on this machine")
    routed = _by_route(facts, all_facts)
    if routed is not None:
        return routed
    address = facts.ssh_address
    if address is not None and not is_loopback(address):
        return Choice(address, _interface_of(facts, address), "the node's end of the SSH connection")
    candidates = _candidates(facts, all_facts)
    if candidates:
        nic, address = candidates[0]
        return Choice(address, nic.name, f"the first address that only {spec.host} has")
    raise CheckFailed(
        f"{spec.host}: no address that its peers could reach was found",
        cause=", ".join(f"{n.name}: {' '.join(n.addresses) or 'none'}" for n in facts.nics or ()) or None,
        hint="set `address:` for this node in the cluster file",
    )


def _by_route(facts: NodeFacts, all_facts: Sequence[NodeFacts]) -> Choice | None:
    """Return the source address that most routes to peers start from."""
    own = {address for nic in facts.nics or () for address in nic.addresses}
    shared = _shared_addresses(all_facts)
    votes: Counter[tuple[str, str | None]] = Counter()
    for route in facts.routes or ():
        if route.source is None or route.peer in own or route.source in shared:
            continue
        if not is_loopback(route.source):
            votes[route.source, route.interface] += 1
    if not votes:
        return None
    (address, interface), count = votes.most_common(1)[0]
    total = sum(votes.values())
    return Choice(address, interface, f"the route to {count} of {total} peers leaves by it")


def _candidates(facts: NodeFacts, all_facts: Sequence[NodeFacts]) -> list[tuple[Nic, str]]:
    shared = _shared_addresses(all_facts)
    return [
        (nic, address)
        for nic in facts.nics or ()
        if not nic.is_loopback and nic.is_up is not False and not nic.name.startswith(VIRTUAL_PREFIXES)
        for address in nic.addresses
        if address not in shared and not is_loopback(address) and not _is_link_local(address)
    ]


def _shared_addresses(all_facts: Sequence[NodeFacts]) -> set[str]:
    """Return addresses that several machines have: docker0's is the same everywhere."""
    seen: Counter[str] = Counter()
    machines: set[str | None] = set()
    for facts in all_facts:
        if facts.machine_id is not None and facts.machine_id in machines:
            continue  # two logical nodes of one machine share all of them
        machines.add(facts.machine_id)
        seen.update({address for nic in facts.nics or () for address in nic.addresses})
    return {address for address, count in seen.items() if count > 1}


def _interface_of(facts: NodeFacts, address: str) -> str | None:
    for nic in facts.nics or ():
        if address in nic.addresses:
            return nic.name
    return "lo" if is_loopback(address) else None


def is_loopback(address: str) -> bool:
    """Return whether ``address`` is a loopback literal or ``localhost``."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_link_local(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_link_local
    except ValueError:
        return False
