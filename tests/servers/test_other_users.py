"""Other users of the machine can neither read a server's files and memory nor block its start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from aligner.triton_cleanup import remove_triton_files
from tests import other_user

_SERVES = """
import sys
from pathlib import Path
from aligner.schema import PortsConfig
from aligner.servers.triton_host import TritonHost
from aligner.servers.wire_protocol import CONTROL
host = TritonHost("127.0.0.1", PortsConfig(), 16, log=Path(sys.argv[1]))
host.start({CONTROL: lambda request: request})
print("ready", flush=True)
sys.stdin.read()
host.stop()
print("stopped", flush=True)
"""


def shared_memory_files(process: psutil.Process) -> set[Path]:
    """Return the shared memory files of a server's processes."""
    processes = (process, *process.children(recursive=True))
    return {
        Path(entry.path)
        for one in processes
        for entry in one.memory_maps()
        if entry.path.startswith("/dev/shm/")
    }


@pytest.mark.promise("shared-memory-hidden-from-other-users")
@pytest.mark.slow
@other_user.needs_root
def test_other_user_cannot_read_or_block_a_server(tmp_path: Path) -> None:
    world = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    planted = [
        Path("/dev/shm") / f"aligner-server-{world}-{name}"
        for name in ("notanumber", "999999999", "999999999-abcdefgh")
    ]
    process = None
    try:
        for path in planted:
            assert other_user.succeeds("mkdir", str(path))
        process = subprocess.Popen(
            [sys.executable, "-c", _SERVES, str(tmp_path / "log")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            umask=0o022,
        )
        # Triton's warnings may precede this line.
        assert process.stdout is not None and "ready\n" in process.stdout
        (claim,) = Path("/dev/shm").glob(f"aligner-server-{world}-{process.pid}-*")
        directories = [Path(line) for line in (claim / "paths").read_text().splitlines()]
        memory = shared_memory_files(psutil.Process(process.pid))
        assert memory and any(path.name.startswith("pytrtion") for path in memory), memory
        for path in memory:
            assert not other_user.succeeds("cat", str(path)), path
        for path in (claim, *directories):
            assert not other_user.succeeds("ls", str(path)), path
        assert process.communicate(timeout=60)[0].endswith("stopped\n")
        assert not [path for path in (claim, *directories, *memory) if path.exists()]
        assert all(path.is_dir() for path in planted)
    finally:
        if process is not None and process.poll() is None:
            for one in (*psutil.Process(process.pid).children(recursive=True), process):
                one.kill()
            process.wait()
            remove_triton_files(process.pid)
        for path in planted:
            if path.exists():
                path.rmdir()
