"""Evaluation during training: scores responses to held-out prompts and compares them with
references.

`Evaluator` evaluates the policy on one suite, `Evaluations` on all suites of a run.
"""

import functools
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from aligner.agents.tool_catalogue import list_suite_tools, tool_schemas
from aligner.agents.tool_protocol import ListedTool
from aligner.algorithms.evaluation_scores import (
    evaluation_metrics,
    group_metrics,
    judge_metrics,
    perplexity,
)
from aligner.data.collectives import broadcast_json, broadcast_samples
from aligner.data.conversations import decode_response, split_turns_with_context
from aligner.data.prompts import open_evaluation_prompts, read_token_ids
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import ABSTAINED, Prompt, Sample, collate
from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError
from aligner.files import write_file
from aligner.megatron.policy import Policy
from aligner.paths import get_run_paths
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.judge import Judge, build_judge
from aligner.rewards.scorers import call_scorer, resolve_scorer
from aligner.rewards.sources import ScoringBatch, TextSource
from aligner.schema import Config, EvaluationConfig
from aligner.schema.derived import is_greedy
from aligner.schema.evaluation_suites import (
    Suite,
    needs_prompt_messages,
    parse_evaluation_suites,
)
from aligner.schema.reward_sources import parse_evaluation_judge
from aligner.servers.remote_client import RemoteFuture
from aligner.training.engine_setup import build_sampling_options
from aligner.training.episode_metrics import compute_reported_means
from aligner.training.rollout_builder import RolloutBuilder, compute_environment_scores
from aligner.training.services import PendingRows, Services, run_and_broadcast_result

Wins = Sequence[tuple[float, float] | None]
"""Results of `Judge.compare`."""


def build_scoring_requests(
    prompts: Sequence[Prompt], samples: Sequence[Sample], tokenizer: Tokenizer
) -> list[ScoringRequest]:
    """Return the last turn of each sample as a response to all tokens before it.

    Texts are without special tokens; metadata is that of the prompt.
    """
    requests = []
    for prompt, sample in zip(prompts, samples, strict=True):
        context, last_turn = split_turns_with_context(sample)[-1]
        response = tokenizer.decode_after(context, last_turn)
        requests.append(ScoringRequest(tokenizer.decode(context), response, prompt.metadata))
    return requests


def compute_text_scores(
    scorer: TextSource, prompts: Sequence[Prompt], samples: Sequence[Sample], tokenizer: Tokenizer
) -> Tensor:
    """Return the scores of the last turns of the samples, float64 [B]. Collective."""
    # The requests are built lazily, because only rank 0 calls the scorer and needs the texts.
    return scorer.compute_raw_scores(
        ScoringBatch(lambda: build_scoring_requests(prompts, samples, tokenizer))
    )


def stack_wins(wins: Wins, prompt_count: int) -> Tensor:
    """Return the results of `Judge.compare` as a tensor, float64 [P, K, 2].

    Args:
        wins: Results for the K responses to each prompt; None, which becomes NaN, if the judge's
            answer could not be parsed.
        prompt_count: Number of prompts P.
    """
    pairs = [(math.nan, math.nan) if pair is None else pair for pair in wins]
    return torch.tensor(pairs, dtype=torch.float64).view(prompt_count, -1, 2)


