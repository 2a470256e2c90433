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

from aligner.agents.tool_catalogue import tool_schemas
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
from aligner.paths import run_paths
from aligner.rewards.judge import Judge, build_judge
from aligner.rewards.scorers import ScoringRequest, call_scorer, resolve_scorer
from aligner.rewards.sources import ScoringBatch, TextSource
from aligner.schema import Config, EvaluationConfig
from aligner.schema.derived import draws_greedily
from aligner.schema.evaluation_suites import Suite, evaluation_suites
from aligner.schema.reward_sources import evaluation_judge
from aligner.servers.remote_client import RemoteFuture
from aligner.training.engine_setup import build_options
from aligner.training.rollout_builder import RolloutBuilder, environment_scores
from aligner.training.services import PendingRows, Services, together

Wins = Sequence[tuple[float, float] | None]
"""Results of `Judge.compare`."""


def scoring_requests(
    prompts: Sequence[Prompt], samples: Sequence[Sample], tokenizer: Tokenizer
) -> list[ScoringRequest]:
    """Return the last turn of each sample as a response to all tokens before it.

    Texts are without special tokens; metadata is that of the prompt.
    """
    requests = []
    for prompt, sample in zip(prompts, samples, strict=True):
        before, last = split_turns_with_context(sample)[-1]
        response = tokenizer.decode_after(before, last)
        requests.append(ScoringRequest(tokenizer.decode(before), response, prompt.metadata))
    return requests


def text_scores(
    scorer: TextSource, prompts: Sequence[Prompt], samples: Sequence[Sample], tokenizer: Tokenizer
) -> Tensor:
    """Return the scores of the samples' `scoring_requests`, float64 [B]."""
    return scorer.compute_raw_scores(
        ScoringBatch(lambda: scoring_requests(prompts, samples, tokenizer))
    )


def judged_wins(told: Wins, prompts: int) -> Tensor:
    """Return the results of `Judge.compare` as a tensor, float64 [P, K, 2].

    Args:
        told: Results for the K responses to each prompt; None, which becomes NaN, if the judge's
            answer could not be parsed.
        prompts: Number of prompts P.
    """
    pairs = [(math.nan, math.nan) if wins is None else wins for wins in told]
    return torch.tensor(pairs, dtype=torch.float64).view(prompts, -1, 2)


