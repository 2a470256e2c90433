"""Whether an image has what its roles need, at versions that fit together: `check_image.py
trainer|server [HELD]`.

Run at the end of a build, so that a base image that does not fit fails there and not on the
cluster. HELD is what `pins.py` wrote: no build step may have replaced any of it. With `--no-gpu`
the packages that only the GPU image has are not asked for.
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

# TensorRT-LLM, transformer-engine and apex load the driver when they are imported, and a build has
# none: they are looked up.
GPU_PACKAGES = ("tensorrt_llm", "transformer_engine", "apex", "ray")
GPU_VERSIONS = {"tensorrt-llm": "1.2."}
VERSIONS = {"megatron-core": "0.16.", "numpy": "1.", "hydra-core": "1.3."}
"""What versions must begin with; numpy below 2 is nvidia-pytriton's bound, kept everywhere."""
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
    """One line for each thing that does not fit."""
    has = installed()
    for name, beginning in {**VERSIONS, **(GPU_VERSIONS if gpu else {})}.items():
        version = has.get(name, "missing")
        if not version.startswith(beginning):
            yield f"{name} is {version}; {beginning}* is needed"
    for name, version in held.items():
        if name in has and has[name] != version:
            yield f"{name} {version} was to stay, and is {has[name]} now"
    for name in GPU_PACKAGES if gpu else ():
        if importlib.util.find_spec(name) is None:
            yield f"{name} is not there; the base image brings all but ray"
    for name in (*EVERYWHERE, *OF_TARGET[target]):
        try:
            importlib.import_module(name)
        except Exception as error:  # a package that does not fit another fails in its own way
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"


def main() -> int:
    """Print what does not fit; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=sorted(OF_TARGET))
    parser.add_argument("held", nargs="?", type=Path, help="name==version a line")
    parser.add_argument("--no-gpu", action="store_true")
    given = parser.parse_args()
    held = pinned(given.held.read_text()) if given.held else {}
    found = list(problems(given.target, held, gpu=not given.no_gpu))
    for problem in found:
        print(f"{given.target} image: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
