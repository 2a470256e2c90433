"""Preparation of a run before its roles start: model directory, and checks of all data."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aligner.agents.tool_catalogue import (
    list_suite_tools,
    list_tools,
    tool_schemas,
    with_tool_arguments,
)
from aligner.algorithms.extension import require_functions
from aligner.data.example_cache import ExampleCache
from aligner.data.examples import open_run_data
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.prompts import (
    PromptFields,
    PromptStream,
    build_prompt_parser,
    open_evaluation_prompts,
    open_prompt_stream,
)
from aligner.data.teacher_scores import TeacherScores
from aligner.data.tokenizer import Tokenizer, Tools, build_run_tokenizer, check_end_tokens
from aligner.data.tokenizer_files import read_tokenizer_files
from aligner.errors import ConfigError
from aligner.observability.logs import NOTE_PREFIX
from aligner.observability.timeline import report_stage
from aligner.placement.server_environment import check_server_environment
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import UserFunction, resolve_scorer, resolve_step_scorer
from aligner.rewards.trial_calls import TRIAL_TIMEOUT_S, try_function
from aligner.rewards.verifiers import CHECKED_VERIFIERS, check_answers, require_form_fields
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
from aligner.schema.scoring_functions import is_built_in_function
from aligner.version import __version__


def prepare_run(config: Config) -> None:
    """Create the model's directory, and check it, the data and the scorers.

    Raises:
        ConfigError: The model, the data or a scorer is invalid.
    """
    # A key that the run does not read must not cause an error.
    config = with_unread_defaults(config)
    if config.cluster.kind != "local":  # otherwise, the launcher has checked the environment
        check_server_environment(config)
    directory = prepare_model(config)
    end_token_notices = _check_end_tokens(config, directory)
    cache = ExampleCache.for_run(
        config, partial(report_stage, config, "prepare"), is_prepared=False
    )
    # Import the user's functions before the data is read: this takes less time.
    with contextlib.ExitStack() as stack:
        functions = _load_functions(config, stack)
        checked_data = _check_data(config, build_run_tokenizer(config, directory), cache, functions)
        cache.write_index()
        trial_results = _try_functions(config, functions, checked_data)
    if config.algorithm.trainer == "online":
        require_functions(config.algorithm)
    for notice in [*end_token_notices, *checked_data.notices, *trial_results]:
        print(f"{NOTE_PREFIX} {notice}", file=sys.stderr)


@dataclass(frozen=True)
class _LoadedFunction:
    """A scoring function of the configuration."""

    key: str
    """Configuration key that names the function."""
    name: str
    """Built-in name, or `module:callable`."""
    scorer: Any
    """The function; a UserFunction if it is the user's own. None for a built-in function that only
    the servers' environment can import (`server.python`)."""
    source: FunctionSource | None
    """Reward source of the function; None for the function of an evaluation suite."""
    python: str | None = None
    """Python interpreter of the servers, which call the function of a reward source; None means the
    interpreter of this process."""

    @property
    def has_steps(self) -> bool:
        """Whether the function rewards steps."""
        return self.source is not None and self.source.step_rewards


def _load_functions(config: Config, stack: contextlib.ExitStack) -> list[_LoadedFunction]:
    """Import the scoring functions of the reward and of the evaluation suites.

    Their errors must not appear first in a scoring request.

    Args:
        config: The run's configuration.
        stack: Closes the functions.

    Raises:
        ConfigError: A function does not exist, cannot be imported, or cannot be called.
    """
    functions = []
    for source in parse_reward_sources(config.reward):
        if isinstance(source, FunctionSource):
            key = f"{source.key}.function"
            timeout_s = min(source.function_timeout_s, TRIAL_TIMEOUT_S)
            python = config.server.python
            # The check of the servers' environment covers the packages of built-in functions.
            if python is not None and is_built_in_function(source.function):
                functions.append(_LoadedFunction(key, source.function, None, source, python))
                continue
            resolve = resolve_step_scorer if source.step_rewards else resolve_scorer
            scorer = resolve(source.function, key, timeout_s, python)
            functions.append(_LoadedFunction(key, source.function, scorer, source, python))
    for suite in parse_evaluation_suites(config):
        name = suite.settings.function
        if name is not None:
            key = f"{suite.key}.function"
            scorer = resolve_scorer(name, key, TRIAL_TIMEOUT_S)
            functions.append(_LoadedFunction(key, name, scorer, None))

    for function in functions:
        if isinstance(function.scorer, UserFunction):
            stack.callback(function.scorer.close)
    return functions


@dataclass
class _CheckedData:
    """Result of the check of all data."""

    notices: list[str]
    """Notices for the user, one line each."""
    first_prompts: dict[str, PromptFields]
    """First prompt that each scoring function scores, by the key of the function."""


def _try_functions(
    config: Config, functions: Sequence[_LoadedFunction], data: _CheckedData
) -> list[str]:
    """Call each of the user's scoring functions once, and return a line about each of them.

    Raises:
        ConfigError: A function raised an exception or returned wrong scores.
    """
    results = {}
    for function in functions:
        prompt = data.first_prompts.get(function.key)
        call = (function.name, function.has_steps)
        # Suites may use the function of the reward.
        if prompt is None or call in results or not isinstance(function.scorer, UserFunction):
            continue
        report_stage(config, "prepare", f"calling {function.key}={function.name}")
        results[call] = try_function(
            function.name,
            function.scorer,
            ScoringRequest(prompt.text, "", prompt.metadata),
            prompt.origin or repr(prompt.text),
            has_steps=function.has_steps,
        )
    return list(results.values())


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
    return open_prompt_stream(build_prompt_parser(config, tokenizer, tools), config.seed, cache)


