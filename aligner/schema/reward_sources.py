"""Sources of the reward in the configuration: one source, or several with weights."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator
from typing_extensions import Self

from aligner.errors import ConfigError, collect_problems
from aligner.schema import EvaluationConfig, RewardConfig
from aligner.schema.data import TASK
from aligner.schema.entries import (
    Entries,
    Text,
    make_field_with_message,
    make_section_field,
    make_validator,
    parse_entries,
)
from aligner.schema.judge_questions import (
    COMPARISONS,
    JUDGE_QUESTIONS,
    find_pattern_problem,
    find_record_fields,
    find_template_problem,
)
from aligner.schema.scoring_functions import FUNCTIONS, RULES, find_function_problem

# Entries of judges that return scores, and of all sources; the judge of an evaluation has neither.
_SCORE_ENTRIES = ("judge_pattern", "judge_lowest", "judge_highest")
_SOURCE_ENTRIES = ("kind", "weight", "task_weights", "gain", "bias")


def _find_url_problem(url: str) -> str | None:
    """Return the problem of an HTTP URL; None if there is no problem."""
    try:
        parts = urlsplit(url)
        # urlsplit checks the port only when it is read: ValueError if it is above 65535.
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    is_readable = url.isascii() and url.isprintable() and " " not in url
    return None if is_complete and is_readable else "must be http://HOST[:PORT]/PATH, or https://…"


_Url = Annotated[str, make_validator(_find_url_problem)]


class Source(Entries):
    """Source of a score or of a part of a score: weight * (gain * raw + bias)."""

    name: str = Field(exclude=True)
    """Name of the source in `reward.sources`, or its kind."""
    key: str = Field(exclude=True)
    """Dotted key of the source: `reward`, or `reward.sources.NAME`."""
    weight: float = 1.0
    """Weight of the source in the score."""
    task_weights: dict[str, float] = make_field_with_message(
        "must be a mapping from task names to finite numbers", default_factory=dict
    )
    """Weights for records of some tasks; a source with weight 0 does not score the record."""
    gain: float = 1.0
    """Factor of the raw score."""
    bias: float = 0.0
    """Constant that is added to the scaled raw score."""
    origin: ClassVar[str]
    """Name of the required entry that identifies the scorer, such as `function` or `url`."""

    # pydantic's own hash of a frozen model fails, because `task_weights` is a dict.
    def __hash__(self) -> int:
        return hash(self.key)

    def get_weight(self, record: Mapping[str, Any]) -> float:
        """Return the weight for the responses to the prompt of a record."""
        return self.task_weights.get(str(record.get(TASK)), self.weight)

    def should_score(self, record: Mapping[str, Any]) -> bool:
        """Return whether the source scores the responses to the prompt of a record."""
        return not self.task_weights or self.get_weight(record) != 0


class FunctionSource(Source):
    """A Python function that scores texts."""

    kind: Literal["function"] = "function"
    function: Annotated[str, make_validator(find_function_problem)]
    function_timeout_s: float = make_section_field(RewardConfig, "function_timeout_s")
    step_rewards: bool = make_section_field(RewardConfig, "step_rewards")
    origin = "function"

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        """Raise ValueError if a built-in function is configured to return step rewards."""
        if self.step_rewards and self.function in {**FUNCTIONS, **RULES}:
            raise ValueError(
                f"{self.key}.step_rewards=true: {self.function} returns one number per response,"
                " not step rewards; set your own function, module:callable"
            )
        return self


class ModelSource(Source):
    """A Megatron reward model."""

    kind: Literal["model"] = "model"
    path: Text
    step_separator: Text | None = make_section_field(RewardConfig, "step_separator")
    step_probability: bool = make_section_field(RewardConfig, "step_probability")
    origin = "path"


class RemoteSource(Source):
    """An HTTP scorer."""

    kind: Literal["remote"] = "remote"
    url: _Url
    timeout_s: float = make_section_field(RewardConfig, "timeout_s")
    skip_special_tokens: bool = make_section_field(RewardConfig, "skip_special_tokens")
    origin = "url"


class JudgeSource(Source):
    """A language model behind an OpenAI-compatible endpoint. Each entry has the meaning of the key
    of `reward` with the same name."""

    kind: Literal["judge"] = "judge"
    judge_url: _Url
    judge_model: Text
    judge_asks: Literal["score", "yes_no", "pairwise", "ranking"] = make_section_field(
        RewardConfig, "judge_asks"
    )
    judge_template: Text | None = make_section_field(RewardConfig, "judge_template")
    judge_pattern: Annotated[str, make_validator(find_pattern_problem)] = make_section_field(
        RewardConfig, "judge_pattern"
    )
    judge_lowest: float = make_section_field(RewardConfig, "judge_lowest")
    judge_highest: float = make_section_field(RewardConfig, "judge_highest")
    judge_temperature: float = make_section_field(RewardConfig, "judge_temperature")
    judge_max_tokens: int = make_section_field(RewardConfig, "judge_max_tokens")
    judge_tries: int = make_section_field(RewardConfig, "judge_tries")
    judge_timeout_s: float = make_section_field(RewardConfig, "judge_timeout_s")
    judge_concurrency: int = make_section_field(RewardConfig, "judge_concurrency")
    judge_requests_per_minute: float | None = make_section_field(
        RewardConfig, "judge_requests_per_minute"
    )
    judge_key_variable: Text | None = make_section_field(RewardConfig, "judge_key_variable")
    judge_input_price: float = make_section_field(RewardConfig, "judge_input_price")
    judge_output_price: float = make_section_field(RewardConfig, "judge_output_price")
    judge_cache: Text | None = make_section_field(RewardConfig, "judge_cache")
    origin = "judge_url"

    @model_validator(mode="after")
    def _check_scores_and_template(self) -> Self:
        """Raise ValueError with the problems of the score range and of the template."""
        problems = []
        if self.judge_lowest >= self.judge_highest:
            problems.append(
                f"{self.key}.judge_lowest={self.judge_lowest:g}: must be below"
                f" {self.key}.judge_highest={self.judge_highest:g}"
            )
        if problem := find_template_problem(self.judge_asks, self.template):
            problems.append(f"{self.key}.judge_template: {problem}")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def template(self) -> str:
        """Template of the question, with fields in braces."""
        return self.judge_template or JUDGE_QUESTIONS[self.judge_asks].template

    @property
    def record_fields(self) -> tuple[str, ...]:
        """Fields of the question that a prompt's record must have."""
        return find_record_fields(self.judge_asks, self.template)

    @property
    def max_duration_s(self) -> float:
        """Maximum time in seconds until a question has an answer or its last attempt has failed."""
        return self.judge_tries * self.judge_timeout_s

    @property
    def is_comparison(self) -> bool:
        """Whether the judge compares the samples of a prompt, and so needs several samples."""
        return self.judge_asks in COMPARISONS


