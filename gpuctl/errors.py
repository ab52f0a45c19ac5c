"""The errors gpuctl raises on purpose, and the exit code each one ends the command with.

::

    GpuctlError
    ├── AnswerError        1   the question was understood and the answer is bad
    │   ├── RunFailed          a run ended FAILED, or was stopped under an attached launch
    │   ├── CheckFailed        a preflight or doctor check failed
    │   └── DoesNotFit         the plan does not fit the hardware or the layout is impossible
    ├── UsageError         2   asked wrongly
    │   ├── ConfigError        a YAML, hostfile, environment or training config is wrong (file:line)
    │   └── UnknownRun         RUN names no run, or several
    └── UnknownAnswer      3   could not find out
        ├── UnreachableError   resolve, connect, banner, key exchange, session
        ├── HostKeyError       unknown, changed or revoked host key
        ├── AuthError          the node refused every identity offered
        ├── TimeoutExpired     a deadline passed
        ├── ProtocolError      what came back is not what gpuctl speaks
        └── AgentError         the agent on a node could not be started or went away

Everything else that escapes is a bug of ours and exits with 70.
"""

from __future__ import annotations


class GpuctlError(Exception):
    """An error with a message, what caused it, and one thing to try.

    ``message`` says what failed and where (file:line, node, command); ``cause`` is the
    underlying text; ``hint`` is one thing to try, a runnable command when possible.
    """

    exit_code = 70

    def __init__(self, message: str, *, cause: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.hint = hint


class AnswerError(GpuctlError):
    """The question was understood and the answer is bad."""

    exit_code = 1


class RunFailed(AnswerError):
    """A run ended otherwise than DONE."""


class CheckFailed(AnswerError):
    """A preflight or doctor check failed."""


class DoesNotFit(AnswerError):
    """The layout is impossible on this hardware, or does not fit its memory."""


class UsageError(GpuctlError):
    """The command was asked wrongly."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file or value is wrong."""


class UnknownRun(UsageError):
    """RUN names no run, or several."""


class UnknownAnswer(GpuctlError):
    """The answer could not be found out."""

    exit_code = 3


class UnreachableError(UnknownAnswer):
    """A node could not be reached; the message names the phase that failed."""


class HostKeyError(UnknownAnswer):
    """A host key is unknown, changed or revoked."""


class AuthError(UnknownAnswer):
    """A node refused every identity offered."""


class TimeoutExpired(UnknownAnswer):
    """A deadline passed."""


class ProtocolError(UnknownAnswer):
    """A peer sent something that is not the gpuctl protocol."""


class AgentError(UnknownAnswer):
    """The agent of a node could not be started, refused, or went away."""
