"""What environments have said to episodes: what is told again when a run goes on, and what a replay
must repeat."""

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from aligner.agents.episode_environment import Outcome
from aligner.data.checksums import DamagedError, seal, unseal
from aligner.data.fencing import fenced_write
from aligner.errors import AlignerError
from aligner.files import append_to_file, open_new_file

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """An answer, the digest of what was asked, and the bytes of its line."""

    asked: str
    outcome: Outcome
    size: int


class EpisodeJournal:
    """Answers by episode and call, 0 its reset; in memory, and in a directory's file of lines that
    each have a checksum.

    An answer is with the operating system when `record` returns: a killed process loses none, a
    machine without power may lose the last ones. One process at a time writes into a directory;
    threads may share a journal.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Makes the directory, and reads what is there; without one, memory is all.

        From a damaged line on nothing is used, and the file is cut there: a warning names the line.
        Raises OSError.
        """
        self._lock = threading.Lock()
        self._episodes: dict[str, list[_Entry]] = {}
        self._size = self._live = 0
        self._file = None if directory is None else directory / "episodes.jsonl"
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
            self._read(self._file)

    @property
    def episodes(self) -> list[str]:
        """The names of those that it has answers to."""
        with self._lock:
            return [*self._episodes]

    def told(self, episode: str, call: int, asked: str) -> Outcome | None:
        """What was answered to a call of that digest; None where none was recorded, or something
        else was asked."""
        with self._lock:
            entries = self._episodes.get(episode, [])
            return (
                entries[call].outcome
                if call < len(entries) and entries[call].asked == asked
                else None
            )

    def answers(self, episode: str) -> list[Outcome]:
        """All that was answered to an episode, in order."""
        with self._lock:
            return [entry.outcome for entry in self._episodes.get(episode, [])]

    @fenced_write()
    def record(self, episode: str, call: int, asked: str, outcome: Outcome) -> None:
        """Note an answer to a call of that digest; it replaces those of the episode from this call
        on.

        Raises OSError, which names the file.
        """
        entry = {"episode": episode, "call": call, "asked": asked, **vars(outcome)}
        with self._lock:
            if call > len(self._episodes.get(episode, [])):
                raise AlignerError(
                    f"episode {episode}: the journal has no entry before call {call}; do not forget"
                    " an episode that is still in progress"
                )
            self._apply(entry, self._write(entry))

    @fenced_write()
    def forget(self, episodes: Iterable[str]) -> None:
        """Drop episodes that are over and not needed any more; unknown ones are passed over. Raises
        OSError."""
        with self._lock:
            known = [episode for episode in episodes if episode in self._episodes]
            if known:
                self._apply({"forget": known}, self._write({"forget": known}))
            if self._file is not None and self._size > 2 * self._live:
                self._rewrite(self._file)

    def _write(self, content: dict[str, Any]) -> int:
        """Add a line to the file; its bytes, 0 without a file."""
        if self._file is None:
            return 0
        try:
            append_to_file(self._file, line := _line(content))
        except OSError:
            # the next line must not go on with what there is of this one
            with contextlib.suppress(OSError):
                os.truncate(self._file, self._size)
            raise
        self._size += len(line)
        return len(line)

    def _apply(self, content: dict[str, Any], size: int) -> None:
        """Do in memory what a line says. Raises KeyError, TypeError and ValueError for what
        `_write` never wrote."""
        if "forget" in content:
            for episode in content["forget"]:
                self._live -= sum(entry.size for entry in self._episodes.pop(episode))
            return
        entries, call = self._episodes.setdefault(content["episode"], []), content["call"]
        if call > len(entries):
            raise ValueError(call)
        outcome = Outcome(content["observation"], content["reward"], content["done"])
        self._live += size - sum(entry.size for entry in entries[call:])
        entries[call:] = [_Entry(content["asked"], outcome, size)]

    def _read(self, file: Path) -> None:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    if not line.endswith(b"\n"):
                        raise DamagedError("the line is truncated")
                    self._apply(unseal(line[:-1].decode("ascii")), len(line))
                except (DamagedError, KeyError, TypeError, ValueError) as error:
                    _log.warning(
                        "%s:%d: %s; dropped this line and all later lines (%d bytes); their"
                        " environment calls run again",
                        *(file, number, error, os.fstat(stream.fileno()).st_size - self._size),
                    )
                    os.truncate(file, self._size)
                    return
                self._size += len(line)

    def _rewrite(self, file: Path) -> None:
        with open_new_file(file) as stream:
            for episode, entries in self._episodes.items():
                for call, entry in enumerate(entries):
                    content = {
                        "episode": episode,
                        "call": call,
                        "asked": entry.asked,
                        **vars(entry.outcome),
                    }
                    stream.write(_line(content))
        self._size = self._live


def digest(asked: Sequence[Any]) -> str:
    """What a journal knows a call by; `asked` is JSON."""
    return xxhash.xxh3_128_hexdigest(json.dumps(asked, sort_keys=True).encode())


def _line(content: dict[str, Any]) -> bytes:
    return seal(json.dumps(content)).encode() + b"\n"
