"""Files that are complete whenever they are there."""

from __future__ import annotations

import os
from pathlib import Path


def write_file(path: Path, content: str | bytes) -> None:
    """Write all of a file or nothing, also where the process is killed or the machine loses power; text as UTF-8.

    One writer at a time: what a killed one leaves, `NAME.tmp`, is written over by the next. Raises OSError.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    _to_disk(temporary)
    temporary.replace(path)
    _to_disk(path.parent)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
