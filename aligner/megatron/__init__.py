"""The only room that imports megatron.core."""

import warnings

import torch

# megatron-core tells, at import and in every model it builds, of each optional GPU library that is absent. It falls back
# to torch, which is what a CPU run wants, and the lines would drown what a log is read for.
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|apex|transformer_engine).*not installed")

# Of torch's newer names for two collectives, and of an environment variable that is about CUDA streams.
warnings.filterwarnings("ignore", message=r".*(reduce_scatter_tensor|all_gather_into_tensor).* is deprecated")
warnings.filterwarnings("ignore", message=r".*CUDA_DEVICE_MAX_CONNECTIONS")


def _import_without_compiler() -> None:
    """Import megatron-core with `torch.compile` as no decoration at all.

    What it decorates is for GPUs. Decorating alone imports the compiler: two seconds of every rank's start.
    """
    compiler = torch.compile
    torch.compile = lambda function, **options: function  # type: ignore[assignment]
    try:
        from megatron.core import jit
    finally:
        torch.compile = compiler
    jit.disable_jit_fuser()  # for its modules that are imported later


if not torch.cuda.is_available():
    _import_without_compiler()
