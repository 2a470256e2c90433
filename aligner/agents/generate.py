"""Samples of a stored model, written to a file: what `aligner generate` does."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_journal import EpisodeJournal
from aligner.agents.episodes import EnvironmentEpisodes, episode_name
from aligner.agents.tool_catalogue import list_tools, tool_schemas, with_tool_arguments
from aligner.agents.tool_protocol import ListedTool
from aligner.data.chat_turns import ChatTurns
from aligner.data.conversations import (
    add_tools,
    build_conversation,
    build_transcript,
    decode_response,
)
from aligner.data.export import Source
from aligner.data.prompts import to_chat_prompt, to_prompt
from aligner.data.records import Record
from aligner.data.tokenizer import Tokenizer
from aligner.data.tokenizer_files import find_tokenizer_problem
from aligner.data.types import Prompt, Sample
from aligner.engines.build import build_engine
from aligner.engines.engine_loop import SingleResponses, StartsSamples
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.files import convert_write_errors, open_new_file
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.models.vocabulary import with_all_end_tokens
from aligner.schema import EngineConfig
from aligner.schema.environment import EnvironmentConfig


@dataclass(frozen=True)
class Progress:
    """How far a job is."""

    samples: int
    """Complete responses."""
    tokens: int
    """Of the complete responses."""
    seconds: float
    """Since generation began."""
    rewards: tuple[float, ...] = ()
    """What environments gave for each of the complete episodes; not a number for one that was lost.
    """

    @property
    def tokens_per_s(self) -> float:
        """Response tokens a second, those of complete responses."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Job:
    """What is to be generated; whatever can be wrong with it has been looked at."""

    source: Source
    shape: ModelShape
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    samples: int
    """Responses a prompt."""
    options: SamplingOptions
    seed: int
    environment: EnvironmentConfig | None = None
    """What answers between the turns of responses that are episodes."""
    tools: Sequence[ListedTool] = ()
    """That it has."""
    journal: EpisodeJournal = field(default_factory=EpisodeJournal)
    """What it said."""

    @cached_property
    def chat(self) -> ChatTurns:
        """How conversations are worded. Raises ConfigError for a model without a chat template."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    @property
    def requests(self) -> list[GenerationRequest]:
        """In the order of the output: each prompt's samples in a row."""
        return [
            GenerationRequest(prompt, index)
            for prompt in self.prompts
            for index in range(self.samples)
        ]


def plan_job(
    source: Source,
    prompts: Sequence[Record],
    *,
    samples: int,
    seed: int,
    stop_at_eos: bool,
    max_new_tokens: int,
    environment: EnvironmentConfig | None = None,
    **sampling: Any,
) -> Job:
    """The job of drawing so many responses to each prompt; `sampling` is what else SamplingOptions
    takes.

    With an environment they are episodes, and a prompt may be chat messages.

    A prompt's id is its place among the prompts. No weight is read. Raises ConfigError for a model
    that generates no text or has no tokenizer, sampling options that do not fit, and a prompt that
    leaves no room for the response, by its place.
    """
    shape = require_generating(source)
    stops = shape.eos_token_ids if stop_at_eos else ()
    try:
        options = SamplingOptions(max_new_tokens, stop_token_ids=stops, **sampling)
    except AlignerError as error:
        raise ConfigError(str(error)) from error
    if options.greedy and samples > 1:
        raise ConfigError(
            f"{samples} samples per prompt with greedy decoding would be identical; generate 1"
            " sample per prompt, or turn off greedy decoding"
        )
    longest = shape.max_positions - max_new_tokens
    if longest < 1:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens}: must be less than the model's"
            f" {shape.max_positions} positions, which include the prompt"
        )
    tokenizer = Tokenizer(source.companions)
    allowed = (
        f"{longest}, the model's {shape.max_positions} positions minus {max_new_tokens} new tokens"
    )
    listed = [] if environment is None else list_tools(environment)
    tools = tool_schemas(listed)
    tokenized = [
        (
            to_prompt(record, record.get_text("prompt"), tokenizer, longest, allowed, id=place)
            if environment is None
            else to_chat_prompt(add_tools(record, tools), tokenizer, longest, allowed, id=place)
        )
        for place, record in enumerate(prompts)
    ]
    return Job(source, shape, tokenizer, tokenized, samples, options, seed, environment, listed)


def require_generating(source: Source) -> ModelShape:
    """The shape of a stored model. Raises ConfigError for one that generates no text, or has no
    tokenizer."""
    shape = with_all_end_tokens(
        read_config(source.config, "the model's config.json"), source.companions
    )
    if source.head != "vocabulary":
        raise ConfigError(
            f"{source.argument}={source.directory}: is a value or reward model, which does not"
            " generate text; must be a policy or another language model"
        )
    if problem := find_tokenizer_problem(source.companions):
        raise ConfigError(
            f"{source.companions}: {problem}; generation requires the model's tokenizer"
        )
    return shape


