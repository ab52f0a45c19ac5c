"""The transport ``ssh``: paramiko, reaching a host the way the user's own ssh would.

Where to go comes from ``ssh -G`` and the cluster file (:mod:`gpuctl.config.ssh_config`). Host keys are
checked strictly against the user's and the machine's known_hosts. Never a prompt, never agent
forwarding, never a second try of an authentication; each phase has its name in its error.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import random
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import paramiko

from gpuctl.config.ssh_config import SshTarget, jump_chain, resolve, run_ssh
from gpuctl.core.cluster import NodeSpec
from gpuctl.errors import AuthError, ConfigError, GpuctlError, HostKeyError, TimeoutExpired, UnreachableError
from gpuctl.transports import Completed, ConnectOptions, known_hosts
from gpuctl.transports.known_hosts import Verdict

#: Stock sshd drops unauthenticated connections beyond 10 (sshd_config MaxStartups 10:30:100).
MAX_HANDSHAKES = 8
RETRIES = 4
#: A dead peer is noticed within these: unacknowledged data, and an idle connection's probes.
TCP_USER_TIMEOUT_MS = 8000
KEEPALIVE = (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 2))
STDERR_TAIL_BYTES = 4096
WINDOW_BYTES = 4 << 20
SEND_BYTES = 1 << 17


@dataclass(frozen=True)
class _Deadline:
    at: float

    def left(self) -> float:
        return max(0.05, self.at - time.monotonic())


class _Retry(Exception):
    """The server hung up before its banner, or reset the connection: it is full, try again."""


def connect(node: NodeSpec, options: ConnectOptions | None = None) -> SshConnection:
    """Connect and authenticate.

    Raises UnreachableError, HostKeyError, AuthError, TimeoutExpired, ConfigError.
    """
    options = options or ConnectOptions()
    deadline = _Deadline(time.monotonic() + options.timeout_s)
    target = resolve(node)
    _refuse_unsupported(node, target)
    hops = jump_chain(target, run_ssh)
    opened: list[paramiko.Transport] = []
    try:
        for hop in (*hops, target):
            through = opened[-1] if opened else None
            opened.append(_enter(node, hop, through, options, deadline, is_hop=hop is not target))
    except BaseException:
        for transport in reversed(opened):
            transport.close()
        raise
    return SshConnection(node, opened)


def _refuse_unsupported(node: NodeSpec, target: SshTarget) -> None:
    if target.proxy_command is not None:
        raise ConfigError(
            f"{node.host}: ssh reaches it by a ProxyCommand, which the transport ssh does not run",
            hint="use ProxyJump in ~/.ssh/config where a jump host is meant",
        )


def _enter(
    node: NodeSpec,
    target: SshTarget,
    through: paramiko.Transport | None,
    options: ConnectOptions,
    deadline: _Deadline,
    *,
    is_hop: bool,
) -> paramiko.Transport:
    """Connect to one host, over the hop before it when there is one."""
    label = f"{node.host}: jump host {target.host}" if is_hop else node.host
    for attempt in range(RETRIES + 1):
        try:
            with _handshakes(target.hostname, target.port):
                sock = _open_socket(label, target, through, deadline)
                return _handshake(label, node, target, sock, options, deadline)
        except _Retry as exc:
            pause = random.uniform(0.1, 0.3) * 2**attempt
            if attempt == RETRIES or time.monotonic() + pause > deadline.at:
                where = f"{target.hostname}:{target.port}"
                raise UnreachableError(
                    f"{label}: the server at {where} closed the connection before its banner",
                    cause=str(exc),
                    hint="it may be full (MaxStartups) or refuse this address",
                ) from exc
            time.sleep(pause)
    raise AssertionError("the loop returns or raises")


@functools.cache
def _handshakes(hostname: str, port: int) -> threading.BoundedSemaphore:
    """One gate a server for the whole process: its own limit counts all our connections."""
    return threading.BoundedSemaphore(MAX_HANDSHAKES)


def _open_socket(
    label: str, target: SshTarget, through: paramiko.Transport | None, deadline: _Deadline
) -> socket.socket | paramiko.Channel:
    if through is not None:
        try:
            return through.open_channel(
                "direct-tcpip", (target.hostname, target.port), ("127.0.0.1", 0), timeout=deadline.left()
            )
        except paramiko.SSHException as exc:
            raise UnreachableError(
                f"{label}: the jump host cannot reach {target.hostname}:{target.port}", cause=str(exc)
            ) from exc
    try:
        infos = socket.getaddrinfo(target.hostname, target.port, type=socket.SOCK_STREAM)
    except socket.gaierror as exc:
        raise UnreachableError(
            f"{label}: the name {target.hostname} cannot be resolved",
            cause=exc.strerror,
            hint="check the name, or set HostName in ~/.ssh/config",
        ) from exc
    return _dial(label, target, infos, deadline)


def _dial(label: str, target: SshTarget, infos: list, deadline: _Deadline) -> socket.socket:  # type: ignore[type-arg]
    problem: OSError | None = None
    for family, kind, protocol, _, address in infos:
        sock = socket.socket(family, kind, protocol)
        sock.settimeout(deadline.left())
        try:
            sock.connect(address)
        except ConnectionResetError as exc:
            sock.close()
            raise _Retry(str(exc)) from exc
        except OSError as exc:
            sock.close()
            problem = exc
            continue
        _tune(sock)
        return sock
    where = f"{target.hostname}:{target.port}"
    if isinstance(problem, TimeoutError):
        raise UnreachableError(
            f"{label}: no answer from {where} while connecting",
            cause="connection timed out",
            hint="is the machine up, and the port not filtered?",
        ) from problem
    reason = (problem.strerror if problem else None) or str(problem)
    raise UnreachableError(f"{label}: cannot connect to {where}", cause=reason) from problem


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; macOS has only the keepalive
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _handshake(
    label: str,
    node: NodeSpec,
    target: SshTarget,
    sock: socket.socket | paramiko.Channel,
    options: ConnectOptions,
    deadline: _Deadline,
) -> paramiko.Transport:
    entries = known_hosts.read_known_hosts([*target.user_known_hosts, *target.global_known_hosts])
    transport = paramiko.Transport(sock, default_window_size=WINDOW_BYTES)
    try:
        transport.banner_timeout = deadline.left()
        _prefer_known(transport, known_hosts.known_types(entries, target.known_hosts_name))
        _start(label, transport, deadline)
        _check_host_key(label, target, transport.get_remote_server_key(), entries, options)
        transport.auth_timeout = deadline.left()
        _authenticate(label, node, target, transport)
    except BaseException:
        transport.close()
        raise
    return transport


def _prefer_known(transport: paramiko.Transport, types: list[str]) -> None:
    options = transport.get_security_options()
    wanted = [t for known in types for t in _algorithms(known) if t in options.key_types]
    options.key_types = tuple(dict.fromkeys([*wanted, *options.key_types]))


def _algorithms(key_type: str) -> tuple[str, ...]:
    return ("rsa-sha2-512", "rsa-sha2-256") if key_type == "ssh-rsa" else (key_type,)


def _start(label: str, transport: paramiko.Transport, deadline: _Deadline) -> None:
    """Exchange banners and keys; paramiko says little about which of the two failed, so we do."""
    try:
        transport.start_client(timeout=deadline.left())
    except (paramiko.SSHException, EOFError, OSError) as exc:
        if not transport.remote_version:
            if deadline.left() <= 0.05:
                raise TimeoutExpired(
                    f"{label}: connected, but the server sent no SSH banner",
                    hint="is something else listening on that port?",
                ) from exc
            raise _Retry(str(exc) or type(exc).__name__) from exc
        if deadline.left() <= 0.05:
            raise TimeoutExpired(f"{label}: the key exchange did not finish", cause=str(exc)) from exc
        raise UnreachableError(f"{label}: the key exchange failed", cause=str(exc)) from exc


def _check_host_key(
    label: str,
    target: SshTarget,
    key: paramiko.PKey,
    entries: list[known_hosts.Entry],
    options: ConnectOptions,
) -> None:
    name, blob, kind = target.known_hosts_name, key.asbytes(), key.get_name()
    answer = known_hosts.check(entries, name, kind, blob)
    if answer.verdict is Verdict.KNOWN:
        return
    shown = f"{kind} {known_hosts.fingerprint(blob)}"
    if answer.verdict is Verdict.CHANGED and answer.entry is not None:
        raise HostKeyError(
            f"{label}: the host key has changed; somebody may be in between, nothing was sent",
            cause=f"{answer.entry.origin} says {known_hosts.fingerprint(answer.entry.key)}, it shows {shown}",
            hint=f"if the machine was reinstalled: `ssh-keygen -R '{name}'`, then check the new key",
        )
    if answer.verdict is Verdict.REVOKED and answer.entry is not None:
        raise HostKeyError(f"{label}: the host key is revoked", cause=f"{answer.entry.origin}: {shown}")
    if options.host_keys == "accept-new" and target.user_known_hosts:
        known_hosts.append(Path(target.user_known_hosts[0]), name, kind, blob)
        return
    port = "" if target.port == 22 else f" -p {target.port}"
    authority = "; its line names a certificate authority, which the transport ssh does not use"
    raise HostKeyError(
        f"{label}: the host key is unknown",
        cause=f"it shows {shown}{authority if answer.has_authority else ''}",
        hint=f"compare it, then `ssh{port} {target.hostname}` once, or set `ssh: {{host_keys: accept-new}}`",
    )


def _authenticate(label: str, node: NodeSpec, target: SshTarget, transport: paramiko.Transport) -> None:
    """Offer the configured identities once each; agent keys only where the user did not choose one."""
    tried: list[str] = []
    problems: list[str] = []
    for name, key in _identities(target, problems):
        tried.append(name)
        try:
            more = transport.auth_publickey(target.user, key)
        except paramiko.BadAuthenticationType as exc:
            allowed = ", ".join(exc.allowed_types)
            raise AuthError(
                f"{label}: the server does not take keys",
                cause=f"it allows: {allowed}",
                hint="passwords and one-time codes are not asked for; set up a key",
            ) from exc
        except (paramiko.AuthenticationException, paramiko.SSHException, EOFError) as exc:
            problems.append(f"{name}: {exc or 'refused'}")
            if not transport.is_active():
                break
            continue
        if not more:
            return
        raise AuthError(f"{label}: the key is accepted, but the server wants more: {', '.join(more)}")
    raise AuthError(
        f"{label}: no identity was accepted for user {target.user}",
        cause="; ".join(problems) or "there is no key to offer",
        hint="`ssh-add -l` shows the agent's keys; set `identity_file:` for this node",
    )


def _identities(target: SshTarget, problems: list[str]) -> list[tuple[str, paramiko.PKey]]:
    """Return the keys to offer, in ssh's order: files somebody chose, the agent's, the default files."""
    agent_keys = _agent_keys(target)
    by_blob = {key.asbytes(): key for key in agent_keys}
    files: list[tuple[str, paramiko.PKey]] = []
    chosen: set[bytes] = set()
    for path in target.identity_files:
        key = _load(path, by_blob, problems, is_default=target.is_default_identity)
        if key is not None:
            files.append((path, key))
            chosen.add(key.asbytes())
    others = [("agent", key) for key in agent_keys if key.asbytes() not in chosen]
    if target.is_default_identity:
        return others + files
    return files if target.identities_only else files + others


def _agent_keys(target: SshTarget) -> list[paramiko.PKey]:
    if target.identity_agent == "none" or not os.environ.get("SSH_AUTH_SOCK"):
        return []
    with contextlib.suppress(paramiko.SSHException, OSError):
        return list(paramiko.Agent().get_keys())
    return []


def _load(
    path: str, by_blob: dict[bytes, paramiko.PKey], problems: list[str], *, is_default: bool
) -> paramiko.PKey | None:
    """Load a private key; one with a passphrase is used through the agent when it is there."""
    public = _public_blob(path)
    if public is not None and public in by_blob:
        return by_blob[public]
    try:
        return paramiko.PKey.from_path(path)
    except FileNotFoundError:
        if not is_default:
            problems.append(f"{path}: no such file")
    except (paramiko.PasswordRequiredException, TypeError):
        problems.append(f"{path}: has a passphrase; add it to the agent with ssh-add")
    except (OSError, ValueError, paramiko.SSHException) as exc:
        problems.append(f"{path}: {exc}")
    return None


def _public_blob(path: str) -> bytes | None:
    try:
        return base64.b64decode(Path(f"{path}.pub").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


class SshConnection:
    """Authenticated transports to one node: the last one is the node's, the others are hops."""

    def __init__(self, node: NodeSpec, transports: list[paramiko.Transport]) -> None:
        self.node = node
        self._transports = transports

    def open(self, command: str) -> SshStream:
        try:
            channel = self._transports[-1].open_session(timeout=10.0)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as exc:
            raise UnreachableError(f"{self.node.host}: no session could be opened", cause=str(exc)) from exc
        return SshStream(channel, self.node.host)

    def run(
        self, command: str, *, stdin: bytes = b"", timeout_s: float, max_output_bytes: int = 4 << 20
    ) -> Completed:
        began = time.monotonic()
        stream = self.open(command)
        try:
            return stream.complete(stdin, began, timeout_s, max_output_bytes)
        finally:
            stream.close()

    def close(self) -> None:
        for transport in reversed(self._transports):
            with contextlib.suppress(Exception):
                transport.close()


