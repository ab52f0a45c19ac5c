"""``cluster.yaml`` to a :class:`gpuctl.core.cluster.Cluster`, and the choice of nodes from it.

Nothing is contacted: every mistake that can be seen in the text is a ConfigError with file:line and
a hint. A leading ``~`` of ``python``, ``workdir`` and ``state_dir`` is the node's home and stays; of
``identity_file`` it is the user's, and a relative one is relative to the file.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from gpuctl.config.messages import spec_error
from gpuctl.config.spec import ClusterSpec, NodeEntry, NodeKeys
from gpuctl.config.yaml_loader import MAX_BYTES, Document, decode, load_document
from gpuctl.core.cluster import Cluster, Failure, NodeSpec
from gpuctl.core.hardware import Vendor
from gpuctl.core.nodeset import MAX_NODES, expand, fold
from gpuctl.errors import ConfigError

CLUSTER_VARIABLE = "GPUCTL_CLUSTER"
DEFAULT_FILE = Path("cluster.yaml")
STDIN = Path("-")
VERSION = 1


def load_cluster(
    path: Path | None, *, environ: Mapping[str, str] = os.environ, text: str | None = None
) -> Cluster:
    """Return the cluster of ``path`` (``-``: stdin), else of $GPUCTL_CLUSTER, else of ./cluster.yaml.

    ``text`` is the content when the caller has it already. Raises ConfigError with file:line.
    """
    path = path or _default_path(environ, has_text=text is not None)
    name = "<stdin>" if path == STDIN else str(path)
    document = load_document(read_text(path) if text is None else text, name)
    spec = _validate(document)
    base = Path.cwd() if path == STDIN else path.parent
    nodes = _nodes(spec, document, base, environ)
    _check_duplicates(nodes)
    failure = _failure(spec, document)
    return Cluster(spec.name, nodes, spec.ssh.host_keys, spec.network.ports, failure, origin=name)


def read_text(path: Path) -> str:
    """Return the text of ``path`` (``-``: stdin), at most 1 MB; raises ConfigError."""
    if path == STDIN:
        return decode(_read_capped(sys.stdin.buffer, "<stdin>"), "<stdin>")
    try:
        with path.open("rb") as file:
            return decode(_read_capped(file, str(path)), str(path))
    except OSError as exc:
        raise ConfigError(
            f"cannot read {path}", cause=exc.strerror, hint="`gpuctl init` writes a cluster file"
        ) from exc


def select_nodes(
    cluster: Cluster, nodelist: str | None = None, exclude: str | None = None, nnodes: int | None = None
) -> Cluster:
    """Return ``cluster`` cut down to the first ``nnodes`` nodes in ``nodelist`` and not in ``exclude``.

    File order is kept, whatever the order of ``nodelist``. Raises ConfigError on a name the cluster
    does not have, or when too few are left.
    """
    wanted = _known_hosts(cluster, nodelist, "--nodelist")
    refused = _known_hosts(cluster, exclude, "--exclude")
    nodes = [n for n in cluster.nodes if (nodelist is None or n.host in wanted) and n.host not in refused]
    if not nodes:
        raise ConfigError("no node is left", hint="--exclude takes away everything that --nodelist chose")
    if nnodes is not None and not 1 <= nnodes <= len(nodes):
        raise ConfigError(
            f"--nnodes {nnodes}: {len(nodes)} can be had ({fold(n.host for n in nodes)})",
            hint=f"ask for 1 to {len(nodes)}",
        )
    return dataclasses.replace(cluster, nodes=tuple(nodes[:nnodes]))


def _default_path(environ: Mapping[str, str], *, has_text: bool) -> Path:
    if environ.get(CLUSTER_VARIABLE):
        return Path(environ[CLUSTER_VARIABLE])
    if has_text or DEFAULT_FILE.is_file():
        return DEFAULT_FILE
    raise ConfigError(
        f"there is no cluster file: neither -f, nor ${CLUSTER_VARIABLE}, nor ./{DEFAULT_FILE}",
        hint="write one: `gpuctl init --nodelist gpu[01-04]`",
    )


def _read_capped(file: IO[bytes], name: str) -> bytes:
    raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name} has more than {MAX_BYTES:,} bytes", hint="is it the right file?")
    return raw


def _validate(document: Document) -> ClusterSpec:
    value = document.value
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "text" if isinstance(value, str) else "a number"
        raise ConfigError(
            f"{document.name}: not a cluster file",
            cause="it is empty" if value is None else f"it is {kind}, not keys and values",
            hint="a hostfile goes to -H; `gpuctl init` writes a cluster file to start from",
        )
    version = value.get("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{document.where(('version',))}: version {version!r} is not known",
            hint=f"write `version: {VERSION}`",
        )
    try:
        return ClusterSpec.model_validate(_keep_env_text(value, document))
    except ValidationError as exc:
        raise spec_error(exc, document) from None


def _keep_env_text(value: dict[str, Any], document: Document) -> dict[str, Any]:
    """Put back the text of env values: ``1.10`` in the file is ``1.10`` on the node, ``true`` is ``true``."""
    for path, text in document.texts.items():
        if path[-2:-1] == ("env",) and len(path) in (3, 4):
            holder: Any = value
            for key in path[:-1]:
                holder = holder[key]
            if holder[path[-1]] is not None:
                holder[path[-1]] = text
    return value


def _failure(spec: ClusterSpec, document: Document) -> Failure:
    failure = Failure(**spec.failure.model_dump())
    if failure.suspect_s >= failure.dead_s:
        raise ConfigError(
            f"{document.where(('failure',))}: suspect_s ({failure.suspect_s:g}) is not below "
            f"dead_s ({failure.dead_s:g})",
            hint="the defaults are suspect_s: 3 and dead_s: 15",
        )
    return failure


def _nodes(
    spec: ClusterSpec, document: Document, base: Path, environ: Mapping[str, str]
) -> tuple[NodeSpec, ...]:
    if not spec.nodes:
        raise ConfigError(f"{document.where(('nodes',))}: nodes is empty", hint="add `- host: gpu01`")
    nodes: list[NodeSpec] = []
    for index, entry in enumerate(spec.nodes):
        where = document.where(("nodes", index))
        hosts = _expand_host(entry, document.where(("nodes", index, "host")))
        keys = _merge(spec.defaults, entry)
        keys["env_origin"] = _env_origin(spec, index, document)
        if keys.get("identity_file"):
            keys["identity_file"] = str(base / _client_path(keys["identity_file"], environ))
        nodes += [NodeSpec(host, origin=where, **keys) for host in hosts]
        if len(nodes) > MAX_NODES:
            raise ConfigError(f"{where}: more than {MAX_NODES:,} nodes", hint="split the cluster file")
    return tuple(nodes)


def _expand_host(entry: NodeEntry, where: str) -> list[str]:
    try:
        hosts = expand(entry.host)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc.message}", cause=exc.cause, hint=exc.hint) from None
    if entry.address is not None and len(hosts) > 1:
        raise ConfigError(
            f"{where}: one address for {len(hosts)} hosts ({fold(hosts)})",
            hint="write these hosts one by one, or leave address out: it is found by route",
        )
    return hosts


def _merge(defaults: NodeKeys, entry: NodeEntry) -> dict[str, Any]:
    """Return NodeSpec's keywords: what the node says, else what ``defaults`` says; env key by key."""
    keys = {**_given(defaults), **_given(entry)}
    keys["env"] = {**defaults.env, **entry.env}
    keys["env_from"] = tuple(dict.fromkeys([*defaults.env_from, *entry.env_from]))
    if keys.get("vendor", "auto") != "auto":
        keys["vendor"] = Vendor(keys["vendor"])
    return keys


