"""What the user's ssh would do for a host: ``ssh -G HOST``, parsed, with the cluster file's keys on top.

Not a parser of ``~/.ssh/config``: Include, Match, wildcards and canonicalisation are ssh's own
business, and ``Match exec`` has side effects, so ssh is asked once a host. Without an ssh binary
only the cluster file's keys count. What ``ssh -G`` prints is trusted as ssh trusts it; the
cluster file can never name a command. ``RemoteCommand``, ``LocalCommand``, ``RequestTTY`` and
forwardings are not read at all.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpuctl.core.cluster import NodeSpec
from gpuctl.core.nodeset import check_host
from gpuctl.errors import ConfigError, TimeoutExpired

SSH_G_TIMEOUT_S = 10.0
"""``Match exec`` and ``CanonicalizeHostname`` may ask a resolver; they do not deserve longer."""

MAX_JUMPS = 8
"""sshd chains longer than this are a loop, not a network."""

CONFIG_VARIABLE = "GPUCTL_SSH_CONFIG"
"""Names another ssh_config (``ssh -F``): ssh reads the passwd home's, whatever HOME says."""

DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "id_xmss", "id_dsa")
"""OpenSSH 9.2's default IdentityFile list; ``ssh -G`` prints it as if it were configured."""

RunSsh = Callable[[Sequence[str]], "str | None"]
"""Runs ssh with these arguments; its stdout, or None when there is no ssh to run."""


@dataclass(frozen=True)
class SshTarget:
    """Everything a transport needs to reach one host. Paths are absolute, tokens expanded."""

    host: str
    """The name that was asked for: the default for known_hosts lookups of an alias-free host."""
    hostname: str
    port: int = 22
    user: str = ""
    identity_files: tuple[str, ...] = ()
    is_default_identity: bool = True
    """The files are ssh's defaults, not anybody's choice: a missing one is not worth a word."""
    identities_only: bool = False
    identity_agent: str | None = None
    """Socket of the agent; None: ``$SSH_AUTH_SOCK``; "none": no agent."""
    certificate_files: tuple[str, ...] = ()
    proxy_jump: str | None = None
    proxy_command: str | None = None
    """Ready for ``sh -c "exec ..."``; only ever from the user's own ssh_config."""
    host_key_alias: str | None = None
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    hash_known_hosts: bool = False
    strict_host_key_checking: str = "ask"
    """As ssh has it. gpuctl's own ``ssh.host_keys`` decides; this is for messages."""
    address_family: str = "any"
    connect_timeout_s: float | None = None
    control_path: str | None = None
    kex_algorithms: tuple[str, ...] = ()
    host_key_algorithms: tuple[str, ...] = ()
    from_ssh: bool = False
    """False when no ssh binary could be asked and only defaults and YAML keys count."""

    @property
    def known_hosts_name(self) -> str:
        """Return the name to look up in known_hosts: ``HostKeyAlias``, ``host`` or ``[host]:port``."""
        if self.host_key_alias:
            return self.host_key_alias
        name = self.hostname.lower()
        return name if self.port == 22 else f"[{name}]:{self.port}"


@dataclass(frozen=True)
class Jump:
    """One hop of a ProxyJump list."""

    host: str
    user: str | None = None
    port: int | None = None


