"""The probe: one POSIX-sh script a node, one round trip, facts out.

Every inner command runs in the background under its own deadline; what does not end is left behind, not
waited for: a vendor tool may sit in the kernel for ever. Sections are framed by a nonce, so that rc files
and banners cannot be taken for an answer, and a reply that was cut off says so.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuctl.core.cluster import Cluster, NodeSpec
from gpuctl.core.hardware import (
    Disk,
    Gpu,
    Nic,
    NodeFacts,
    Problem,
    Route,
    Software,
    Vendor,
)
from gpuctl.core.network import is_loopback
from gpuctl.core.registry import VENDORS
from gpuctl.errors import ProtocolError
from gpuctl.services.session import Session
from gpuctl.transports import Connection
from gpuctl.transports.fanout import GroupResult, NodeResult, fanout
from gpuctl.vendors import ToolAnswer, ToolQuery, VendorReading, vendor_module

#: The whole round trip; the longest inner deadline is 8 s.
PROBE_S = 20.0
COMMAND = "exec /bin/sh -s"
#: Non-interactive shells have a short PATH; the vendors' tools stand elsewhere.
PATHS = (
    "/usr/local/sbin:/usr/sbin:/sbin:/opt/rocm/bin:/usr/lib/wsl/lib:/usr/local/nvidia/bin:/usr/local/cuda/bin"
    ":/run/current-system/sw/bin"
)
#: Variables of the login environment that change how a collective runs.
ENV_PATTERN = "^(NCCL|RCCL|HSA|HIP|ROCR|GLOO|UCX|FI|TORCH|CUDA|GPU)_[A-Z0-9_]*="
CONFIG_FILES = ("/etc/nccl.conf", "/etc/rccl.conf", "~/.nccl.conf", "~/.rccl.conf")

#: Runs in the node's interpreter; imports nothing that is not in the standard library.
PYTHON_CODE = r"""
import importlib.util, json, os, re, sys
facts = {"python": sys.executable, "version": sys.version.split()[0]}
sys.path[:] = [p for p in sys.path if p]
try:
    from importlib import metadata
    packages = {}
    for d in metadata.distributions():
        name = d.metadata["Name"]
        if name and name.lower() not in packages:
            packages[name.lower()] = d.version
    facts["packages"] = packages
except Exception as exc:
    facts["problem"] = repr(exc)
try:
    spec = importlib.util.find_spec("torch")
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        text = file.read()
    for key in ("__version__", "cuda", "hip"):
        found = re.search(r"^%s\b[^=]*= *'([^']+)'" % key, text, re.M)
        facts["torch_" + key.strip("_")] = found.group(1) if found else None
except Exception:
    pass
print(json.dumps(facts))
"""

_PROLOGUE = r"""
LC_ALL=C; export LC_ALL
PATH="$PATH:@PATHS@"; export PATH
T=$(mktemp -d "${TMPDIR:-/tmp}/gpuctl-probe.XXXXXX") || exit 9
jobs=0
kill_tree() {
  for c in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do kill_tree "$c"; done
  kill -9 "$1" 2>/dev/null
}
job() {
  n=$1; shift; jobs=$((jobs + 1))
  ( ( "$@" ) >"$T/$n.out" 2>"$T/$n.err" </dev/null; echo $? >"$T/$n.code"; mv "$T/$n.code" "$T/$n.rc" ) \
    >/dev/null 2>&1 </dev/null &
  eval "pid_$n=$!"
}
"""

_EPILOGUE = r"""
i=0
while [ "$(ls "$T" | grep -c '\.rc$')" -lt "$jobs" ] && [ $i -lt @TICKS@ ]; do
  i=$((i + 1)); sleep 0.05 2>/dev/null || { sleep 1; i=$((i + 19)); }
done
for n in @NAMES@; do
  if [ -f "$T/$n.rc" ]; then rc=$(cat "$T/$n.rc"); else rc=124; eval "kill_tree \$pid_$n"; fi
  echo "@@@NONCE@ begin $n $rc"
  cat "$T/$n.out" 2>/dev/null
  echo; echo "@@@NONCE@ stderr $n"
  head -c 8192 "$T/$n.err" 2>/dev/null
  echo; echo "@@@NONCE@ end $n"
