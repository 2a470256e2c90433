"""The model directories that a run reads: the headers of their weight files, and their notes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aligner.errors import ConfigError
from aligner.models.families import SCALAR_HEAD
from aligner.models.hugging_face import config_notes
from aligner.models.model_source import ExpectedInputs, directory_config, directory_shape
from aligner.models.weight_headers import has_weights, tied_head_problems, weight_problems
from aligner.models.weight_slices import weight_table
from aligner.schema import Config
from aligner.schema.reward_sources import model_sources, reward_sources
from aligner.schema.teacher_sources import teacher_sources


@dataclass(frozen=True)
class _StoredModel:
    """A model directory that a run reads."""

    key: str
    """Configuration key that names the directory."""
    directory: Path
    use: Literal["language", "reward", "critic"]


def weight_file_problems(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    """Yield damaged weight files and indexes, and tensors that do not match config.json.

    A directory without weight files is skipped: a configuration can be checked before the weights
    are downloaded, and the run's preparation refuses such a directory. The sections of the
    configuration report a config.json that cannot be read.
    """
    for model in _stored_models(config, expected):
        if not has_weights(model.directory):
            continue
        try:
            problems = _file_problems(model)
        except ConfigError as error:
            problems = [str(error)]
        for problem in problems:
            yield f"{model.key}={model.directory}: {problem}"


def stored_model_notes(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    """Yield the notes of `config_notes` about each model directory that the run reads, and about
    the description of a random model."""
    if config.model.source == "random":
        for note in config_notes(config.model.config):
            yield f"model.config: {note}"
    for model in _stored_models(config, expected):
        for note in config_notes(directory_config(model.directory, model.key)):
            yield f"{model.key}={model.directory}: {note}"


def _file_problems(model: _StoredModel) -> list[str]:
    shape = directory_shape(model.directory, model.key)
    if model.use == "reward":
        return weight_problems(model.directory, weight_table(shape, "scalar"))
    if model.use == "critic":
        # It is trained: its head may be new, and another head may be left in the files.
        table = weight_table(shape, "scalar")
        return weight_problems(model.directory, table, optional=(SCALAR_HEAD.name,), partial=True)
    problems = weight_problems(model.directory, weight_table(shape))
    return problems + tied_head_problems(model.directory, shape)


def _stored_models(config: Config, expected: ExpectedInputs) -> Iterator[_StoredModel]:
    """Yield the models whose directories exist and have a supported config.json, each directory
    once per use."""
    seen = set()
    for model in _named_models(config):
        if str(model.directory) in expected or (model.directory, model.use) in seen:
            continue
        seen.add((model.directory, model.use))
        try:
            directory_shape(model.directory, model.key)
        except ConfigError:  # the section of the key reports it
            continue
        yield model


def _named_models(config: Config) -> Iterator[_StoredModel]:
    if config.model.source == "directory" and config.model.path is not None:
        yield _StoredModel("model.path", Path(config.model.path), "language")
    if config.algorithm.has_critic and config.critic.path is not None:
        yield _StoredModel("critic.path", Path(config.critic.path), "critic")
    try:
        rewards = reward_sources(config.reward) if config.algorithm.generates else ()
        teachers = teacher_sources(config.teacher) if config.has_teacher else ()
    except ConfigError:  # their sections report it
        return
    for source in model_sources(rewards):
        yield _StoredModel(f"{source.key}.path", Path(source.path), "reward")
    for teacher in teachers:
        yield _StoredModel(f"{teacher.key}.path", Path(teacher.path), "language")
