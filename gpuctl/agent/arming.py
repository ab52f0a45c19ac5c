"""What a node checks before it says "armed": everything that would otherwise fail in a rank.

Pure reads, all reasons at once: a node that cannot start says everything that is in the way.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from gpuctl.agent.paths import Home, RunDir
from gpuctl.core.plan import NodePlan, Plan

BUNDLED_NEEDS = ("torch", "numpy", "safetensors")
MIN_FREE_BYTES = 64 << 20


def working_directory(plan: Plan, node: NodePlan, run_dir: RunDir) -> Path:
    """Return where the ranks work: the synchronised copy, the node's workdir, or the home."""
    if plan.sync_sha256:
        return run_dir.work
    return Path(os.path.expanduser(node.workdir or "~"))


def reasons_not_to_start(
    plan: Plan, node: NodePlan, home: Home, run_dir: RunDir, env: Mapping[str, str]
) -> list[str]:
    """Return why this node cannot run its ranks; empty when it can."""
    reasons = []
    free = shutil.disk_usage(home.path).free
    if free < MIN_FREE_BYTES:
        reasons.append(f"{home.path} has {free >> 20} MiB free, {MIN_FREE_BYTES >> 20} are needed")
    if plan.program.is_bundled:
        reasons += _missing_libraries()
        reasons += _missing_data(plan, home)
    else:
        reasons += _missing_program(plan, working_directory(plan, node, run_dir), env)
    return reasons


def _missing_libraries() -> list[str]:
    # found, not imported: the fork server imports, once
    missing = [name for name in BUNDLED_NEEDS if importlib.util.find_spec(name) is None]
    return [f"{sys.executable} has no {', '.join(missing)}"] if missing else []


def _missing_data(plan: Plan, home: Home) -> list[str]:
    digest = plan.program.config.get("training", {}).get("data", {}).get("digest")
    if digest and not home.data(digest).is_file():
        return [f"the training data {digest[:12]} is not in {home.path / 'data'}"]
    return []


def _missing_program(plan: Plan, workdir: Path, env: Mapping[str, str]) -> list[str]:
    if not workdir.is_dir():
        return [f"the working directory {workdir} is missing"]
    program = plan.program.argv[0]
    if plan.program.kind == "script":
        if not (workdir / program).is_file():
            return [f"{workdir / program} is missing (--sync carries a folder over)"]
        return []
    found = shutil.which(os.path.join(workdir, program) if "/" in program else program, path=env.get("PATH"))
    return [] if found else [f"{program} is not on this node's PATH, or cannot be executed"]