def without_reference(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts whose record has no `reference`."""
    return [prompt for prompt in prompts if "reference" not in prompt.metadata]


def reference_samples(
    prompts: Sequence[Prompt], drawn: Sequence[Sample], tokenizer: Tokenizer, *, ended: bool
) -> list[Sample]:
    """Return one reference per prompt, as a sample.

    Args:
        drawn: Generated references; a prompt without one uses the `reference` of its record.
        ended: Whether an end-of-sequence token is appended to a reference that has only a text. A
            record's token ids take precedence over its text and are used unchanged.

    Raises:
        AlignerError: The tokenizer cannot encode a text.
    """
    sample_by_prompt = {sample.prompt_id: sample for sample in drawn}
    for prompt in prompts:
        if prompt.id in sample_by_prompt:
            continue
        response = read_token_ids(
            prompt.metadata, "reference", f"the prompt {prompt.text!r}", tokenizer
        )
        if response is None:
            reference = prompt.metadata["reference"]
            response = tokenizer.encode_after(prompt.text, prompt.tokens, reference)
            response = tokenizer.append_end_token(response) if ended else response
        has_end = ended and tokenizer.find_end(response[-1:]) is not None
        sample_by_prompt[prompt.id] = Sample(
            prompt_id=prompt.id,
            sample_index=0,
            tokens=torch.cat((prompt.tokens, response)),
            prompt_length=len(prompt.tokens),
            engine_logprobs=torch.zeros(len(response)),
            weight_versions=torch.zeros(len(response), dtype=torch.int64),
            finish_reason="stop" if has_end else "length",
        )
    return [sample_by_prompt[prompt.id] for prompt in prompts]


@dataclass(frozen=True)
class _Answers:
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
    writes: bool
    """Whether this rank writes files; True on rank 0 only."""
    judge: Judge | None = None
    """Judge of `evaluation.judge`, which compares the responses with the references; None on ranks
    that do not write."""
    has_begun: bool = field(default=False, init=False)
    """Whether `begin` was called and `evaluate` has not been called since."""
    _begun: Future[_Answers] | None = field(default=None, init=False)
    """Pending result of the evaluation that `begin` started, on the rank that writes."""
    _reference_scores: Tensor | None = field(default=None, init=False)
    _reference_texts: list[str] = field(default_factory=list, init=False)

    @property
    def settings(self) -> EvaluationConfig:
        """Settings of the suite."""
        return self.suite.settings

    def draw(self, builder: RolloutBuilder) -> list[Sample]:
        """Generate responses to the held-out prompts, consecutive for each prompt, with the weights
        that serve `builder`.

        The random streams are the same in every evaluation, and differ from those of all training
        steps.
        """
        return builder.generate(self.prompts, self.settings.samples, self.options)

    def begin(self, step: int, drawn: Callable[[], list[Sample]] | None) -> None:
        """Start to score the responses that `drawn` returns. Collective.

        `evaluate` waits for the result.

        Args:
            step: Step whose weights generate the responses.
            drawn: Callable that returns the responses, on the rank that writes; None on the other
                ranks.

        Raises:
            AlignerError: Creating or reading the references failed.
        """
        self._references(step)
        self.has_begun = True
        if drawn is not None:
            self._begun = begun = RemoteFuture[_Answers](set())
            # A daemon thread, not an executor: a failing run must not wait for a judge.
            Thread(
                target=begun.fulfil,
                args=(self._scored_alone, drawn),
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
        references = self._references(step)
        answers = self._taken() if self.has_begun else self._answers()
        scores = answers.scores.view(len(self.prompts), -1)
        samples = answers.samples
        lost_count = int(scores.isnan().sum())
        # A lost episode has no score.
        scores = torch.where(scores.isnan(), 0.0, scores)

        metrics = evaluation_metrics(scores, self.settings.pass_threshold, references)

        if (field := self.settings.group_by) is not None:
            groups = [str(prompt.metadata.get(field)) for prompt in self.prompts]
            metrics |= group_metrics(scores, self.settings.pass_threshold, groups)

        if lost_count:
            metrics["eval/lost_episodes"] = float(lost_count)
        if answers.wins is not None:
            metrics |= judge_metrics(judged_wins(answers.wins, len(self.prompts)))
        batch = collate(samples, self.tokenizer.pad_token_id)
        # The reference model measures how probable the responses were before training.
        logprobs = self.policy.reference_logprobs(
            batch.tokens, batch.lengths, mask=batch.mask, temperature=1.0
        )
        metrics["eval/reference_perplexity"] = perplexity(logprobs, batch.mask)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        # For greedy or truncated sampling the difference of the log-probs does not estimate the KL.
        if not self.options.greedy and not self.options.truncates:
            logprob_change = (
                torch.where(batch.mask, batch.engine_logprobs - logprobs, 0.0).double().sum()
            )
            metrics["eval/reference_kl"] = float(logprob_change) / len(samples)

        return {
            self.suite.prefix + name.removeprefix("eval/"): value for name, value in metrics.items()
        }

    def _answers(self) -> _Answers:
        """Return responses of the engine's current weights with their scores. Collective."""
        samples = self.draw(self.builder)
        prompts = self._prompts_of_samples()
        scores = self._scores(prompts, samples)
        wins = together(lambda: self._compared(prompts, samples)) if self.settings.judge else None
        return _Answers(samples, scores, wins)

    def _scored_alone(self, drawn: Callable[[], list[Sample]]) -> _Answers:
        """Return the scored responses on the rank that writes, without the other ranks."""
        samples = drawn()
        prompts = self._prompts_of_samples()
        return _Answers(
            samples, self._scores(prompts, samples, alone=True), self._compared(prompts, samples)
        )

    def _taken(self) -> _Answers:
        """Wait for the evaluation that `begin` started and return its result on every rank.
        Collective."""
        begun = self._begun
        self._begun = None
        self.has_begun = False
        answers: list[_Answers] = []

        def wait() -> tuple[list[float], Wins | None] | None:
            if begun is None:
                return None
            answers.append(begun.result())
            return answers[0].scores.tolist(), answers[0].wins

        scores, wins = together(wait)
        samples = broadcast_samples(answers[0].samples if answers else [])
        return _Answers(samples, torch.tensor(scores, dtype=torch.float64), wins)

    def _prompts_of_samples(self) -> list[Prompt]:
        """Return the prompt of each sample."""
        return [prompt for prompt in self.prompts for _ in range(self.settings.samples)]

    def _compared(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Wins | None:
        """Return the judge's comparison of each sample with its prompt's reference; None on ranks
        without a judge."""
        if self.judge is None:
            return None
        references = [text for text in self._reference_texts for _ in range(self.settings.samples)]
        return self.judge.compare(scoring_requests(prompts, samples, self.tokenizer), references)

    def _scores(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], *, alone: bool = False
    ) -> Tensor:
        """Return the scores of the samples [B], including the rewards of their environments.

        Collective, unless `alone`: then one rank computes the scores for itself.
        """
        if self.scorer is None:
            batch = collate(samples, self.tokenizer.pad_token_id)
            metadata = [prompt.metadata for prompt in prompts]
            if alone:
                rows = PendingRows(self.services.ask_scores(batch, metadata)).local()
                scores = rows[:, 0] if rows.ndim > 1 else rows
            else:
                scores = self.services.score(batch, metadata)
        elif alone:
            requests = scoring_requests(prompts, samples, self.tokenizer)
            function_scores = call_scorer(self.scorer.name, self.scorer.scorer, requests)
            scores = torch.tensor(
                [ABSTAINED if score is None else score for score in function_scores],
                dtype=torch.float64,
            )
        else:
            scores = text_scores(self.scorer, prompts, samples, self.tokenizer)

        environment_rewards = environment_scores(samples, 1)
        return scores if environment_rewards is None else scores + environment_rewards

    def _references(self, step: int) -> Tensor:
        """Return the scores of the references [P].

        The references are computed once and stored in the run directory. A prompt's reference is
        the `reference` of its record, or else the greedy response of the initial policy.
        """
        if self._reference_scores is None:
            self._reference_scores = self._stored_scores()
        if self._reference_scores is None:
            if step and without_reference(self.prompts):
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
        unreferenced_prompts = without_reference(self.prompts)
        generated = (
            self.builder.generate(unreferenced_prompts, 1, replace(self.options, greedy=True))
            if unreferenced_prompts
            else []
        )
        samples = reference_samples(
            self.prompts, generated, self.tokenizer, ended=bool(self.options.stop_token_ids)
        )

        scores = self._scores(self.prompts, samples)
        self._reference_texts = [decode_response(sample, self.tokenizer) for sample in samples]

        if self.writes:
            lines = []
            rows = zip(self.prompts, samples, self._reference_texts, scores.tolist(), strict=True)
            for prompt, sample, response, score in rows:
                record: dict[str, Any] = {"prompt": prompt.text, "response": response}
                record |= {
                    "response_tokens": sample.response.tolist(),
                    "score": None if score == ABSTAINED else score,
                    "scorer": self.settings.function,
                }
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
            write_file(self.references_file, "".join(lines))
        return scores

    def _stored_scores(self) -> Tensor | None:
        """Return the references' scores from the run directory; None if there are none.
        Collective."""
        records = None
        if self.writes and self.references_file.exists():
            records = [
                json.loads(line)
                for line in self.references_file.read_text(encoding="utf-8").splitlines()
            ]
        # Only rank 0 reads the file: another rank could see it while rank 0 is still writing it.
        records = broadcast_json(records)
        if records is None:
            return None
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
        tools: Tools that the suite's prompts describe to the model.

    Raises:
        ConfigError: The prompts are invalid, or the scorer or the judge does not exist.
    """
    settings = suite.settings
    scorer = None
    if settings.function is not None:
        deadline = settings.function_timeout_s
        scorer = TextSource(
            settings.function, resolve_scorer(settings.function, f"{suite.key}.function", deadline)
        )
    writes = policy.world.rank == 0
    judge = evaluation_judge(settings, suite.key)
    return Evaluator(
        suite=suite,
        prompts=open_evaluation_prompts(
            suite,
            config.data,
            tokenizer,
            include_messages=config.environment.draws_episodes,
            tools=tool_schemas(tools),
        ),
        options=replace(
            build_options(config.rollout, policy.runner.shape),
            greedy=draws_greedily(settings),
            temperature=settings.temperature,
            renormalize=False,
        ),
        tokenizer=tokenizer,
        policy=policy,
        builder=builder,
        services=services,
        scorer=scorer,
        references_file=run_paths(config).references_of(suite.name),
        writes=writes,
        judge=build_judge(judge, run_paths(config)) if judge is not None and writes else None,
    )


@dataclass(frozen=True)
class Evaluations:
    """Evaluates the policy on every suite of the run.

    Every rank of the trainer has an instance and calls every method.
    """

    suites: tuple[Evaluator, ...]
    every: int
    last_step: int

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called and `evaluate` has not been called since."""
        return any(evaluator.has_begun for evaluator in self.suites)

    def is_due(self, step: int) -> bool:
        """Return whether the weights after `step` must be evaluated: the initial weights, those
        after every `every` steps, and the last."""
        return step % self.every == 0 or step == self.last_step

    def draw(self, builder: RolloutBuilder) -> list[list[Sample]]:
        """Generate responses to the prompts of each suite; see `Evaluator.draw`."""
        return [evaluator.draw(builder) for evaluator in self.suites]

    def begin(self, step: int, drawn: Future[list[list[Sample]]] | None) -> None:
        """Start to score the responses of each suite; see `Evaluator.begin`. Collective."""
        for index, evaluator in enumerate(self.suites):
            evaluator.begin(
                step, None if drawn is None else functools.partial(_drawn_of, drawn, index)
            )

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of all suites for the weights after `step`; see `Evaluator.evaluate`.
        Collective."""
        return {
            name: value
            for evaluator in self.suites
            for name, value in evaluator.evaluate(step).items()
        }


def _drawn_of(drawn: Future[list[list[Sample]]], place: int) -> list[Sample]:
    return drawn.result()[place]


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
        for suite in evaluation_suites(config)
    )
    return Evaluations(tuple(evaluators), config.evaluation.every, config.run.steps)