def _given(keys: NodeKeys) -> dict[str, Any]:
    return {name: getattr(keys, name) for name in keys.model_fields_set if name != "host"}


def _env_origin(spec: ClusterSpec, index: int, document: Document) -> dict[str, str]:
    origins = {name: document.where(("defaults", "env", name)) for name in spec.defaults.env}
    return origins | {name: document.where(("nodes", index, "env", name)) for name in spec.nodes[index].env}


def _client_path(path: str, environ: Mapping[str, str]) -> str:
    home = environ.get("HOME")
    return home + path[1:] if home and path.startswith("~/") else path


def _check_duplicates(nodes: tuple[NodeSpec, ...]) -> None:
    """Refuse a host that stands there twice; CPU nodes on one machine differ in their state_dir."""
    seen: dict[tuple[str, int | None], list[NodeSpec]] = {}
    for node in nodes:
        for other in seen.setdefault((node.host.lower(), node.port), []):
            if not _can_share(node, other):
                raise ConfigError(
                    f"{node.origin}: host {node.host} is a node already at {other.origin}",
                    hint="remove one; two CPU nodes on one machine need `vendor: cpu` and a state_dir each",
                )
        seen[node.host.lower(), node.port].append(node)


def _can_share(node: NodeSpec, other: NodeSpec) -> bool:
    return node.vendor is other.vendor is Vendor.CPU and node.state_dir != other.state_dir


def _known_hosts(cluster: Cluster, text: str | None, flag: str) -> frozenset[str]:
    if text is None:
        return frozenset()
    try:
        names = expand(text)
    except ConfigError as exc:
        raise ConfigError(f"{flag}: {exc.message}", cause=exc.cause, hint=exc.hint) from None
    hosts = {node.host for node in cluster.nodes}
    unknown = [name for name in names if name not in hosts]
    if unknown:
        raise ConfigError(
            f"{flag}: {fold(unknown)} is not in {cluster.origin or 'the cluster'}",
            hint=f"it has {fold(node.host for node in cluster.nodes)}",
        )
    return frozenset(names)
