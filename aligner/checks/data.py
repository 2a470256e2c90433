"""The records that a run learns from, against the trainer and the model."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs, is_expected
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.data_sources import FUNCTION, data_sources, is_dataset
from aligner.schema.derived import longest_sequence, longest_sequence_keys

_RECORDS = {
    "online": "prompt",
    "preferences": "prompt",
    "sft": "demonstration",
    "dpo": "preference",
    "reward_model": "preference",
}


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What is wrong with what is learned from, but for the records' content."""
    yield from _source_problems(config, expected)
    normalization = config.data.normalization
    if normalization is not None and not is_expected(normalization, expected) and not Path(normalization).exists():
        yield f"data.normalization={normalization}: no such file"
    longest = longest_sequence(config)
    if model is not None and not config.algorithm.generates and longest > model.max_positions:
        yield f"{longest_sequence_keys(config)}: {longest} tokens, but the model has {model.max_positions} positions"


def _source_problems(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    data, trainer = config.data, config.algorithm.trainer
    try:
        sources = data_sources(data)
    except ConfigError as error:
        yield str(error)
        return
    if not sources and not config.algorithm.generates:
        yield f"data.prompts: prompts alone are nothing for algorithm.trainer={trainer} to learn from; give data.path=FILE"
    if not sources and any(not prompt.strip() for prompt in data.prompts):
        yield "data.prompts: a prompt is empty"
    for source in sources:
        if not is_expected(source.path, expected) and (problem := path_problem(source.path, trainer)):
            yield f"{source.given_as}: {problem}"


def path_problem(path: Path, trainer: str) -> str | None:
    """What is wrong with a path of what a trainer learns from, if anything; the records are not read."""
    if str(path).startswith(FUNCTION):
        named = re.fullmatch(r"[\w.]+:\w+", str(path).removeprefix(FUNCTION))
        return None if named else f"must be {FUNCTION}MODULE:CALLABLE"
    if path.is_dir():
        return _directory_problem(path)
    allowed = (".jsonl", ".txt") if _RECORDS[trainer] == "prompt" else (".jsonl",)
    if path.suffix not in allowed:
        saved = "directories that Hugging Face datasets saved"
        return f"allowed are {' and '.join(allowed)} files, and {saved} (algorithm.trainer={trainer})"
    if not path.is_file():
        return "no such file"
    with path.open("rb") as lines:
        return None if any(line.strip() for line in lines) else f"the {_RECORDS[trainer]} file is empty"


def _directory_problem(path: Path) -> str | None:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(split.name for split in path.iterdir() if is_dataset(split))
        return f"several splits; give one of them: {', '.join(str(path / split) for split in splits)}"
    if not is_dataset(path):
        return "a directory, but not one that Hugging Face datasets saved: state.json and dataset_info.json are missing"
    if importlib.util.find_spec("datasets") is None:
        return "reading it needs the datasets package; install the datasets extra: pip install 'aligner[datasets]'"
    return None
