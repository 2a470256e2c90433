"""Implementation of `aligner generate`: write samples of a stored model to a JSONL file.

`plan_job` checks the input and tokenizes the prompts, `generate_samples` generates the samples, and
`generate` writes them. `aligner serve-model` also uses `load_weights` and `read_generating_shape`.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import torch

from aligner.agents.agent_transcripts import AgentTranscripts
from aligner.agents.episode_journal import EpisodeJournal
from aligner.agents.episode_source import start_episodes
from aligner.agents.episodes import build_episode_name
from aligner.agents.tool_catalogue import list_tools, tool_schemas
from aligner.agents.tool_protocol import ListedTool
from aligner.data.chat_turns import ChatTurns
from aligner.data.conversations import (
    add_tools,
    build_conversation,
    build_transcript,
    decode_response,
)
from aligner.data.episode_reports import EpisodeReport
from aligner.data.export import Source
from aligner.data.prompts import apply_template_use, to_prompt
from aligner.data.records import BadRecord, ExcludedRecord, Record
from aligner.data.tokenizer import Tokenizer, build_run_tokenizer
from aligner.data.tokenizer_files import find_tokenizer_problem, has_chat_template
from aligner.data.types import Prompt, Sample
from aligner.engines.build import build_engine
from aligner.engines.engine_loop import SampleStarter, SingleResponses
from aligner.engines.engine_protocol import GenerationEngine, GenerationRequest, SamplingOptions
from aligner.errors import AlignerError, ConfigError
from aligner.files import convert_write_errors, open_new_file
from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape
from aligner.models.vocabulary import with_all_end_tokens
from aligner.schema import Config, DataConfig, EngineConfig
from aligner.schema.environment import EnvironmentConfig

if TYPE_CHECKING:
    from aligner.agents.agent_episodes import TurnListener

_COMMAND_SETTINGS = {
    name: f"--{name.replace('_', '-')}"
    for name in ("temperature", "top_k", "top_p", "min_p", "seed")
}
"""Options of the sampling parameters of a command; see `SessionContext.sampling_settings`."""
TemplateUse = Literal["auto", "chat", "raw"]
"""When the chat template renders a prompt: only for messages (`auto`), also for plain texts as the
message of a user (`chat`), or never (`raw`)."""


@dataclass(frozen=True)
class Progress:
    """Progress of a generation job."""

    samples: int
    """Number of complete responses."""
    tokens: int
    """Number of generated tokens of the complete responses."""
    seconds: float
    """Time since the start of generation, in seconds."""
    rewards: tuple[float, ...] = ()
    """Sum of the environment's rewards of each complete episode; NaN for a lost episode."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of complete responses per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Job:
    """A checked generation job; `plan_job` creates it."""

    source: Source
    shape: ModelShape
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]
    samples_per_prompt: int
    """Number of responses per prompt."""
    options: SamplingOptions
    seed: int
    max_sequence_length: int
    """Maximum number of tokens of a prompt and its response, or of one sequence of an agent."""
    environment: EnvironmentConfig | None = None
    """Environment or agent of the episodes; None for single responses."""
    tools: Sequence[ListedTool] = ()
    """Tools of the environment."""
    journal: EpisodeJournal = field(default_factory=EpisodeJournal)
    """Answers of the environment, by episode."""
    notices: Sequence[str] = ()
    """Notices about the prompts for the user, one line each."""
    positions: Sequence[int] = ()
    """Index of each prompt's record in the sequence that `plan_job` received."""
    first_prompt_id: int = 0
    """Id of the first prompt; the ids of the others follow."""

    @cached_property
    def chat(self) -> ChatTurns:
        """The chat template. Raises ConfigError for a model without one."""
        return ChatTurns.for_tokenizer(self.tokenizer)

    @property
    def has_agent(self) -> bool:
        """Whether an agent requests the turns of the episodes."""
        return self.environment is not None and self.environment.has_agent

    def get_prompt_index(self, sample: Sample) -> int:
        """Return the index of a sample's prompt in `prompts`."""
        return sample.prompt_id - self.first_prompt_id

    @property
    def requests(self) -> list[GenerationRequest]:
        """Requests in the order of the output: all samples of the first prompt, and so on."""
        return [
            GenerationRequest(prompt, index)
            for prompt in self.prompts
            for index in range(self.samples_per_prompt)
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
    template: TemplateUse = "auto",
    run: Config | None = None,
    data: DataConfig | None = None,
    first_prompt_id: int = 0,
    **sampling: Any,
) -> Job:
    """Check and tokenize the input of a generation job; read no weights.

    Args:
        source: The stored model.
        prompts: Records whose prompts are plain texts or chat messages. The id of a prompt is
            `first_prompt_id` plus its index in this sequence, without the records that `data`
            excludes.
        samples: Number of responses per prompt.
        seed: Seed of the random choices.
        stop_at_eos: Whether the model's end-of-sequence tokens end a response.
        max_new_tokens: Maximum number of tokens of a response.
        environment: Environment that answers between the turns of an episode, or agent that
            requests the turns; None for single responses.
        template: When the chat template renders a prompt.
        run: Configuration of the run that trained the model; its settings of the chat template are
            used. None for another model.
        data: Boundaries and maximum length of the prompts, and the handling of longer prompts and
            of bad records. None uses the whole prompt, which the model's positions limit.
        first_prompt_id: Id of the first prompt. Samples are equal to those of another job or run
            only if the ids, the seeds and the sampling options are equal.
        **sampling: Further arguments of `SamplingOptions`.

    Raises:
        ConfigError: The model generates no text or has no tokenizer, the sampling options are
            invalid, `data` excludes all prompts, or a prompt leaves no room for the response; or
            the agent does not support the options.
    """
    shape = read_generating_shape(source)
    has_agent = environment is not None and environment.has_agent
    if has_agent and not stop_at_eos:
        raise ConfigError(
            "--no-stop-at-eos: is not supported with an agent, because no token would end a turn"
        )
    if has_agent and template != "auto":
        raise ConfigError(
            f"--{template}: is not supported with an agent, which chooses the prompts itself: with"
            " requests for chat completions or for text completions"
        )
    stop_token_ids = shape.eos_token_ids if stop_at_eos else ()
    try:
        options = SamplingOptions(max_new_tokens, stop_token_ids=stop_token_ids, **sampling)
    except AlignerError as error:
        raise ConfigError(str(error)) from error
    if options.greedy and samples > 1:
        raise ConfigError(
            f"{samples} samples per prompt with greedy decoding would be identical; generate 1"
            " sample per prompt, or turn off greedy decoding"
        )

    max_prompt_tokens = shape.max_positions - max_new_tokens
    if max_prompt_tokens < 1:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens}: must be less than the model's"
            f" {shape.max_positions} positions, which include the prompt"
        )

    tokenizer = build_source_tokenizer(source, run)
    # end of the error message for a prompt that is too long
    limit_description = (
        f"{max_prompt_tokens}, the model's {shape.max_positions} positions minus {max_new_tokens}"
        " new tokens"
    )
    # an agent has its own tools
    tools = [] if environment is None or has_agent else list_tools(environment)
    schemas = tool_schemas(tools)

    if data is None:
        data = DataConfig(max_prompt_tokens=max_prompt_tokens)
    elif data.max_prompt_tokens > max_prompt_tokens:
        data = replace(data, max_prompt_tokens=max_prompt_tokens)
    else:
        limit_description = f"data.max_prompt_tokens={data.max_prompt_tokens}"

    tokenized_prompts: list[Prompt] = []
    positions = []
    exclusions = []
    for position, record in enumerate(prompts):
        try:
            record = add_tools(apply_template_use(record, template), schemas)
            prompt = to_prompt(
                record,
                tokenizer,
                data,
                limit_description,
                id=first_prompt_id + len(tokenized_prompts),
            )
        except BadRecord as error:
            if not (isinstance(error, ExcludedRecord) or data.skip_bad_records):
                raise
            exclusions.append(str(error))
            continue
        tokenized_prompts.append(prompt)
        positions.append(position)
    if exclusions and not tokenized_prompts:
        raise ConfigError(f"all {len(prompts)} prompts are excluded; the first: {exclusions[0]}")

    notices = []
    if exclusions:
        notices.append(
            f"skipped {len(exclusions)} of {len(prompts)} prompts; the first: {exclusions[0]}"
        )
    is_plain = not has_agent and not all(record.has_messages for record in prompts)
    if template == "auto" and is_plain and has_chat_template(source.companions):
        notices.append(
            "the model has a chat template, which is not applied to plain-text prompts; --chat"
            " applies it, and --raw omits this note"
        )
    # the engine reserves memory for the longest sequence of the job, not for the model's context;
    # the prompts of an agent are not known in advance
    longest_prompt = max((prompt.tokens.numel() for prompt in tokenized_prompts), default=0)
    prompt_limit = data.max_prompt_tokens if has_agent else longest_prompt
    return Job(
        source,
        shape,
        tokenizer,
        tokenized_prompts,
        samples,
        options,
        seed,
        prompt_limit + max_new_tokens,
        environment,
        tools,
        notices=notices,
        positions=positions,
        first_prompt_id=first_prompt_id,
    )


