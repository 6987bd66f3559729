"""The command line, one file a command."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 (done), 1 (the answer is no), 2 (bad input) or 3 (our bug)."""
    from kvcore.cli.dispatch import run_main

    return run_main(argv)
