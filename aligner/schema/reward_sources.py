"""What scores the samples: one source, or several with weights."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from aligner.errors import ConfigError
from aligner.schema import EvaluationConfig, RewardConfig
from aligner.schema.judge_questions import (
    ASKINGS,
    COMPARISONS,
    pattern_problem,
    record_fields,
    template_problem,
)
from aligner.schema.keys import schema_keys
from aligner.schema.options import is_finite_number, key_hint
from aligner.schema.reasoning_tasks import TASK
from aligner.schema.scoring_functions import FUNCTIONS, RULES, function_problem

_SHORTEST_TIMEOUT_S = 0.1
_OF_SCORES = ("judge_pattern", "judge_lowest", "judge_highest")


@dataclass(frozen=True, kw_only=True)
class Source:
    """What gives a score, or a part of it: weight * (gain * raw + bias)."""

    name: str
    key: str
    """Where the configuration has it: `reward`, or `reward.sources.NAME`."""
    weight: float = 1.0
    task_weights: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Weights for records of some tasks; of those for which it is 0 the source is not asked."""
    gain: float = 1.0
    bias: float = 0.0
    needs: ClassVar[tuple[str, ...]]
    """The keys without which there are no scores; the first says where they come from."""

    def weight_of(self, record: Mapping[str, Any]) -> float:
        """Its weight for a prompt with what else the prompt's record has."""
        return self.task_weights.get(str(record.get(TASK)), self.weight)

    def is_asked(self, record: Mapping[str, Any]) -> bool:
        """Whether it scores the responses to this record's prompt."""
        return not self.task_weights or self.weight_of(record) != 0


@dataclass(frozen=True, kw_only=True)
class FunctionSource(Source):
    """A Python function over texts."""

    function: str
    function_timeout_s: float = RewardConfig.function_timeout_s
    step_rewards: bool = RewardConfig.step_rewards
    needs = ("function",)


@dataclass(frozen=True, kw_only=True)
class ModelSource(Source):
    """A Megatron reward model."""

    path: str
    step_separator: str | None = None
    step_probability: bool = RewardConfig.step_probability
    needs = ("path",)


@dataclass(frozen=True, kw_only=True)
class RemoteSource(Source):
    """An HTTP scorer."""

    url: str
    timeout_s: float = RewardConfig.timeout_s
    skip_special_tokens: bool = RewardConfig.skip_special_tokens
    needs = ("url",)


@dataclass(frozen=True, kw_only=True)
class JudgeSource(Source):
    """A language model behind an OpenAI-compatible endpoint. What each key is, `reward` says of the
    one of the same name."""

    judge_url: str
    judge_model: str
    judge_asks: str = RewardConfig.judge_asks
    judge_template: str | None = None
    judge_pattern: str = RewardConfig.judge_pattern
    judge_lowest: float = RewardConfig.judge_lowest
    judge_highest: float = RewardConfig.judge_highest
    judge_temperature: float = RewardConfig.judge_temperature
    judge_max_tokens: int = RewardConfig.judge_max_tokens
    judge_tries: int = RewardConfig.judge_tries
    judge_timeout_s: float = RewardConfig.judge_timeout_s
    judge_concurrency: int = RewardConfig.judge_concurrency
    judge_requests_per_minute: float | None = None
    judge_key_variable: str | None = None
    judge_input_price: float = RewardConfig.judge_input_price
    judge_output_price: float = RewardConfig.judge_output_price
    judge_cache: str | None = None
    needs = ("judge_url", "judge_model")

    @property
    def template(self) -> str:
        """The question, its fields in braces."""
        return self.judge_template or ASKINGS[self.judge_asks].template

    @property
    def record_fields(self) -> tuple[str, ...]:
        """Fields of the question that a prompt's record must have."""
        return record_fields(self.judge_asks, self.template)

    @property
    def longest_s(self) -> float:
        """How long a question may take at most, until its answer is read or given up."""
        return self.judge_tries * self.judge_timeout_s

    @property
    def compares(self) -> bool:
        """Whether it tells the samples of a prompt apart by each other, and so needs several of
        them."""
        return self.judge_asks in COMPARISONS


_KINDS: Mapping[str, type[Source]] = {
    "function": FunctionSource,
    "model": ModelSource,
    "remote": RemoteSource,
    "judge": JudgeSource,
}


