"""`aligner install-vllm`: create the separate Python environment of the vLLM engine."""

import argparse

from aligner.placement.roles import has_gpu
from aligner.vllm_environment import (
    CPU_PACKAGE,
    GPU_PACKAGE,
    get_default_vllm_directory,
    install_vllm,
)


def install(parsed: argparse.Namespace) -> None:
    """Create the environment if it does not exist, and print the path of its Python interpreter."""
    package = parsed.package or (GPU_PACKAGE if has_gpu() else CPU_PACKAGE)
    print(install_vllm(get_default_vllm_directory(), package))
