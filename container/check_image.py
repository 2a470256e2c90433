"""Check that an image contains the packages that its roles import, at compatible versions.

    check_image.py trainer|server [HELD] [--no-gpu]

The build of each image ends with this check, so an unsuitable base image fails at build time and
not on the cluster. HELD is the constraints file that `pins.py` wrote; the check fails if a build
step replaced one of the packages in it. With `--no-gpu`, packages that only the GPU image contains
are not required.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from pins import installed, pinned

# TensorRT-LLM, transformer-engine and apex load the GPU driver when they are imported. An image
# build has no driver, so these packages are located without an import.
GPU_PACKAGES = ("tensorrt_llm", "transformer_engine", "apex", "ray")
GPU_VERSIONS = {"tensorrt-llm": "1.2."}
VERSIONS = {"megatron-core": "0.16.", "numpy": "1.", "hydra-core": "1.3."}
"""Required version prefix of each package. nvidia-pytriton requires numpy below 2; all roles use
the same bound."""
EVERYWHERE = (
    *(
        "torch",
        "hydra",
        "safetensors",
        "tokenizers",
        "jinja2",
        "tritonclient.grpc",
        "rich",
        "tensorboard",
        "psutil",
        "xxhash",
    ),
    *(
        "vaderSentiment",
        "math_verify",
        "wandb",
        "mlflow.tracking",
        "duckdb",
        "aligner.cli",
        "aligner.config.compose",
        "aligner_examples.arithmetic",
    ),
)
OF_TARGET = {"trainer": ("aligner.launcher.local",), "server": ("pytriton.triton",)}


def problems(target: str, held: Mapping[str, str], *, gpu: bool) -> Iterator[str]:
    """Yield one message for each missing or incompatible package."""
    has = installed()
    for name, beginning in {**VERSIONS, **(GPU_VERSIONS if gpu else {})}.items():
        version = has.get(name, "not installed")
        if not version.startswith(beginning):
            yield f"{name} is {version}; requires {beginning}*"
    for name, version in held.items():
        if name in has and has[name] != version:
            yield f"{name} is {has[name]}, but HELD pins {version}; a build step replaced it"
    for name in GPU_PACKAGES if gpu else ():
        if importlib.util.find_spec(name) is None:
            remedy = (
                "install the extra tensorrt_llm"
                if name == "ray"
                else "use a TensorRT-LLM release image as BASE_IMAGE"
            )
            yield f"{name} is not installed; {remedy}"
    for name in (*EVERYWHERE, *OF_TARGET[target]):
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
