"""Entries of the cache: their sizes, the runs that use them, and their deletion.

    data/<name>/                       tokenized data
    datasets/<name>/                   data sets of the Hugging Face Hub
    models/<name>/                     converted models
    packages/<name>/                   packages of `aligner fetch`
    experiments/<name>/                prerequisite experiments and their results
    engines/<name>/                    environments of engines
    uses/<kind>/<name>/<digest>        the directory of a run that uses an entry; the file's
                                       modification time is the time of the last use

Each use is a separate file, so that concurrent runs do not overwrite each other's records.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aligner.files import NO_LOCKS, open_new_file
from aligner.paths import LOCK, get_cache_directory

KINDS = ("data", "datasets", "models", "packages", "experiments", "engines")
"""Kinds of entries, which are the names of their directories in the cache."""

_USES = "uses"
# Minimum age of a temporary directory that counts as the leftover of a killed process.
_LEFTOVER_AGE_S = 86400.0


@dataclass(frozen=True)
class CacheEntry:
    """An entry of the cache."""

    kind: str
    """One of `KINDS`."""
    name: str
    path: Path
    size: int
    """Total size of the entry's files in bytes."""
    last_use: float
    """Start of the last run that used the entry, or creation of the entry if that is later, in
    seconds since the epoch."""
    runs: tuple[Path, ...]
    """Directories of the runs that use the entry, the most recent use first. Runs whose directory
    was deleted are omitted."""


@dataclass
class PruneReport:
    """Result of `prune`."""

    deleted: list[CacheEntry] = field(default_factory=list)
    kept: list[tuple[CacheEntry, str]] = field(default_factory=list)
    """Entries that were to be deleted but could not be, with the reason."""
    leftovers: list[Path] = field(default_factory=list)
    """Deleted temporary directories of killed processes."""
    freed_bytes: int = 0
    remaining_bytes: int = 0
    """Total size of the entries that remain."""


def record_use(entry: Path, run_directory: Path) -> None:
    """Record that a run uses an entry of the cache from now on.

    Errors are ignored, because a run also works with a cache that it cannot write.

    Args:
        entry: Path of the entry, or of a file in it. The entry need not exist yet. Paths outside
            the cache are ignored.
        run_directory: Directory of the run. It need not exist yet.
    """
    cache = get_cache_directory().absolute()
    path = entry.absolute()
    if cache not in path.parents:
        return
    kind, *names = path.relative_to(cache).parts
    if kind not in KINDS or not names:
        return

    run = os.fsencode(run_directory.absolute())
    record = _get_uses_directory(kind, names[0]) / hashlib.sha256(run).hexdigest()[:16]
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        with open_new_file(record) as file:
            file.write(run)


def list_entries(kinds: Sequence[str] = KINDS) -> list[CacheEntry]:
    """Return the complete entries of some kinds, ordered by kind and name."""
    entries = []
    for kind in kinds:
        for path in _list_directories(kind):
            if not _is_temporary(path):
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                    entries.append(_read_entry(kind, path))
    return entries


def prune(
    get_active_state: Callable[[Path], str | None],
    *,
    older_than_s: float | None = None,
    max_bytes: float | None = None,
    kinds: Sequence[str] = KINDS,
    dry_run: bool = False,
) -> PruneReport:
    """Delete entries by their last use, and leftovers of killed processes.

    An entry is kept if an active run uses it, or if another process holds its lock.

    Args:
        get_active_state: Function that returns the state of the run in a directory, such as
            `running`; None for a run that has ended.
        older_than_s: Delete entries whose last use was more than this number of seconds ago.
        max_bytes: Delete the least recently used entries until the total size of the entries is at
            most this number of bytes.
        kinds: Kinds of entries to delete and to count.
        dry_run: Whether to delete nothing, and only report the entries that would be deleted.
    """
    report = PruneReport()
    now = time.time()
    for leftover in _list_leftovers(kinds, now):
        size = _measure(leftover).size
        with contextlib.suppress(OSError):  # for example, a directory of another user
            if not dry_run:
                _delete_tree(leftover)
            report.leftovers.append(leftover)
            report.freed_bytes += size

    entries = sorted(list_entries(kinds), key=lambda entry: entry.last_use)
    report.remaining_bytes = sum(entry.size for entry in entries)
    for entry in entries:
        is_old = older_than_s is not None and now - entry.last_use > older_than_s
        is_excess = max_bytes is not None and report.remaining_bytes > max_bytes
        if not (is_old or is_excess):
            continue
        reason = _delete_entry(entry, get_active_state, dry_run)
        if reason is not None:
            report.kept.append((entry, reason))
            continue
        report.deleted.append(entry)
        report.freed_bytes += entry.size
        report.remaining_bytes -= entry.size

    if not dry_run:
        _delete_stale_records()
    return report


def _read_entry(kind: str, path: Path) -> CacheEntry:
    uses = _read_uses(kind, path.name)
    # The time of a use counts also if the directory of the run was deleted.
    last_use = max([path.lstat().st_mtime, *(use.time for use in uses)])
    runs = tuple(use.run for use in uses if _may_exist(use.run))
    return CacheEntry(kind, path.name, path, _measure(path).size, last_use, runs)


