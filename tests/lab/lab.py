"""See the package's docstring. ``python -m tests.lab.lab`` shows whether a lab can be made here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
READY_S = 15.0


def find_sshd() -> str | None:
    """Return the sshd that the repository's script finds or fetches; None where there is none."""
    done = subprocess.run([str(REPOSITORY / "scripts/sshd")], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


@dataclass
class LabNode:
    """One node: where it listens, where its files lie, how to run something on it."""

    name: str
    address: str
    port: int
    folder: Path
    enter: tuple[str, ...] = ()
    """What to put before a command to run it inside the node's namespaces."""
    sshd: subprocess.Popen[bytes] | None = None
    init: subprocess.Popen[bytes] | None = None
    python: str = sys.executable

    @property
    def state_dir(self) -> Path:
        """Where gpuctl keeps its files on this node, as seen from here."""
        return self.folder / "state"

    def run(self, argv: Sequence[str], *, timeout_s: float = 20.0) -> str:
        """Run a command on the node, without SSH, and return its stdout."""
        done = subprocess.run(
            [*self.enter, *argv], capture_output=True, text=True, timeout=timeout_s, check=True
        )
        return done.stdout


@dataclass
class Lab:
    """Nodes and a client. Use :meth:`made` as a context manager."""

    folder: Path
    sshd_path: str
    tag: str
    nodes: list[LabNode] = field(default_factory=list)
    is_namespaced: bool = False

    @classmethod
    @contextlib.contextmanager
    def made(cls, num_nodes: int, sshd_path: str) -> Iterator[Lab]:
        """Make a lab of ``num_nodes`` nodes; everything it started is ended and removed at the end."""
        # a short path: sshd's own sockets and gpuctl's must fit a unix address
        folder = Path(tempfile.mkdtemp(prefix="lab-"))
        folder.chmod(0o755)
        lab = cls(folder, sshd_path, folder.name[4:12].replace("_", "x").lower())
        try:
            lab._make_keys()
            lab.is_namespaced = os.getuid() == 0
            if lab.is_namespaced:
                lab._make_network()
            for i in range(num_nodes):
                lab.nodes.append(lab._make_node(i))
            lab._write_client_files()
            for node in lab.nodes:
                lab._wait_until_ready(node)
            yield lab
        finally:
            lab.close()

    # -- what tests use

    def cluster_yaml(
        self, num_nodes: int = 2, *, gpus: int = 2, name: str = "lab", extra: str = "", **keys: str
    ) -> Path:
        """Write a cluster file for the first nodes (CPU ranks) and return its path."""
        defaults = {"user": user_name(), "vendor": "cpu", "gpus": str(gpus), "python": sys.executable, **keys}
        lines = ["version: 1", f"name: {name}", "defaults:"]
        lines += [f"  {key}: {value}" for key, value in defaults.items()]
        lines.append("nodes:")
        for node in self.nodes[:num_nodes]:
            lines.append(f"  - host: {node.name if self.is_namespaced else node.address}")
            lines.append(f"    port: {node.port}")
            lines.append(f"    state_dir: {'/var/tmp' if self.is_namespaced else node.state_dir}")
            if not self.is_namespaced:
                lines.append(f"    address: {node.address}")
        path = self.folder / f"{name}-{len(list(self.folder.glob('*.yaml')))}.yaml"
        path.write_text(
            "\n".join(lines) + "\n" + f"failure: {{suspect_s: 3, dead_s: 5, grace_s: 10}}\n{extra}"
        )
        return path

    def environment(self, home: Path | None = None) -> dict[str, str]:
        """Return the environment of a client: its own HOME, no agent, no inherited gpuctl settings."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUCTL_", "SSH_", "XDG_"))}
        home = home or self.folder / "client"
        return {**kept, "HOME": str(home), "GPUCTL_SSH_CONFIG": str(self.folder / "client/.ssh/config")}

    def client(
        self,
        *argv: str,
        home: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``gpuctl`` as the lab's user would; the caller waits for it or ends it."""
        return subprocess.Popen(
            [sys.executable, "-m", "gpuctl", *argv],
            env={**self.environment(home), **(env or {})},
            cwd=cwd or self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def gpuctl(
        self, *argv: str, timeout_s: float = 90.0, home: Path | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``gpuctl`` to its end."""
        process = self.client(*argv, home=home, cwd=cwd)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"gpuctl {' '.join(argv)} took over {timeout_s} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def processes(self, run_id: str) -> list[int]:
        """Return every process on this machine that carries the run's tag."""
        return tagged_processes(run_id)

    def cut(self, node: LabNode) -> None:
        """Let every frame to and from the node vanish; nobody gets a FIN or a reset."""
        index = self.nodes.index(node)
        _sh("ip", "-n", self._switch, "link", "set", f"p{index}", "nomaster")

    def heal(self, node: LabNode) -> None:
        """Undo :meth:`cut`."""
        index = self.nodes.index(node)
        _sh("ip", "-n", self._switch, "link", "set", f"p{index}", "master", "br0")

    # -- making

    @property
    def _switch(self) -> str:
        return f"gl{self.tag}sw"

    def _make_keys(self) -> None:
        (self.folder / "client/.ssh").mkdir(parents=True, mode=0o700)
        _keygen(self.folder / "client/.ssh/id_ed25519")

    def _make_network(self) -> None:
        _sh("ip", "netns", "add", self._switch)
        _sh(
            "ip",
            "link",
            "add",
            f"gl{self.tag}u"[:15],
            "type",
            "veth",
            "peer",
            "name",
            "uplink",
            "netns",
            self._switch,
        )
        _sh("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        for name in ("br0", "lo", "uplink"):
            _sh("ip", "-n", self._switch, "link", "set", name, "up")
        _sh("ip", "-n", self._switch, "link", "set", "uplink", "master", "br0")
        uplink = f"gl{self.tag}u"[:15]
        _sh("ip", "addr", "add", f"{self._subnet}.1/24", "dev", uplink)
        _sh("ip", "link", "set", uplink, "up")

    @property
    def _subnet(self) -> str:
        # one of 200 /24s by the lab's tag: two test runs on one machine rarely meet, and `ip addr` says so
        return f"10.{200 + sum(map(ord, self.tag)) % 50}.{int.from_bytes(self.tag.encode(), 'big') % 250}"

    def _make_node(self, index: int) -> LabNode:
        name = f"node{index}"
        folder = self.folder / name
        for part in ("home/.ssh", "tmp", "vartmp", "state"):
            (folder / part).mkdir(parents=True, mode=0o700)
        _keygen(folder / "host_key")
        shutil.copy(self.folder / "client/.ssh/id_ed25519.pub", folder / "authorized_keys")
        if self.is_namespaced:
            return self._make_namespaced(index, name, folder)
        address, port = f"127.0.0.{11 + index}", free_port(f"127.0.0.{11 + index}")
        node = LabNode(name, address, port, folder)
        self._write_sshd_config(node, folder)
        command = [self.sshd_path, "-D", "-e", "-f", str(folder / "sshd_config")]
        node.sshd = _spawn(command, folder / "sshd.log", env=os.environ | {"HOME": str(folder / "home")})
        return node

    def _make_namespaced(self, index: int, name: str, folder: Path) -> LabNode:
        namespace, address = f"gl{self.tag}n{index}", f"{self._subnet}.{10 + index}"
        _sh("ip", "netns", "add", namespace)
        _sh(
            "ip",
            "-n",
            self._switch,
            "link",
            "add",
            f"p{index}",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            namespace,
        )
        _sh("ip", "-n", self._switch, "link", "set", f"p{index}", "master", "br0")
        _sh("ip", "-n", self._switch, "link", "set", f"p{index}", "up")
        _sh("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _sh("ip", "-n", namespace, "link", "set", link, "up")
        node = LabNode(name, address, 22, folder)
        self._write_sshd_config(node, folder)
        (folder / "machine-id").write_text(os.urandom(16).hex() + "\n")
        hosts = self.folder / "hosts"
        (folder / "init").write_text(INIT.format(folder=folder, name=name, sshd=self.sshd_path, hosts=hosts))
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        enter = ["ip", "netns", "exec", namespace, *unshare, "--propagation", "slave"]
        command = [*enter, "/bin/sh", str(folder / "init")]
        (self.folder / "hosts").touch()
        node.init = _spawn(command, folder / "sshd.log", env=dict(os.environ))
        return node

    def _write_sshd_config(self, node: LabNode, folder: Path) -> None:
        (folder / "sshd_config").write_text(
            f"Port {node.port}\nListenAddress {node.address}\nHostKey {folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized_keys\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nUsePAM no\nUseDNS no\nStrictModes no\n"
            "PermitRootLogin prohibit-password\nAcceptEnv LANG\nMaxStartups 100\n"
        )

    def _write_client_files(self) -> None:
        ssh = self.folder / "client/.ssh"
        known, config, hosts = [], [], ["127.0.0.1 localhost"]
        for node in self.nodes:
            key = " ".join((node.folder / "host_key.pub").read_text().split()[:2])
            name = node.address if node.port == 22 else f"[{node.address}]:{node.port}"
            known.append(f"{name} {key}")
            hosts.append(f"{node.address} {node.name}")
            config.append(f"Host {node.name}\n  HostName {node.address}\n  Port {node.port}\n")
        config.append(
            f"Host *\n  User {user_name()}\n  IdentityFile {ssh}/id_ed25519\n  IdentitiesOnly yes\n"
        )
        config.append(f"  UserKnownHostsFile {ssh}/known_hosts\n  GlobalKnownHostsFile /dev/null\n")
        (ssh / "known_hosts").write_text("\n".join(known) + "\n")
        (ssh / "config").write_text("".join(config))
        (ssh / "config").chmod(0o600)
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _wait_until_ready(self, node: LabNode) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((node.address, node.port), 1.0) as sock,
            ):
                sock.settimeout(2.0)
                if sock.recv(4).startswith(b"SSH-"):
                    break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{node.name} is not up: {(node.folder / 'sshd.log').read_text()[-2000:]}")
            time.sleep(0.02)
        if self.is_namespaced and node.init is not None:
            inside = _child_of(_child_of(node.init.pid) or node.init.pid) or _child_of(node.init.pid)
            assert inside is not None
            node.enter = ("nsenter", "-t", str(inside), "-m", "-u", "-i", "-n", "-p", "--")

    def close(self) -> None:
        """End and remove everything; safe to call at any point of the making."""
        for node in self.nodes:
            for process in (node.sshd, node.init):
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if self.is_namespaced:
            names = [f"gl{self.tag}n{i}" for i in range(len(self.nodes))] + [self._switch]
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", f"gl{self.tag}u"[:15]], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)


#: The first process of a node: private mounts, then sshd in the foreground.
INIT = """\
set -e
hostname {name}
mount --bind {folder}/machine-id /etc/machine-id
mount --bind {folder}/vartmp /var/tmp && chmod 1777 /var/tmp
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run && mkdir -p /run/sshd
mount --bind {hosts} /etc/hosts
# root's HOME is the node's own; the system's stays where the interpreter may lie
sed 's|^root:\\([^:]*\\):0:0:\\([^:]*\\):[^:]*:|root:\1:0:0:\2:{folder}/home:|' /etc/passwd >{folder}/passwd
grep -q '^sshd:' {folder}/passwd || echo 'sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin' >>{folder}/passwd
mount --bind {folder}/passwd /etc/passwd
exec {sshd} -D -e -f {folder}/sshd_config
"""


def tagged_processes(run_id: str) -> list[int]:
    """Return the processes whose environment holds GPUCTL_RUN_ID=``run_id``."""
    wanted, found = f"GPUCTL_RUN_ID={run_id}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def user_name() -> str:
    """Return the name of the user the tests run as."""
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def free_port(address: str) -> int:
    """Return a port that nobody listens on at ``address`` now."""
    with socket.socket() as sock:
        sock.bind((address, 0))
        return int(sock.getsockname()[1])


def _child_of(pid: int) -> int | None:
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(words[0]) if words else None


def _keygen(path: Path) -> None:
    _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path))


def _sh(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _spawn(command: Sequence[str], log: Path, *, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True, env=dict(env)
        )


if __name__ == "__main__":
    path = find_sshd()
    assert path is not None
    with Lab.made(2, path) as lab:
        print(lab.folder, [(n.name, n.address, n.port) for n in lab.nodes])
        done = lab.gpuctl("exec", "-f", str(lab.cluster_yaml()), "--", "hostname")
        print(done.stdout, done.stderr)
