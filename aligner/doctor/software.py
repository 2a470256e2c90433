"""Checks of installed software: Python, packages, Triton, the compiler, vLLM, sandboxes, containers
and Slurm."""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from aligner.agents.sandboxes.bubblewrap import Bubblewrap, find_bubblewrap
from aligner.agents.sandboxes.sandbox_limits import describe_missing_groups, list_remedies
from aligner.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from aligner.errors import ConfigError
from aligner.extras import describe_missing_modules, describe_numpy_conflict
from aligner.gpu_libraries import find_broken_libraries
from aligner.placement.roles import has_gpu
from aligner.schema import VLLMConfig
from aligner.schema.environment import PythonToolConfig
from aligner.vllm_environment import find_vllm_python

_PYTHON_VERSIONS = ((3, 10), (3, 12))
_REQUIRED_PACKAGES = ("torch", "megatron-core")
_SLURM_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
_COMPILERS = ("cc", "gcc", "clang")
_TIMEOUT_S = 2.0


def check_python() -> Iterator[Finding]:
    """Check the version of Python and the platform."""
    version = platform.python_version()
    system, machine = platform.system(), platform.machine()
    found = f"{version} at {sys.executable}, {system} on {machine}"
    oldest, newest = _PYTHON_VERSIONS
    if not oldest <= sys.version_info[:2] <= newest:
        yield Finding(
            "Python",
            ERROR,
            f"{found}; aligner supports 3.10, 3.11 and 3.12, and the Triton server has no Python"
            " backend for other versions",
            "create a virtual environment with Python 3.11",
        )
    elif (system, machine) != ("Linux", "x86_64"):
        yield Finding(
            "Python",
            ERROR,
            f"{found}; the Triton server exists only for Linux on x86_64",
            "use a Linux machine with an x86-64 processor",
        )
    else:
        yield Finding("Python", OK, found)