def run_ssh(arguments: Sequence[str], *, timeout_s: float = SSH_G_TIMEOUT_S) -> str | None:
    """Run the system's ssh with ``arguments`` and return its stdout; None without an ssh binary.

    Raises ConfigError when ssh refuses its own configuration, TimeoutExpired past ``timeout_s``.
    """
    try:
        # Its own session: at the deadline what a `Match exec` started goes with it.
        process = subprocess.Popen(
            ["ssh", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError:
        return None
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as exc:
        raise TimeoutExpired(
            f"`ssh {shlex.join(arguments)}` did not answer within {timeout_s:g} s",
            hint="look for a `Match exec` or CanonicalizeHostname in ~/.ssh/config that waits",
        ) from exc
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise ConfigError(
            f"ssh does not accept its configuration for {arguments[-1]}",
            cause=_last_lines(stderr) or f"ssh exited with {process.returncode}",
            hint=f"run `ssh {shlex.join(arguments)}` and mend what it names",
        )
    return stdout.decode(errors="surrogateescape")


def resolve(node: NodeSpec, run: RunSsh = run_ssh, *, environ: Mapping[str, str] | None = None) -> SshTarget:
    """Return how to reach ``node``: ssh_config's answer, overruled by the node's own keys.

    ``environ`` may name another ssh_config in GPUCTL_SSH_CONFIG (default: this process's).
    """
    target = resolve_host(node.host, user=node.user, port=node.port, run=run, environ=environ)
    if node.identity_file is None:
        return target
    return replace(target, identity_files=(_tilde(node.identity_file, _home()),), is_default_identity=False)


def resolve_host(
    host: str,
    *,
    user: str | None = None,
    port: int | None = None,
    jump: str | None = None,
    run: RunSsh = run_ssh,
    environ: Mapping[str, str] | None = None,
) -> SshTarget:
    """Return how ssh would reach ``host``; ``user``, ``port`` and ``jump`` win over ssh_config.

    They are given to ssh too, so that ``Match user`` sees them.
    """
    check_host(host)
    config = (os.environ if environ is None else environ).get(CONFIG_VARIABLE)
    arguments = [*(["-F", config] if config else []), "-G"]
    arguments += ["-l", user] if user else []
    arguments += ["-p", str(port)] if port else []
    arguments += ["-J", jump] if jump else []
    text = run([*arguments, "--", host])
    target = _defaults(host) if text is None else parse(text, host)
    target = replace(target, user=user or target.user, port=port or target.port)
    return _expand(target)


def jump_chain(
    target: SshTarget, run: RunSsh = run_ssh, *, environ: Mapping[str, str] | None = None
) -> tuple[SshTarget, ...]:
    """Return the hosts to pass through on the way to ``target``, the first to connect to first.

    As ssh does it: of ``ProxyJump a,b`` b is reached through a, and a as its own entry says.
    Raises ConfigError on a loop.
    """
    chain: list[SshTarget] = []
    seen = {(target.hostname, target.port)}
    while target.proxy_jump:
        *before, last = target.proxy_jump.split(",")
        hop = parse_jump(last)
        via = ",".join(before) or None
        target = resolve_host(hop.host, user=hop.user, port=hop.port, jump=via, run=run, environ=environ)
        if (target.hostname, target.port) in seen or len(chain) >= MAX_JUMPS:
            raise ConfigError(
                f"ProxyJump goes in a circle: {hop.host} is reached through itself",
                hint=f"give {hop.host} its own Host entry with `ProxyJump none`, before the wildcard one",
            )
        seen.add((target.hostname, target.port))
        chain.insert(0, target)
    return tuple(chain)


def parse_jump(text: str) -> Jump:
    """Parse one hop: ``[user@]host[:port]`` or an ``ssh://`` URI."""
    match = _JUMP.fullmatch(text.strip())
    if not match:
        raise ConfigError(
            f"ProxyJump {text!r} in ssh_config is not [user@]host[:port]",
            hint="mend it in ~/.ssh/config; an IPv6 address stands in brackets",
        )
    port = int(match["port"]) if match["port"] else None
    return Jump(check_host(match["v6"] or match["host"]), match["user"], port)


def parse(text: str, host: str) -> SshTarget:
    """Parse what ``ssh -G host`` printed; tokens (%h) and ``~`` stay. Odd lines are passed over."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if value:
            values.setdefault(key.lower(), []).append(value)

    def last(key: str, default: str = "") -> str:
        return values.get(key, [default])[-1]

    def words(key: str) -> tuple[str, ...]:
        return tuple(word for word in last(key).split(",") if word)

    files = tuple(path for path in values.get("identityfile", []) if path != "none")
    return SshTarget(
        host=host,
        hostname=last("hostname", host),
        port=_number(last("port"), 22),
        user=last("user"),
        identity_files=files,
        is_default_identity=set(files) <= {f"~/.ssh/{name}" for name in DEFAULT_KEYS},
        identities_only=last("identitiesonly") == "yes",
        identity_agent=_agent(last("identityagent")),
        certificate_files=tuple(path for path in values.get("certificatefile", []) if path != "none"),
        proxy_jump=_unless_none(last("proxyjump")),
        proxy_command=_unless_none(last("proxycommand")),
        host_key_alias=_unless_none(last("hostkeyalias")),
        user_known_hosts=_paths(last("userknownhostsfile")),
        global_known_hosts=_paths(last("globalknownhostsfile")),
        hash_known_hosts=last("hashknownhosts") == "yes",
        strict_host_key_checking=last("stricthostkeychecking", "ask"),
        address_family=last("addressfamily", "any"),
        connect_timeout_s=_number(last("connecttimeout"), 0) or None,
        control_path=_unless_none(last("controlpath")),
        kex_algorithms=words("kexalgorithms"),
        host_key_algorithms=words("hostkeyalgorithms"),
        from_ssh=True,
    )


_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@\s/]+)@)?(?:\[(?P<v6>[^\]\s]+)\]|(?P<host>[^:@\s/\[\]]+))(?::(?P<port>\d{1,5}))?/?"
)


def _defaults(host: str) -> SshTarget:
    return SshTarget(
        host=host,
        hostname=host,
        user=getpass.getuser(),
        identity_files=tuple(f"~/.ssh/{name}" for name in DEFAULT_KEYS),
        user_known_hosts=("~/.ssh/known_hosts", "~/.ssh/known_hosts2"),
        global_known_hosts=("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"),
    )


def _expand(target: SshTarget) -> SshTarget:
    """Replace tokens and ``~``, which ``ssh -G`` leaves in place."""
    home = _home()
    tokens = {
        "%": "%",
        "h": target.hostname,
        "n": target.host,
        "p": str(target.port),
        "r": target.user,
        "u": getpass.getuser(),
        "d": home,
        "i": str(os.getuid()),
        "k": target.host_key_alias or target.host,
        "j": target.proxy_jump or "",
        "l": os.uname().nodename,
        "L": os.uname().nodename.split(".")[0],
    }

    def fill(text: str) -> str:
        return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)

    def paths(found: Iterable[str]) -> tuple[str, ...]:
        return tuple(os.path.expandvars(fill(_tilde(path, home))) for path in found)

    agent = target.identity_agent
    return replace(
        target,
        identity_files=paths(target.identity_files),
        certificate_files=paths(target.certificate_files),
        user_known_hosts=paths(target.user_known_hosts),
        global_known_hosts=paths(target.global_known_hosts),
        identity_agent=agent if agent in (None, "none") else paths([agent])[0],
        proxy_command=fill(target.proxy_command) if target.proxy_command else None,
    )


def _home() -> str:
    """Return the passwd home: ssh ignores ``$HOME``."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.environ.get("HOME", "/")


def _tilde(path: str, home: str) -> str:
    """Replace a leading ``~`` or ``~user``; an unknown user's stays, as ssh leaves it."""
    if path == "~" or path.startswith("~/"):
        return home + path[1:]
    try:
        return str(Path(path).expanduser())
    except RuntimeError:
        return path


def _paths(text: str) -> tuple[str, ...]:
    """Split a known_hosts list; ``ssh -G`` drops the quotes, so a blank inside a path must be guessed."""
    paths: list[str] = []
    for word in text.split():
        if paths and not word.startswith(("/", "~", "%", "$")) and word != "none":
            paths[-1] += f" {word}"
        else:
            paths.append(word)
    return tuple(path for path in paths if path != "none")


def _agent(text: str) -> str | None:
    """Return the agent's socket; ``SSH_AUTH_SOCK`` is a word ssh_config has for the default."""
    return None if text in ("", "SSH_AUTH_SOCK") else text


def _unless_none(text: str) -> str | None:
    return None if text in ("", "none") else text


def _number(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"\d{1,6}", text) else default


def _last_lines(raw: bytes, count: int = 10) -> str:
    return "\n".join(raw.decode(errors="replace").strip().splitlines()[-count:])
