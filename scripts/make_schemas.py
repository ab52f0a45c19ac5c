"""JSON schemas of every ``--json`` output, made from the dataclasses that are printed.

Run: ``python scripts/make_schemas.py`` writes ``gpuctl/schemas/*.json``; with ``--check`` it fails when
one is out of date (a test does that, so a changed key is seen in review). ``cluster.json`` is not made here.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from gpuctl.collectives.verdict import Comparison, SlowLink, Verdict
from gpuctl.core.hardware import FactsFile, NodeFacts
from gpuctl.core.plan import Plan
from gpuctl.core.run import RankFailure, RunRecord
from gpuctl.services.init import InitResult
from gpuctl.services.runs import CleanResult, StopResult

FOLDER = Path(__file__).parents[1] / "gpuctl/schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
VERSION = {"const": 1}


def of(hint: Any) -> dict[str, Any]:
    """Return the schema of a type as ``core.codec.to_json`` prints it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [of(arg) for arg in args]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (tuple, list):
        return {"type": "array", "items": of(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": of(args[1])}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return fixed({field.name: of(hints[field.name]) for field in dataclasses.fields(hint)})
    return {}


def fixed(properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object schema with exactly these keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def versioned(**properties: Any) -> dict[str, Any]:
    """Return the schema of one document: these keys and its version."""
    return fixed({"schema_version": VERSION, **properties})


def mapping(items: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object keyed by node or run."""
    return {"type": "object", "additionalProperties": items}


def array(items: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


STRING, NUMBER, INTEGER, BOOLEAN = (
    {"type": "string"},
    {"type": "number"},
    {"type": "integer"},
    {"type": "boolean"},
)
MAYBE_NUMBER = {"type": ["number", "null"]}
MAYBE_STRING = {"type": ["string", "null"]}
MAYBE_INTEGER = {"type": ["integer", "null"]}


def _run() -> dict[str, Any]:
    """The lead's record with each node's state."""
    record = of(RunRecord)
    node = fixed(
        {"node_rank": INTEGER, "host": STRING, "state": STRING, "kill_method": {"type": ["string", "null"]}}
    )
    record["properties"]["nodes"] = array(node)
    record["required"].append("nodes")
    return record


def _event() -> dict[str, Any]:
    """One line of ``launch --json``: common keys, then what each kind carries at least."""
    measured = ("loss", "grad_norm", "lr", "tokens_per_s", "tflops", "mfu", "exposed_comm_ms", "memory_bytes")
    step = dict.fromkeys(measured, MAYBE_NUMBER)
    started = {
        "schema_version": VERSION, "name": STRING, "world_size": INTEGER, "nodes": array(STRING),
        "master_addr": STRING, "master_port": INTEGER, "restart_count": INTEGER,
    }  # fmt: skip
    failure = of(RankFailure)["properties"]
    kinds: dict[str, dict[str, Any]] = {
        "started": started,
        "step": {"step": INTEGER, **step},
        "failed": failure,
    }
    common = {"event": STRING, "run": STRING, "generation": INTEGER, "time": NUMBER}
    rules = [
        {
            "if": {"properties": {"event": {"const": kind}}},
            "then": {"properties": properties, "required": list(properties)},
        }
        for kind, properties in kinds.items()
    ]
    return {"type": "object", "properties": common, "required": list(common), "allOf": rules}


def _bench() -> dict[str, Any]:
    times = fixed(dict.fromkeys(("mean", "min", "median", "p95", "max"), NUMBER))
    both = {
        "collective": STRING, "size_bytes": INTEGER, "dtype": STRING, "num_ranks": INTEGER, "algo": STRING,
        "engine": STRING, "wrong": INTEGER, "checked": BOOLEAN, "iters": INTEGER, "warmup_iters": INTEGER,
    }  # fmt: skip
    row = {
        **both, "count": INTEGER, "op": MAYBE_STRING, "root": MAYBE_INTEGER, "group": MAYBE_INTEGER,
        "time_us": times, "host_us": NUMBER, "torch_us": MAYBE_NUMBER, "model_us": MAYBE_NUMBER, "cv": NUMBER,
        "slowest_rank": INTEGER, "algbw_gb_s": MAYBE_NUMBER, "busbw_gb_s": MAYBE_NUMBER,
    }  # fmt: skip
    matrix = {**both, "bandwidth_gb_s": array(array(MAYBE_NUMBER)), "latency_us": array(array(MAYBE_NUMBER))}
    link = fixed({"alpha_us": NUMBER, "bandwidth_gb_s": NUMBER, "crossing_bytes": NUMBER})
    properties = {
        "schema_version": VERSION, "run": STRING, "collective": MAYBE_STRING, "collectives": array(STRING),
        "setup": {"type": "object"}, "link": {"anyOf": [link, {"type": "null"}]},
        "results": array({"anyOf": [fixed(row), fixed(matrix)]}),
        "wrong": INTEGER, "verdicts": array(of(Verdict)),
        "comparisons": {"anyOf": [array(of(Comparison)), {"type": "null"}]},
        "slow_links": array(of(SlowLink)), "warnings": array(STRING),
    }  # fmt: skip
    return {"type": "object", "properties": properties, "required": list(properties)}


def schemas() -> dict[str, dict[str, Any]]:
    """Return every schema by file name."""
    answer = fixed(
        {
            "host": STRING, "exit_code": {"type": ["integer", "null"]}, "stdout": STRING, "stderr": STRING,
            "elapsed_s": NUMBER, "is_truncated": BOOLEAN,
        }
    )  # fmt: skip
    line = fixed({"rank": INTEGER, "stream": {"enum": ["out", "err"]}, "time": MAYBE_NUMBER, "line": STRING})
    return {
        "plan": of(Plan),
        "facts": of(FactsFile),
        "status": versioned(nodes=array(of(NodeFacts)), unreachable=mapping(STRING), runs=array(_run())),
        "status_run": versioned(run=_run()),
        "launch_event": _event(),
        "logs_line": line,
        "stop": versioned(runs=array(of(StopResult))),
        "bench": _bench(),
        "exec": versioned(nodes=array(answer), errors=mapping(STRING)),
        "clean": versioned(dry_run=BOOLEAN, nodes=mapping(of(CleanResult))),
        "init": versioned(**of(InitResult)["properties"]),
    }


def main(argv: list[str]) -> int:
    """Write the schemas, or say which are out of date."""
    stale = []
    for name, schema in schemas().items():
        path = FOLDER / f"{name}.json"
        text = json.dumps({"$schema": DIALECT, "title": f"gpuctl {name}", **schema}, indent=1) + "\n"
        if "--check" not in argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(path.name)
    if stale:
        print(f"out of date: {', '.join(stale)}; run python scripts/make_schemas.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
