"""``gpuctl plan``: the Plan that launch would execute, from probed or recorded facts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpuctl.cli import launch, options
from gpuctl.cli.planning import TrainingFlags, build_plan, gather_facts, load_facts, parse_env

EPILOG = """\b
Examples:
  gpuctl plan -s zero2
  gpuctl plan -s zero2 --model llama3-8b --facts facts.json
"""


def command(
    ctx: typer.Context,
    script: launch.Script = None,
    strategy: launch.Strategy = None,
    zero: launch.Zero = None,
    model: launch.Model = None,
    steps: launch.Steps = None,
    global_batch: launch.GlobalBatch = None,
    micro_batch: launch.MicroBatch = None,
    compile: launch.Compile = None,
    config: launch.Config = None,
    settings: launch.Settings = None,
    env: launch.Env = None,
    env_file: launch.EnvFile = None,
    master_addr: launch.MasterAddr = None,
    master_port: launch.MasterPort = None,
    name: launch.Name = None,
    facts: Annotated[
        Path | None, typer.Option("--facts", help="Recorded facts (`status --json`) instead of a probe.")
    ] = None,
    file: options.File = None,
    hostfile: options.Hostfile = None,
    nodelist: options.Nodelist = None,
    exclude: options.Exclude = None,
    nnodes: options.Nnodes = None,
    nproc_per_node: options.NprocPerNode = None,
    json: options.Json = False,
    no_color: options.NoColor = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Show ranks, addresses and environment (with reasons) of a launch; start nothing."""
    terminal = options.terminal(json, no_color, quiet, verbose)
    flags = TrainingFlags(
        model, steps, global_batch, micro_batch, compile, None, config, tuple(settings or ())
    )
    request = launch.make_request(
        script,
        ctx.obj.theirs,
        flags,
        strategy=strategy,
        zero=zero,
        name=name,
        nproc_per_node=nproc_per_node,
        env=parse_env(env or (), env_file),
        master_addr=master_addr,
        master_port=master_port,
    )
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    if facts is not None:
        plan = build_plan(cluster, load_facts(facts, cluster), request)
    else:
        from gpuctl.services.session import open_session

        with open_session(cluster) as session:
            plan = build_plan(cluster, gather_facts(session, terminal), request)
    launch.show_plan(plan, terminal)
    return 0