done
echo "@@@NONCE@ complete"
rm -rf "$T"
exit 0
"""


def tool_queries() -> tuple[ToolQuery, ...]:
    """Return what every vendor wants to ask."""
    return tuple(query for name in VENDORS for query in vendor_module(Vendor(name)).queries)


def probe_script(spec: NodeSpec, peers: Sequence[str], nonce: str) -> str:
    """Return the script for one node; ``peers`` are addresses to ask the route to."""
    state_dir = spec.state_dir or "/var/tmp"
    jobs = {
        "id": _ID,
        "addr": "ip -o addr show 2>/dev/null || ifconfig -a",
        "links": _LINKS,
        "routes": _routes(peers),
        "limits": "cat /proc/self/limits",
        "disk": f"d={_path(state_dir)}; {_DISK}",
        "environ": f"env | grep -E {shlex.quote(ENV_PATTERN)}; true",
        "configs": "".join(f'[ -r {p} ] && echo "== {p}" && cat {p}; ' for p in CONFIG_FILES) + "true",
        "pci": _PCI,
        "python": _python(spec),
    }
    jobs.update({query.section: query.command for query in tool_queries()})
    lines = [_PROLOGUE.replace("@PATHS@", PATHS)]
    lines += [f"job {name} /bin/sh -c {shlex.quote(text)}" for name, text in jobs.items()]
    ticks = int(max(8, *(q.timeout_s for q in tool_queries())) / 0.05)
    lines.append(_EPILOGUE.replace("@TICKS@", str(ticks)).replace("@NAMES@", " ".join(jobs)))
    return "\n".join(lines).replace("@NONCE@", nonce)


_ID = r"""
echo "hostname=$(hostname)"; echo "kernel=$(uname -srm)"; echo "uid=$(id -u)"; echo "user=$(id -un)"
echo "boot_id=$(cat /proc/sys/kernel/random/boot_id)"; echo "machine_id=$(cat /etc/machine-id 2>/dev/null)"
echo "cpus=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
grep -E '^(MemTotal|MemAvailable):' /proc/meminfo | sed 's/: */=/; s/ kB//'
echo "ssh=$SSH_CONNECTION"; echo "now=$(date -u +%s.%N)"
for f in /.dockerenv /run/.containerenv; do [ -e $f ] && echo "container=$f"; done
command -v cc gcc clang | head -n 1 | sed 's/^/compiler=/'
"""
_LINKS = r"""
for d in /sys/class/net/*; do
  v=0; case "$(readlink "$d")" in */virtual/*) v=1;; esac; w=0; [ -e "$d/wireless" ] && w=1
  echo "${d##*/} $(cat "$d/operstate") $(cat "$d/mtu") $(cat "$d/speed" 2>/dev/null || echo -1) $v $w"
done 2>/dev/null
"""
_DISK = 'df -Pk "$d" | tail -n 1; stat -f -c %T "$d"; df -Pk /dev/shm | tail -n 1'
_PCI = r"""
for d in /sys/bus/pci/devices/*; do
  echo "${d##*/} $(cat "$d/vendor") $(cat "$d/device") $(cat "$d/class")"
done 2>/dev/null | grep -E ' 0x(10de|1002) .* 0x(0300|0302|0380|1200)'; true
"""


def _routes(peers: Sequence[str]) -> str:
    # ip takes no names: the node resolves them as its ranks would; getent leaves a literal as it is
    return "; ".join(_route(shlex.quote(peer)) for peer in peers) or "true"


def _route(peer: str) -> str:
    address = f"$(getent ahosts {peer} | awk 'NR == 1 {{print $1}}')"
    return f'echo "peer "{peer}; ip -o route get "{address}" 2>&1'


def _python(spec: NodeSpec) -> str:
    activate = f"eval {shlex.quote(spec.activate)} >&2; " if spec.activate else ""
    return f"cd /; {activate}exec {_path(spec.python or 'python3')} -c {shlex.quote(PYTHON_CODE)}"


def _path(path: str) -> str:
    """Quote a path of the node, where ``~/`` means its home."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


# -- over the nodes


def probe(
    session: Session,
    *,
    timeout_s: float = PROBE_S,
    on_result: Callable[[NodeResult[NodeFacts]], None] | None = None,
) -> GroupResult[NodeFacts]:
    """Probe every connected node at once; failures are data."""
    specs = session.specs
    peers = peer_addresses(session.cluster)

    def probe_one(label: str) -> NodeFacts:
        spec = specs[label]
        own = spec.address or spec.host
        return probe_node(session.connections[label], spec, [p for p in peers if p != own], timeout_s)

    return fanout(
        {label: label for label in session.connections},
        probe_one,
        timeout_s=timeout_s + 5,
        on_result=on_result,
    )


def peer_addresses(cluster: Cluster) -> list[str]:
    """Return what is known of the nodes' addresses before they were asked; at most 8 are enough."""
    return list(dict.fromkeys(spec.address or spec.host for spec in cluster.nodes))[:8]


