"""``gpuctl init``: write a cluster file from names, from another tool's file, or from a template.

Nothing is contacted. What is written has been read back with the real loader first, so that a file
from ``init`` never fails in the next command.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuctl.config.cluster import DEFAULT_FILE, STDIN, load_cluster, read_text
from gpuctl.config.hostfile import LOOPBACK, HostLine
from gpuctl.config.inventory import Inventory, hosts_of, read_inventory
from gpuctl.config.yaml_loader import resolve_scalar
from gpuctl.core.nodeset import expand, fold
from gpuctl.errors import ConfigError

DEFAULT_TEMPLATE = "local"
SLURM_NODES = "SLURM_JOB_NODELIST"


@dataclass(frozen=True)
class InitResult:
    """What ``init`` wrote and from what."""

    path: str
    source: str
    """``--nodelist``, ``a DeepSpeed hostfile (hosts.txt)``, ``template local`` ..."""
    num_nodes: int
    nodes: str
    """The hosts, folded."""
    text: str
    notes: tuple[str, ...] = ()
    """What was left out, and why."""
    is_overwritten: bool = False


def init(
    path: Path = DEFAULT_FILE,
    *,
    nodelist: str | None = None,
    source: Path | None = None,
    template: str | None = None,
    force: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> InitResult:
    """Write a cluster file to ``path`` (``-``: write nothing, the text is in the result).

    The nodes come from ``nodelist``, from the file ``source`` (``-``: stdin), or from the Slurm
    allocation around; the rest, and the nodes where there are none of these, from ``template``.
    Raises ConfigError; refuses to overwrite without ``force``.
    """
    if nodelist is not None and source is not None:
        raise ConfigError("--nodelist and --from both name the nodes", hint="give one of them")
    is_there = path != STDIN and os.path.lexists(path)
    if is_there and not force:
        raise ConfigError(
            f"{path} is there already", hint="`gpuctl init --force` writes over it; -f names another"
        )
    inventory, origin = _inventory(nodelist, source, environ)
    if inventory is None:
        name = template or DEFAULT_TEMPLATE
        text, origin = read_template(f"clusters/{name}.yaml"), f"template {name}"
    else:
        text = render(inventory, origin, template)
    cluster = load_cluster(path, text=text, environ=environ)
    if path != STDIN:
        _write(path, text)
    return InitResult(
        str(path),
        origin,
        len(cluster.nodes),
        fold(node.host for node in cluster.nodes),
        text,
        inventory.notes if inventory else (),
        is_there,
    )


def render(inventory: Inventory, origin: str, template: str | None = None) -> str:
    """Return a cluster file for the hosts of ``inventory``, under a template's other keys."""
    header = _template_header(template) if template else _HEADER.format(source=origin)
    return header + "".join(_node_lines(inventory))


def template_names(folder: str = "clusters") -> list[str]:
    """Return the names ``--template`` takes (or the files of another template folder)."""
    return sorted(entry.stem for entry in (_TEMPLATES / folder).iterdir())


def read_template(name: str) -> str:
    """Return the text of ``templates/NAME``; raises ConfigError naming the ones there are."""
    folder, _, file = name.partition("/")
    stem = file.rpartition(".")[0]
    if stem not in template_names(folder):
        raise ConfigError(
            f"there is no template {stem!r}", hint=f"there are {', '.join(template_names(folder))}"
        )
    return (_TEMPLATES / name).read_text(encoding="utf-8")


_TEMPLATES = Path(__file__).parent.parent / "templates"


_HEADER = """\
# A gpuctl cluster file, from {source}.
# Look at it: gpuctl status    See a launch: gpuctl plan -s zero2    Start: gpuctl launch -s zero2
version: 1
name: cluster

# ssh:
#   host_keys: strict         # strict: only keys in known_hosts; accept-new: new ones are added

# Keys for every node; a node's own win. User, port, key and jump host come from ~/.ssh/config.
# defaults:
#   user: ubuntu
#   python: ~/venv/bin/python # the interpreter on the node; default: python3
#   activate: . ~/.profile    # one line for sh before it: module load, conda activate
#   workdir: ~/work           # where your scripts run
#   state_dir: /var/tmp       # where gpuctl keeps runs and checkpoints on the node
#   env: {{NCCL_DEBUG: WARN}}
#   env_from: [HF_TOKEN]      # variables of your shell to hand on; their values are never stored

# network: {{ports: 29400-29500}} # when a firewall lets only some ports through
# failure: {{suspect_s: 3, dead_s: 15, grace_s: 30}}

"""


def _inventory(
    nodelist: str | None, source: Path | None, environ: Mapping[str, str]
) -> tuple[Inventory | None, str]:
    if nodelist is not None:
        try:
            return Inventory("a node set", hosts_of(expand(nodelist))), "--nodelist"
        except ConfigError as exc:
            raise ConfigError(f"--nodelist: {exc.message}", cause=exc.cause, hint=exc.hint) from None
    if source is not None:
        name = "<stdin>" if source == STDIN else str(source)
        folder = None if source == STDIN else source.parent
        inventory = read_inventory(read_text(source), name, folder)
        return inventory, f"{inventory.kind} ({name})"
    if environ.get(SLURM_NODES):
        return Inventory("Slurm", hosts_of(expand(environ[SLURM_NODES]))), "this Slurm allocation"
    return None, ""


def _template_header(template: str) -> str:
    """Return a template up to its nodes, which stand last in every one."""
    head, _, _ = read_template(f"clusters/{template}.yaml").partition("\nnodes:")
    return head + "\n"


def _node_lines(inventory: Inventory) -> Iterable[str]:
    yield from (f"# {note}\n" for note in inventory.notes)
    yield "nodes:\n"
    is_local = len(inventory.hosts) == 1 and inventory.hosts[0].host in LOOPBACK
    for group in _groups(inventory.hosts):
        yield f"  - host: {_scalar(fold(host.host for host in group))}\n"
        first = group[0]
        yield from (f"    {key}: {value}\n" for key, value in _keys(first) if value is not None)
        if is_local:
            yield "    transport: local\n"
        if first.slots is None:
            yield "    # gpus: auto            # auto, a count, or [0, 2, 3]\n"
            yield "    # vendor: auto          # auto, nvidia, amd, cpu\n"


def _groups(hosts: tuple[HostLine, ...]) -> Iterable[tuple[HostLine, ...]]:
    """Fold neighbours that agree in everything, without changing the order: it numbers the nodes."""
    for _, found in itertools.groupby(hosts, key=_keys):
        group = tuple(found)
        names = [host.host for host in group]
        if expand(fold(names)) == names:
            yield group
        else:
            yield from ((host,) for host in group)


def _keys(host: HostLine) -> tuple[tuple[str, str | int | None], ...]:
    return ("gpus", host.slots), ("user", _scalar(host.user) if host.user else None), ("port", host.port)


def _scalar(text: str) -> str:
    """Quote what YAML would not read as this text."""
    is_plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+\[\],-]*", text) and resolve_scalar(text) == text
    return text if is_plain else f"'{text}'"


def _write(path: Path, text: str) -> None:
    """Write beside, then rename: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as exc:
        temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write {path}", cause=exc.strerror, hint="name another file with -f"
        ) from exc
