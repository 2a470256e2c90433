"""Evaluation while training: the newest weights' responses to held-out prompts, scored and
compared."""

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
from aligner.rollout.rollout_builder import RolloutBuilder, environment_scores
from aligner.rollout.services import PendingRows, Services, together
from aligner.schema import Config, EvaluationConfig
from aligner.schema.derived import draws_greedily
from aligner.schema.evaluation_suites import Suite, evaluation_suites
from aligner.schema.reward_sources import evaluation_judge
from aligner.servers.remote_client import RemoteFuture
from aligner.training.engine_setup import build_options

Wins = Sequence[tuple[float, float] | None]
"""What `Judge.compare` tells."""


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
    """float64 [B], of `scoring_requests`."""
    return scorer.compute_raw_scores(
        ScoringBatch(lambda: scoring_requests(prompts, samples, tokenizer))
    )


def judged_wins(told: Wins, prompts: int) -> Tensor:
    """What `Judge.compare` tells of the responses to so many prompts, float64 [P, K, 2]; NaN where
    it could not be read."""
    pairs = [(math.nan, math.nan) if wins is None else wins for wins in told]
    return torch.tensor(pairs, dtype=torch.float64).view(prompts, -1, 2)


def without_reference(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those whose record has no `reference`."""
    return [prompt for prompt in prompts if "reference" not in prompt.metadata]


def reference_samples(
    prompts: Sequence[Prompt], drawn: Sequence[Sample], tokenizer: Tokenizer, *, ended: bool
) -> list[Sample]:
    """What was drawn for a prompt, else its `reference` as if it had been: the tokens that its
    record says it was drawn as, else those of the text, with `ended` with an end of sequence last.

    Raises AlignerError for a text that the tokenizer can not express.
    """
    found = {sample.prompt_id: sample for sample in drawn}
    for prompt in prompts:
        if prompt.id in found:
            continue
        response = read_token_ids(
            prompt.metadata, "reference", f"the prompt {prompt.text!r}", tokenizer
        )
        if response is None:
            reference = prompt.metadata["reference"]
            response = tokenizer.encode_after(prompt.text, prompt.tokens, reference)
            response = tokenizer.append_end_token(response) if ended else response
        has_end = ended and tokenizer.find_end(response[-1:]) is not None
        found[prompt.id] = Sample(
            prompt_id=prompt.id,
            sample_index=0,
            tokens=torch.cat((prompt.tokens, response)),
            prompt_length=len(prompt.tokens),
            engine_logprobs=torch.zeros(len(response)),
            weight_versions=torch.zeros(len(response), dtype=torch.int64),
            finish_reason="stop" if has_end else "length",
        )
    return [found[prompt.id] for prompt in prompts]


@dataclass(frozen=True)
class _Answers:
    """Responses to the held-out prompts, each prompt's in a row, and what they are worth."""

    samples: list[Sample]
    scores: Tensor
    """float64 [B], NaN for a lost episode, ABSTAINED where the reward function abstained"""
    wins: Wins | None
    """Of a judge, where there is one."""


@dataclass
class Evaluator:
    """One rank's part of evaluating the policy on one suite; every rank calls every method."""

    suite: Suite
    prompts: list[Prompt]
    options: SamplingOptions
    tokenizer: Tokenizer
    policy: Policy
    builder: RolloutBuilder
    services: Services
    scorer: TextSource | None
    """What scores the responses; the run's own reward where None."""
    references_file: Path
    writes: bool
    """Whether this rank is the one that writes files."""
    judge: Judge | None = None
    """What compares the responses with the references, where `evaluation.judge` says so, on the
    rank that writes."""
    has_begun: bool = field(default=False, init=False)
    """Whether `begin` was called, and `evaluate` is to follow."""
    _begun: Future[_Answers] | None = field(default=None, init=False)
    """What was begun, on the rank that writes."""
    _reference_scores: Tensor | None = field(default=None, init=False)
    _reference_texts: list[str] = field(default_factory=list, init=False)

    @property
    def settings(self) -> EvaluationConfig:
        """Those of the suite."""
        return self.suite.settings

    def draw(self, builder: RolloutBuilder) -> list[Sample]:
        """Responses to the held-out prompts, each prompt's in a row, by the weights that serve
        `builder`.

        Random streams are the same every time and never a training step's.
        """
        return builder.generate(self.prompts, self.settings.samples, self.options)

    def begin(self, step: int, drawn: Callable[[], list[Sample]] | None) -> None:
        """Have what `drawn` returns, responses by the weights of `step`, scored, on the rank that
        writes, which alone draws.

        Collective; `evaluate` waits for it. Raises AlignerError as that does for references.
        """
        self._references(step)
        self.has_begun = True
        if drawn is not None:
            self._begun = begun = RemoteFuture[_Answers](set())
            # Not an executor's thread: a run that fails must not wait for a judge before it ends.
            Thread(
                target=begun.fulfil,
                args=(self._scored_alone, drawn),
                name="evaluation",
                daemon=True,
            ).start()

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics, `eval/…`, of the weights of `step`: those that the engine holds, or that
        `begin` was called for.

        Collective. An episode whose environment failed counts as one that is worth nothing, and in
        `eval/lost_episodes`. Raises AlignerError as the scorer does, and where the run has gone on
        without the references' scores.
        """
        references = self._references(step)
        answers = self._taken() if self.has_begun else self._answers()
        scores, samples = answers.scores.view(len(self.prompts), -1), answers.samples
        lost = int(scores.isnan().sum())
        scores = torch.where(scores.isnan(), 0.0, scores)
        metrics = evaluation_metrics(scores, self.settings.pass_threshold, references)
        if (field := self.settings.group_by) is not None:
            groups = [str(prompt.metadata.get(field)) for prompt in self.prompts]
            metrics |= group_metrics(scores, self.settings.pass_threshold, groups)
        if lost:
            metrics["eval/lost_episodes"] = float(lost)
        if answers.wins is not None:
            metrics |= judge_metrics(judged_wins(answers.wins, len(self.prompts)))
        batch = collate(samples, self.tokenizer.pad_token_id)
        logprobs = self.policy.reference_logprobs(
            batch.tokens, batch.lengths, mask=batch.mask, temperature=1.0
        )
        metrics["eval/reference_perplexity"] = perplexity(logprobs, batch.mask)
        metrics["eval/length"] = float(batch.mask.sum()) / len(samples)
        # of other draws the log-probs' difference is no KL
        if not self.options.greedy and not self.options.truncates:
            moved = torch.where(batch.mask, batch.engine_logprobs - logprobs, 0.0).double().sum()
            metrics["eval/reference_kl"] = float(moved) / len(samples)
        return {
            self.suite.prefix + name.removeprefix("eval/"): value for name, value in metrics.items()
        }

    def _answers(self) -> _Answers:
        """By the weights that the engine holds. Collective."""
        samples = self.draw(self.builder)
        prompts = self._prompts_of_samples()
        scores = self._scores(prompts, samples)
        wins = together(lambda: self._compared(prompts, samples)) if self.settings.judge else None
        return _Answers(samples, scores, wins)

    def _scored_alone(self, drawn: Callable[[], list[Sample]]) -> _Answers:
        """On the rank that writes, beside what the ranks do."""
        samples, prompts = drawn(), self._prompts_of_samples()
        return _Answers(
            samples, self._scores(prompts, samples, alone=True), self._compared(prompts, samples)
        )

    def _taken(self) -> _Answers:
        """What was begun, on every rank, once it is there. Collective."""
        begun, self._begun, self.has_begun = self._begun, None, False
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
        """Each sample's prompt."""
        return [prompt for prompt in self.prompts for _ in range(self.settings.samples)]

    def _compared(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Wins | None:
        """What the judge says of each sample against the prompt's reference; None on ranks that ask
        nothing."""
        if self.judge is None:
            return None
        others = [text for text in self._reference_texts for _ in range(self.settings.samples)]
        return self.judge.compare(scoring_requests(prompts, samples, self.tokenizer), others)

    def _scores(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], *, alone: bool = False
    ) -> Tensor:
        """[B]: what each sample is worth, with what its environment gave. Collective, or one rank's
        `alone`."""
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
            found = call_scorer(self.scorer.name, self.scorer.scorer, requests)
            scores = torch.tensor(
                [ABSTAINED if score is None else score for score in found], dtype=torch.float64
            )
        else:
            scores = text_scores(self.scorer, prompts, samples, self.tokenizer)
        given = environment_scores(samples, 1)
        return scores if given is None else scores + given

    def _references(self, step: int) -> Tensor:
        """[P]: the scores of the references, which are found once and kept in the run directory.

        A prompt's reference is the record's `reference`, else the initial policy's most probable
        response.
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
        lacking = without_reference(self.prompts)
        drawn = (
            self.builder.generate(lacking, 1, replace(self.options, greedy=True)) if lacking else []
        )
        samples = reference_samples(
            self.prompts, drawn, self.tokenizer, ended=bool(self.options.stop_token_ids)
        )
        scores = self._scores(self.prompts, samples)
        self._reference_texts = [decode_response(sample, self.tokenizer) for sample in samples]
        if self.writes:
            lines = []
            told = zip(self.prompts, samples, self._reference_texts, scores.tolist(), strict=True)
            for prompt, sample, response, score in told:
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
        records = None
        if self.writes and self.references_file.exists():
            records = [
                json.loads(line)
                for line in self.references_file.read_text(encoding="utf-8").splitlines()
            ]
        # a rank that looked for itself might find what rank 0 is only now writing
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
    """What evaluates the run on a suite, whose prompts tell the model of the tools.

    Raises ConfigError for prompts that can not be used, or a scorer or a judge that is not there.
    """
    settings, scorer = suite.settings, None
    if settings.function is not None:
        deadline = settings.function_timeout_s
        scorer = TextSource(
            settings.function, resolve_scorer(settings.function, f"{suite.key}.function", deadline)
        )
    writes, judge = policy.world.rank == 0, evaluation_judge(settings, suite.key)
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
    """One rank's part of evaluating the policy on every suite; every rank calls every method."""

    suites: tuple[Evaluator, ...]
    every: int
    last_step: int

    @property
    def has_begun(self) -> bool:
        """Whether `begin` was called, and `evaluate` is to follow."""
        return any(one.has_begun for one in self.suites)

    def is_due(self, step: int) -> bool:
        """Whether the weights of `step` are to be evaluated: the initial ones, every so many
        steps', and the last."""
        return step % self.every == 0 or step == self.last_step

    def draw(self, builder: RolloutBuilder) -> list[list[Sample]]:
        """Responses to each suite's prompts, as `Evaluator.draw`."""
        return [one.draw(builder) for one in self.suites]

    def begin(self, step: int, drawn: Future[list[list[Sample]]] | None) -> None:
        """Have each suite of what is `drawn` of the weights of `step` scored, as `Evaluator.begin`.
        Collective."""
        for place, one in enumerate(self.suites):
            one.begin(step, None if drawn is None else functools.partial(_drawn_of, drawn, place))

    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics of the weights of `step`, as `Evaluator.evaluate`. Collective."""
        return {name: value for one in self.suites for name, value in one.evaluate(step).items()}


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
    """What evaluates the run; None where `evaluation.every` is 0. Raises ConfigError as
    `build_evaluator`."""
    if not config.evaluation.every:
        return None
    each = (
        build_evaluator(config, suite, tokenizer, policy, builder, services, tools)
        for suite in evaluation_suites(config)
    )
    return Evaluations(tuple(each), config.evaluation.every, config.run.steps)
