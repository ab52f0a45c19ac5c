"""The environment of a rank: the node's login environment, the Plan's variables, the contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuctl.core.plan import NodePlan, Plan

#: What must not leak from the agent's own environment into a rank.
_OWN_PREFIX = "GPUCTL_"


@dataclass(frozen=True)
class Start:
    """What is known only when a generation starts."""

    generation: int
    master_addr: str
    master_port: int
    restart_count: int = 0


def node_environment(
    plan: Plan, node: NodePlan, inherited: Mapping[str, str], secrets: Mapping[str, str]
) -> dict[str, str]:
    """Return what all ranks of ``node`` share, also the fork server.

    Order, later wins: inherited, ``env_from`` values, the Plan's variables.
    """
    env = {k: v for k, v in inherited.items() if not k.startswith(_OWN_PREFIX)}
    env.update(secrets)
    for variable in node.env:
        if variable.is_unset:
            env.pop(variable.name, None)
        else:
            env[variable.name] = variable.value
    env["GPUCTL_RUN_ID"] = plan.run_id
    env["PYTHONUNBUFFERED"] = "1"
    return env


def rank_environment(plan: Plan, node: NodePlan, local_rank: int, start: Start) -> dict[str, str]:
    """Return torchrun's contract for one rank (pytorch docs, "torchrun", environment variables)."""
    world, local_world = plan.world_size, len(node.ranks)
    rank = node.ranks[local_rank]
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node.node_rank),
        "NODE_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(len(plan.nodes)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": str(start.master_port),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(start.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        # True would make every rank wait for a store in an agent that has none
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