def build_source_tokenizer(source: Source, run: Config | None) -> Tokenizer:
    """Return the tokenizer of a stored model.

    Args:
        source: The stored model.
        run: Configuration of the run that trained the model; its settings of the chat template are
            used. None for another model.
    """
    if run is None:
        return Tokenizer(source.companions)
    return build_run_tokenizer(run, source.companions)


def read_generating_shape(source: Source) -> ModelShape:
    """Return the shape of a stored model that can generate text.

    Raises ConfigError if the model has no vocabulary head or no tokenizer.
    """
    # generation_config.json may list end tokens that config.json omits, such as the end of a turn
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
    """Generate the samples of a job with an engine in this process, and write them as JSONL.

    The lines are in the order of the job's requests. An episode with branches has one line per
    sequence, the sample's own sequence last. The file gets its name when it is complete; if
    generation fails, no file remains.

    Args:
        job: The job.
        settings: The section `engine` of the configuration.
        output: The file to write.
        overwrite: Whether an existing file may be replaced.
        min_score: Minimum score of the episodes that are written; None writes all episodes except
            lost ones.
        as_messages: Whether episodes are written as chat messages instead of token sequences.
        progress: Function that is called after every engine step.

    Returns:
        The totals of the job.

    Raises:
        ConfigError: `output` cannot be written, or exists and must not be overwritten, or the
            engine cannot run on this machine.
    """
    totals = Progress(0, 0, 0.0)

    def record_progress(latest: Progress) -> None:
        nonlocal totals
        totals = latest
        progress(latest)

    threshold = -math.inf if min_score is None else min_score
    transcripts = AgentTranscripts()
    turn_listener = transcripts.record if as_messages else None
    with open_output(output, overwrite) as file:
        for sample in generate_samples(job, settings, record_progress, turn_listener):
            score = None if job.environment is None else compute_episode_score(sample)
            # NaN, the score of a lost episode, fails this comparison too
            if score is not None and not score >= threshold:
                continue
            if as_messages:
                records = build_conversation_records(job, sample, transcripts)
            else:
                records = build_sequence_records(job, sample)
            for record in records:
                file.write(format_json_line(record))
    return totals


