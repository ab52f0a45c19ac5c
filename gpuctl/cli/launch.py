"""``gpuctl launch``: start a run on the nodes and stay with it, or leave it to itself."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpuctl.cli import options
from gpuctl.cli.planning import (
    TrainingFlags,
    build_plan,
    gather_facts,
    parse_env,
    plan_document,
    prepare_data,
    print_plan,
    secret_values,
    size_text,
)
from gpuctl.cli.render import Terminal, bytes_text
from gpuctl.errors import UsageError

if TYPE_CHECKING:
    from gpuctl.core.plan import Plan
    from gpuctl.services.launch import Outcome, Uploads
    from gpuctl.services.plan import LaunchRequest
    from gpuctl.services.session import Session

EPILOG = """\b
Examples:
  gpuctl launch -s zero2 --model small --steps 200
  gpuctl launch train.py -- --lr 3e-4
  gpuctl launch --sync . train.py
  gpuctl launch -- ./my_binary --flag
"""

Strategy = Annotated[str | None, typer.Option("--strategy", "-s", help="ddp, zero1, zero2, ...")]
Zero = Annotated[int | None, typer.Option("--zero", help="ZeRO stage on the dp axis.", min=0, max=3)]
Model = Annotated[str | None, typer.Option("--model", help="Model preset: tiny, small, llama-1b, ...")]
Steps = Annotated[int | None, typer.Option("--steps", help="Optimizer steps.", min=1)]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", help="Sequences a step, whatever the layout.", min=1)
]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", help="Sequences at once on a rank.", min=1)]
Compile = Annotated[bool | None, typer.Option("--compile/--no-compile", help="torch.compile every block.")]
Config = Annotated[Path | None, typer.Option("--config", help="Training config (YAML).")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set a training config field: optim.lr=1e-3.")
]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", help="K=V for the ranks; K passes yours on.")]
EnvFile = Annotated[Path | None, typer.Option("--env-file", help="File of K=V lines for the ranks.")]
MasterAddr = Annotated[str | None, typer.Option("--master-addr", help="Address of the rendezvous.")]
MasterPort = Annotated[
    int | None, typer.Option("--master-port", help="Port of the rendezvous.", min=1, max=65535)
]
Name = Annotated[str | None, typer.Option("--name", help="Name of the run.")]
Script = Annotated[
    str | None, typer.Argument(help="Your script; its arguments after --.", show_default=False)
]


def command(
    ctx: typer.Context,
    script: Script = None,
    strategy: Strategy = None,
    zero: Zero = None,
    model: Model = None,
    steps: Steps = None,
    global_batch: GlobalBatch = None,
    micro_batch: MicroBatch = None,
    compile: Compile = None,
    config: Config = None,
    settings: Settings = None,
    env: Env = None,
    env_file: EnvFile = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    out: Annotated[str | None, typer.Option("--out", help="Where checkpoints go on the nodes.")] = None,
    exit_grace: Annotated[
        float | None,
        typer.Option("--exit-grace", help="Seconds the others may run on after a rank exited 0."),
    ] = None,
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="Restarts after a failure.", min=0)] = 0,
    sync: Annotated[
        Path | None, typer.Option("--sync", help="Carry this folder to the nodes and run in it (. for here).")
    ] = None,
    sync_limit: Annotated[int, typer.Option("--sync-limit", help="Limit of --sync, MiB.", min=1)] = 64,
    name: Name = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave the run once it has started.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, start nothing.")] = False,
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
    """Start a training run (or your own script) on the nodes and stay with it until it ends."""
    terminal = options.terminal(json, no_color, quiet, verbose)
    flags = TrainingFlags(
        model, steps, global_batch, micro_batch, compile, out, config, tuple(settings or ())
    )
    request = make_request(
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
        exit_grace_s=exit_grace,
        max_restarts=max_restarts,
    )
    cluster = options.Selection(file, hostfile, nodelist, exclude, nnodes).load()
    request, synced = _with_sync(request, sync, sync_limit, terminal)
    from gpuctl.services.session import open_session

    with open_session(cluster) as session:
        plan = build_plan(cluster, gather_facts(session, terminal), request)
        plan, uploads = prepare_data(plan)
        if dry_run:
            show_plan(plan, terminal)
            return 0
        return run_plan(
            plan, session, uploads if synced is None else _both(uploads, synced), terminal, detach
        )


def make_request(
    script: str | None, theirs: tuple[str, ...] | None, flags: TrainingFlags, **fields: Any
) -> LaunchRequest:
    """Return the request: the bundled trainer, SCRIPT [-- ARGS], or -- CMD."""
    from gpuctl.config.training import load_training
    from gpuctl.services.plan import LaunchRequest

    if script is not None:
        return LaunchRequest(kind="script", argv=(script, *(theirs or ())), **fields)
    if theirs:
        return LaunchRequest(kind="command", argv=theirs, **fields)
    if theirs is not None:
        raise UsageError("nothing stands after --", hint="`gpuctl launch -- ./program --flag`")
    training = load_training(flags.config, settings=flags.as_settings())
    return LaunchRequest(kind="train", training=training, **fields)


def _with_sync(
    request: LaunchRequest, folder: Path | None, limit_mib: int, terminal: Terminal
) -> tuple[LaunchRequest, Any]:
    if folder is None:
        return request, None
    if request.kind == "train":
        raise UsageError("--sync is for your own script; the bundled trainer travels by itself")
    import dataclasses

    from gpuctl.services.sync import pack_folder

    synced = pack_folder(folder, limit_bytes=limit_mib << 20)
    for name in synced.skipped:
        terminal.note(f"--sync leaves out {name}")
    terminal.note(f"--sync: {synced.num_files} files, {bytes_text(synced.size_bytes)}")
    return dataclasses.replace(request, sync_sha256=synced.archive.sha256), synced.archive


def _both(uploads: Uploads, synced: Any) -> Uploads:
    import dataclasses

    return dataclasses.replace(uploads, sync=synced)


def show_plan(plan: Plan, terminal: Terminal) -> None:
    """Print the Plan as a table or as its JSON document."""
    if terminal.is_json:
        terminal.json(plan_document(plan))
    else:
        print_plan(plan, terminal)


def run_plan(
    plan: Plan,
    session: Session,
    uploads: Uploads,
    terminal: Terminal,
    is_detached: bool,
    *,
    also: Callable[[dict[str, Any]], None] | None = None,
) -> int:
    """Execute a Plan, show what happens (``also`` gets every event), return the exit code."""
    from gpuctl.services.launch import Interrupts, Listener, Reach, launch
    from gpuctl.services.session import by_rank

    labels = list(session.specs)
    interrupts = Interrupts()
    previous = signal.signal(signal.SIGINT, lambda *_: interrupts.press())
    view = View(plan, terminal)
    try:
        outcome = launch(
            plan,
            Reach(by_rank(session), lambda rank: session.reconnect(labels[rank])),
            secrets=secret_values(plan),
            uploads=uploads,
            listener=Listener(_both_hear(view.on_event, also), view.on_log),
            interrupts=interrupts,
            is_detached=is_detached,
        )
    except KeyboardInterrupt:
        if interrupts.count >= 3:
            terminal.note(f"left; the agents finish the stop of {plan.run_id}")
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
    view.finish(outcome, is_detached)
    return outcome.exit_code


def _both_hear(
    first: Callable[[dict[str, Any]], None], second: Callable[[dict[str, Any]], None] | None
) -> Callable[[dict[str, Any]], None]:
    if second is None:
        return first

    def hear(event: dict[str, Any]) -> None:
        first(event)
        second(event)

    return hear


class View:
    """Shows a run's events: a line a step, rank 0's own lines, the failure, a closing table."""

    def __init__(self, plan: Plan, terminal: Terminal) -> None:
        self.plan = plan
        self.terminal = terminal
        self._first_loss: float | None = None
        self._last_step: dict[str, Any] = {}
        self._checkpoint: dict[str, Any] = {}
        self._generation = 0

    def on_event(self, event: dict[str, Any]) -> None:
        self._generation = event.get("generation", self._generation)
        if self.terminal.is_json:
            # What the client says itself (stopping, warning) carries the same keys as what agents say.
            always = {"run": self.plan.run_id, "generation": self._generation, "time": time.time()}
            self.terminal.json({**always, **event})
        handler = getattr(self, f"_on_{event.get('event')}", None)
        if handler is not None:
            handler(event)

    def on_log(self, rank: int, stream: str, line: bytes) -> None:
        if not self.terminal.is_json:
            self.terminal.raw(line, stream)
        else:
            sys.stderr.write(line.decode("utf-8", "backslashreplace") + "\n")

    def _on_started(self, event: dict[str, Any]) -> None:
        where = f"{event['master_addr']}:{event['master_port']}"
        self._say(f"{self.plan.run_id}: {size_text(self.plan)}, meeting at {where}")

    def _on_step(self, event: dict[str, Any]) -> None:
        self._last_step = event
        if self._first_loss is None:
            self._first_loss = event.get("loss")
        if not self.terminal.is_json and not self.terminal.is_quiet:
            self.terminal.data(step_line(event))

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        self._checkpoint = event
        self._say(f"checkpoint: step {event.get('step')} in {event.get('path', '?')}")

    def _on_warning(self, event: dict[str, Any]) -> None:
        self.terminal.warn(str(event.get("message")))

    def _on_node_lost(self, event: dict[str, Any]) -> None:
        self.terminal.warn(f"{event.get('node')} is lost: {event.get('message')}")

    def _on_stopping(self, event: dict[str, Any]) -> None:
        grace = event.get("grace_s")
        self._say(f"stopping: the ranks save and leave within {grace:g} s; Ctrl-C again ends them now")

    def _on_killing(self, _event: dict[str, Any]) -> None:
        self._say("ending the ranks; Ctrl-C again leaves, and the agents finish")

    def _on_restarting(self, event: dict[str, Any]) -> None:
        attempt = f"{event.get('attempt')} of {event.get('max_restarts')}"
        self._say(f"restarting ({attempt}) in {event.get('delay_s'):g} s")

    def _on_failed(self, event: dict[str, Any]) -> None:
        if event.get("final"):
            return  # the error at the end says it, once
        from gpuctl.cli.failure import failure_lines

        for line in failure_lines(event):
            self._say(line)

    def _say(self, text: str) -> None:
        self.terminal.note(text)

    def finish(self, outcome: Outcome, is_detached: bool) -> None:
        """Print the closing table and the next command, or raise the run's failure."""
        from gpuctl.cli.failure import raise_outcome

        run_id = self.plan.run_id
        if is_detached and outcome.state.value == "running":
            if self.terminal.is_json:
                self.terminal.json({"event": "detached", "run": run_id})
            else:
                self.terminal.data(run_id)
            self._say(
                f"it runs on by itself: `gpuctl logs -f {run_id}` follows it, `gpuctl stop {run_id}` ends it"
            )
            return
        if outcome.was_interrupted:
            self._say(f"{run_id} {outcome.state.value}: {outcome.reason}")
            return
        raise_outcome(outcome, self.plan)
        if self.plan.program.kind == "train" and not self.terminal.is_json:
            self._closing_table(outcome)

    def _closing_table(self, outcome: Outcome) -> None:
        last = self._last_step
        rows = [
            ("run", self.plan.run_id),
            ("layout", f"{self.plan.strategy}, {size_text(self.plan)}"),
            ("steps", last.get("step")),
            (
                "loss",
                f"{self._first_loss:.4f} -> {last['loss']:.4f}" if last.get("loss") is not None else None,
            ),
            ("tokens/s", f"{last['tokens_per_s']:,.0f}" if last.get("tokens_per_s") else None),
            ("checkpoint", self._checkpoint.get("path")),
        ]
        self.terminal.data()
        self.terminal.table(("what", "value"), rows)


def step_line(event: dict[str, Any]) -> str:
    """Return one line for a step event; what is unknown is left out, never shown as 0."""
    parts = [f"step {event.get('step'):>5}"]
    for key, form in (("loss", "loss {:.4f}"), ("grad_norm", "norm {:.3f}"), ("lr", "lr {:.2e}"),
                      ("tokens_per_s", "{:,.0f} tok/s"), ("tflops", "{:.3g} TFLOP/s"), ("mfu", "MFU {:.1%}"),
                      ("exposed_comm_ms", "exposed {:.1f} ms")):  # fmt: skip
        if event.get(key) is not None:
            parts.append(form.format(event[key]))
    if event.get("memory_bytes"):
        parts.append(str(bytes_text(event["memory_bytes"])))
    return "  ".join(parts)
