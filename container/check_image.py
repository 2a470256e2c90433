"""Check that an image contains what its roles import, at versions that aligner accepts.

    check_image.py trainer|server [HELD] [--no-gpu]

The build of each image ends with this check, so an unsuitable base image fails at build time and
not on the cluster. The check compares each requirement of aligner and of megatron-core with the
installed version, and imports what a run imports. HELD is the constraints file that `pins.py`
wrote; the check fails if a build step replaced one of the packages in it. With `--no-gpu`, packages
that only the GPU image contains are not required.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, Specifier
from packaging.version import InvalidVersion
from pins import canonical, installed, pinned

# TensorRT-LLM, transformer-engine and apex load the GPU driver when they are imported. An image
# build has no driver, so these packages are located without an import.
GPU_PACKAGES = ("tensorrt_llm", "transformer_engine", "apex", "ray")
GPU_VERSIONS = {"tensorrt-llm": "1.2."}
"""Required version prefix of packages that are not requirements of aligner."""
GPU_EXTRAS = ("tensorrt_llm",)
EXTRAS = {
    "trainer": ("sentiment", "verify", "wandb", "mlflow", "view", *GPU_EXTRAS),
    "server": ("sentiment", "verify", "wandb", "mlflow", "view", *GPU_EXTRAS, "server"),
}
"""Extras of aligner in each image."""
ROLES = {
    "trainer": ("prepare", "trainer"),
    "server": ("prepare", "trainer", "generator", "critic", "reward", "teacher"),
}
"""Roles of a run whose modules each image imports."""
EVERYWHERE = (
    *("aligner.cli", "aligner.launcher.local", "aligner.observability.sinks"),
    "aligner_examples.arithmetic",
    # Modules that a run or a command imports only when it uses them.
    *("tritonclient.grpc", "rich", "pyarrow.parquet", "huggingface_hub", "llguidance"),
    *("tensorboard.summary.writer.event_file_writer", "tensorboard.compat.proto.event_pb2"),
    *("vaderSentiment", "math_verify", "wandb", "mlflow.tracking"),
    *("duckdb", "plotly", "starlette", "uvicorn"),
)
OF_TARGET = {"trainer": (), "server": ("pytriton.triton", "aiohttp")}


def find_violations(
    distribution: str, extras: Sequence[str], has: Mapping[str, str]
) -> Iterator[str]:
    """Yield a message for each requirement of a distribution that is not met.

    Pre-releases, such as the builds of torch in NVIDIA's images, are accepted if they are within
    the bounds.

    Args:
        distribution: Name of an installed distribution.
        extras: Extras whose requirements must be met, too.
        has: Installed versions by normalized name.
    """
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        version = has.get(canonical(requirement.name))
        bounds = str(requirement.specifier) or "any version"
        if version is None:
            yield f"{requirement.name} is not installed; {distribution} requires {bounds}"
            continue
        try:
            is_met = requirement.specifier.contains(version, prereleases=True)
        except InvalidVersion:  # for example a version of Debian, such as 1.7build1
            is_met = False
        if not is_met:
            yield f"{requirement.name} is {version}; {distribution} requires {bounds}"


def is_pinned_version(installed_version: str, pin: str) -> bool:
    """Return whether pip accepts an installed version for a pin.

    A pin without a local version, such as 2.13.0, also accepts 2.13.0+cpu.
    """
    try:
        return Specifier(f"=={pin}").contains(installed_version, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):  # for example a version of Debian
        return installed_version == pin


def list_modules(target: str) -> tuple[str, ...]:
    """Return the modules that the roles and commands of an image import."""
    from aligner.cli.rank_processes import ROLES as FUNCTIONS

    roles = tuple(FUNCTIONS[role].partition(":")[0] for role in ROLES[target])
    return (*EVERYWHERE, *roles, *OF_TARGET[target])


def problems(target: str, held: Mapping[str, str], *, gpu: bool) -> Iterator[str]:
    """Yield one message for each missing or incompatible package."""
    has = installed()
    extras = [extra for extra in EXTRAS[target] if gpu or extra not in GPU_EXTRAS]
    # The build installs aligner and megatron-core without pip's check of their requirements.
    yield from dict.fromkeys(find_violations("aligner", extras, has))
    yield from find_violations("megatron-core", (), has)
    for name, beginning in GPU_VERSIONS.items() if gpu else ():
        version = has.get(name, "not installed")
        if not version.startswith(beginning):
            yield f"{name} is {version}; requires {beginning}*"
    for name, version in held.items():
        if name in has and not is_pinned_version(has[name], version):
            yield f"{name} is {has[name]}, but HELD pins {version}; a build step replaced it"
    for name in GPU_PACKAGES if gpu else ():
        if importlib.util.find_spec(name) is None:
            remedy = (
                "install the extra tensorrt_llm"
                if name == "ray"
                else "use a TensorRT-LLM release image as BASE_IMAGE"
            )
            yield f"{name} is not installed; {remedy}"
    for name in list_modules(target):
        try:
            importlib.import_module(name)
        except Exception as error:  # an incompatible package can raise any exception
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"


def main() -> int:
    """Print the problems of this environment; return 1 if there are any, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", choices=sorted(OF_TARGET), help="image to check")
    parser.add_argument(
        "held",
        nargs="?",
        type=Path,
        help="constraints file of pins.py, one name==version per line",
    )
    parser.add_argument(
        "--no-gpu",
        action="store_true",
        help="do not require the packages that only the GPU image contains",
    )
    given = parser.parse_args()
    held = pinned(given.held.read_text()) if given.held else {}
    found = list(problems(given.target, held, gpu=not given.no_gpu))
    for problem in found:
        print(f"{given.target} image: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
