"""`aligner new`: create the files of an experiment for the user to edit."""

import argparse
import shlex
from pathlib import Path

from aligner.errors import ConfigError
from aligner.terminal import print_text

_TEMPLATES = Path(__file__).parent / "templates"
_FILES = {
    "experiment/my_experiment.yaml": "experiment.yaml",
    "cluster/my_slurm.yaml": "my_slurm.yaml",
    "my_reward.py": "my_reward.py",
    "data.jsonl": "data.jsonl",
}
_ARGUMENTS = "--config-dir . experiment=my_experiment model.path=DIRECTORY_OR_NAME"
_NEXT = f"""\
Edit these files, at least data.jsonl and my_reward.py. Then:
    cd {{directory}}
    aligner validate {_ARGUMENTS}    # prints each chosen value and the reason
    aligner launch   {_ARGUMENTS}
    aligner launch   {_ARGUMENTS} cluster=my_slurm --dry-run"""


def new_experiment(parsed: argparse.Namespace) -> None:
    """Write the files of an experiment to a directory, and print the next commands.

    Raises:
        ConfigError: A file exists already, or cannot be written.
    """
    directory: Path = parsed.directory
    files = {
        directory / name: (_TEMPLATES / template).read_text(encoding="utf-8")
        for name, template in _FILES.items()
    }
    if existing := [str(file) for file in files if file.exists()]:
        raise ConfigError(
            f"{', '.join(existing)}: existing files are not overwritten; give another directory"
        )
    try:
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(file)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot write the files: {error}") from error
    print_text(_NEXT.format(directory=shlex.quote(str(directory))))
