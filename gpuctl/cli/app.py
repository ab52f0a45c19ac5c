"""The entry point of ``gpuctl`` and its only error boundary.

Importing this module loads no torch, paramiko, pydantic, yaml or rich: a verb's module is
imported when that verb is called. Run as ``gpuctl ...`` or ``python -m gpuctl ...``.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

import gpuctl
from gpuctl.cli import arguments
from gpuctl.errors import GpuctlError, UsageError

BUG_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: a script never takes a crash for a failed run
INTERRUPTED = 130
# Click's ClickException, by a path that exists whether typer depends on click (to 0.25) or carries it.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]


@dataclass(frozen=True)
class Verb:
    """One row of the command table: where a verb lives and what it does."""

    module: str
    summary: str
    hidden: bool = False
    takes_program: bool = False
    """What stands after ``--`` is the user's program or its arguments."""


VERBS: dict[str, Verb] = {
    "init": Verb("init", "Write a cluster file."),
    "plan": Verb("plan", "Show what launch would do, and why.", takes_program=True),
    "launch": Verb("launch", "Start a training run on the nodes.", takes_program=True),
    "status": Verb("status", "Show the runs and the nodes, or one run in detail."),
    "ps": Verb("status", "Same as status.", hidden=True),
    "logs": Verb("logs", "Show what the ranks of a run printed."),
    "stop": Verb("stop", "Stop runs."),
    "bench": Verb("bench", "Measure collectives between the nodes."),
    "exec": Verb("exec", "Run a command on every node.", takes_program=True),
    "clean": Verb("clean", "Remove finished runs and bundles from the nodes."),
}

EPILOG = """\b
Examples:
  gpuctl init --nodelist gpu[01-04]
  gpuctl plan -s zero2
  gpuctl launch -s zero2 --model small --steps 200
  gpuctl launch train.py -- --lr 3e-4
  gpuctl logs -f latest
"""

CONTEXT = {"help_option_names": ["-h", "--help"]}


class VerbGroup(typer.core.TyperGroup):
    """The verbs: listed from the table, imported when called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the row's name and summary, enough for help and completion of verbs."""
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        return typer.core.TyperCommand(cmd_name, help=verb.summary, hidden=verb.hidden)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        self.commands = {name: self.get_command(ctx, name) for name in VERBS}  # for "did you mean"
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name and command else command, rest


def load_verb(name: str) -> Any:
    """Import the module of verb ``name`` and return its command."""
    verb = VERBS[name]
    module = importlib.import_module(f"gpuctl.cli.{verb.module}")
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name=name, context_settings=dict(CONTEXT), epilog=getattr(module, "EPILOG", None))(
        module.command
    )
    return typer.main.get_command(single)


app = typer.Typer(
    cls=VerbGroup,
    context_settings=dict(CONTEXT),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: the same in a pipe and on a terminal, and rich is not loaded
    no_args_is_help=True,
    epilog=EPILOG,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuctl {gpuctl.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Launch and look after distributed training on GPU machines reachable by SSH."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code: the boundary where errors become text."""
    debug = "--debug" in argv[: argv.index("--")] if "--" in argv else "--debug" in argv
    try:
        return _dispatch(argv)
    except GpuctlError as error:
        return _show(error, debug)
    except CommandLineError as error:
        return _show(_usage_error(error, argv), debug)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away (`gpuctl logs | head`); keep the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except Exception:
        return _apologise(debug)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv:
        app(["--help"], prog_name="gpuctl", standalone_mode=False)
        return 2
    words = arguments.split(argv)
    verb = VERBS.get(next((word for word in words.ours if not word.startswith("-")), ""))
    ours = list(words.ours)
    if words.theirs is not None and not (verb and verb.takes_program):
        ours += ["--", *words.theirs]
    code = app(ours, prog_name="gpuctl", standalone_mode=False, obj=words)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _usage_error(error: Any, argv: Sequence[str]) -> UsageError:
    """Put typer's complaint about the command line into our words."""
    message = error.format_message().rstrip(".")
    name = next((word for word in argv if word in VERBS), None)
    hint = f"`gpuctl {name} --help` lists what it takes" if name else "`gpuctl --help` lists the commands"
    is_unknown = message.startswith(("No such option", "Got unexpected extra argument"))
    if name and is_unknown and VERBS[name].takes_program and "--" not in argv:
        hint = f"arguments of your own program go after --: `gpuctl {name} train.py -- --lr 3e-4`"
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def _show(error: GpuctlError, debug: bool) -> int:
    from gpuctl.cli.render import print_error  # its import must not be able to break the boundary

    if debug:
        traceback.print_exception(error)
    print_error(error)
    return error.exit_code


def _apologise(debug: bool) -> int:
    """Report a bug of ours: where the traceback is and where to send it."""
    if debug:
        traceback.print_exc()
    print("error: gpuctl has a bug and stopped; sorry", file=sys.stderr)
    last = ascii(traceback.format_exc().splitlines()[-1])[1:-1]  # it may quote what a node sent
    print(f"  caused by: {last}\n", file=sys.stderr)
    print(f"hint: please report it, with {_save_traceback()}", file=sys.stderr)
    return BUG_EXIT_CODE


def _save_traceback() -> Path:
    """Write the traceback (no values of variables, no command line) where the user can find it."""
    text = f"gpuctl {gpuctl.__version__}, Python {sys.version}\n\n{traceback.format_exc()}"
    state = Path(os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()) / "gpuctl"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        state = Path(tempfile.mkdtemp(prefix="gpuctl-"))
    path = state / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    path.write_text(text)
    return path


if __name__ == "__main__":
    main()