def probe_node(connection: Connection, spec: NodeSpec, peers: Sequence[str], timeout_s: float) -> NodeFacts:
    """Run the script on one node; raises what the transport raises, ProtocolError for a cut reply."""
    nonce = secrets.token_hex(12)
    script = probe_script(spec, peers, nonce)
    sent = time.time()
    done = connection.run(COMMAND, stdin=script.encode(), timeout_s=timeout_s)
    middle = (sent + time.time()) / 2
    return parse_probe(spec, done.stdout.decode("utf-8", "replace"), nonce, middle, done.stderr)


def parse_probe(spec: NodeSpec, output: str, nonce: str, asked_at: float, stderr: bytes = b"") -> NodeFacts:
    """Return the facts in a reply; raises ProtocolError when it was cut off or is none."""
    answers = split_sections(output, nonce)
    if f"@@{nonce} complete" not in output:
        said = (stderr.decode("utf-8", "replace").strip() or output.strip()).splitlines()[-5:]
        raise ProtocolError(
            f"{spec.host}: the probe's reply is cut off after {len(answers)} sections",
            cause="\n".join(said) or "nothing came back",
            hint=f"try `ssh {spec.host} /bin/sh -c true`",
        )
    readings = {name: vendor_module(Vendor(name)).read(answers) for name in VENDORS}
    ident = _pairs(answers["id"].stdout)
    facts = NodeFacts(
        host=spec.host,
        hostname=ident.get("hostname"),
        machine_id=ident.get("machine_id") or None,
        boot_id=ident.get("boot_id"),
        uid=_int(ident.get("uid")),
        user=ident.get("user"),
        kernel=ident.get("kernel"),
        cpu_count=_int(ident.get("cpus")),
        memory_total_bytes=_kib(ident.get("MemTotal")),
        memory_available_bytes=_kib(ident.get("MemAvailable")),
        nics=_nics(answers["addr"].stdout, answers["links"].stdout),
        routes=_read_routes(answers["routes"].stdout),
        ssh_address=_ssh_address(ident.get("ssh", "")),
        software=_software(answers["python"], ident.get("compiler")),
        clock_offset_s=_clock(ident.get("now"), asked_at),
        inherited_env=_environ(answers["environ"].stdout),
        config_files=_configs(answers["configs"].stdout),
        limits=_limits(answers["limits"].stdout),
        gpu_count_by_os=len([line for line in answers["pci"].stdout.splitlines() if line.strip()]) or None,
        container=ident.get("container"),
    )
    facts = _with_disk(facts, spec, answers["disk"].stdout)
    return _with_gpus(facts, readings, answers)


def split_sections(output: str, nonce: str) -> dict[str, ToolAnswer]:
    """Return the complete sections of a reply."""
    pattern = re.compile(
        rf"^@@{nonce} begin (\w+) (\d+)\n(.*?)\n?@@{nonce} stderr \1\n(.*?)\n?@@{nonce} end \1$", re.M | re.S
    )
    return {m[1]: ToolAnswer(m[3].rstrip("\n"), m[4].strip(), int(m[2])) for m in pattern.finditer(output)}


def _with_gpus(
    facts: NodeFacts, readings: Mapping[str, VendorReading], answers: Mapping[str, ToolAnswer]
) -> NodeFacts:
    """Decide the vendor from what the tools found: discrete GPUs first, then what the kernel shows."""
    gpus: list[Gpu] = []
    problems: list[Problem] = list(facts.problems)
    could_tell = True
    chosen: VendorReading | None = None
    vendor = Vendor.CPU
    for name, reading in readings.items():
        problems += reading.problems
        could_tell = could_tell and reading.gpus is not None
        gpus += reading.gpus or ()
        usable = [g for g in reading.gpus or () if not g.is_integrated]
        if usable and vendor is Vendor.CPU:
            vendor, chosen = Vendor(name), reading
    if not gpus and not could_tell:
        # a tool is there and gave no answer: what the kernel shows decides, and without that nobody can tell
        pci = answers["pci"].stdout
        by_pci = Vendor.NVIDIA if "0x10de" in pci else Vendor.AMD
        return replace(facts, vendor=by_pci if pci.strip() else None, problems=tuple(problems))
    return replace(
        facts,
        vendor=vendor,
        gpus=tuple(gpus) if could_tell or gpus else None,
        driver_version=chosen.driver_version if chosen else None,
        runtime_version=chosen.runtime_version if chosen else None,
        problems=tuple(problems),
    )


# -- sections


