"""Preparation of a run before its roles start: model directory, and checks of all data."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from aligner.agents.tool_catalogue import list_tools, tool_schemas, with_tool_arguments
from aligner.algorithms.extension import require_functions
from aligner.data.example_cache import ExampleCache
from aligner.data.examples import open_run_data
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.prompts import (
    PromptFields,
    PromptStream,
    open_evaluation_prompts,
    open_prompts,
)
from aligner.data.teacher_scores import TeacherScores
from aligner.data.tokenizer import Tokenizer, Tools, build_run_tokenizer, check_end_tokens
from aligner.data.tokenizer_files import read_tokenizer_files
from aligner.errors import ConfigError
from aligner.observability.timeline import report_stage
from aligner.rewards.scorers import resolve_scorer
from aligner.rewards.verifiers import CHECKED_VERIFIERS, check_answers
from aligner.schema import Config
from aligner.schema.data import TASK
from aligner.schema.evaluation_suites import (
    get_active_suites,
    needs_prompt_messages,
    parse_evaluation_suites,
)
from aligner.schema.keys import with_unread_defaults
from aligner.schema.reward_sources import (
    FunctionSource,
    JudgeSource,
    parse_evaluation_judge,
    parse_judge_sources,
    parse_reward_sources,
)
from aligner.version import __version__


def prepare_run(config: Config) -> None:
    """Create the model's directory, and check it, the data and the scorers.

    Raises:
        ConfigError: The model, the data or a scorer is invalid.
    """
    # A key that the run does not read must not cause an error.
    config = with_unread_defaults(config)
    directory = prepare_model(config)
    end_token_notices = _check_end_tokens(config, directory)
    cache = ExampleCache.for_run(
        config, partial(report_stage, config, "prepare"), is_prepared=False
    )
    data_notices = _check_data(config, build_run_tokenizer(config, directory), cache)
    cache.write_index()
    for notice in [*end_token_notices, *data_notices]:
        print(f"aligner: note: {notice}", file=sys.stderr)

    # Import the user's functions now: their errors must not appear first in a scoring request.
    for source in parse_reward_sources(config.reward):
        if isinstance(source, FunctionSource):
            resolve_scorer(source.function, f"{source.key}.function")
    for suite in parse_evaluation_suites(config):
        if suite.settings.function is not None:
            resolve_scorer(suite.settings.function, f"{suite.key}.function")
    if config.algorithm.trainer == "online":
        require_functions(config.algorithm)


def _check_end_tokens(config: Config, directory: Path) -> list[str]:
    """Return notices about the EOS tokens of a policy's model directory."""
    if config.model.source != "directory":
        return []
    eos_token_ids = read_shape(directory).eos_token_ids
    return check_end_tokens(directory, eos_token_ids, read_tokenizer_files(directory))


def open_run_prompts(
    config: Config, tokenizer: Tokenizer, tools: Tools | None, cache: ExampleCache
) -> PromptStream:
    """Return the prompts of a run that generates samples.

    Args:
        config: The run's configuration.
        tokenizer: The policy's tokenizer.
        tools: Schemas of the environment's tools.
        cache: The cache of tokenized examples.

    Raises:
        ConfigError: See `open_prompts`.
    """
    return open_prompts(
        config.data,
        tokenizer,
        config.seed,
        # The files of all samples contain the messages of the prompts.
        include_messages=needs_prompt_messages(config) or config.logging.samples_mib > 0,
        include_responses=config.algorithm.has_demonstrations,
        tools=tools,
        cache=cache,
    )