def reward_sources(reward: RewardConfig) -> tuple[Source, ...]:
    """The sources of the score. Raises ConfigError with one line for each thing that is wrong."""
    problems = []
    if reward.kind == "combined" and not reward.sources:
        problems.append(
            "reward.sources: reward.kind=combined requires at least one source; add one with"
            " '+reward.sources.NAME={kind: function, function: FUNCTION}'"
        )
    if reward.kind == "combined" and reward.combine != "sum" and len(reward.sources) == 1:
        problems.append(
            f"reward.combine={reward.combine}: requires at least two reward.sources, got 1; add"
            " sources, or set reward.combine=sum"
        )
    if (
        reward.kind == "combined"
        and reward.combine != "sum"
        and any(map(_entries_have_steps, reward.sources.values()))
    ):
        problems.append(
            f"reward.combine={reward.combine}: is not supported with step rewards; set"
            " reward.combine=sum"
        )
    sources = []
    for key, name, entries in _entries(reward):
        found = list(_source_problems(key, entries))
        problems += found
        if not found:
            chosen = {entry: value for entry, value in entries.items() if entry != "kind"}
            sources.append(_KINDS[entries["kind"]](name=name, key=key, **chosen))
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(sources)


def source_names(reward: RewardConfig) -> tuple[str, ...]:
    """Their names, in the order of the parts of a score. Raises ConfigError as `reward_sources`."""
    return tuple(source.name for source in reward_sources(reward))


def score_parts(reward: RewardConfig) -> int | None:
    """How many parts a score is told with before rewards of steps; None where there are none of
    these."""
    names = source_names(reward) if has_step_rewards(reward) else None
    return None if names is None else len(names) if len(names) > 1 else 0


def model_sources(sources: tuple[Source, ...]) -> tuple[ModelSource, ...]:
    """Those that are Megatron models."""
    return tuple(source for source in sources if isinstance(source, ModelSource))


def has_step_rewards(reward: RewardConfig) -> bool:
    """Whether a source rewards the steps of a response, not it alone; False for sources that do not
    say what they must."""
    if reward.kind == "combined":
        return any(map(_entries_have_steps, reward.sources.values()))
    entries = (
        {"step_rewards": reward.step_rewards}
        if reward.kind == "function"
        else {"step_separator": reward.step_separator}
    )
    return reward.kind in ("function", "model") and _entries_have_steps(entries)


def _entries_have_steps(entries: Any) -> bool:
    is_mapping = isinstance(entries, Mapping)
    return is_mapping and (
        entries.get("step_rewards") is True or entries.get("step_separator") is not None
    )


def judge_sources(reward: RewardConfig) -> tuple[JudgeSource, ...]:
    """Those that are judges. Raises ConfigError as `reward_sources`."""
    return tuple(source for source in reward_sources(reward) if isinstance(source, JudgeSource))


def evaluation_judge(
    evaluation: EvaluationConfig, section: str = "evaluation"
) -> JudgeSource | None:
    """What compares responses with references, of the settings at `section`; None where nothing
    does.

    Raises ConfigError as `reward_sources`.
    """
    key, given = f"{section}.judge", evaluation.judge
    if not given:
        return None
    asks = given.get("judge_asks", "pairwise")
    problems = (
        []
        if asks == "pairwise"
        else [f"{key}.judge_asks={asks}: must be pairwise in an evaluation; remove this key"]
    )
    problems += [
        f"{key}.{entry}: is not supported in an evaluation, which counts wins; remove this key"
        for entry in ("kind", "weight", "task_weights", "gain", "bias", *_OF_SCORES)
        if entry in given
    ]
    entries = {"kind": "judge", "judge_asks": "pairwise"} | given
    if problems := problems or list(_source_problems(key, entries)):
        raise ConfigError("\n".join(problems))
    return JudgeSource(
        name="evaluation",
        key=key,
        **{entry: value for entry, value in entries.items() if entry != "kind"},
    )


def asked_address(source: Source) -> str | None:
    """Where a source that asks another program over HTTP does so; None for any other."""
    if isinstance(source, RemoteSource):
        return source.url
    return source.judge_url if isinstance(source, JudgeSource) else None


def has_reward_model(reward: RewardConfig) -> bool:
    """Whether a model scores; False for sources that do not say what they must."""
    try:
        return bool(model_sources(reward_sources(reward)))
    except ConfigError:
        return False


def describe_sources(reward: RewardConfig) -> str:
    """What scores, in a few words, for the placement table."""
    each = [
        ("" if source.weight == 1 else f"{source.weight:g} x ")
        + f"{kind} {getattr(source, source.needs[0])}"
        for source in reward_sources(reward)
        for kind, chosen in _KINDS.items()
        if isinstance(source, chosen)
    ]
    return " + ".join(each) if reward.combine == "sum" else f"{reward.combine} of {', '.join(each)}"


def source_entry(source: Source) -> dict[str, Any]:
    """A source as an entry of `reward.sources`."""
    (kind,) = (kind for kind, chosen in _KINDS.items() if isinstance(source, chosen))
    values = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    return {"kind": kind} | {
        name: value
        for name, value in values.items()
        if name not in ("name", "key") and value not in (None, {})
    }


