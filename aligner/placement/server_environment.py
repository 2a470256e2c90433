"""The Python environment of the servers, which may differ from the environment of the launcher.

PyTriton requires releases of numpy and Python that would otherwise limit the environment of the
trainer. With `server.python`, the roles that host a PyTriton server run with the interpreter of
another environment on the same machine.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from aligner.errors import ConfigError
from aligner.extras import describe_missing_modules, describe_numpy_conflict
from aligner.placement.job_layout import get_node_settings
from aligner.placement.roles import count_server_ranks, has_generator
from aligner.schema import Config
from aligner.schema.reward_sources import FunctionSource, parse_reward_sources
from aligner.schema.scoring_functions import EXTRAS_OF_FUNCTIONS
from aligner.version import __version__

# Maximum duration of the probe in seconds. It imports only small modules of aligner, but a network
# file system may be slow.
_PROBE_TIMEOUT_S = 60.0
# Program that describes its environment as JSON. Its arguments are the required extras. Like a
# rank, it finds modules in the working directory and in PYTHONPATH. It stops after the version of
# aligner if this version is not the launcher's, because the other modules may differ.
_PROBE = """
import json, platform, sys
from importlib import metadata
found = {"python": platform.python_version()}
try:
    from aligner.version import __version__
    found["aligner"] = __version__
    if __version__ == sys.argv[1]:
        from aligner.extras import describe_missing_modules, describe_numpy_conflict
        lines = [*map(describe_missing_modules, sys.argv[2:]), describe_numpy_conflict()]
        found["problems"] = [line for line in lines if line is not None]
        found["torch"] = metadata.version("torch")
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


def get_server_python(config: Config) -> str:
    """Return the Python interpreter of the roles that host PyTriton servers."""
    return config.server.python or sys.executable


def check_server_environment(config: Config) -> None:
    """Raise ConfigError with all problems of the servers' Python environment."""
    if problems := list(find_environment_problems(config)):
        raise ConfigError("\n".join(problems))


def find_environment_problems(config: Config) -> Iterator[str]:
    """Yield a line for each reason why the servers of a run cannot start in their Python
    environment on this machine.

    In a job, this is the environment of the trainer's image. Servers with another image start in
    an environment that cannot be checked from here.
    """
    servers = [
        group for group in count_server_ranks(config) if _has_image_of_trainer(config, group)
    ]
    if not servers:
        return
    python = config.server.python
    if python is None:
        if problem := describe_missing_modules("server") or describe_numpy_conflict():
            yield (
                f"this run starts servers ({', '.join(servers)}): {problem}, or set"
                " server.python to the Python interpreter of another environment that has this"
                " extra"
            )
        return

    key = f"server.python={python}"
    if shutil.which(python) is None:
        yield (
            f"{key}: no such program; set the path of the Python interpreter of an environment in"
            f" which 'aligner[server]' {__version__} is installed"
        )
        return
    try:
        found = _probe_environment(python, _list_required_extras(config))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        yield f"{key}: is not a working Python interpreter: {_describe_probe_error(error)}"
        return

    remedy = f"install it there with {python} -m pip install 'aligner[server]=={__version__}'"
    if "aligner" not in found:
        yield f"{key}: aligner cannot be imported there ({found['error']}); {remedy}"
    elif found["aligner"] != __version__:
        yield (
            f"{key}: aligner {found['aligner']} is installed there, but this process is aligner"
            f" {__version__}; {remedy}"
        )
    elif problems := found.get("problems"):
        yield from (f"{key}: {problem}" for problem in problems)
    elif "error" in found:
        yield f"{key}: this environment is not complete ({found['error']}); {remedy}"
    else:
        yield from _find_torch_problems(config, found["torch"])


def _has_image_of_trainer(config: Config, group: str) -> bool:
    """Return whether a server group starts in the same container image as the trainer, or in
    none."""
    if config.cluster.kind == "local":
        return True
    images = [
        getattr(get_node_settings(config, role), "image", None) for role in ("trainer", group)
    ]
    # A role without an image of its own has that of the job.
    own, server = (image or config.cluster.job.image for image in images)
    return own == server


def _find_torch_problems(config: Config, server_torch: str) -> Iterator[str]:
    """Yield a line if trainer and generator, which form one process group, differ in torch."""
    if not has_generator(config):
        return
    own_torch = metadata.version("torch")
    # Builds of a release for CPUs and for releases of CUDA differ in the text after the plus sign.
    if server_torch.partition("+")[0] != own_torch.partition("+")[0]:
        yield (
            f"server.python={config.server.python}: torch {server_torch} is installed there, but"
            f" torch {own_torch} here; with engine.placement=server, both must be the same"
            " release, because trainer and generator form one process group"
        )


def _list_required_extras(config: Config) -> list[str]:
    """Return the extras that the servers of a run need."""
    try:
        sources = parse_reward_sources(config.reward)
    except ConfigError:
        return ["server"]  # checks/reward.py reports the error
    names = [source.function for source in sources if isinstance(source, FunctionSource)]
    extras = [EXTRAS_OF_FUNCTIONS[name] for name in names if name in EXTRAS_OF_FUNCTIONS]
    return ["server", *dict.fromkeys(extras)]


def _probe_environment(python: str, extras: list[str]) -> dict[str, Any]:
    """Return the description of an environment that `_PROBE` prints.

    Raises:
        OSError: The interpreter cannot be executed.
        SubprocessError: The probe failed or took too long.
        ValueError: The program printed something else, so it is not a Python interpreter.
    """
    probe = subprocess.run(
        [python, "-c", _PROBE, __version__, *extras],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=True,
    )
    found = json.loads(probe.stdout)
    if not isinstance(found, dict):
        raise ValueError(f"it printed {probe.stdout.strip()!r}")
    return found


def _describe_probe_error(error: Exception) -> str:
    """Return the reason why the probe failed, in one line."""
    if isinstance(error, subprocess.CalledProcessError) and error.stderr:
        return str(error.stderr.strip().splitlines()[-1])
    return str(error)
