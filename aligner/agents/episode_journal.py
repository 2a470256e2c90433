"""Journal of the answers of environments to episodes.

A resumed run reads answers from the journal instead of calling environments again, and the replay
of an episode in a fresh environment has to repeat them.
"""

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
from aligner.data.episode_reports import FailureKind
from aligner.data.fencing import fenced_write
from aligner.errors import AlignerError
from aligner.files import append_to_file, open_new_file

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A recorded answer."""

    call_digest: str
    """Digest of the call; see `compute_call_digest`."""
    outcome: Outcome
    size: int
    """Size of the entry's line in the file, in bytes; 0 if the journal has no file."""


class EpisodeJournal:
    """Answers of environments by episode and call, in memory and in a file.

    Call 0 of an episode is its reset. Each line of the file has a checksum. `record` returns after
    the answer has been written, but not flushed to disk: a killed process loses no answer, but a
    power failure may lose the latest answers. Only one process at a time may write to a directory;
    threads may share a journal.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Create the directory if necessary, and read the journal in it.

        Without a directory, the journal exists only in memory.
        A damaged line and all lines after it are removed from the file, with a warning that
        contains the line's number. Raises OSError.
        """
        self._lock = threading.Lock()
        self._episodes: dict[str, list[_Entry]] = {}
        # sizes in bytes of the file, and of its lines that are still in use
        self._size = 0
        self._live_size = 0
        self._file = None if directory is None else directory / "episodes.jsonl"
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
            self._read(self._file)

    @property
    def episodes(self) -> list[str]:
        """Names of the episodes that have entries."""
        with self._lock:
            return [*self._episodes]

    def find(self, episode: str, call: int, call_digest: str) -> Outcome | None:
        """Return the answer to a call; None if none is recorded for a call with this digest."""
        with self._lock:
            entries = self._episodes.get(episode, [])
            # An answer to another request with the same index must not be reused, for example after
            # the sampling of the resumed run has changed.
            is_recorded = call < len(entries) and entries[call].call_digest == call_digest
            return entries[call].outcome if is_recorded else None

    def answers(self, episode: str) -> list[Outcome]:
        """Return all answers of an episode, in the order of its calls."""
        with self._lock:
            return [entry.outcome for entry in self._episodes.get(episode, [])]

    @fenced_write()
    def record(self, episode: str, call: int, call_digest: str, outcome: Outcome) -> None:
        """Record the answer to a call; it replaces this and all later answers of the episode.

        Args:
            episode: Name of the episode.
            call: Index of the call; 0 is the reset.
            call_digest: Digest of the call.
            outcome: The answer.

        Raises:
            AlignerError: The journal does not contain the previous call of the episode.
            OSError: The file cannot be written; the error contains its name.
        """
        entry = {"episode": episode, "call": call, "asked": call_digest, **vars(outcome)}
        with self._lock:
            if call > len(self._episodes.get(episode, [])):
                raise AlignerError(
                    f"episode {episode}: the journal has no entry before call {call}; do not forget"
                    " an episode that is still in progress"
                )
            self._apply(entry, self._write(entry))

    @fenced_write()
    def forget(self, episodes: Iterable[str]) -> None:
        """Remove complete episodes that are not needed any more; ignore unknown ones.

        Raises OSError.
        """
        with self._lock:
            known = [episode for episode in episodes if episode in self._episodes]
            if known:
                self._apply({"forget": known}, self._write({"forget": known}))
            # Rewrite the file only after at least as many bytes were appended as the rewrite
            # copies, so that the amortized cost is constant.
            if self._file is not None and self._size > 2 * self._live_size:
                self._rewrite(self._file)

    def _write(self, content: dict[str, Any]) -> int:
        """Append a line to the file, and return its size in bytes; 0 if there is no file."""
        if self._file is None:
            return 0
        line = _encode_line(content)
        try:
            append_to_file(self._file, line)
        except OSError:
            # remove an incomplete line, so that the next line does not continue it
            with contextlib.suppress(OSError):
                os.truncate(self._file, self._size)
            raise
        self._size += len(line)
        return len(line)

    def _apply(self, content: dict[str, Any], size: int) -> None:
        """Apply a line of the file to the entries in memory.

        Raises KeyError, TypeError or ValueError for a line that `_write` has not written.
        """
        if "forget" in content:
            for episode in content["forget"]:
                self._live_size -= sum(entry.size for entry in self._episodes.pop(episode))
            return

        entries = self._episodes.setdefault(content["episode"], [])
        call = content["call"]
        if call > len(entries):
            raise ValueError(call)
        # A new answer invalidates the answers to all later calls, which depended on it.
        # absent in the journals of earlier versions of aligner
        failure = content.get("failure")
        outcome = Outcome(
            content["observation"],
            content["reward"],
            content["done"],
            None if failure is None else FailureKind(failure),
        )
        self._live_size += size - sum(entry.size for entry in entries[call:])
        entries[call:] = [_Entry(content["asked"], outcome, size)]

    def _read(self, file: Path) -> None:
        """Read the file up to the first damaged line, and truncate it there."""
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                try:
                    if not line.endswith(b"\n"):
                        raise DamagedError("the line is truncated")
                    self._apply(unseal(line[:-1].decode("ascii")), len(line))
                except (DamagedError, KeyError, TypeError, ValueError) as error:
                    # Later lines may depend on the damaged one, such as answers to later calls.
                    dropped_bytes = os.fstat(stream.fileno()).st_size - self._size
                    _log.warning(
                        "%s:%d: %s; dropped this line and all later lines (%d bytes); their"
                        " environment calls run again",
                        file,
                        number,
                        error,
                        dropped_bytes,
                    )
                    os.truncate(file, self._size)
                    return
                self._size += len(line)

    def _rewrite(self, file: Path) -> None:
        """Replace the file by one that contains only the current entries."""
        with open_new_file(file) as stream:
            for episode, entries in self._episodes.items():
                for call, entry in enumerate(entries):
                    content = {
                        "episode": episode,
                        "call": call,
                        "asked": entry.call_digest,
                        **vars(entry.outcome),
                    }
                    stream.write(_encode_line(content))
        self._size = self._live_size


def compute_call_digest(call: Sequence[Any]) -> str:
    """Return the hash by which a journal identifies a call, which consists of JSON values."""
    return xxhash.xxh3_128_hexdigest(json.dumps(call, sort_keys=True).encode())


def _encode_line(content: dict[str, Any]) -> bytes:
    """Return an object as a line with its checksum."""
    return seal(json.dumps(content)).encode() + b"\n"
