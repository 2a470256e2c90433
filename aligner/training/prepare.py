"""Preparation of a run before its roles start: model directory, and checks of all data."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from aligner.agents.tool_catalogue import list_tools, tool_schemas, with_tool_arguments
from aligner.algorithms.extension import require_functions
from aligner.data.examples import open_run_data
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.prompts import open_evaluation_prompts, open_prompts
from aligner.data.teacher_scores import TeacherScores
from aligner.data.tokenizer import Tokenizer, build_run_tokenizer, check_end_tokens
from aligner.data.tokenizer_files import read_tokenizer_files
from aligner.data.types import Prompt
from aligner.errors import ConfigError
from aligner.rewards.scorers import resolve_scorer
from aligner.rewards.verifiers import CHECKED_VERIFIERS, check_answers
from aligner.schema import Config
from aligner.schema.data import TASK
from aligner.schema.evaluation_suites import evaluated_suites, evaluation_suites
from aligner.schema.keys import only_read
from aligner.schema.reward_sources import (
    FunctionSource,
    JudgeSource,
    evaluation_judge,
    judge_sources,
    reward_sources,
)


def prepare_run(config: Config) -> None:
    """Create the model's directory, and check it, the data and the scorers.

    Raises:
        ConfigError: The model, the data or a scorer is invalid.
    """
    config = only_read(config)
    directory = prepare_model(config)
    notices = _check_end_tokens(config, directory)
    for notice in [*notices, *_check_data(config, build_run_tokenizer(config, directory))]:
        print(f"aligner: note: {notice}", file=sys.stderr)
    for source in reward_sources(config.reward):
        if isinstance(source, FunctionSource):
            resolve_scorer(source.function, f"{source.key}.function")
    for suite in evaluation_suites(config):
        if suite.settings.function is not None:
            resolve_scorer(suite.settings.function, f"{suite.key}.function")
    if config.algorithm.trainer == "online":
        require_functions(config.algorithm)


def _check_end_tokens(config: Config, directory: Path) -> list[str]:
    """Return notices about the EOS tokens of a policy's model directory."""
    if config.model.source != "directory":
        return []
    ids = read_shape(directory).eos_token_ids
    return check_end_tokens(directory, ids, read_tokenizer_files(directory))


def _check_data(config: Config, tokenizer: Tokenizer) -> Sequence[str]:
    """Read and tokenize all training and evaluation data, and return notices about it."""
    tools_listed = list_tools(config.environment)
    tools = tool_schemas(tools_listed)
    scored: list[Prompt] = []
    answer_notices: list[str] = []
    for suite in evaluated_suites(config):
        evaluated = open_evaluation_prompts(suite, config.data, tokenizer, tools=tools)
        if suite.settings.function is None:
            scored += evaluated
        else:
            answer_notices += _check_answers(
                suite.settings.function, f"{suite.key}.function", evaluated
            )
        if (judge := evaluation_judge(suite.settings, suite.key)) is not None:
            _check_judged([judge], evaluated)
    if config.algorithm.generates:
        tokenizer.get_single_token(config.rollout.truncate_token, "rollout.truncate_token")
        with_tool_arguments(config.environment, tools_listed, tokenizer)
        has_demonstrations = config.algorithm.has_demonstrations
        prompts = open_prompts(
            config.data, tokenizer, config.seed, include_responses=has_demonstrations, tools=tools
        )
        scored += prompts.iterate_examples()
        _check_judged(judge_sources(config.reward), scored)
        _check_tasks(config, scored)
        _check_kept(config.algorithm.kept_fields, prompts.iterate_examples())
        for source in reward_sources(config.reward):
            if isinstance(source, FunctionSource):
                scored_prompts = [prompt for prompt in scored if source.is_asked(prompt.metadata)]
                answer_notices += _check_answers(
                    source.function, f"{source.key}.function", scored_prompts
                )
        return [*prompts.notices, *answer_notices]
    if config.teacher.scores is not None:
        TeacherScores(Path(config.teacher.scores)).require_undamaged()
    return open_run_data(config, tokenizer).notices


def _check_answers(function: str, key: str, prompts: Sequence[Prompt]) -> list[str]:
    """Check that a verifier can compare responses with the answers of the records.

    Returns:
        A notice about answers of which only the text is compared.

    Raises:
        ConfigError: An answer cannot be compared with any response.
    """
    if function not in CHECKED_VERIFIERS:
        return []
    resolve_scorer(function, key)
    records = [(prompt.origin or repr(prompt.text), prompt.metadata) for prompt in prompts]
    return check_answers(function, f"{key}={function}", records)


def _check_judged(judges: Sequence[JudgeSource], prompts: Iterable[Prompt]) -> None:
    """Raise ConfigError if a prompt's record lacks a field of a judge's template."""
    judges_with_fields = [source for source in judges if source.record_fields]
    for prompt in prompts if judges_with_fields else ():
        for source in (judge for judge in judges_with_fields if judge.is_asked(prompt.metadata)):
            for field in source.record_fields:
                if field not in prompt.metadata:
                    raise ConfigError(
                        f"{source.key}.judge_template: contains {{{field}}}, but the record of"
                        f" prompt {prompt.text!r} has no such field; fields of the record:"
                        f" {', '.join(prompt.metadata) or 'none'}. Add the field to every"
                        " record, or remove it from the template"
                    )


def _check_kept(fields: Sequence[str], prompts: Iterable[Prompt]) -> None:
    """Raise ConfigError if a prompt's record lacks a field of `algorithm.kept_fields`."""
    for prompt in prompts if fields else ():
        for field in fields:
            if field not in prompt.metadata:
                raise ConfigError(
                    f"algorithm.kept_fields: the record of prompt {prompt.text!r} has no field"
                    f" `{field}`; fields of the record: {', '.join(prompt.metadata) or 'none'}"
                )


def _check_tasks(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if no reward source scores a prompt, or if task weights name a task without
    records."""
    sources = reward_sources(config.reward)
    if not any(source.task_weights for source in sources):
        return
    tasks = sorted({str(prompt.metadata.get(TASK)) for prompt in prompts})
    for prompt in prompts:
        if not any(source.is_asked(prompt.metadata) for source in sources):
            raise ConfigError(
                f"reward.sources: the record of prompt {prompt.text!r} has"
                f" task={prompt.metadata.get(TASK)}, but every source has weight 0 for this task."
                " Set task_weights or weight of at least one source"
            )
    for source in sources:
        for task in source.task_weights:
            if task not in tasks:
                raise ConfigError(
                    f"{source.key}.task_weights.{task}: no record has this task; tasks of the"
                    f" records: {', '.join(tasks)}"
                )
