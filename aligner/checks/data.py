"""The records that a run learns from, against the trainer and the model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from aligner.checks.algorithm import preference_loss_problems
from aligner.errors import ConfigError
from aligner.models.model_source import NOTHING_EXPECTED, ExpectedInputs, is_expected
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.data_sources import FUNCTION, data_sources, is_dataset

_RECORDS = {
    "online": "prompt",
    "preferences": "prompt",
    "sft": "demonstration",
    "dpo": "preference",
    "reward_model": "preference",
}


def data_problems(config: Config, coming: ExpectedInputs = NOTHING_EXPECTED) -> Iterator[str]:
    """One line for each thing that is wrong with what is learned from, but for the records' content."""
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
        if not is_expected(source.path, coming) and (problem := path_problem(source.path, trainer)):
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


def offline_problems(config: Config, shape: ModelShape | None, coming: ExpectedInputs = NOTHING_EXPECTED) -> Iterator[str]:
    """One line for each thing about a run of algorithm.trainer=sft, dpo or reward_model that does not fit together."""
    yield from _length_problems(config, shape)
    if config.algorithm.trainer == "dpo":
        yield from preference_loss_problems(config.algorithm.preference)
    yield from _normalization_problems(config, coming)
    trainer, data = config.algorithm.trainer, config.data
    if trainer == "reward_model" and config.actor.lora.rank:
        yield (
            f"actor.lora.rank={config.actor.lora.rank}: with adapters the new head of a reward model would not be trained;"
            " leave it 0 with algorithm.trainer=reward_model"
        )
    if config.evaluation.every and not data.held_out:
        yield f"evaluation.every={config.evaluation.every}: there is nothing to evaluate on; give data.held_out=ROWS"


def _length_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    trainer, data, budget = config.algorithm.trainer, config.data, config.actor.micro_batch_tokens
    longest = data.max_prompt_tokens + data.max_response_tokens
    described = f"data.max_prompt_tokens={data.max_prompt_tokens} + data.max_response_tokens={data.max_response_tokens}"
    if shape is not None and longest > shape.max_positions:
        yield f"{described}: {longest} tokens, but the model has {shape.max_positions} positions"
    together = 1 if trainer == "sft" else 2
    if budget < together * longest:
        what = "the longest row" if together == 1 else "a pair of the longest rows"
        yield f"actor.micro_batch_tokens={budget}: must hold {what}, {together * longest} tokens ({described})"


def _normalization_problems(config: Config, coming: ExpectedInputs) -> Iterator[str]:
    given = config.data.normalization
    if given is None:
        return
    if config.algorithm.trainer != "reward_model":
        yield f"data.normalization={given}: read with algorithm.trainer=reward_model only"
    elif not is_expected(given, coming) and not Path(given).exists():
        yield f"data.normalization={given}: no such file"
