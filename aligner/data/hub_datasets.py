"""Data sets of the Hugging Face Hub, by name: `OWNER/NAME`, `OWNER/NAME:CONFIG` or
`OWNER/NAME:CONFIG:SPLIT`.

A split is loaded once, and stored in `$ALIGNER_CACHE/datasets/` as `Dataset.save_to_disk` writes
it. Later launches and resumed runs read this directory without a network.
"""

import contextlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from aligner.errors import ConfigError
from aligner.paths import get_cache_directory
from aligner.schema import Config
from aligner.schema.data_sources import FILE_SUFFIXES, get_file_kind, is_dataset
from aligner.schema.references import map_paths

_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]*))?(?::([\w.-]+))?")
_DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class HubDataset:
    """A split of a data set on the Hugging Face Hub."""

    name: str
    """Name on the Hub: OWNER/NAME."""
    config: str | None
    """Configuration of the data set; None for its default."""
    split: str

    @property
    def directory(self) -> Path:
        """Directory of the split in aligner's cache."""
        parts = (*self.name.split("/"), self.config or "default", self.split)
        return get_cache_directory() / "datasets" / "--".join(parts)


def parse_hub_dataset(path: str) -> HubDataset | None:
    """Return the data set that a path names; None if the path exists or cannot be such a name."""
    match = _NAME.fullmatch(path)
    if match is None or get_file_kind(Path(path)) in FILE_SUFFIXES or Path(path).exists():
        return None
    name, config, split = match.groups()
    return HubDataset(name, config or None, split or _DEFAULT_SPLIT)


def resolve_hub_datasets(config: Config) -> Config:
    """Replace names of Hub data sets in the configuration by directories of aligner's cache.

    The names remain if the run can be checked without its data: in a tiny dry run, and if
    `model.config` describes an absent policy.

    Raises:
        ConfigError: A data set cannot be loaded.
    """
    is_described = config.model.source == "directory" and bool(config.model.config)
    if is_described or config.dry_run.scale != "none":
        return config

    def resolve(key: str, path: str) -> str:
        is_data = key.endswith(".path") and key.partition(".")[0] in ("data", "evaluation")
        return str(resolve_hub_path(path, f"{key}=")) if is_data else path

    return map_paths(config, resolve)


def resolve_hub_path(path: str, key: str) -> Path:
    """Return the directory of a Hub data set, which is loaded if necessary; other paths remain.

    Args:
        path: A path, or the name of a data set.
        key: The configuration key of the path and the text after it, for messages.

    Raises:
        ConfigError: The data set cannot be loaded.
    """
    dataset = parse_hub_dataset(path)
    if dataset is None:
        return Path(path)
    if not is_dataset(dataset.directory):
        print(
            f"aligner: {key}{path}: loading split {dataset.split} from the Hugging Face Hub",
            file=sys.stderr,
        )
        _store(dataset, f"{key}{path}")
    return dataset.directory


def _store(dataset: HubDataset, setting: str) -> None:
    """Load a split with Hugging Face datasets, and store it in aligner's cache."""
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"{setting}: no such file or directory; a data set of the Hugging Face Hub requires the"
            " datasets package; install it with pip install 'aligner[datasets]'"
        ) from error
    try:
        rows = datasets.load_dataset(dataset.name, dataset.config, split=dataset.split)
    # The Hub's client raises many types of errors: no network, an unknown name, no permission, a
    # full disk, a missing configuration or split.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(_describe_failure(dataset, setting, reason)) from error

    directory = dataset.directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Launches at the same time each write a directory of their own; the first one is kept.
    with TemporaryDirectory(prefix=".", dir=directory.parent) as scratch:
        complete = Path(scratch) / "split"
        rows.save_to_disk(str(complete))
        with contextlib.suppress(OSError):
            complete.rename(directory)
    if not is_dataset(directory):
        raise ConfigError(f"{setting}: the data set could not be stored in {directory}")


def _describe_failure(dataset: HubDataset, setting: str, reason: str) -> str:
    config = "" if dataset.config is None else f"{dataset.config!r}, "
    target = dataset.name.rpartition("/")[2]
    return (
        f"{setting}: no such file or directory, and split {dataset.split} of the data set"
        f" {dataset.name} could not be loaded from the Hugging Face Hub or its cache: {reason}."
        " Expected OWNER/NAME, OWNER/NAME:CONFIG or OWNER/NAME:CONFIG:SPLIT. Without a network, run"
        ' on a machine that has one: python -c "from datasets import load_dataset;'
        f" load_dataset({dataset.name!r}, {config}split={dataset.split!r})"
        f'.save_to_disk({target!r})", copy the directory {target} to this machine, and set its'
        " path instead of the name"
    )
