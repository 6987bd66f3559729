"""Progress on standard error: a moving bar on a terminal, one line a stage elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Display:
    """What is going on, while a command works.

    with Display() as display:
        display.stage("loading the weights")
        display.samples(3, 6, 120)
    """

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = self._console.is_terminal
        self._last = ""
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, what: str) -> None:
        """A new stage begins."""
        self._say(what)
        self._bar.update(self._task, description=what, total=None, completed=0)

    def fraction(self, what: str, done: float) -> None:
        """A stage with a known end; `done` is 0 to 1."""
        self._say(what)
        self._bar.update(self._task, description=what, total=1.0, completed=done)

    def samples(self, finished: int, total: int, tokens: int) -> None:
        """`finished` of `total` texts are complete, `tokens` tokens generated so far."""
        if not self._live:
            self._say("generating")
            return
        description = f"generating: {finished} of {total} texts, {tokens} tokens"
        self._bar.update(self._task, description=description, total=total, completed=finished)

    def _say(self, what: str) -> None:
        if not self._live and what != self._last:
            self._console.print(f"kvcore: {what}", highlight=False, markup=False, soft_wrap=True)
        self._last = what