def _check_data(
    config: Config,
    tokenizer: Tokenizer,
    cache: ExampleCache,
    functions: Sequence[_LoadedFunction],
) -> _CheckedData:
    """Read, tokenize and check all training and evaluation data.

    Args:
        config: The run's configuration.
        tokenizer: The policy's tokenizer.
        cache: The cache of tokenized examples.
        functions: The scoring functions of the run.
    """
    tools = list_tools(config.environment)
    schemas = tool_schemas(tools)
    suite_prompts_of_reward: list[PromptFields] = []
    data = _CheckedData([], {})

    for suite in get_active_suites(config):
        suite_tools = list_suite_tools(config, suite, tools)
        with suite.renaming_environment_keys():
            # This call only checks; see below.
            with_tool_arguments(suite.environment, suite_tools, tokenizer)
        suite_prompts = [
            PromptFields(prompt.text, prompt.metadata, prompt.origin)
            for prompt in open_evaluation_prompts(
                suite,
                config.data,
                tokenizer,
                include_messages=needs_prompt_messages(config),
                tools=tool_schemas(suite_tools),
            )
        ]
        suite_functions = [each for each in functions if each.key == f"{suite.key}.function"]
        if not suite_functions:
            suite_prompts_of_reward += suite_prompts
        for function in suite_functions:
            data.notices += _check_answers(function, suite_prompts)
            data.first_prompts[function.key] = suite_prompts[0]
        if (judge := parse_evaluation_judge(suite.settings, suite.key)) is not None:
            _check_judge_fields([judge], suite_prompts)

    if config.algorithm.generates_samples:
        # These two calls only check: they raise an error if the value is not a single token, or if
        # the chat template supports no tool calls.
        tokenizer.get_single_token(config.rollout.truncate_token, "rollout.truncate_token")
        with_tool_arguments(config.environment, tools, tokenizer)
        prompts = open_run_prompts(config, tokenizer, schemas, cache)
        reward_functions = [function for function in functions if function.source is not None]
        check = partial(_check_prompts, config, reward_functions, suite_prompts_of_reward, prompts)
        identity = {
            # The required fields follow from the code of a function, not from its name.
            "required_fields": [
                list(function.scorer.form.required_fields)
                for function in reward_functions
                if isinstance(function.scorer, UserFunction)
            ],
            "reward": asdict(config.reward),
            "kept_fields": config.algorithm.kept_fields,
            "suite_prompts": [
                [prompt.text, prompt.metadata, prompt.origin] for prompt in suite_prompts_of_reward
            ],
            "version": __version__,
        }
        data.notices[:0] = prompts.notices
        data.notices += cache.remember(identity, check)
        for function in reward_functions:
            for prompt in _select_scored(function, prompts.iterate_fields()):
                data.first_prompts[function.key] = prompt
                break
        return data

    if config.teacher.scores is not None:
        TeacherScores(Path(config.teacher.scores)).require_undamaged()
    data.notices += open_run_data(config, tokenizer, cache).notices
    return data


def _select_scored(
    function: _LoadedFunction, prompts: Iterable[PromptFields]
) -> Iterator[PromptFields]:
    """Yield the prompts whose responses a function scores."""
    for prompt in prompts:
        if function.source is None or function.source.should_score(prompt.metadata):
            yield prompt


def _check_prompts(
    config: Config,
    functions: Sequence[_LoadedFunction],
    suite_prompts: Sequence[PromptFields],
    prompts: PromptStream,
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
    for function in functions:
        notices += _check_answers(function, _select_scored(function, iterate_prompts()))
    return notices


def _check_answers(function: _LoadedFunction, prompts: Iterable[PromptFields]) -> list[str]:
    """Check that the records have the fields that a scoring function requires.

    Returns:
        A notice about answers of which only the text is compared.

    Raises:
        ConfigError: A record lacks a field, or a verifier cannot compare its answer with any
            response.
    """
    setting_text = f"{function.key}={function.name}"
    records = ((prompt.origin or repr(prompt.text), prompt.metadata) for prompt in prompts)
    if isinstance(function.scorer, UserFunction):
        require_form_fields(function.scorer.form, setting_text, records)
        return []
    if function.name not in CHECKED_VERIFIERS:
        return []
    return check_answers(function.name, setting_text, records, function.python)


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
                        f" {_describe(prompt)} has no such field; fields of the record:"
                        f" {', '.join(prompt.metadata) or 'none'}. Add the field to every"
                        " record, or remove it from the template"
                    )


def _describe(prompt: PromptFields) -> str:
    """Return the text of a prompt, and the origin of its record, for messages."""
    origin = f" ({prompt.origin})" if prompt.origin else ""
    return f"prompt {prompt.text!r}{origin}"


def _check_kept_fields(fields: Sequence[str], prompts: Iterable[PromptFields]) -> None:
    """Raise ConfigError if a prompt's record lacks a field of `algorithm.kept_fields`."""
    if not fields:
        return  # without reading the prompts

    for prompt in prompts:
        for field in fields:
            if field not in prompt.metadata:
                raise ConfigError(
                    f"algorithm.kept_fields: the record of {_describe(prompt)} has no field"
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
                f"reward.sources: the record of {_describe(prompt)} has"
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
