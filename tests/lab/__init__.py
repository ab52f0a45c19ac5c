"""A cluster of real sshd nodes on this machine, made and removed by the tests that use it.

As root: network, mount, UTS and PID namespaces, each node with its own address, host name, HOME, /tmp,
/var/tmp, machine id and sshd on port 22; links can be cut. As an ordinary user: one sshd a node on
127.0.0.11 and up, on free ports. Either way a client with a HOME, a key and a known_hosts of its own.
"""

from tests.lab.lab import Lab, LabNode, find_sshd

__all__ = ["Lab", "LabNode", "find_sshd"]