def check_shared_libpython() -> Iterator[Finding]:
    """Check that this Python has a shared library, which Triton's Python processes load.

    `servers.triton_host` adds LIBDIR to the library path of these processes.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    directory = str(sysconfig.get_config_var("LIBDIR"))
    if (Path(directory) / name).exists():
        yield Finding("libpython", OK, f"{directory}/{name}")
        return
    yield Finding(
        "libpython",
        WARNING,
        f"{name} is not in LIBDIR={directory}; Triton's Python processes would load another one or"
        " none, and the servers of online algorithms would not start",
        "use a Python that was built with --enable-shared, such as that of uv, conda or"
        " PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install",
    )


def check_packages() -> Iterator[Finding]:
    """Check that required packages are installed in versions that work together."""
    versions = {}
    for package in _REQUIRED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if missing := [package for package in _REQUIRED_PACKAGES if package not in versions]:
        yield Finding(
            "packages",
            ERROR,
            f"{', '.join(missing)}: not installed; training needs them",
            f"pip install -c constraints.txt {' '.join(missing)}",
        )
    else:
        installed = [f"{package} {version}" for package, version in versions.items()]
        yield Finding("packages", OK, ", ".join(installed))
    if (conflict := describe_numpy_conflict()) is not None:
        yield Finding(
            "numpy",
            ERROR,
            f"{conflict.partition(';')[0]}; Triton's Python processes would return wrong bytes",
            "pip install 'numpy<2'",
        )


def check_triton() -> Iterator[Finding]:
    """Check the Triton server and the libraries that it loads."""
    if (missing := describe_missing_modules("server")) is not None:
        found, _, remedy = missing.partition("; ")
        yield Finding(
            "Triton",
            WARNING,
            f"{found}; only offline algorithms work (sft, dpo, reward_model), and runs with"
            " server.python",
            remedy.removeprefix("install the server extra: "),
        )
        return
    specification = find_spec("pytriton")
    assert specification is not None and specification.origin is not None
    server = Path(specification.origin).parent / "tritonserver" / "bin" / "tritonserver"
    version = importlib.metadata.version("nvidia-pytriton")
    missing_libraries = _find_missing_libraries(server)
    if missing_libraries:
        yield Finding(
            "Triton",
            ERROR,
            f"{server} needs {', '.join(missing_libraries)}, which the dynamic linker does not"
            " find; no server would start",
            "install the packages of the system that contain these libraries",
        )
    elif not os.access(server, os.X_OK):
        yield Finding(
            "Triton",
            ERROR,
            f"{server} does not exist or is not executable; no server would start",
            "pip install --force-reinstall nvidia-pytriton",
        )
    else:
        yield Finding("Triton", OK, f"PyTriton {version} with its Triton server")


def _find_missing_libraries(program: Path) -> list[str]:
    """Return the names of the shared libraries of a program that cannot be found."""
    output = _run_command("ldd", str(program))
    lines = [] if output is None else output.splitlines()
    return [line.split()[0] for line in lines if line.rstrip().endswith("not found")]


def check_gpu_libraries() -> Iterator[Finding]:
    """Check that the installed GPU libraries of megatron-core can be imported."""
    level, consequence = NOTE, "runs on CPUs do not use it"
    if has_gpu():
        level, consequence = ERROR, "the trainer and servers with models would not start"
    for library, reason in find_broken_libraries().items():
        yield Finding(
            library,
            level,
            f"is installed, but cannot be imported: {reason}; {consequence}",
            f"correct the installation, or pip uninstall {library}",
        )


def check_compiler() -> Iterator[Finding]:
    """Check the compiler, with which torch.compile builds the launchers of GPU kernels."""
    if not has_gpu():
        return  # on CPUs, nothing is compiled
    compiler = os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    lacks = []
    if compiler is None or shutil.which(compiler) is None:
        lacks.append("no C compiler (cc, gcc, clang or $CC)")
    if not header.is_file():
        lacks.append(f"no {header}")
    if lacks:
        yield Finding(
            "compiler",
            WARNING,
            f"{' and '.join(lacks)}; torch.compile cannot build the kernels that compute log-probs"
            " on GPUs",
            "apt-get install gcc, and the headers of this Python (python3-dev)",
        )
    else:
        yield Finding("compiler", OK, f"{shutil.which(str(compiler))}, with Python's headers")


def check_vllm() -> Iterator[Finding]:
    """Check the separate environment of vLLM."""
    try:
        python = find_vllm_python(VLLMConfig())
    except ConfigError:
        yield Finding(
            "vLLM",
            NOTE,
            "is not installed; runs with engine=vllm need it",
            "aligner install-vllm",
        )
        return
    packages = Path(python).parent.parent / "lib"
    is_installed = any(packages.glob("python*/site-packages/vllm/__init__.py"))
    if is_installed:
        yield Finding("vLLM", OK, f"environment {Path(python).parent.parent}")
    else:
        yield Finding(
            "vLLM",
            WARNING,
            f"{python} exists, but its environment has no vLLM; runs with engine=vllm would fail",
            f"rm -r {Path(python).parent.parent}; aligner install-vllm",
        )


def check_sandbox() -> Iterator[Finding]:
    """Check with a probe program what a sandbox of this machine does not enforce."""
    consequence = "the agent tools python and bash refuse to start (environment.sandbox=required)"
    if find_bubblewrap() is None:
        yield Finding(
            "sandbox",
            WARNING,
            f"bubblewrap is not installed, or older than 0.8; {consequence}",
            "pip install 'aligner[sandbox]', or apt-get install bubblewrap",
        )
        return
    limits = PythonToolConfig()
    gaps = Bubblewrap.detect(limits).find_gaps()
    if gaps:
        yield Finding(
            "sandbox",
            WARNING,
            f"of a program in a sandbox, {'; '.join(map(str, gaps))}; {consequence}",
            f"{list_remedies(gaps)}, or use environment.sandbox_url (docs/sandboxes.md)",
        )
    elif missing_groups := describe_missing_groups(limits):
        yield Finding("sandbox", NOTE, f"bubblewrap; {missing_groups}")
    else:
        yield Finding("sandbox", OK, "bubblewrap; a probe program could not break out")


def check_containers() -> Iterator[Finding]:
    """Check whether this machine is a container, and which container programs it has."""
    inside = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    programs = [name for name in ("podman", "docker", "enroot") if shutil.which(name)]
    place = "this is a container; " if inside else ""
    if not programs:
        yield Finding(
            "containers",
            NOTE,
            f"{place}podman, docker and enroot are not installed;"
            " environment.sandbox_image needs podman or docker",
            "install podman if you need it",
        )
        return
    socket = Path("/var/run/docker.sock")
    if programs == ["docker"] and socket.exists() and not os.access(socket, os.W_OK):
        yield Finding(
            "containers",
            WARNING,
            f"{place}this user may not use {socket}; environment.sandbox_image would fail",
            "add the user to the group docker, or install podman",
        )
    else:
        yield Finding("containers", OK, f"{place}{', '.join(programs)}")


def check_slurm() -> Iterator[Finding]:
    """Check the commands of Slurm that `cluster=slurm` calls."""
    missing = [name for name in _SLURM_COMMANDS if shutil.which(name) is None]
    if len(missing) == len(_SLURM_COMMANDS):
        yield Finding(
            "Slurm",
            NOTE,
            "is not installed; runs with cluster=slurm are launched on a machine of the cluster",
        )
    elif missing:
        yield Finding(
            "Slurm",
            WARNING,
            f"{', '.join(missing)}: not found in PATH; runs with cluster=slurm would fail",
            "install the package slurm-client, or load Slurm's module",
        )
    else:
        version = _run_command("sinfo", "--version") or "commands found"
        yield Finding("Slurm", OK, version.strip())


def _run_command(*command: str) -> str | None:
    """Return the output of a command; None if it fails, hangs or does not exist."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout
