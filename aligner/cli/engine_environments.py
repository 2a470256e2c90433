"""`aligner install-vllm`: the environment of an engine that cannot live in ours."""

import argparse

from aligner.placement.roles import has_gpu
from aligner.vllm_environment import CPU_PACKAGE, GPU_PACKAGE, install_vllm, vllm_place


def install(parsed: argparse.Namespace) -> None:
    """Make it, if it is not there, and print its Python."""
    package = parsed.package or (GPU_PACKAGE if has_gpu() else CPU_PACKAGE)
    print(install_vllm(vllm_place(), package))
