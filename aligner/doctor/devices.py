"""Checks of GPUs: the driver, the build of torch, other processes on the GPUs, and NCCL."""

import contextlib
import ctypes
import importlib.metadata
import os
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil

from aligner.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from aligner.placement.roles import count_gpus

_NVIDIA_SMI_S = 2.5
_GPU_FIELDS = ("name", "driver_version", "memory.total", "memory.used")
# Memory in MiB that the driver itself uses on an idle GPU.
_IDLE_GPU_MIB = 1024
_CUDA_VERSION = re.compile(r"^cuda\b.*= ['\"](\d+)\.(\d+)", re.MULTILINE)
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def check_gpus() -> Iterator[Finding]:
    """Check the GPUs, their driver, and whether torch can use them."""
    count = count_gpus()
    if not count:
        yield Finding("GPUs", OK, "none; runs compute on CPUs in float32")
        return
    gpus = _query_gpus()
    if gpus is None:
        yield Finding(
            "GPUs",
            ERROR,
            f"the driver shows {count} GPUs, but nvidia-smi fails or does not answer within"
            f" {_NVIDIA_SMI_S:g} s; CUDA would fail or hang",
            "run nvidia-smi; reload the driver, or in a container use docker run --gpus all",
        )
        return
    name, driver, total, _ = gpus[0]
    yield Finding("GPUs", OK, f"{len(gpus)} x {name}, {int(total) / 1024:.0f} GiB, driver {driver}")
    busy = [index for index, gpu in enumerate(gpus) if int(gpu[3]) > _IDLE_GPU_MIB]
    if busy:
        yield Finding(
            "GPU memory",
            WARNING,
            f"other processes use memory of GPU {', '.join(map(str, busy))}; runs may not fit",
            "end them (nvidia-smi shows them), or select GPUs with CUDA_VISIBLE_DEVICES or"
            " cluster.devices",
        )
    yield from _check_torch_build()


def _query_gpus() -> list[list[str]] | None:
    """Return `_GPU_FIELDS` of each GPU; None if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}"]
    try:
        output = subprocess.run(
            [*command, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    gpus = [line.split(", ") for line in output.splitlines()]
    is_valid = gpus and all(len(gpu) == len(_GPU_FIELDS) and gpu[2].isdecimal() for gpu in gpus)
    return gpus if is_valid else None


def _check_torch_build() -> Iterator[Finding]:
    """Check that torch was built for CUDA, and that the driver supports this CUDA version."""
    torch_cuda = _read_torch_cuda_version()
    if torch_cuda is None:
        yield Finding(
            "torch",
            ERROR,
            "is a build for CPUs, so that no run can use the GPUs",
            "pip install the default build of torch, which supports CUDA",
        )
        return
    driver_cuda = _read_driver_cuda_version()
    # Within a major version of CUDA, older drivers run newer programs.
    if driver_cuda is not None and driver_cuda[0] < torch_cuda[0]:
        yield Finding(
            "torch",
            ERROR,
            f"is built for CUDA {torch_cuda[0]}.{torch_cuda[1]}, but the driver supports only CUDA"
            f" {driver_cuda[0]}.{driver_cuda[1]}",
            "update the driver, or install a build of torch for an older CUDA",
        )
    if find_spec("transformer_engine") is None:
        yield Finding(
            "transformer-engine",
            NOTE,
            "is not installed; bf16 layers use torch attention, which is slower, and fp8 is not"
            " available",
            "use aligner's container, or pip install transformer-engine[pytorch]",
        )


def _read_torch_cuda_version() -> tuple[int, int] | None:
    """Return the CUDA version that torch was built for, without importing torch; None for a build
    for CPUs."""
    specification = find_spec("torch")
    if specification is None or specification.origin is None:
        return None
    match = _CUDA_VERSION.search((Path(specification.origin).parent / "version.py").read_text())
    return None if match is None else (int(match[1]), int(match[2]))


def _read_driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports; None if it cannot be read."""
    version = ctypes.c_int()
    try:
        # This call does not create a CUDA context.
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def check_nccl() -> Iterator[Finding]:
    """Check NCCL and the network interfaces that environment variables select."""
    interfaces = set(psutil.net_if_addrs())
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        # Names are prefixes, `=` precedes exact names, and `^` names that are excluded.
        names = [] if value.startswith("^") else value.lstrip("=").split(",")
        unknown = [
            name
            for name in names
            if not any(interface.startswith(name) for interface in interfaces)
        ]
        if unknown:
            yield Finding(
                "NCCL",
                ERROR,
                f"{variable}={value}: this machine has no interface {', '.join(unknown)}, only"
                f" {', '.join(sorted(interfaces))}; ranks cannot connect",
                f"unset {variable}, or correct it",
            )
    if not count_gpus():
        return
    for package in _NCCL_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield Finding("NCCL", OK, f"{importlib.metadata.version(package)} ({package})")
            return
    yield Finding(
        "NCCL", OK, "no package nvidia-nccl: torch brings its own, as in NVIDIA's containers"
    )
