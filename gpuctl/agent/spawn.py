"""Fork and exec a program as a rank is started: own session, dies with the agent, first for the OOM killer.

Not ``subprocess``: its children are reaped by whoever holds the Popen object, and here the agent reaps
everything; and ``posix_spawn`` knows no PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpuctl.agent import identity

#: The kernel ends ranks before the agent, the guardian and sshd (which keep 0 or less).
OOM_SCORE_ADJ = 500
#: A working directory on a dead file server must not stop the agent's heartbeats for long.
EXEC_LIMIT_S = 5.0


def spawn_exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    *,
    stdout_fd: int,
    stderr_fd: int,
    keep_fds: Sequence[int] = (),
    oom_score_adj: int = OOM_SCORE_ADJ,
    before_exec: Callable[[], None] | None = None,
) -> int:
    """Start ``argv`` and return its pid; the caller reaps it.

    Call it from the main thread only: PR_SET_PDEATHSIG follows the forking *thread*. Raises OSError with
    ``filename`` set when the directory or the program cannot be used; nothing is left running then.
    """
    identity.load_libc()
    parent = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        with signals_blocked():
            pid = os.fork()
            if pid == 0:
                try:
                    become_rank(parent, oom_score_adj, stdout_fd, stderr_fd)
                    _exec(argv, env, cwd, keep_fds, before_exec)
                except BaseException as exc:
                    _tell(write_fd, exc)
                finally:
                    os._exit(127)
        os.close(write_fd)
        write_fd = -1
        _raise_failure(pid, read_fd)
    finally:
        os.close(read_fd)
        if write_fd >= 0:
            os.close(write_fd)
    return pid


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block all signals around a fork: the parent's handlers and wakeup descriptor are not the child's."""
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_rank(parent: int, oom_score_adj: int, stdout_fd: int, stderr_fd: int) -> None:
    """In the child: session, death signal, OOM score, stdio, default signals."""
    identity.set_pdeathsig(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(127)
    os.setsid()
    raise_oom_score(oom_score_adj)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((null, 0), (stdout_fd, 1), (stderr_fd, 2)):
        os.dup2(source, target)
    for fd in {null, stdout_fd, stderr_fd} - {0, 1, 2}:
        os.close(fd)
    reset_signals()


def reset_signals() -> None:
    """Give every signal its default action and unblock all of them."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def raise_oom_score(by: int) -> None:
    """Add ``by`` to this process's oom_score_adj (at most 1000); raising it needs no privilege."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            value = min(1000, int(file.read()) + by)
            file.seek(0)
            file.write(str(value))
    except OSError:
        pass  # a masked /proc: the rank runs all the same


def _exec(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    keep_fds: Sequence[int],
    before_exec: Callable[[], None] | None,
) -> None:
    for fd in keep_fds:
        os.set_inheritable(fd, True)
    if cwd is not None:
        os.chdir(cwd)
    if before_exec is not None:
        before_exec()
    try:
        os.execvpe(argv[0], list(argv), dict(env))
    except OSError as exc:
        exc.filename = exc.filename or argv[0]
        raise


def _tell(fd: int, exc: BaseException) -> None:
    number = exc.errno if isinstance(exc, OSError) and exc.errno else 0
    name = exc.filename if isinstance(exc, OSError) and exc.filename else ""
    text = b"%d\0%s\0%s" % (number, os.fsencode(name), repr(exc).encode(errors="replace"))
    os.write(fd, text[: select.PIPE_BUF])


def _raise_failure(pid: int, read_fd: int) -> None:
    """Wait until the child has called exec (the pipe closes), or raise what it says went wrong."""
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(read_fd, select.POLLIN)
    ready = poll.poll(EXEC_LIMIT_S * 1000)
    text = os.read(read_fd, select.PIPE_BUF) if ready else b""
    if ready and not text:
        return
    if not ready:
        os.kill(pid, signal.SIGKILL)  # a child of ours that nobody has reaped: the number is its own
        raise TimeoutError(f"not started within {EXEC_LIMIT_S:.0f} s")
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    number, name, shown = text.split(b"\0", 2)
    if int(number) == 0:
        raise RuntimeError(shown.decode(errors="replace"))
    raise OSError(int(number), os.strerror(int(number)), os.fsdecode(name) or None)
