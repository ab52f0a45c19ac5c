"""What ``plan``, ``launch`` and ``bench`` have in common: from flags to a Plan."""

from __future__ import annotations

import dataclasses
import datetime
import os
import secrets as random_tokens
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuctl.cli.render import Terminal, count_text
from gpuctl.core.codec import from_json, to_json
from gpuctl.core.plan import EnvVar, Plan
from gpuctl.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from gpuctl.core.cluster import Cluster
    from gpuctl.core.hardware import NodeFacts
    from gpuctl.services.launch import Uploads
    from gpuctl.services.plan import LaunchRequest
    from gpuctl.services.session import Session

#: Names whose values are never shown.
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "PRIVATE_KEY", "CREDENTIAL")


@dataclass(frozen=True)
class TrainingFlags:
    """The flags that change the training config; None: not given."""

    model: str | None = None
    steps: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    compile: bool | None = None
    out: str | None = None
    config: Path | None = None
    settings: tuple[str, ...] = ()

    def as_settings(self) -> list[str]:
        """Return the flags as ``key=value``: they win over ``--set`` and the file."""
        pairs = {
            "preset": self.model,
            "steps": self.steps,
            "global_batch": self.global_batch,
            "micro_batch": self.micro_batch,
            "out": self.out,
            "compile": None if self.compile is None else str(self.compile).lower(),
        }
        return [*self.settings, *(f"{key}={value}" for key, value in pairs.items() if value is not None)]


def parse_env(words: Sequence[str], env_file: Path | None) -> tuple[EnvVar, ...]:
    """Return the variables of ``--env-file``, then ``-e K=V`` (``-e K``: the client's own value)."""
    found = list(_read_env_file(env_file)) if env_file is not None else []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            if name not in os.environ:
                raise UsageError(f"-e {name}: it is not set here", hint=f"give a value: -e {name}=VALUE")
            value = os.environ[name]
        _check_name(name, f"-e {word}")
        found.append(EnvVar(name, value, "asked for on the command line", "flag"))
    return tuple(found)


def _read_env_file(path: Path) -> Sequence[EnvVar]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the environment file {path}", cause=str(exc)) from exc
    found = []
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        if not equals:
            raise ConfigError(f"{path}:{number}: not NAME=VALUE")
        _check_name(name.strip(), f"{path}:{number}")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        found.append(EnvVar(name.strip(), value, "set in the environment file", f"{path}:{number}"))
    return found


def _check_name(name: str, where: str) -> None:
    from gpuctl.config.spec import check_env_name

    try:
        check_env_name(name)
    except ValueError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def gather_facts(session: Session, terminal: Terminal) -> list[NodeFacts]:
    """Probe the nodes; raises one error that names every node that did not answer."""
    from gpuctl.services.probe import probe

    group = probe(session)
    group.raise_for_failures("cannot be probed")
    values = group.values()
    facts = [values[label] for label in session.specs]
    for fact in facts:
        for problem in fact.problems:
            terminal.warn(f"{fact.host}: {problem.message}")
    return facts


def load_facts(path: Path, cluster: Cluster) -> list[NodeFacts]:
    """Return recorded facts (``status --json``) for the nodes of a cluster, by host.

    One recorded node stands for all: `what would eight machines like this one do` is a fair question.
    """
    import json

    from gpuctl.core.hardware import FactsFile

    try:
        recorded = from_json(FactsFile, json.loads(path.read_text())).nodes
    except (OSError, ValueError) as exc:
        raise ConfigError(f"cannot read the facts in {path}", cause=str(exc)) from exc
    by_host = {fact.host: fact for fact in recorded}
    missing = [spec.host for spec in cluster.nodes if spec.host not in by_host]
    if missing and len(recorded) != 1:
        raise ConfigError(f"{path} has no facts of {missing[0]}", cause=f"it has {', '.join(by_host)}")
    one = recorded[0]
    return [
        by_host.get(spec.host)
        or dataclasses.replace(one, host=spec.host, ssh_address=spec.address or spec.host)
        for spec in cluster.nodes
    ]


def build_plan(cluster: Cluster, facts: Sequence[NodeFacts], request: LaunchRequest) -> Plan:
    """Return the Plan, with a fresh run id."""
    from gpuctl.services.plan import make_plan

    return make_plan(cluster, facts, request, now=datetime.datetime.now(), token=random_tokens.token_hex(2))


def prepare_data(plan: Plan) -> tuple[Plan, Uploads]:
    """Make or read the training data on the client and put its digest into the Plan."""
    from gpuctl.services.data import default_text, read_data
    from gpuctl.services.launch import Uploads
    from gpuctl.services.plan import with_data

    if plan.program.kind != "train":
        return plan, Uploads()
    data: Mapping[str, Any] = plan.program.config["training"]["data"]
    if data["kind"] == "random":
        return plan, Uploads()
    file = read_data(Path(data["path"]).expanduser()) if data.get("path") else default_text(cache_dir())
    return with_data(plan, file.archive.sha256), Uploads(data=file.archive)


def cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/gpuctl``."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "gpuctl"


def secret_values(plan: Plan) -> dict[int, dict[str, str]]:
    """Return the client's values of each node's ``env_from``; raises UsageError for one not set here."""
    values: dict[int, dict[str, str]] = {}
    for node in plan.nodes:
        missing = [name for name in node.env_from if name not in os.environ]
        if missing:
            raise UsageError(
                f"env_from names {missing[0]}, which is not set here", hint=f"export {missing[0]}=... first"
            )
        values[node.node_rank] = {name: os.environ[name] for name in node.env_from}
    return values


def shown_value(variable: EnvVar) -> str:
    """Return a variable's value for people: secrets are masked."""
    if variable.is_unset:
        return "(removed)"
    is_secret = any(word in variable.name.upper() for word in SECRET_WORDS)
    return "(hidden)" if is_secret else variable.value


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the Plan as JSON to look at: as executed, but for the values of secrets."""
    nodes = tuple(
        dataclasses.replace(node, env=tuple(dataclasses.replace(v, value=shown_value(v)) for v in node.env))
        for node in plan.nodes
    )
    document: dict[str, Any] = to_json(dataclasses.replace(plan, nodes=nodes))
    return document


def size_text(plan: Plan) -> str:
    """Return ``8 ranks on 2 nodes``."""
    return f"{count_text(plan.world_size, 'rank')} on {count_text(len(plan.nodes), 'node')}"


def print_plan(plan: Plan, terminal: Terminal) -> None:
    """Print a Plan for people: ranks and addresses, the environment with reasons when verbose."""
    dims = plan.dims
    what = plan.strategy or " ".join(plan.program.argv) or plan.program.kind
    terminal.data(
        f"{plan.name}: {what}, {size_text(plan)} over {plan.backend}"
        f" (pp {dims.pp}, dp {dims.dp}, tp {dims.tp}, zero {dims.zero})"
    )
    rows = [
        (n.node_rank, n.host, n.vendor.value, _ranks(n.ranks), n.address, n.interface, n.address_why)
        for n in plan.nodes
    ]
    terminal.table(("node", "host", "vendor", "ranks", "address", "interface", "why"), rows)
    env_rows = [
        (n.host, v.name, shown_value(v), v.source, v.why)
        for n in plan.nodes
        for v in n.env
        if terminal.is_verbose or n.node_rank == 0
    ]
    terminal.data()
    first = "" if terminal.is_verbose or len(plan.nodes) == 1 else " of the first node (-v: of all)"
    terminal.table(("host", "variable", "value", "set by", "why"), env_rows, title=f"environment{first}")
    terminal.data()
    if plan.memory is None and plan.program.kind == "train":
        terminal.data("memory: not predicted yet")
    for warning in plan.warnings:
        terminal.warn(warning)


def _ranks(ranks: Sequence[int]) -> str:
    return "-" if not ranks else (f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0]))
