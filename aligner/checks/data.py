"""Checks of the section `data` against the trainer and the model.

The content of the records is not checked here.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.model_source import ExpectedInputs, is_expected
from aligner.models.shape import ModelShape
from aligner.schema import Config, DataConfig
from aligner.schema.data_sources import (
    FILE_SUFFIXES,
    FUNCTION,
    get_file_kind,
    is_dataset,
    parse_data_sources,
)
from aligner.schema.derived import describe_max_sequence_length, get_max_sequence_length
from aligner.schema.reasoning_tasks import ReasoningTask, parse_reasoning_tasks

# Kind of records that each trainer reads.
_RECORD_KINDS = {
    "online": "prompt",
    "preferences": "prompt",
    "sft": "demonstration",
    "teacher_scores": "demonstration",
    "dpo": "preference",
    "reward_model": "preference",
}


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the data, except for the content of the records."""
    yield from _find_source_problems(config, expected)
    yield from _find_difficulty_problems(config.data, expected)
    normalization = config.data.normalization
    if (
        normalization is not None
        and not is_expected(normalization, expected)
        and not Path(normalization).exists()
    ):
        yield f"data.normalization={normalization}: no such file"
    max_length = get_max_sequence_length(config)
    if (
        model is not None
        and not config.algorithm.generates_samples
        and max_length > model.max_positions
    ):
        yield (
            f"{describe_max_sequence_length(config)}: {max_length} tokens exceed the"
            f" {model.max_positions} positions of the model; set smaller lengths"
        )


def _find_source_problems(config: Config, expected: ExpectedInputs) -> Iterator[str]:
    """Yield problems of the sources, the tasks and the prompts."""
    data = config.data
    trainer = config.algorithm.trainer
    try:
        sources = parse_data_sources(data)
    except ConfigError as error:
        yield str(error)
        return
    if data.tasks:
        yield from _find_task_problems(parse_reasoning_tasks(data.tasks))
    if not sources and not config.algorithm.generates_samples:
        yield (
            f"data.prompts: algorithm.trainer={trainer} requires records, not only prompts; set"
            " data.path=FILE"
        )
    if not sources and any(not prompt.strip() for prompt in data.prompts):
        yield "data.prompts: must not contain an empty prompt"
    for source in sources:
        if not is_expected(source.path, expected) and (
            problem := find_path_problem(source.path, trainer)
        ):
            yield f"{source.setting_text}: {problem}"


def _find_difficulty_problems(data: DataConfig, expected: ExpectedInputs) -> Iterator[str]:
    """Yield problems of the selection and the order of prompts by their difficulty."""
    for key, bounds in {
        "data.pass_rate": data.pass_rate,
        "data.curriculum.between": data.curriculum.between,
    }.items():
        # An empty list means no selection.
        if bounds and not (len(bounds) == 2 and 0 <= bounds[0] <= bounds[1] <= 1):
            value = ", ".join(f"{bound:g}" for bound in bounds)
            yield (f"{key}=[{value}]: must be [LOW, HIGH] with 0 <= LOW <= HIGH <= 1")
    if data.sort_by is not None and data.shuffle:
        yield (
            f"data.sort_by={data.sort_by}: is not supported with data.shuffle=true, which would"
            " undo the order; set data.shuffle=false"
        )
    if (samples := data.pass_rate_samples) is not None:
        if not is_expected(samples, expected) and (
            problem := find_path_problem(Path(samples), "sft")
        ):
            yield f"data.pass_rate_samples={samples}: {problem}"
        if not data.pass_rate and data.sort_by is None:
            yield (
                f"data.pass_rate_samples={samples}: has no effect without data.pass_rate or"
                " data.sort_by; set data.pass_rate=[LOW, HIGH], or data.sort_by=-pass_rate with"
                " data.shuffle=false"
            )


def _find_task_problems(tasks: Sequence[ReasoningTask]) -> Iterator[str]:
    """Yield problems of the tasks of `data.tasks` according to the library reasoning_gym."""
    # reasoning_gym is an optional dependency.
    try:
        from reasoning_gym.factory import CURRICULA, DATASETS
    except ImportError as error:
        yield (
            "data.tasks: requires the reasoning_gym extra; install it with pip install"
            f" 'aligner[reasoning_gym]': {error}"
        )
        return
    for index, task in enumerate(tasks):
        key = f"data.tasks[{index}]"
        if task.name not in DATASETS:
            close_names = difflib.get_close_matches(task.name, DATASETS, n=3)
            hint = (
                f"did you mean {' or '.join(close_names)}?"
                if close_names
                else f"allowed: {', '.join(sorted(DATASETS))}"
            )
            yield f"{key}={task.name}: reasoning_gym has no such task; {hint}"
            continue
        if task.difficulty is not None and task.name not in CURRICULA:
            yield (
                f"{key}.difficulty: {task.name} has no difficulty levels; set {key}.config instead"
            )
        # DATASETS maps names to (dataset class, config class). aligner sets `seed` and `size`.
        allowed = {field.name for field in fields(DATASETS[task.name][1])} - {"seed", "size"}
        for entry in sorted(task.config.keys() - allowed):
            close_names = difflib.get_close_matches(entry, allowed, n=1)
            hint = (
                f"did you mean {close_names[0]}?"
                if close_names
                else f"allowed: {', '.join(sorted(allowed))}"
            )
            yield f"{key}.config.{entry}: {task.name} has no such setting; {hint}"


def find_path_problem(path: Path, trainer: str) -> str | None:
    """Return the problem of the path of a data source; None if there is no problem.

    The records are not read, except for a test whether a file is empty.

    Args:
        path: File, directory, or `function:MODULE:CALLABLE`.
        trainer: Value of `algorithm.trainer`, which determines the kind of the records.
    """
    if str(path).startswith(FUNCTION):
        is_callable_name = re.fullmatch(r"[\w.]+:\w+", str(path).removeprefix(FUNCTION))
        return None if is_callable_name else f"must be {FUNCTION}MODULE:CALLABLE"
    if path.is_dir():
        return _find_directory_problem(path)
    allowed = [f".{suffix}" for suffix in FILE_SUFFIXES if suffix != "txt"]
    if _RECORD_KINDS[trainer] == "prompt":
        allowed.append(".txt")
    if f".{get_file_kind(path)}" not in allowed:
        dataset = "a directory saved by Hugging Face datasets (save_to_disk)"
        return (
            f"must be a {', '.join(allowed[:-1])} or {allowed[-1]} file, or {dataset}, with"
            f" algorithm.trainer={trainer}"
        )
    if not path.is_file():
        return "no such file"
    with path.open("rb") as lines:
        return (
            None
            if any(line.strip() for line in lines)
            else f"the {_RECORD_KINDS[trainer]} file is empty"
        )


def _find_directory_problem(path: Path) -> str | None:
    """Return the problem of a directory of records; None if there is no problem."""
    # save_to_disk of a DatasetDict writes one directory per split.
    if (path / "dataset_dict.json").is_file():
        splits = sorted(split.name for split in path.iterdir() if is_dataset(split))
        return (
            "contains several splits; set the path of one split:"
            f" {', '.join(str(path / split) for split in splits)}"
        )
    if not is_dataset(path):
        return (
            "is not a directory saved by Hugging Face datasets (save_to_disk): state.json or"
            " dataset_info.json is missing"
        )
    if importlib.util.find_spec("datasets") is None:
        return "requires the datasets extra; install it with pip install 'aligner[datasets]'"
    return None
