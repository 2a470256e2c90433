"""Checksums of the files that a run reads: models, tokenizers and data.

Every checkpoint of a run records them, and a run resumes only if the files are the same. Without
this check, a reference model whose weights changed on disk would change the KL penalty, and changed
data would change the order of the prompts, both without an error.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from aligner.data.checksums import FileRecord, compute_file_record
from aligner.data.collectives import gather_json, shard_across_ranks
from aligner.errors import ConfigError
from aligner.models.model_source import model_directory
from aligner.schema import Config
from aligner.schema.data_sources import FILE_SUFFIXES, FUNCTION, get_file_kind
from aligner.schema.references import find_read_paths

InputChecksums = Mapping[str, Mapping[str, FileRecord]]
"""Size and checksum of each file, by configuration key and then by the file's path in the directory
that the key names."""

# Kinds of the files of a directory that a role may read: of models, of data sets, and of records.
_READ_KINDS = frozenset(("safetensors", "jinja", "model", "arrow", *FILE_SUFFIXES))
# Folder of a model's named chat templates.
_TEMPLATES = "additional_chat_templates"


def compute_input_checksums(
    config: Config, known: Mapping[str, Mapping[str, FileRecord]] | None = None
) -> InputChecksums:
    """Compute the checksums of all models and training data of the run.

    Evaluation data are left out, because they may change when a run resumes. A Python function that
    yields records is left out too. Collective: each rank reads its share of the files.

    Args:
        config: The run's configuration.
        known: Checksums that are known already, by the path in the configuration. These files are
            not read.

    Raises:
        ConfigError: A file cannot be read.
    """
    known = known or {}
    paths = _input_paths(config)
    known_inputs = {key: known[str(path)] for key, path in paths.items() if str(path) in known}
    files = {key: list_input_files(path) for key, path in paths.items() if key not in known_inputs}
    unique = sorted({str(file) for key_files in files.values() for file in key_files.values()})

    rank_records = {file: _compute_record(Path(file)) for file in shard_across_ranks(unique)}
    records: dict[str, FileRecord] = {}
    for part in gather_json(rank_records):
        records |= {file: FileRecord(*record) for file, record in part.items()}

    read_inputs = {
        key: {name: records[str(file)] for name, file in key_files.items()}
        for key, key_files in files.items()
    }
    return {**known_inputs, **read_inputs}


def describe_input_changes(
    saved: InputChecksums, current: InputChecksums, accepted: Iterable[str]
) -> dict[str, list[str]]:
    """Describe how the files of a run differ from those that a checkpoint was trained on.

    Args:
        saved: The checksums that the checkpoint records.
        current: The checksums of the files as they are now.
        accepted: Configuration keys, or sections, whose files may have changed (`run.changes`).

    Returns:
        A line for each file that differs, by configuration key; empty if nothing differs.
    """
    names = list(accepted)
    changes: dict[str, list[str]] = {}
    for key, expected in saved.items():
        if any(key == name or key.startswith(f"{name}.") for name in names):
            continue
        actual = current.get(key, {})
        differing = [
            name for name in sorted({*expected, *actual}) if expected.get(name) != actual.get(name)
        ]
        if differing:
            changes[key] = [
                f"{key}: {name}: {_describe(expected.get(name))} when the checkpoint was saved,"
                f" now {_describe(actual.get(name))}"
                for name in differing
            ]
    return changes


def _input_paths(config: Config) -> dict[str, Path]:
    """Return the paths of models and data by configuration key, without those of evaluations."""
    paths = {
        key: Path(path)
        for key, path in find_read_paths(config).items()
        if not key.startswith("evaluation.") and not path.startswith(FUNCTION)
    }
    if config.model.source != "directory":
        paths["model.source"] = model_directory(config)
    return paths


def list_input_files(path: Path) -> dict[str, Path]:
    """Return the file itself, or the files of a directory that a role may read, by name."""
    if not path.is_dir():
        return {path.name: path}
    paths = [
        file
        for directory in (path, path / _TEMPLATES)
        if directory.is_dir()
        for file in directory.iterdir()
        if get_file_kind(file) in _READ_KINDS and file.is_file()
    ]
    return {os.path.relpath(file, path): file for file in sorted(paths)}


def _compute_record(file: Path) -> FileRecord:
    try:
        return compute_file_record(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error


def _describe(record: FileRecord | None) -> str:
    if record is None:
        return "missing"
    return f"{record.size} bytes with checksum {record.checksum}"
