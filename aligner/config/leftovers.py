"""What a server that was killed leaves behind on its machine."""

from __future__ import annotations

from pathlib import Path


def remove_shared_memory(pid: int) -> None:
    """Free the shared memory between Triton and its Python helpers that an ended process `pid` had PyTriton set up."""
    for file in Path("/dev/shm").glob(f"pytrtion{pid}-*"):  # PyTriton's spelling
        file.unlink(missing_ok=True)