def _check_data(config: Config, tokenizer: Tokenizer, cache: ExampleCache) -> Sequence[str]:
    """Read and tokenize all training and evaluation data, and return notices about it."""
    tools = list_tools(config.environment)
    schemas = tool_schemas(tools)
    suite_prompts_of_reward: list[PromptFields] = []
    answer_notices: list[str] = []

    for suite in get_active_suites(config):
        suite_prompts = [
            PromptFields(prompt.text, prompt.metadata, prompt.origin)
            for prompt in open_evaluation_prompts(suite, config.data, tokenizer, tools=schemas)
        ]
        if suite.settings.function is None:
            suite_prompts_of_reward += suite_prompts
        else:
            answer_notices += _check_answers(
                suite.settings.function, f"{suite.key}.function", suite_prompts
            )
        if (judge := parse_evaluation_judge(suite.settings, suite.key)) is not None:
            _check_judge_fields([judge], suite_prompts)

    if config.algorithm.generates_samples:
        # These two calls only check: they raise an error if the value is not a single token, or if
        # the chat template supports no tool calls.
        tokenizer.get_single_token(config.rollout.truncate_token, "rollout.truncate_token")
        with_tool_arguments(config.environment, tools, tokenizer)
        prompts = open_run_prompts(config, tokenizer, schemas, cache)
        check = partial(_check_prompts, config, suite_prompts_of_reward, prompts)
        identity = {
            "reward": asdict(config.reward),
            "kept_fields": config.algorithm.kept_fields,
            "suite_prompts": [
                [prompt.text, prompt.metadata, prompt.origin] for prompt in suite_prompts_of_reward
            ],
            "version": __version__,
        }
        return [*prompts.notices, *answer_notices, *cache.remember(identity, check)]

    if config.teacher.scores is not None:
        TeacherScores(Path(config.teacher.scores)).require_undamaged()
    return open_run_data(config, tokenizer, cache).notices


def _check_prompts(
    config: Config, suite_prompts: Sequence[PromptFields], prompts: PromptStream
) -> list[str]:
    """Check that the reward can score all prompts of the training data and of the suites without
    their own function, and return notices."""

    def iterate_prompts() -> Iterator[PromptFields]:
        yield from suite_prompts
        yield from prompts.iterate_fields()

    judges = parse_judge_sources(config.reward)
    _check_judge_fields(judges, iterate_prompts())
    _check_tasks(config, iterate_prompts)
    _check_kept_fields(config.algorithm.kept_fields, prompts.iterate_fields())
    notices = []
    for source in parse_reward_sources(config.reward):
        if isinstance(source, FunctionSource):
            scored_prompts = (
                prompt for prompt in iterate_prompts() if source.should_score(prompt.metadata)
            )
            notices += _check_answers(source.function, f"{source.key}.function", scored_prompts)
    return notices


def _check_answers(function: str, key: str, prompts: Iterable[PromptFields]) -> list[str]:
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


def _check_judge_fields(judges: Sequence[JudgeSource], prompts: Iterable[PromptFields]) -> None:
    """Raise ConfigError if a prompt's record lacks a field of a judge's template."""
    judges_with_fields = [judge for judge in judges if judge.record_fields]
    if not judges_with_fields:
        return

    for prompt in prompts:
        for judge in judges_with_fields:
            # A judge needs the fields only of the records that it scores.
            if not judge.should_score(prompt.metadata):
                continue
            for field in judge.record_fields:
                if field not in prompt.metadata:
                    raise ConfigError(
                        f"{judge.key}.judge_template: contains {{{field}}}, but the record of"
                        f" prompt {prompt.text!r} has no such field; fields of the record:"
                        f" {', '.join(prompt.metadata) or 'none'}. Add the field to every"
                        " record, or remove it from the template"
                    )


def _check_kept_fields(fields: Sequence[str], prompts: Iterable[PromptFields]) -> None:
    """Raise ConfigError if a prompt's record lacks a field of `algorithm.kept_fields`."""
    if not fields:
        return  # without reading the prompts

    for prompt in prompts:
        for field in fields:
            if field not in prompt.metadata:
                raise ConfigError(
                    f"algorithm.kept_fields: the record of prompt {prompt.text!r} has no field"
                    f" `{field}`; fields of the record: {', '.join(prompt.metadata) or 'none'}"
                )


def _check_tasks(config: Config, iterate_prompts: Callable[[], Iterator[PromptFields]]) -> None:
    """Raise ConfigError if no reward source scores a prompt, or if task weights name a task without
    records."""
    # Without task weights, every source scores every prompt.
    sources = parse_reward_sources(config.reward)
    if not any(source.task_weights for source in sources):
        return
    tasks = sorted({str(prompt.metadata.get(TASK)) for prompt in iterate_prompts()})
    for prompt in iterate_prompts():
        if not any(source.should_score(prompt.metadata) for source in sources):
            raise ConfigError(
                f"reward.sources: the record of prompt {prompt.text!r} has"
                f" task={prompt.metadata.get(TASK)}, but every source has weight 0 for this task."
                " Set task_weights or weight of at least one source"
            )

    # A misspelled task would silently have no effect.
    for source in sources:
        for task in source.task_weights:
            if task not in tasks:
                raise ConfigError(
                    f"{source.key}.task_weights.{task}: no record has this task; tasks of the"
                    f" records: {', '.join(tasks)}"
                )
