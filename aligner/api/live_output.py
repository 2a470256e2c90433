"""What a command prints, shown as it comes: in a script as it is, in a notebook in one place with
how far the run is."""

import io
import sys
import threading
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aligner.api.child_command import ChildCommand
from aligner.config.compose import load_config
from aligner.observability.console import WINDOW, Pace
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths

_EVERY_S = 0.5
_LINES, _LAST_LINES = 16, 48
"""Lines of what is printed that a notebook shows while the run goes on, and once it has ended."""
_WIDTH = 100


def in_notebook() -> bool:
    """Whether this process is a notebook's, and not a script's or a terminal's."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


class LiveOutput:
    """Shows what a command prints when it is asked to."""

    def __init__(self, command: ChildCommand) -> None:
        self._command, self._shown = command, 0

    def begin(self, directory: Path) -> None:
        """The run's directory is known now."""

    def update(self) -> None:
        """Show what is new."""
        printed = self._command.printed
        print(printed[self._shown :], end="", flush=True)
        self._shown = len(printed)

    def close(self) -> None:
        """Show what is left, once the command has ended."""
        self.update()


class NotebookOutput(LiveOutput):
    """Shows it below the cell that started the command, by a thread of its own, also while other
    cells run."""

    def __init__(self, command: ChildCommand) -> None:
        super().__init__(command)
        from IPython.display import display

        self._paths: RunPaths | None = None
        self._before: dict[str, str] = {}
        self._display: Any = display({"text/plain": ""}, raw=True, display_id=True)
        self._thread = threading.Thread(target=self._follow, name="aligner output", daemon=True)
        self._thread.start()

    def begin(self, directory: Path) -> None:
        """See `LiveOutput`."""
        self._paths = RunPaths(directory)

    def update(self) -> None:
        """The thread does it."""

    def close(self) -> None:
        """See `LiveOutput`."""
        self._thread.join()

    def _follow(self) -> None:
        has_ended = threading.Event()
        while not has_ended.wait(_EVERY_S):
            if self._command.exit_code is not None:
                has_ended.set()
            shown = notebook_bundle(
                self._command.printed, self._paths, _LAST_LINES if has_ended.is_set() else _LINES
            )
            if shown != self._before:
                self._display.update(shown, raw=True)
                self._before = shown


def notebook_bundle(printed: str, paths: RunPaths | None, lines: int) -> dict[str, str]:
    """The last lines of what was printed below a bar of the run's steps, once there are some, as
    HTML and as text."""
    parts: list[Any] = []
    if paths is not None and (metrics := read_metrics(paths.metrics)):
        pace = Pace(load_config(paths.config).run.steps)
        for record in metrics[-WINDOW:]:
            pace.add(record)
        parts.append(Text(f"step {pace.done}/{pace.steps}  {pace.describe(metrics[-1])}"))
        bar = Table.grid()  # which ends its line
        bar.add_row(ProgressBar(total=pace.steps, completed=pace.done, width=60))
        parts.append(bar)
    parts.append(Text("\n".join(printed.splitlines()[-lines:])))
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False)
    for part in parts:
        console.print(part)
    html = console.export_html(
        inline_styles=True, clear=False, code_format="<pre style='line-height:1.2'>{code}</pre>"
    )
    return {"text/html": html, "text/plain": console.export_text()}


def live_output(command: ChildCommand) -> LiveOutput:
    """What fits where this is run."""
    return NotebookOutput(command) if in_notebook() else LiveOutput(command)
