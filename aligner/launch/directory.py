"""The run directory, from a launch that takes it to its end."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from aligner.config.access import create_access_key
from aligner.config.checks import check
from aligner.config.compose import save_config
from aligner.config.paths import RunPaths, run_paths
from aligner.config.resume import is_unused, settled
from aligner.config.schema import Config
from aligner.errors import ConfigError
from aligner.launch.lock import locked


@contextlib.contextmanager
def run_directory(config: Config) -> Iterator[Config]:
    """Alone with the run's directory, which is ready to start or to resume; gives the configuration, run.resume settled.

    Raises ConfigError for what `check` refuses, or where another launch works there. Where it is raised inside, nothing has
    started, and what was made here is removed.
    """
    paths = run_paths(config)
    with locked(paths.root):
        is_new = is_unused(paths)
        check(config)
        config = settled(config)
        if not config.run.resumes:
            _forget_training(paths)
        try:
            save_config(config, paths.config)
            create_access_key(config)
            yield config
        except ConfigError:
            if is_new:
                shutil.rmtree(paths.root)
            raise


def _forget_training(paths: RunPaths) -> None:
    """Remove what a start that did not come to its first checkpoint has left."""
    for path in paths.of_training:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
