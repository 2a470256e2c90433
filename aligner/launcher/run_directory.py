"""A run's directory, for one launch alone: made ready, resumed, and left with the run's timeline
and summary."""

import contextlib
import itertools
import shutil
from collections.abc import Iterator

from rich.console import Console

from aligner.config.compose import save_config
from aligner.config.resume import check_directory, dated, is_unused, settled
from aligner.data.claim import take_run
from aligner.errors import AlignerError, ConfigError, Stopped
from aligner.launcher.lock import locked
from aligner.launcher.next_steps import next_steps
from aligner.observability.console import print_line, print_summary
from aligner.observability.metrics import read_metrics
from aligner.observability.trace import write_trace
from aligner.paths import PRIVATE, RunPaths, early_end, run_paths
from aligner.placement.addresses import create_access_key
from aligner.schema import Config


@contextlib.contextmanager
def run_directory(config: Config, console: Console, patience_s: float = 0.0) -> Iterator[Config]:
    """Alone with the run's directory, ready to start or to resume; gives the configuration with
    run.resume settled.

    Writes the trace and, unless the run failed, prints a summary. Raises ConfigError where the
    directory is another run's, or after `patience_s` still another launch's. Nothing is left of a
    run that is refused before its trainer starts.
    """
    paths = run_paths(config)
    with locked(paths.root, patience_s=patience_s, mode=PRIVATE):
        check_directory(config)
        # from here on a trainer of an earlier launch changes nothing that is looked at
        if not (is_new := is_unused(paths)):
            take_run(config)
        config = dated(settled(config))
        if not config.run.resumes:
            _set_training_aside(paths, console)
        stopped = None
        try:
            save_config(config, paths.config)
            create_access_key(config)
            yield config
        except ConfigError:
            if is_new:
                shutil.rmtree(paths.root)
            raise
        except Stopped as error:
            stopped = error
        finally:
            try:
                write_trace(paths)
            except (AlignerError, OSError) as error:  # the run does not fail for want of it
                print_line(console, f"could not write {paths.trace}: {error}")
        metrics = read_metrics(paths.metrics)
        print_summary(metrics, paths, console)
        if (ended := early_end(paths)) is not None:
            print_line(console, ended)
        for line in next_steps(config, int(metrics[-1]["step"]) if metrics else 0):
            print_line(console, line)
        if stopped is not None:
            raise stopped


def _set_training_aside(paths: RunPaths, console: Console) -> None:
    """Move what a start that did not come to its first checkpoint has left out of the way; of what
    is empty nothing stays.

    Raises ConfigError for what cannot be moved.
    """
    left = [path for path in paths.of_training if path.exists()]
    if any(
        file.is_file() and file.stat().st_size for path in left for file in (path, *path.rglob("*"))
    ):
        aside = next(
            place for n in itertools.count(1) if not (place := paths.set_aside / str(n)).exists()
        )
        try:
            aside.mkdir(parents=True)
            for path in left:
                path.rename(aside / path.name)
        except OSError as error:
            raise ConfigError(
                f"run.dir={paths.root}: files of an earlier launch cannot be moved to another"
                f" directory: {error}; choose another run.dir"
            ) from error
        print_line(
            console,
            "no complete checkpoint: the run starts again from step 0. The files of the earlier"
            f" launch were moved to {aside}",
        )
    for path in left:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