def without_tasks(reward: RewardConfig) -> dict[str, Any]:
    """`reward.sources` with each asked about all records. Raises ConfigError as
    `reward_sources`."""
    sources = (
        {source.name: source for source in reward_sources(reward)}
        if reward.kind == "combined"
        else {}
    )
    changed = {
        name: dataclasses.replace(source, task_weights={})
        for name, source in sources.items()
        if source.task_weights
    }
    return dict(reward.sources) | {
        name: source_entry(source) | {"weight": source.weight or 1.0}
        for name, source in changed.items()
    }


def _entries(reward: RewardConfig) -> Iterator[tuple[str, str, Any]]:
    """(key, name, entries) of each source; a single one is written in the section itself, without
    its defaults."""
    if reward.kind == "combined":
        for name, entries in reward.sources.items():
            yield f"reward.sources.{name}", name, entries
        return
    entries = {"kind": reward.kind, "gain": reward.gain, "bias": reward.bias}
    fields = (
        field.name
        for field in dataclasses.fields(_KINDS[reward.kind])
        if hasattr(reward, field.name)
    )
    entries |= {
        field: getattr(reward, field) for field in fields if getattr(reward, field) is not None
    }
    yield "reward", reward.kind, entries


def _source_problems(key: str, entries: Any) -> Iterator[str]:
    if not isinstance(entries, Mapping):
        yield (
            f"{key}={entries}: expected a mapping with kind and the keys that this kind"
            f" requires, got {type(entries).__name__}"
        )
        return
    kind = _KINDS.get(str(entries.get("kind")))
    if kind is None:
        got = (
            f"{key}.kind={entries['kind']}: unknown kind"
            if "kind" in entries
            else f"{key}.kind: missing"
        )
        yield f"{got}; allowed: {', '.join(_KINDS)}"
        return
    allowed = [
        "kind",
        *(field.name for field in dataclasses.fields(kind) if field.name not in ("name", "key")),
    ]
    for entry, value in entries.items():
        if entry not in allowed:
            hint = key_hint(key, entry, allowed, f"allowed in {key}: {', '.join(allowed)}")
            yield f"{key}.{entry}: unknown key with kind={entries['kind']}; {hint}"
        elif problem := _value_problem(entry, value):
            yield f"{key}.{entry}={value}: {problem}"
    for needed in kind.needs:
        if needed not in entries:
            yield f"{key}.{needed}: missing; required with kind={entries['kind']}"
    if entries.get("step_rewards") is True and (name := entries.get("function")) in {
        **FUNCTIONS,
        **RULES,
    }:
        yield (
            f"{key}.step_rewards=true: {name} returns one number per response, not step rewards;"
            " set your own function, module:callable"
        )
    if kind is JudgeSource:
        yield from _judge_problems(
            key, {entry: value for entry, value in entries.items() if entry in allowed}
        )


def _judge_problems(key: str, entries: Mapping[str, Any]) -> Iterator[str]:
    """What does not go together among a judge's entries, those that are wrong by themselves left
    aside."""
    right = {
        entry: value for entry, value in entries.items() if _value_problem(entry, value) is None
    }
    lowest, highest = (
        right.get(entry, getattr(RewardConfig, entry))
        for entry in ("judge_lowest", "judge_highest")
    )
    if lowest >= highest:
        yield f"{key}.judge_lowest={lowest:g}: must be below {key}.judge_highest={highest:g}"
    template, asks = right.get("judge_template"), right.get("judge_asks", RewardConfig.judge_asks)
    if template is not None and (problem := template_problem(asks, template)):
        yield f"{key}.judge_template: {problem}"


def _value_problem(entry: str, value: Any) -> str | None:
    if entry.startswith("judge_"):
        return _judge_value_problem(entry, value)
    if entry in ("skip_special_tokens", "step_rewards", "step_probability"):
        return None if isinstance(value, bool) else "must be true or false"
    if entry in ("weight", "gain", "bias", "timeout_s", "function_timeout_s"):
        if not is_finite_number(value):
            return "must be a finite number"
        if entry.endswith("timeout_s") and value < _SHORTEST_TIMEOUT_S:
            return f"must be at least {_SHORTEST_TIMEOUT_S:g}"
        return None
    if entry == "task_weights":
        good = isinstance(value, Mapping) and all(isinstance(task, str) for task in value)
        return (
            None
            if good and all(map(is_finite_number, value.values()))
            else "must be a mapping from task names to finite numbers"
        )
    if not isinstance(value, str) or not value:
        return f"expected a string, got {type(value).__name__}"
    if entry == "function":
        return function_problem(value)
    return _url_problem(value) if entry == "url" else None


def _judge_value_problem(entry: str, value: Any) -> str | None:
    """By the section's key of the same name."""
    if value is None:
        return "expected a value, got null; remove the entry to use the default"
    if (problem := schema_keys()[f"reward.{entry}"].value_problem(value)) is not None:
        return problem
    if entry == "judge_url":
        return _url_problem(value)
    return pattern_problem(value) if entry == "judge_pattern" else None


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        complete = complete and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        complete = False
    return None if complete else "must be http://HOST[:PORT]/PATH, or https://…"
