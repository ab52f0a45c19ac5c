"""Run the trainer by hand under torchrun's environment: ``python -m gpuctl.trainer CONFIG.json``.

CONFIG.json is {"training": {...}, "dims": {...}, "strategy": "zero2", "checkpoint_dir": null}; events are
printed as JSON lines.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpuctl.agent.worker import run_program
from gpuctl.trainer.loop import run


def main(arguments: list[str]) -> int:
    """Train and return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m gpuctl.trainer CONFIG.json", file=sys.stderr)
        return 2
    return run_program(run, json.loads(Path(arguments[0]).read_text()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
