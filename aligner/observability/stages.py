"""What each role is at while it starts, in a line of a file, and how whoever watches is told of
what takes long."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aligner.paths import RunPaths, run_paths
from aligner.schema import Config

_LONG_S = 2.0
"""What takes less is not told: nobody has begun to wonder."""
_FIRST_STEP = {
    "generate": "generating the first samples",
    "server_wait": "waiting for the first results from the servers",
    "logprobs": "computing the first log-probs",
    "train": "training the first step",
    "reshard": "syncing the new weights to the engine",
    "evaluate": "evaluating the initial model",
}
"""What phases of a step are called before one has ended."""


def tell_stage(config: Config, role: str, stage: str | None) -> None:
    """The first rank of a role, or server group, is at this now; None: it has started. Other ranks
    say nothing."""
    if int(os.environ.get("RANK", "0")):
        return
    file = run_paths(config).stages / role
    with contextlib.suppress(OSError):  # of a full disk others tell
        if stage is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(stage, encoding="utf-8")


def tell_phase(config: Config, phase: str) -> None:
    """The trainer begins a phase of its first step."""
    if stage := _FIRST_STEP.get(phase):
        tell_stage(config, "trainer", stage)


def forget_stages(paths: RunPaths) -> None:
    """Drop what an earlier start has left."""
    for file in paths.stages.glob("*"):
        file.unlink(missing_ok=True)


@dataclass
class _Stage:
    text: str
    since: float
    is_told: bool = False


class StageWatch:
    """Tells what each role is at, once that has taken a while, and how long it took."""

    def __init__(
        self,
        paths: RunPaths,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._tell, self._clock = paths.stages, tell, clock
        self._now: dict[str, _Stage] = {}

    def poll(self) -> None:
        """Look, and tell what is to be told."""
        now, found = self._clock(), self._read()
        for role in [role for role, stage in self._now.items() if found.get(role) != stage.text]:
            stage = self._now.pop(role)
            if stage.is_told:
                self._tell(f"{role}: {stage.text} took {now - stage.since:.0f} s")
        for role, text in found.items():
            stage = self._now.setdefault(role, _Stage(text, now))
            if not stage.is_told and now - stage.since >= _LONG_S:
                stage.is_told = True
                self._tell(f"{role}: {text} …")

    def _read(self) -> Mapping[str, str]:
        found = {}
        for file in sorted(self._directory.glob("*")):
            with contextlib.suppress(OSError):
                found[file.name] = file.read_text(encoding="utf-8")
        return {role: text for role, text in found.items() if text}
