"""Creation of sandboxes from settings, and the default settings of a process."""

import asyncio
from collections.abc import Mapping
from functools import lru_cache

from aligner.agents.failures import InfrastructureError
from aligner.agents.sandboxes.bubblewrap import Bubblewrap
from aligner.agents.sandboxes.local_sandbox import LocalSandbox
from aligner.agents.sandboxes.sandbox import Sandbox, SandboxSettings
from aligner.agents.sandboxes.sandbox_limits import Gap, describe_gaps
from aligner.schema.environment import PythonToolConfig

_default_settings = SandboxSettings()


def set_default_settings(settings: SandboxSettings) -> None:
    """Set the settings that `create_sandbox` uses in this process."""
    global _default_settings
    _default_settings = settings


async def create_sandbox(
    files: Mapping[str, str | bytes] | None = None, settings: SandboxSettings | None = None
) -> Sandbox:
    """Start a sandbox; the caller has to close it.

    Args:
        files: Contents of the initial files by their paths.
        settings: Kind and limits. Default are the run's settings: `environment.sandbox_image`,
            `environment.sandbox_url`, `environment.sandbox` and `environment.python`.

    Raises:
        InfrastructureError: The sandbox does not start, or this machine cannot enforce its
            isolation.
        SandboxFileError: A file cannot be written.
    """
    settings = settings or _default_settings
    sandbox = await _build_sandbox(settings)
    try:
        await sandbox.start(files or {})
    except BaseException:
        await sandbox.close()
        raise
    return sandbox


async def _build_sandbox(settings: SandboxSettings) -> Sandbox:
    """Return a sandbox that has not been started."""
    if settings.url is not None:
        from aligner.agents.sandboxes.remote_sandbox import RemoteSandbox

        return RemoteSandbox(settings)
    if settings.image is not None:
        from aligner.agents.sandboxes.container_sandbox import ContainerSandbox

        return ContainerSandbox(settings.image, settings.limits)
    if settings.isolation is not None:
        return LocalSandbox(Bubblewrap(settings.limits, settings.isolation))

    # the detection blocks for some processes' time
    bubblewrap, gaps = await asyncio.to_thread(_detect, tuple(vars(settings.limits).items()))
    if gaps and settings.requirement == "required":
        raise InfrastructureError(
            f"this machine does not enforce the sandbox: {describe_gaps(gaps)}"
        )
    return LocalSandbox(bubblewrap)


@lru_cache
def _detect(limits: tuple[tuple[str, int], ...]) -> tuple[Bubblewrap, list[Gap]]:
    """Return the strongest isolation of this machine and its gaps, detected once per process."""
    bubblewrap = Bubblewrap.detect(PythonToolConfig(**dict(limits)))
    return bubblewrap, bubblewrap.find_gaps()