class SshStream:
    """A session channel as a byte stream."""

    def __init__(self, channel: paramiko.Channel, host: str) -> None:
        self._channel = channel
        self._host = host
        self._stderr = b""
        self._keep = STDERR_TAIL_BYTES
        # stdout and stderr share one window: whoever does not drain both can hang for ever
        self._reader = threading.Thread(target=self._read_stderr, name=f"stderr-{host}", daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        sent = 0
        try:
            while sent < len(data):
                # the channel has one timeout for both directions: a reader's may end a wait here
                with contextlib.suppress(TimeoutError):
                    sent += self._channel.send(data[sent : sent + SEND_BYTES])
        except (OSError, EOFError) as exc:
            raise UnreachableError(f"{self._host}: the connection is lost", cause=str(exc)) from exc

    def receive(self, max_bytes: int, timeout_s: float | None) -> bytes:
        self._channel.settimeout(None if timeout_s is None else max(timeout_s, 1e-6))
        try:
            data = self._channel.recv(max_bytes)
        except TimeoutError as exc:
            raise TimeoutExpired(f"{self._host}: nothing came within {timeout_s:g} s") from exc
        if not data and not self._channel.eof_received and not self._is_connected():
            raise UnreachableError(f"{self._host}: the connection is lost")
        return data

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def stderr_tail(self) -> str:
        if self._channel.closed or self._channel.eof_received:
            self._reader.join(0.2)
        return self._stderr.decode("utf-8", "replace")

    def exit_code(self, timeout_s: float) -> int | None:
        if not self._channel.status_event.wait(timeout_s):
            return None
        code = self._channel.exit_status
        return code if code >= 0 else None

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()

    def complete(self, stdin: bytes, began: float, timeout_s: float, max_output_bytes: int) -> Completed:
        """Feed ``stdin``, collect everything, return when the command has ended."""
        self._keep = max_output_bytes
        writer = threading.Thread(target=self._feed, args=(stdin,), daemon=True)
        writer.start()
        out, size = [], 0
        while True:
            left = began + timeout_s - time.monotonic()
            if left <= 0:
                raise TimeoutExpired(f"{self._host}: the command took longer than {timeout_s:g} s")
            try:
                data = self.receive(1 << 16, left)
            except TimeoutExpired:
                continue
            if not data:
                break
            if size < max_output_bytes:
                out.append(data[: max_output_bytes - size])
            size += len(data)
        code = self.exit_code(max(0.1, began + timeout_s - time.monotonic()))
        self._reader.join(1.0)
        elapsed = time.monotonic() - began
        return Completed(code, b"".join(out), self._stderr, elapsed, size > max_output_bytes)

    def _feed(self, data: bytes) -> None:
        with contextlib.suppress(GpuctlError):  # a command that does not read its stdin is no error
            self.send(data)
        self.close_stdin()

    def _is_connected(self) -> bool:
        transport = self._channel.get_transport()
        return transport is not None and transport.is_active()

    def _read_stderr(self) -> None:
        while True:
            try:
                data = self._channel.recv_stderr(1 << 16)
            except TimeoutError:
                continue  # the timeout is that of whoever reads stdout
            except (OSError, EOFError):
                return
            if not data:
                return
            self._stderr = (self._stderr + data)[-self._keep :]