def format_json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of a JSONL file."""
    return (json.dumps(record, ensure_ascii=False) + "\n").encode()


def generate_samples(
    job: Job,
    settings: EngineConfig,
    progress: Callable[[Progress], None],
    turn_listener: "TurnListener | None" = None,
) -> Iterator[Sample]:
    """Yield the samples of a job in the order of its requests, from an engine in this process.

    Closing the generator shuts down the engine and the environments.

    Args:
        job: The job.
        settings: The section `engine` of the configuration.
        progress: Function that is called after every engine step.
        turn_listener: Function that is called with the turns of each agent's episode.

    Raises:
        ConfigError: The engine or the environment cannot run on this machine.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = build_engine(
        job.shape,
        settings,
        job.source.companions,
        seed=job.seed,
        device=device,
        max_sequence_length=job.max_sequence_length,
    )
    episodes = None
    try:
        if job.environment is not None:
            episodes = start_episodes(
                job.environment,
                engine,
                job.tokenizer,
                job.seed,
                job.max_sequence_length,
                # the journal of an agent contains whole samples, which this job does not reuse
                journal=None if job.has_agent else job.journal,
                tools=job.tools,
                turn_listener=turn_listener,
                sampling_settings=_COMMAND_SETTINGS,
            )
        starter: SampleStarter = episodes or SingleResponses(engine)

        load_weights(engine, job.source)
        generation = starter.start(job.requests, job.options)
        # complete samples, by request index, that must be yielded after incomplete earlier ones
        waiting_samples: dict[int, Sample] = {}
        next_index = 0
        totals = Progress(0, 0, 0.0)
        start_s = time.monotonic()
        while not generation.is_done:
            completed_samples = generation.step()
            waiting_samples |= completed_samples
            while next_index in waiting_samples:
                yield waiting_samples.pop(next_index)
                next_index += 1

            new_tokens = sum(
                sequence.generated_token_count
                for _, sample in completed_samples
                for sequence in sample.sequences
            )
            new_rewards = tuple(
                compute_episode_score(sample)
                for _, sample in completed_samples
                if sample.rewards is not None
            )
            totals = Progress(
                samples=totals.samples + len(completed_samples),
                tokens=totals.tokens + new_tokens,
                seconds=time.monotonic() - start_s,
                rewards=totals.rewards + new_rewards,
            )
            progress(totals)
    finally:
        if episodes is not None:
            episodes.close()
        engine.shutdown()