def _delete_entry(
    entry: CacheEntry, get_active_state: Callable[[Path], str | None], dry_run: bool
) -> str | None:
    """Delete an entry, or return the reason why it is kept."""
    # A process that starts now must never find a part of the entry.
    hidden = entry.path.with_name(f".{entry.name}.{secrets.token_hex(16)}")
    try:
        with _hold_lock(entry.kind, entry.path, create=not dry_run) as is_held:
            if not is_held:
                return "another process is creating or checking it"
            # A run may have started since the entry was listed.
            uses = _read_uses(entry.kind, entry.name)
            for use in uses:
                if (state := get_active_state(use.run)) is not None:
                    return f"used by {use.run}, which is {state}"
            if dry_run:
                return None
            entry.path.rename(hidden)
            for use in uses:
                use.record.unlink(missing_ok=True)
        _delete_tree(hidden)
    except OSError as error:
        return f"cannot be deleted: {error}"
    return None


@dataclass(frozen=True)
class _Use:
    """The recorded use of an entry by a run."""

    record: Path
    """File of the record."""
    run: Path
    time: float


def _get_uses_directory(kind: str, name: str) -> Path:
    return get_cache_directory().absolute() / _USES / kind / name


def _read_uses(kind: str, name: str) -> list[_Use]:
    """Return the uses of an entry, the most recent use first."""
    uses = []
    for record in _get_uses_directory(kind, name).glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
            run = Path(os.fsdecode(record.read_bytes()))
            uses.append(_Use(record, run, record.stat().st_mtime))
    return sorted(uses, key=lambda use: use.time, reverse=True)


def _delete_stale_records() -> None:
    """Delete the records of runs whose directory was deleted.

    The most recent record of each entry is kept, because its time is the entry's last use.
    """
    for directory in (get_cache_directory().absolute() / _USES).glob("*/*"):
        for use in _read_uses(directory.parent.name, directory.name)[1:]:
            if not _may_exist(use.run):
                with contextlib.suppress(OSError):
                    use.record.unlink()


def _may_exist(path: Path) -> bool:
    """Return whether a path exists, or is hidden by the permissions of its parents."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _list_directories(kind: str) -> list[Path]:
    """Return the directories of entries of one kind, and temporary directories."""
    return sorted(
        path for path in (get_cache_directory().absolute() / kind).glob("*") if path.is_dir()
    )


def _is_temporary(path: Path) -> bool:
    """Return whether a directory is incomplete: a process is creating or deleting it, or was
    killed."""
    # `create_directory` hides its directory, `start_directory` appends `.tmp`, and `install_vllm`
    # appends `.partial`.
    return path.name.startswith(".") or path.suffix in (".tmp", ".partial")


def _list_leftovers(kinds: Sequence[str], now: float) -> list[Path]:
    """Return temporary directories of processes that were killed.

    Args:
        kinds: Kinds of entries.
        now: The current time in seconds since the epoch.
    """
    leftovers = []
    for kind in kinds:
        for path in filter(_is_temporary, _list_directories(kind)):
            # The name of a hidden directory is `.<name>.<random digits>`.
            entry = path.with_name(path.stem.removeprefix("."))
            if now - _measure(path).modified <= _LEFTOVER_AGE_S:
                continue
            with _hold_lock(kind, entry, create=False) as is_held:
                if is_held:
                    leftovers.append(path)
    return leftovers


@contextlib.contextmanager
def _hold_lock(kind: str, entry: Path, *, create: bool) -> Iterator[bool]:
    """Lock an entry in a `with` block; yield False if another process holds the lock.

    Models, packages and environments have no locks; their processes create a directory under
    another name.

    Args:
        kind: Kind of the entry.
        entry: Path of the entry.
        create: Whether to create the lock file of a data set if it does not exist.
    """
    if kind == "data":
        lock = entry.with_name(f"{entry.name}.lock")
    elif kind == "experiments":
        lock = entry / LOCK
    else:
        yield True
        return
    # A launch holds the lock of an experiment until the result is complete, and then deletes it.
    if not lock.exists() and not (create and kind == "data"):
        yield True
        return

    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            is_held = True
        else:
            is_held = True
        yield is_held


@dataclass(frozen=True)
class _Measurement:
    """Total size in bytes of a directory's files, and the time of the latest modification."""

    size: int
    modified: float


def _measure(directory: Path) -> _Measurement:
    """Measure a directory. Symbolic links are not followed."""
    size = 0
    modified = directory.lstat().st_mtime
    tree = () if directory.is_symlink() else os.walk(directory)
    for parent, directory_names, file_names in tree:
        for name in (*directory_names, *file_names):
            with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                status = Path(parent, name).lstat()
                modified = max(modified, status.st_mtime)
                size += 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return _Measurement(size, modified)


def _delete_tree(directory: Path) -> None:
    """Delete a directory, or a symbolic link to a directory without its target."""
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)