def _pairs(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def _int(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _kib(text: str | None) -> int | None:
    value = _int(text)
    return value * 1024 if value is not None else None


def _ssh_address(text: str) -> str | None:
    """Return the server's end of ``SSH_CONNECTION`` (client, port, server, port)."""
    words = text.split()
    return words[2].partition("%")[0] if len(words) == 4 else None


def _clock(text: str | None, asked_at: float) -> float | None:
    try:
        return round(float(text or "") - asked_at, 3)
    except ValueError:
        return None  # busybox date knows no %N


def _nics(addr: str, links: str) -> tuple[Nic, ...] | None:
    details = {words[0]: words for line in links.splitlines() if len(words := line.split()) == 6}
    addresses: dict[str, list[tuple[str, int]]] = {name: [] for name in details}
    for line in addr.splitlines():
        match = re.match(r"\d+: (\S+?)(?:@\S+)? +inet6? ([0-9a-fA-F.:]+)/(\d+)", line)
        if match:
            addresses.setdefault(match[1], []).append((match[2], int(match[3])))
    if not addresses:
        return None
    return tuple(_nic(name, found, details.get(name)) for name, found in addresses.items())


def _nic(name: str, found: Sequence[tuple[str, int]], words: Sequence[str] | None) -> Nic:
    state = words[1] if words else None
    speed = _int(words[3]) if words else None
    return Nic(
        name=name,
        addresses=tuple(address for address, _ in found),
        # "unknown" is what lo and many virtual links say while they are up
        is_up=None if state is None else state in ("up", "unknown"),
        is_virtual=words[4] == "1" if words else None,
        is_loopback=name == "lo" or bool(found and all(is_loopback(a) for a, _ in found)),
        is_wireless=words[5] == "1" if words else None,
        mtu=_int(words[2]) if words else None,
        speed_mbps=speed or None,
        prefix_lengths=tuple(length for _, length in found),
    )


def _read_routes(text: str) -> tuple[Route, ...]:
    routes, peer = [], None
    for line in text.splitlines():
        if line.startswith("peer "):
            peer = line[5:]
        elif peer is not None and line.strip():
            device, source = re.search(r"\bdev (\S+)", line), re.search(r"\bsrc (\S+)", line)
            error = None if device else line.strip()[:200]
            routes.append(Route(peer, device and device[1], source and source[1], error))
            peer = None
    return tuple(routes)


def _software(answer: ToolAnswer, compiler: str | None) -> Software | None:
    try:
        found: Any = json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return None
    packages = found.get("packages") or {}
    nccl = next((v for k, v in packages.items() if k.startswith("nvidia-nccl-cu")), None)
    return Software(
        python=found.get("python"),
        python_version=found.get("version"),
        torch_version=found.get("torch_version") or packages.get("torch"),
        torch_cuda=found.get("torch_cuda"),
        torch_hip=found.get("torch_hip"),
        nccl_version=nccl,
        packages={str(k): str(v) for k, v in packages.items()},
        compiler=compiler,
    )


def _environ(text: str) -> dict[str, str]:
    return _pairs(text)


def _configs(text: str) -> dict[str, str]:
    parts = re.split(r"^== (\S+)$", text, flags=re.M)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=False)}


LIMITS = {"Max locked memory": "memlock", "Max open files": "nofile", "Max processes": "nproc"}


def _limits(text: str) -> dict[str, int]:
    found = {}
    for line in text.splitlines():
        for title, name in LIMITS.items():
            if line.startswith(title):
                soft = (line[len(title) :].split() or [""])[0]
                value = -1 if soft == "unlimited" else _int(soft)
                if value is not None:
                    found[name] = value
    return found


def _with_disk(facts: NodeFacts, spec: NodeSpec, text: str) -> NodeFacts:
    rows = [line.split() for line in text.splitlines() if line.strip()]
    tables = [row for row in rows if len(row) >= 6 and row[3].isdigit()]
    kinds = [row[0] for row in rows if len(row) == 1]
    state_dir = spec.state_dir or "/var/tmp"
    home = tables[0] if tables and (len(tables) > 1 or tables[0][-1] != "/dev/shm") else None
    shm = next((row for row in tables if row[-1] == "/dev/shm"), None)
    kind = kinds[0] if kinds else None
    shared = None if kind is None else kind in ("nfs", "lustre", "ceph", "gpfs", "smb2", "fuseblk")
    free = int(home[3]) * 1024 if home else None
    return replace(
        facts, disk=Disk(state_dir, free, kind, shared), shm_bytes=int(shm[1]) * 1024 if shm else None
    )