def load_weights(engine: GenerationEngine, source: Source) -> None:
    """Load the weights of a stored model into an engine of one rank.

    Their weight version is the training step of the model, 0 if it has none.
    """
    update = engine.begin_update(source.step)
    try:
        # load group by group, so that host memory never contains the whole model
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
def open_output(output: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """Open a file under a temporary name, and rename it to `output` when the block succeeds.

    Raises ConfigError if `output` cannot be written, or exists and must not be overwritten.
    """
    if output.is_dir() or (output.exists() and not overwrite):
        advice = (
            "is a directory; must be a file"
            if output.is_dir()
            else "already exists; choose another file, or allow overwriting"
        )
        raise ConfigError(f"{output}: {advice}")
    with ExitStack() as stack:
        # convert only errors of opening the file, not errors of the caller's block
        with convert_write_errors(output):
            file = stack.enter_context(open_new_file(output))
        yield file


def build_sequence_records(job: Job, sample: Sample) -> list[dict[str, Any]]:
    """Return one record per sequence of a sample: its branches, then the sample itself.

    If the sample has branches, or an agent has chosen the prompt, each record contains the
    sequence's own prompt, and the score of the whole episode.
    """
    if not sample.branches and not job.has_agent:
        return [build_sample_record(job, sample)]

    records = []
    for sequence in sample.sequences:
        record = build_sample_record(job, replace(sequence, branches=()))
        prompt_tokens = sequence.tokens[: sequence.prompt_length]
        record["prompt"] = job.tokenizer.decode(prompt_tokens, skip_special_tokens=False)
        record["prompt_tokens"] = prompt_tokens.tolist()
        record |= build_episode_fields(sample)
        records.append(record)
    return records


def build_sample_record(job: Job, sample: Sample) -> dict[str, Any]:
    """Return the output record of a sample without branches."""
    prompt = job.prompts[job.get_prompt_index(sample)]
    episode_fields: dict[str, Any] = {}
    if job.environment is not None:
        generated_mask = sample.generated_mask
        if generated_mask is None:
            generated_mask = torch.ones(len(sample.response))
        episode_fields = {
            **build_episode_fields(sample),
            "turns": build_transcript(sample, job.tokenizer),
            "drawn": generated_mask.int().tolist(),
            "prompt_tokens": prompt.tokens.tolist(),
        }
    return {
        "prompt": prompt.text,
        "response": decode_response(sample, job.tokenizer),
        "prompt_index": job.get_prompt_index(sample),
        "sample_index": sample.sample_index,
        "finish_reason": sample.finish_reason,
        "tokens": sample.response.tolist(),
        "logprobs": sample.engine_logprobs.tolist(),
        # observation tokens have version 0
        "weight_version": int(sample.weight_versions.max()),
        "metadata": dict(prompt.metadata),
        **episode_fields,
    }


def build_conversation_records(
    job: Job, sample: Sample, transcripts: AgentTranscripts
) -> list[dict[str, Any]]:
    """Return the output records of an episode as chat messages.

    An agent's episode has one record per sequence. An environment's episode is one conversation,
    also with branches.

    Args:
        job: The job.
        sample: The episode.
        transcripts: Conversations of the agents.
    """
    prompt = job.prompts[job.get_prompt_index(sample)]
    if job.has_agent:
        conversations = transcripts.take_conversations(sample, job.tokenizer, lambda: job.chat)
    else:
        answers = [
            outcome.observation
            for outcome in job.journal.answers(build_episode_name(prompt.id, sample.sample_index))
        ]
        conversations = [
            build_conversation(sample, prompt, answers, job.tokenizer, lambda: job.chat)
        ]
    episode_fields = {
        **build_episode_fields(sample),
        "prompt_index": job.get_prompt_index(sample),
        "sample_index": sample.sample_index,
    }
    return [conversation | episode_fields for conversation in conversations]


def build_episode_fields(sample: Sample) -> dict[str, Any]:
    """Return the fields of a record that are facts about the whole episode: its score, its failure,
    its retries and its metrics."""
    report = sample.report or EpisodeReport()
    return {"score": compute_episode_score(sample), **report.to_json()}


def compute_episode_score(sample: Sample) -> float:
    """Return the sum of an episode's rewards; NaN if the episode was lost."""
    reward = sample.environment_reward
    return 0.0 if reward is None else float(reward)