RewardSource = Annotated[
    FunctionSource | ModelSource | RemoteSource | JudgeSource, Field(discriminator="kind")
]
"""Union of the kinds of entries of `reward.sources`."""


def parse_reward_sources(reward: RewardConfig) -> tuple[Source, ...]:
    """Return the sources of the score.

    Raises:
        ConfigError: One line for each problem of the sources.
    """
    problems = list(_find_combination_problems(reward)) if reward.kind == "combined" else []
    sources = []
    for key, name, entries in _iterate_entries(reward):
        with collect_problems(problems):
            sources.append(_parse_source(key, name, entries))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(sources)


def _parse_source(key: str, name: str, entries: Any) -> Source:
    """Validate the entries of a source.

    Raises:
        ConfigError: One line for each problem of the entries.
    """
    source: Source = parse_entries(
        RewardSource,
        key,
        entries,
        expected="kind and the keys that this kind requires",
        identity={"name": name, "key": key},
    )
    return source


def _find_combination_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield problems of the combination of several sources."""
    if not reward.sources:
        yield (
            "reward.sources: reward.kind=combined requires at least one source; add one with"
            " '+reward.sources.NAME={kind: function, function: FUNCTION}'"
        )
    if reward.combine == "sum":
        return
    if len(reward.sources) == 1:
        yield (
            f"reward.combine={reward.combine}: requires at least two reward.sources, got 1; add"
            " sources, or set reward.combine=sum"
        )
    if any(map(_entries_have_steps, reward.sources.values())):
        yield (
            f"reward.combine={reward.combine}: is not supported with step rewards; set"
            " reward.combine=sum"
        )


def list_source_names(reward: RewardConfig) -> tuple[str, ...]:
    """Return the names of the sources, in the order of the parts of a score.

    Raises:
        ConfigError: One line for each problem of the sources.
    """
    return tuple(source.name for source in parse_reward_sources(reward))


def count_score_parts(reward: RewardConfig) -> int | None:
    """Return the number of score parts that precede step rewards; None without step rewards."""
    if not has_step_rewards(reward):
        return None
    # A score with a single source has no parts besides itself.
    names = list_source_names(reward)
    return len(names) if len(names) > 1 else 0


def select_model_sources(sources: tuple[Source, ...]) -> tuple[ModelSource, ...]:
    """Return the sources that are Megatron models."""
    return tuple(source for source in sources if isinstance(source, ModelSource))


def has_step_rewards(reward: RewardConfig) -> bool:
    """Return whether a source rewards the steps of a response; False for invalid sources."""
    if reward.kind == "combined":
        return any(map(_entries_have_steps, reward.sources.values()))
    if reward.kind == "function":
        return reward.step_rewards
    return reward.kind == "model" and reward.step_separator is not None


def _entries_have_steps(entries: Any) -> bool:
    """Return whether the entries of a source enable step rewards; the entries may be invalid."""
    if not isinstance(entries, Mapping):
        return False
    return entries.get("step_rewards") is True or entries.get("step_separator") is not None


def parse_judge_sources(reward: RewardConfig) -> tuple[JudgeSource, ...]:
    """Return the sources that are judges.

    Raises:
        ConfigError: One line for each problem of the sources.
    """
    return tuple(
        source for source in parse_reward_sources(reward) if isinstance(source, JudgeSource)
    )


def parse_evaluation_judge(
    evaluation: EvaluationConfig, section: str = "evaluation"
) -> JudgeSource | None:
    """Return the judge that compares responses with references; None without a judge.

    Args:
        evaluation: Settings of the evaluation, or of one suite.
        section: Dotted key of the settings.

    Raises:
        ConfigError: One line for each problem of the judge.
    """
    if not evaluation.judge:
        return None

    key = f"{section}.judge"
    asks = evaluation.judge.get("judge_asks", "pairwise")
    problems = [
        f"{key}.{entry}: is not supported in an evaluation, which counts wins; remove this key"
        for entry in (*_SOURCE_ENTRIES, *_SCORE_ENTRIES)
        if entry in evaluation.judge
    ]
    if asks != "pairwise":
        problems.append(
            f"{key}.judge_asks={asks}: must be pairwise in an evaluation; remove this key"
        )
    if problems:
        raise ConfigError("\n".join(problems))

    judge = _parse_source(
        key, "evaluation", {"kind": "judge", "judge_asks": "pairwise"} | evaluation.judge
    )
    assert isinstance(judge, JudgeSource)
    return judge


def get_request_url(source: Source) -> str | None:
    """Return the URL of a source that is requested over HTTP; None for any other source."""
    if isinstance(source, RemoteSource):
        return source.url
    return source.judge_url if isinstance(source, JudgeSource) else None


def has_reward_model(reward: RewardConfig) -> bool:
    """Return whether a source is a Megatron model; False for invalid sources."""
    try:
        return bool(select_model_sources(parse_reward_sources(reward)))
    except ConfigError:
        return False


def describe_sources(reward: RewardConfig) -> str:
    """Return a short description of the sources, for the placement table."""
    descriptions = [_describe_source(source) for source in parse_reward_sources(reward)]
    if reward.combine == "sum":
        return " + ".join(descriptions)
    return f"{reward.combine} of {', '.join(descriptions)}"


def _describe_source(source: Source) -> str:
    """Return a short description of a source, with its weight unless the weight is 1."""
    weight = "" if source.weight == 1 else f"{source.weight:g} x "
    return f"{weight}{to_source_entry(source)['kind']} {getattr(source, source.origin)}"


def to_source_entry(source: Source) -> dict[str, Any]:
    """Return a source as an entry of `reward.sources`."""
    # An empty mapping stands for a default, such as no task weights.
    values = source.model_dump(exclude_none=True)
    return {name: value for name, value in values.items() if value != {}}


def without_task_weights(reward: RewardConfig) -> dict[str, Any]:
    """Return `reward.sources` in which every source scores all records.

    Raises:
        ConfigError: One line for each problem of the sources.
    """
    if reward.kind != "combined":
        return dict(reward.sources)
    changed_entries = {
        source.name: to_source_entry(source.model_copy(update={"task_weights": {}}))
        # A source that scores only some tasks often has the weight 0 for the others.
        | {"weight": source.weight or 1.0}
        for source in parse_reward_sources(reward)
        if source.task_weights
    }
    return dict(reward.sources) | changed_entries


def _iterate_entries(reward: RewardConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield the key, the name and the entries of each source.

    The keys of the section `reward` are the entries of a single source.
    """
    if reward.kind == "combined":
        for name, entries in reward.sources.items():
            yield f"reward.sources.{name}", name, entries
        return
    (model,) = (
        model
        for model in (FunctionSource, ModelSource, RemoteSource, JudgeSource)
        if model.model_fields["kind"].default == reward.kind
    )
    # Fields such as `weight` are entries of `reward.sources` only, not keys of `reward`.
    entries = {name: getattr(reward, name, None) for name in model.model_fields}
    yield (
        "reward",
        reward.kind,
        {name: value for name, value in entries.items() if value is not None},
    )