def select_without_reference(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts whose record has no `reference`."""
    return [prompt for prompt in prompts if "reference" not in prompt.metadata]


def build_reference_samples(
    prompts: Sequence[Prompt],
    generated: Sequence[Sample],
    tokenizer: Tokenizer,
    *,
    append_end: bool,
) -> list[Sample]:
    """Return one reference per prompt, as a sample.

    Args:
        generated: Generated references; a prompt without one uses the `reference` of its record.
        append_end: Whether an end-of-sequence token is appended to a reference that has only a
            text. A record's token ids take precedence over its text and are used unchanged.

    Raises:
        AlignerError: The tokenizer cannot encode a text.
    """
    sample_by_prompt = {sample.prompt_id: sample for sample in generated}
    for prompt in prompts:
        if prompt.id in sample_by_prompt:
            continue
        response = read_token_ids(
            prompt.metadata, "reference", f"the prompt {prompt.text!r}", tokenizer
        )
        if response is None:
            reference = prompt.metadata["reference"]
            response = tokenizer.encode_after(prompt.text, prompt.tokens, reference)
            response = tokenizer.append_end_token(response) if append_end else response

        has_end = append_end and tokenizer.find_end(response[-1:]) is not None
        sample_by_prompt[prompt.id] = Sample(
            prompt_id=prompt.id,
            sample_index=0,
            tokens=torch.cat((prompt.tokens, response)),
            prompt_length=len(prompt.tokens),
            # The engine did not generate these tokens. Scorers read neither log-probs nor versions.
            engine_logprobs=torch.zeros(len(response)),
            weight_versions=torch.zeros(len(response), dtype=torch.int64),
            finish_reason="stop" if has_end else "length",
        )
    return [sample_by_prompt[prompt.id] for prompt in prompts]


@dataclass(frozen=True)
class _ScoredResponses:
    """Responses to the held-out prompts, consecutive for each prompt, and their scores."""

    samples: list[Sample]
    scores: Tensor
    """Scores, float64 [B]; NaN for a lost episode, ABSTAINED if the reward function abstained."""
    wins: Wins | None
    """Results of the judge; None without a judge."""


@dataclass
class Evaluator:
    """Evaluates the policy on one suite.

    Every rank of the trainer has an instance and calls every method.
    """

    suite: Suite
    prompts: list[Prompt]
    options: SamplingOptions
    tokenizer: Tokenizer
    policy: Policy
    builder: RolloutBuilder
    services: Services
    scorer: TextSource | None
    """Function that scores the responses; None for the run's own reward."""
    references_file: Path
    is_writer: bool
    """Whether this rank writes files; True on rank 0 only."""
    judge: Judge | None = None
    """Judge of `evaluation.judge`, which compares the responses with the references; None on ranks
    that do not write."""
    has_begun: bool = field(default=False, init=False)
    """Whether `begin` was called and `evaluate` has not been called since."""
    _pending: Future[_ScoredResponses] | None = field(default=None, init=False)
    """Pending result of the evaluation that `begin` started, on the rank that writes."""
    _reference_scores: Tensor | None = field(default=None, init=False)
    """Scores of the references [P]; None until they are computed or read."""
    _reference_texts: list[str] = field(default_factory=list, init=False)
    """Texts of the references, for the judge."""

    @property
    def settings(self) -> EvaluationConfig:
        """Settings of the suite."""
        return self.suite.settings

    def generate(self, builder: RolloutBuilder) -> list[Sample]:
        """Generate responses to the held-out prompts, consecutive for each prompt, with the weights
        that serve `builder`.

        The random streams are the same in every evaluation, and differ from those of all training
        steps.
        """
        return builder.generate(self.prompts, self.settings.samples, self.options)

    def begin(self, step: int, generate_responses: Callable[[], list[Sample]] | None) -> None:
        """Start to score the responses that `generate_responses` returns. Collective.

        `evaluate` waits for the result.

        Args:
            step: Step whose weights generate the responses.
            generate_responses: Callable that returns the responses, on the rank that writes; None
                on the other ranks.

        Raises:
            AlignerError: Creating or reading the references failed.
        """
        # All ranks generate and score missing references together, so the references must exist
        # before rank 0 continues on its own in the thread.
        self._get_reference_scores(step)
        self.has_begun = True
        if generate_responses is not None:
            future = RemoteFuture[_ScoredResponses](set())
            self._pending = future
            # A daemon thread, not an executor: a failing run must not wait for a judge.
            Thread(
                target=future.fulfil,
                args=(self._score_on_rank0, generate_responses),
                name="evaluation",
                daemon=True,
            ).start()

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics `eval/…` of the weights after `step`. Collective.

        These are the weights of the evaluation that `begin` started, or else the engine's current
        weights. An episode whose environment failed counts with score 0, and in
        `eval/lost_episodes`.

        Raises:
            AlignerError: Scoring failed, or the run resumed without the file of the references'
                scores.
        """
        reference_scores = self._get_reference_scores(step)
        responses = self._wait_for_pending() if self.has_begun else self._generate_and_score()
        scores = responses.scores.view(len(self.prompts), -1)  # [P, K]
        samples = responses.samples
        lost_count = int(scores.isnan().sum())
        # A lost episode has no score.
        scores = torch.where(scores.isnan(), 0.0, scores)

        metrics = evaluation_metrics(scores, self.settings.pass_threshold, reference_scores)

        if (group_field := self.settings.group_by) is not None:
            groups = [str(prompt.metadata.get(group_field)) for prompt in self.prompts]
            metrics |= group_metrics(scores, self.settings.pass_threshold, groups)

        if lost_count:
            metrics["eval/lost_episodes"] = float(lost_count)
        metrics |= compute_reported_means(samples, "eval/metrics/")
        if responses.wins is not None:
            metrics |= judge_metrics(stack_wins(responses.wins, len(self.prompts)))

        batch = collate(samples, self.tokenizer.pad_token_id)
        # The reference model measures how probable the responses were before training. Its weights
        # are frozen, so the policy may have trained since `begin`.
        logprobs = self.policy.reference_logprobs(
            batch.tokens,
            batch.lengths,
            mask=batch.mask,
            temperature=1.0,
            guided_tokens=batch.guided_tokens,
        )
        metrics["eval/reference_perplexity"] = perplexity(logprobs, batch.mask)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        # For greedy or truncated sampling the difference of the log-probs does not estimate the KL.
        if not self.options.greedy and not self.options.has_truncation:
            # KL(policy ‖ reference) per response: the mean log-ratio over the policy's samples.
            logprob_change = (
                torch.where(batch.mask, batch.engine_logprobs - logprobs, 0.0).double().sum()
            )
            metrics["eval/reference_kl"] = float(logprob_change) / len(samples)

        # The metrics of each suite have their own prefix instead of `eval/`.
        return {
            self.suite.prefix + name.removeprefix("eval/"): value for name, value in metrics.items()
        }

    def _generate_and_score(self) -> _ScoredResponses:
        """Return responses of the engine's current weights with their scores. Collective."""
        samples = self.generate(self.builder)
        prompts = self._repeat_prompts()
        scores = self._compute_scores(prompts, samples)
        wins: Wins | None = None
        if self.settings.judge:
            # Only rank 0 has the judge.
            wins = run_and_broadcast_result(lambda: self._judge_samples(prompts, samples))
        return _ScoredResponses(samples, scores, wins)

    def _score_on_rank0(self, generate_responses: Callable[[], list[Sample]]) -> _ScoredResponses:
        """Return the scored responses on the rank that writes, without the other ranks."""
        # This runs in a thread during the next training step, so it must not call a collective: the
        # other ranks would match it with a collective of that step.
        samples = generate_responses()
        prompts = self._repeat_prompts()
        scores = self._compute_scores(prompts, samples, is_rank0_only=True)
        wins = self._judge_samples(prompts, samples)
        return _ScoredResponses(samples, scores, wins)

    def _wait_for_pending(self) -> _ScoredResponses:
        """Wait for the evaluation that `begin` started and return its result on every rank.
        Collective."""
        pending = self._pending
        self._pending = None
        self.has_begun = False
        local_responses: list[_ScoredResponses] = []

        def wait() -> tuple[list[float], Wins | None] | None:
            if pending is None:
                return None
            responses = pending.result()
            local_responses.append(responses)
            return responses.scores.tolist(), responses.wins

        # The result is broadcast as JSON, which cannot represent samples; their tensors follow.
        scores, wins = run_and_broadcast_result(wait)
        samples = broadcast_samples(local_responses[0].samples if local_responses else [])
        return _ScoredResponses(samples, torch.tensor(scores, dtype=torch.float64), wins)

    def _repeat_prompts(self) -> list[Prompt]:
        """Return the prompt of each sample."""
        return [prompt for prompt in self.prompts for _ in range(self.settings.samples)]

    def _judge_samples(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Wins | None:
        """Return the judge's comparison of each sample with its prompt's reference; None on ranks
        without a judge."""
        if self.judge is None:
            return None
        references = [text for text in self._reference_texts for _ in range(self.settings.samples)]
        return self.judge.compare(
            build_scoring_requests(prompts, samples, self.tokenizer), references
        )

    def _compute_scores(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], *, is_rank0_only: bool = False
    ) -> Tensor:
        """Return the scores of the samples [B], including the rewards of their environments.

        Collective, unless `is_rank0_only`: then one rank computes the scores for itself.
        """
        if self.scorer is None:
            batch = collate(samples, self.tokenizer.pad_token_id)
            metadata = [prompt.metadata for prompt in prompts]
            if is_rank0_only:
                rows = PendingRows(self.services.request_scores(batch, metadata)).result_on_rank0()
                # Column 0 is the total; the columns after it are the scores of single sources.
                scores = rows[:, 0] if rows.ndim > 1 else rows
            else:
                scores = self.services.score(batch, metadata)
        elif is_rank0_only:
            # `TextSource.compute_raw_scores` is collective, so call its scorer directly.
            requests = build_scoring_requests(prompts, samples, self.tokenizer)
            function_scores = call_scorer(self.scorer.name, self.scorer.scorer, requests)
            scores = torch.tensor(
                [ABSTAINED if score is None else score for score in function_scores],
                dtype=torch.float64,
            )
        else:
            scores = compute_text_scores(self.scorer, prompts, samples, self.tokenizer)

        # With group size 1, a lost episode makes only its own score NaN. Training uses the prompt's
        # group instead, because it compares the samples of a prompt.
        environment_rewards = compute_environment_scores(samples, 1)
        return scores if environment_rewards is None else scores + environment_rewards

    def _get_reference_scores(self, step: int) -> Tensor:
        """Return the scores of the references [P].

        The references are computed once and stored in the run directory. A prompt's reference is
        the `reference` of its record, or else the greedy response of the initial policy.
        """
        if self._reference_scores is None:
            self._reference_scores = self._read_reference_scores()
        if self._reference_scores is None:
            # After step 0 the engine no longer has the initial policy, which generates the missing
            # references.
            if step and select_without_reference(self.prompts):
                raise AlignerError(
                    f"{self.references_file}: no such file, so there are no references to compare"
                    " responses with. A run that is evaluated from its first step writes the"
                    " initial policy's responses to this file. Add a `reference` to every prompt"
                    f" of {self.suite.key}.path, or set evaluation.every=0"
                )
            self._reference_scores = self._score_references()
        return self._reference_scores

    def _score_references(self) -> Tensor:
        """Compute the references and their scores, and write them to the run directory.
        Collective."""
        unreferenced_prompts = select_without_reference(self.prompts)
        generated = (
            self.builder.generate(unreferenced_prompts, 1, replace(self.options, greedy=True))
            if unreferenced_prompts
            else []
        )
        append_end = bool(self.options.stop_token_ids)
        samples = build_reference_samples(
            self.prompts, generated, self.tokenizer, append_end=append_end
        )

        scores = self._compute_scores(self.prompts, samples)
        self._reference_texts = [decode_response(sample, self.tokenizer) for sample in samples]

        if self.is_writer:
            lines = []
            rows = zip(self.prompts, samples, self._reference_texts, scores.tolist(), strict=True)
            for prompt, sample, response, score in rows:
                record: dict[str, Any] = {"prompt": prompt.text, "response": response}
                record |= {
                    "response_tokens": sample.response.tolist(),
                    # ABSTAINED is -inf, which standard JSON cannot represent.
                    "score": None if score == ABSTAINED else score,
                    "scorer": self.settings.function,
                }
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            write_file(self.references_file, "".join(lines))
        return scores

    def _read_reference_scores(self) -> Tensor | None:
        """Return the references' scores from the run directory; None if there are none.
        Collective."""
        records = None
        if self.is_writer and self.references_file.exists():
            records = [
                json.loads(line)
                for line in self.references_file.read_text(encoding="utf-8").splitlines()
            ]
        # Only rank 0 reads the file: another rank could see it while rank 0 is still writing it.
        records = broadcast_json(records)
        if records is None:
            return None

        # The scores are valid only for the prompts and the scorer for which they were computed.
        if [record["prompt"] for record in records] != [prompt.text for prompt in self.prompts]:
            raise AlignerError(
                f"{self.references_file}: contains references of other prompts than"
                f" {self.suite.key}.path or {self.suite.key}.prompts; resume with the prompts that"
                " the run was started with"
            )

        function = records[0]["scorer"]
        if function != self.settings.function:
            raise AlignerError(
                f"{self.references_file}: contains scores of {self.suite.key}.function={function};"
                f" resume with {self.suite.key}.function={function}, not {self.settings.function}"
            )

        self._reference_texts = [record["response"] for record in records]
        scores = [ABSTAINED if record["score"] is None else record["score"] for record in records]
        return torch.tensor(scores, dtype=torch.float64)


def build_evaluator(
    config: Config,
    suite: Suite,
    tokenizer: Tokenizer,
    policy: Policy,
    builder: RolloutBuilder,
    services: Services,
    tools: Sequence[ListedTool] = (),
) -> Evaluator:
    """Build the evaluator of one suite.

    Args:
        tools: Tools of the section `environment`.

    Raises:
        ConfigError: The prompts are invalid, or the scorer or the judge does not exist.
    """
    settings = suite.settings
    scorer = None
    if settings.function is not None:
        timeout_s = settings.function_timeout_s
        function = resolve_scorer(settings.function, f"{suite.key}.function", timeout_s)
        scorer = TextSource(settings.function, function)

    is_writer = policy.world.rank == 0
    judge_source = parse_evaluation_judge(settings, suite.key)
    prompts = open_evaluation_prompts(
        suite,
        config.data,
        tokenizer,
        include_messages=needs_prompt_messages(config),
        tools=tool_schemas(list_suite_tools(config, suite, tools)),
    )
    options = replace(
        build_sampling_options(config.rollout, policy.runner.shape),
        greedy=is_greedy(settings),
        temperature=settings.temperature,
        # Log-probs over the whole vocabulary, which are comparable with the reference model's.
        renormalize=False,
    )

    judge = None
    if judge_source is not None and is_writer:
        judge = build_judge(judge_source, get_run_paths(config))
    return Evaluator(
        suite=suite,
        prompts=prompts,
        options=options,
        tokenizer=tokenizer,
        policy=policy,
        builder=builder,
        services=services,
        scorer=scorer,
        references_file=get_run_paths(config).get_references_file(suite.name),
        is_writer=is_writer,
        judge=judge,
    )


@dataclass(frozen=True)
class Evaluations:
    """Evaluates the policy on every suite of the run.

    Every rank of the trainer has an instance and calls every method.
    """

    suites: tuple[Evaluator, ...]
    every: int
    """Interval of the evaluations in steps."""
    last_step: int
    """Last step of the run."""

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called and `evaluate` has not been called since."""
        return any(evaluator.has_begun for evaluator in self.suites)

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` must be evaluated: the initial weights, those
        after every `every` steps, and the last."""
        return step % self.every == 0 or step == self.last_step

    def generate(self, builder: RolloutBuilder) -> list[list[Sample]]:
        """Generate responses to the prompts of each suite; see `Evaluator.generate`."""
        return [evaluator.generate(builder) for evaluator in self.suites]

    def begin(self, step: int, responses: Future[list[list[Sample]]] | None) -> None:
        """Start to score the responses of each suite; see `Evaluator.begin`. Collective.

        Args:
            step: Step whose weights generate the responses.
            responses: Pending result of `generate` on the rank that writes; None on the other
                ranks.
        """
        for index, evaluator in enumerate(self.suites):
            generate_responses = None
            if responses is not None:
                # `partial` binds the index now; a lambda would read it after the loop.
                generate_responses = functools.partial(_get_suite_samples, responses, index)
            evaluator.begin(step, generate_responses)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all suites for the weights after `step`; see `Evaluator.evaluate`.
        Collective."""
        return {
            name: value
            for evaluator in self.suites
            for name, value in evaluator.evaluate(step).items()
        }


def _get_suite_samples(responses: Future[list[list[Sample]]], suite_index: int) -> list[Sample]:
    return responses.result()[suite_index]


def build_evaluations(
    config: Config,
    tokenizer: Tokenizer,
    policy: Policy,
    builder: RolloutBuilder,
    services: Services,
    tools: Sequence[ListedTool] = (),
) -> Evaluations | None:
    """Build the evaluators of all suites; return None if `evaluation.every` is 0.

    Raises:
        ConfigError: See `build_evaluator`.
    """
    if not config.evaluation.every:
        return None
    evaluators = (
        build_evaluator(config, suite, tokenizer, policy, builder, services, tools)
        for suite in parse_evaluation_suites(config)
    )
    return Evaluations(tuple(evaluators), config.evaluation.every, config.run.steps)