def generate(
    job: Job,
    settings: EngineConfig,
    output: Path,
    *,
    overwrite: bool = False,
    min_score: float | None = None,
    as_messages: bool = False,
    progress: Callable[[Progress], None],
) -> Progress:
    """Do the job with an engine of this one process, and write a JSON object a sample; returns the
    totals.

    Of episodes those of less than `min_score`, and those that were lost, are not written; with
    `as_messages` the others' conversations are. The lines are in the order of the job's requests;
    an episode with branches has one for each of these too, before its last. The file takes its name
    when it is complete, and nothing is left of it when this fails. `progress` is told after every
    step of the engine. Raises ConfigError where `output` can not be written, or exists and is not
    to be overwritten, and where the engine can not run here.
    """
    done = Progress(0, 0, 0.0)

    def told(now: Progress) -> None:
        nonlocal done
        done = now
        progress(now)

    with written(output, overwrite) as file:
        for sample in draw(job, settings, told):
            score = None if job.environment is None else episode_score(sample)
            if score is not None and not score >= (-math.inf if min_score is None else min_score):
                continue
            for record in (
                [conversation_record(job, sample)] if as_messages else sequence_records(job, sample)
            ):
                file.write(json_line(record))
    return done


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a JSONL file."""
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def draw(
    job: Job, settings: EngineConfig, progress: Callable[[Progress], None]
) -> Iterator[Sample]:
    """The job's samples, in the order of its requests, by an engine of this one process; its end
    shuts the engine down.

    `progress` is told after every step of the engine. Raises ConfigError where the engine can not
    run here.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    longest = max(prompt.tokens.numel() for prompt in job.prompts) + job.options.max_new_tokens
    engine = build_engine(
        job.shape, settings, job.source.companions, seed=job.seed, device=device, context=longest
    )
    pool = (
        None
        if job.environment is None
        else EnvironmentPool.of(
            with_tool_arguments(job.environment, job.tools, job.tokenizer), job.journal
        )
    )
    try:
        source: StartsSamples = SingleResponses(engine)
        if pool is not None and job.environment is not None:
            try:
                pool.start()
            except ConfigError as error:
                raise ConfigError(f"environment.target: {error}") from error
            source = EnvironmentEpisodes(engine, pool, job.tokenizer, job.environment, job.seed)
        load(engine, job.source)
        generation = source.start(job.requests, job.options)
        waiting: dict[int, Sample] = {}
        """Complete samples that have to follow others, by place."""
        done, given, started = Progress(0, 0, 0.0), 0, time.monotonic()
        while not generation.done:
            complete = generation.step()
            waiting |= complete
            while given in waiting:
                yield waiting.pop(given)
                given += 1
            tokens = done.tokens + sum(
                each.generated_token_count for _, sample in complete for each in sample.sequences
            )
            rewards = done.rewards + tuple(
                episode_score(sample) for _, sample in complete if sample.rewards is not None
            )
            done = Progress(
                done.samples + len(complete), tokens, time.monotonic() - started, rewards
            )
            progress(done)
    finally:
        if pool is not None:
            pool.close()
        engine.shutdown()


def load(engine: GenerationEngine, source: Source) -> None:
    """Put a stored model's weights into an engine of one rank; their version is the training step,
    0 without one."""
    update = engine.begin_update(source.step)
    try:
        for tensors in source.weights():
            views = update.views(list(tensors))
            for name, tensor in tensors.items():
                views[name].copy_(tensor)
            update.load(list(tensors))
        update.commit()
    except BaseException:
        update.abort()
        raise


@contextmanager
def written(output: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A file under a temporary name, which takes that of `output` when the block ends well.

    Raises ConfigError where `output` can not be written, or exists and is not to be overwritten.
    """
    if output.is_dir() or (output.exists() and not overwrite):
        advice = (
            "is a directory; must be a file"
            if output.is_dir()
            else "already exists; choose another file, or allow overwriting"
        )
        raise ConfigError(f"{output}: {advice}")
    with ExitStack() as stack:
        with convert_write_errors(output):
            file = stack.enter_context(open_new_file(output))
        yield file


def sequence_records(job: Job, sample: Sample) -> list[dict[str, Any]]:
    """All that was drawn for a sample of the job, each with what it read as its prompt, and with
    the episode's score."""
    if not sample.branches:
        return [sample_record(job, sample)]
    return [
        sample_record(job, replace(each, branches=()))
        | {
            "prompt": job.tokenizer.decode(asked, skip_special_tokens=False),
            "prompt_tokens": asked.tolist(),
        }
        | {"score": episode_score(sample)}
        for each in sample.sequences
        for asked in [each.tokens[: each.prompt_length]]
    ]


def sample_record(job: Job, sample: Sample) -> dict[str, Any]:
    """A sample of the job, which has no branches, as its line of the output has it."""
    prompt = job.prompts[sample.prompt_id]
    episode: dict[str, Any] = {}
    if job.environment is not None:
        marks = torch.ones(len(sample.response)) if sample.drawn is None else sample.drawn
        episode = {
            "score": episode_score(sample),
            "turns": build_transcript(sample, job.tokenizer),
            "drawn": marks.int().tolist(),
            "prompt_tokens": prompt.tokens.tolist(),
        }
    return {
        "prompt": prompt.text,
        "response": decode_response(sample, job.tokenizer),
        "prompt_index": prompt.id,
        "sample_index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "tokens": sample.response.tolist(),
        "logprobs": sample.engine_logprobs.tolist(),
        "weight_version": int(sample.weight_versions.max()),  # given tokens have none
        "metadata": dict(prompt.metadata),
        **episode,
    }


def conversation_record(job: Job, sample: Sample) -> dict[str, Any]:
    """An episode of the job as chat messages."""
    prompt = job.prompts[sample.prompt_id]
    answers = [
        outcome.observation
        for outcome in job.journal.answers(episode_name(prompt.id, sample.sample_index))
    ]
    said = build_conversation(sample, prompt, answers, job.tokenizer, lambda: job.chat)
    return said | {
        "score": episode_score(sample),
        "prompt_index": prompt.id,
        "sample_index": sample.sample_index,
    }


def episode_score(sample: Sample) -> float:
    """The sum of an episode's rewards; not a number where it was lost."""
    given = sample.environment_reward
    return 0.0 if given is None else float(given)
