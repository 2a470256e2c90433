"""Rollout batches of a step: dynamic sampling, skipped prompts, teacher log-probs, selection."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from aligner.data.types import Sample
from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import RolloutConfig
from aligner.servers.remote_client import RefusedError, RemoteError, TransportError, UnscoredError
from aligner.training.rollout_builder import RolloutBuilder, select_informative, truncate_response
from aligner.training.services import PendingRows
from tests.training.fakes import Digits, Scorers, Stream, teacher_logprobs

EACH = 2


def rollouts(
    mixed,
    rounds,
    prompts_per_step=4,
    micro_batches=2,
    engine=None,
    services=None,
    skippable=1.0,
    **more,
):
    settings = RolloutConfig(
        prompts_per_step=prompts_per_step,
        samples_per_prompt=EACH,
        micro_batches=micro_batches,
        max_skipped_fraction=skippable,
    )
    return RolloutBuilder(
        Stream(),
        engine or Digits(),
        services or Scorers(mixed.__contains__),
        settings,
        SamplingOptions(max_new_tokens=2),
        pad_token_id=0,
        dynamic_sampling_rounds=rounds,
        **more,
    )


def test_each_prompt_is_used_once_and_position_resumes_stream():
    source = rollouts(mixed=(), rounds=0)
    seen = [[prompt.id for prompt in source.take().prompts[::EACH]] for _ in range(3)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    resumed = rollouts(mixed=(), rounds=0)
    resumed.position = 8
    assert [prompt.id for prompt in resumed.take().prompts[::EACH]] == seen[2]


def test_dynamic_sampling_replaces_prompts_with_equal_scores():
    source = rollouts(mixed={1, 4, 5, 9, 10}, rounds=3)
    rollout = source.take()
    assert [sample.prompt_id for sample in rollout.samples[::EACH]] == [1, 4, 5, 9]
    assert rollout.scores.result().tolist() == [0.0, 1.0] * 4
    assert rollout.batch.tokens[:, 1].tolist() == [11, 11, 14, 14, 15, 15, 19, 19]
    assert len(rollout.all_scores.result()) == EACH * source.position == EACH * 10


def test_dynamic_sampling_compares_shaped_scores():
    def penalize_missing_ends(scores, samples):
        return torch.where(
            torch.tensor([sample.prompt_id in (1, 4) for sample in samples]), -1.0, scores
        )

    source = rollouts(mixed={1, 4, 5, 9, 10, 12}, rounds=4, transform_scores=penalize_missing_ends)
    rollout = source.take()
    assert [sample.prompt_id for sample in rollout.samples[::EACH]] == [5, 9, 10, 12]
    assert rollout.scores.result().tolist() == [0.0, 1.0] * 4


def test_exhausted_dynamic_sampling_is_reported_with_keys():
    source = rollouts(mixed={0, 2}, rounds=2)
    with pytest.raises(AlignerError) as caught:
        source.take()
    message = str(caught.value)
    assert (
        "algorithm.dynamic_sampling_rounds=2: only 2 of 8 prompts have samples with different"
        " scores" in message
    )
    assert "rollout.samples_per_prompt=2" in message


class Longer(Digits):
    """Adds k tokens to the samples of prompt k; the second sample of each prompt gets a branch with
    three more tokens."""

    def sample(self, samples, samples_per_prompt, options, early_stop=None):
        return [
            self.lengthened(sample)
            for sample in super().sample(samples, samples_per_prompt, options, early_stop)
        ]

    def lengthened(self, sample, further=None):
        further = sample.prompt_id if further is None else further
        longer = replace(
            sample,
            tokens=torch.cat([sample.tokens, torch.full((further,), 7)]),
            engine_logprobs=torch.zeros(2 + further),
            weight_versions=torch.zeros(2 + further, dtype=torch.int64),
        )
        return (
            replace(longer, branches=(self.lengthened(sample, 3),))
            if sample.sample_index and further != 3
            else longer
        )


def test_teacher_logprobs_follow_selection_and_branches():
    services = Scorers({1, 4, 5, 9}.__contains__)
    asked, tasks, plain = [], [], services.request_teacher_logprobs

    def request_teacher_logprobs(batch, metadata):
        asked.append(batch.lengths.tolist())
        tasks.append([fields["task"] for fields in metadata])
        return plain(batch, metadata)

    services.request_teacher_logprobs = request_teacher_logprobs
    rollout = rollouts(mixed=(), rounds=3, engine=Longer(), services=services).take()
    assert [sample.prompt_id for sample in rollout.samples[::EACH]] == [1, 4, 5, 9]
    assert asked[:2] == [[3, 3, 4, 4], [5, 5, 6, 6]] and asked[-1] == [
        6,
        6,
        6,
        6,
    ], "parts as drawn, branches at the end"
    assert tasks[0] == ["task 0", "task 0", "task 1", "task 1"] and tasks[-1] == [
        "task 1",
        "task 4",
        "task 5",
        "task 9",
    ]
    width = rollout.batch.tokens.shape[1] - 1
    assert torch.equal(rollout.teacher_logprobs.result(width), teacher_logprobs(rollout.batch))
    rows = torch.tensor([3, 0])
    chosen = rollout.select(rows)
    assert len(chosen.batch.tokens) == 3, "two samples, and the branch of one"
    assert torch.equal(chosen.teacher_logprobs.result(width), teacher_logprobs(chosen.batch))
    alone = rollout.drop_branches()
    assert torch.equal(alone.teacher_logprobs.result(width), teacher_logprobs(alone.batch))


class Picky(Digits):
    """An engine that always refuses some prompts, and refuses the first `at_first` requests."""

    def __init__(self, refused, at_first=0, error=RefusedError):
        super().__init__()
        self.refused, self.at_first, self.error = refused, at_first, error

    def sample(self, samples, samples_per_prompt, options, early_stop=None):
        self.at_first -= 1
        prompts = {sample.prompt_id for sample in samples}
        if self.at_first >= 0 or self.refused & prompts:
            raise self.error("generator", "host:1", "AlignerError", f"{len(prompts)} prompts")
        return super().sample(samples, samples_per_prompt, options, early_stop)


def test_prompts_refused_by_generator_are_skipped_and_counted(caplog):
    source = rollouts(mixed=(), rounds=0, engine=Picky({1, 2, 6}), is_rank0_only=True)
    taken = [source.take() for _ in range(2)]
    assert [[prompt.id for prompt in rollout.prompts[::EACH]] for rollout in taken] == [
        [0, 3, 4, 5],
        [7, 8, 9, 10],
    ]
    assert [rollout.skipped for rollout in taken] == [2, 1]
    assert (
        caplog.text.count(
            "is skipped, because generation failed: generator server at host:1: AlignerError: 1 prompts"
        )
        == 3
    )


def test_max_skipped_fraction_limits_skipped_prompts():
    def source(refused):
        return rollouts(
            mixed=(), rounds=0, engine=Picky(refused), is_rank0_only=True, skippable=0.25
        )

    assert source({1}).take().skipped == 1
    with pytest.raises(RefusedError, match="2 prompts"):
        source({1, 2}).take()


def test_skipping_does_not_depend_on_micro_batches():
    source = rollouts(
        mixed=(), rounds=0, micro_batches=4, engine=Picky({0, 1, 2}), is_rank0_only=True
    )
    rollout = source.take()
    assert [prompt.id for prompt in rollout.prompts[::EACH]] == [
        3,
        4,
        5,
        6,
    ] and rollout.skipped == 3


class Unable(Scorers):
    """A server that scores only some prompts; each request contains one prompt."""

    def __init__(self, able):
        super().__init__(able.__contains__)
        self.able = able

    def request_scores_and_values(self, batch, metadata, retry_batch_rows=None):
        future, (prompt, *_) = Future(), (batch.tokens[:, 1] - 10).tolist()
        if prompt in self.able:
            future.set_result(torch.ones(len(batch.tokens)))
        else:
            refused = RefusedError("reward", "host:1", "ScoringError", f"of {prompt} nothing")
            future.set_exception(UnscoredError(refused, len(batch.tokens)))
        return (future,), ()


def test_unscored_prompts_are_skipped_unless_all_fail():
    rollout = rollouts(mixed=(), rounds=0, micro_batches=4, services=Unable({1, 2})).take()
    assert rollout.scores.result().isnan().tolist() == [
        True,
        True,
        False,
        False,
        False,
        False,
        True,
        True,
    ]
    assert [prompt.id for prompt in rollout.drop_unscored().prompts[::EACH]] == [1, 2]
    none = rollouts(mixed=(), rounds=0, micro_batches=4, services=Unable({})).take()
    with pytest.raises(AlignerError, match="ScoringError: of 0 nothing"):
        none.drop_unscored()


def test_request_refused_once_is_retried():
    source = rollouts(mixed=(), rounds=0, engine=Picky(set(), at_first=1), is_rank0_only=True)
    assert source.take().skipped == 0


@pytest.mark.parametrize(
    "engine",
    [Picky(set(range(99))), Picky({1}, error=TransportError), Picky(set(), at_first=99)],
    ids=["all", "lost", "at large"],
)
def test_error_not_about_single_prompts_is_raised(engine):
    with pytest.raises(RemoteError):
        rollouts(mixed=(), rounds=0, engine=engine, is_rank0_only=True).take()


def test_prompts_with_equal_scores_are_not_informative():
    scores = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.5, 0.25])
    assert select_informative(scores, 2).tolist() == [2, 3, 6, 7]


def test_selection_keeps_samples_tensors_and_scores_aligned():
    rollout = rollouts(mixed={0, 3}, rounds=0).take()
    chosen = rollout.select(torch.tensor([7, 1]))
    assert [(sample.prompt_id, sample.sample_index) for sample in chosen.samples] == [
        (3, 1),
        (0, 1),
    ]
    assert [prompt.id for prompt in chosen.prompts] == [3, 0]
    assert chosen.batch.tokens[:, 1].tolist() == [13, 10]
    assert chosen.scores.result().tolist() == [1.0, 1.0]
    assert chosen.select(torch.tensor([1])).scores.result().tolist() == [1.0]


def test_pending_result_is_fetched_only_once(monkeypatch):
    scores: Future = Future()
    scores.set_result(torch.tensor([0.5, 0.25, 2.0]))
    pending = PendingRows((scores,))
    assert pending.select(torch.tensor([2, 0])).result().tolist() == [2.0, 0.5]
    monkeypatch.setattr(scores, "result", lambda: pytest.fail("asked again"))
    assert pending.result().tolist() == [0.5, 0.25, 2.0]
    assert pending.select(torch.tensor([1])).result().tolist() == [0.25]


def response(*tokens):
    return Sample(
        0,
        0,
        torch.tensor([8, 9, *tokens]),
        2,
        torch.arange(float(len(tokens))),
        torch.arange(len(tokens)),
        "length",
    )


def test_response_is_cut_after_first_truncation_token():
    cut = truncate_response(response(3, 4, 3, 4, 3), token_id=3, first_index=1)
    assert cut.tokens.tolist() == [8, 9, 3, 4, 3]
    assert cut.engine_logprobs.tolist() == [0.0, 1.0, 2.0] and cut.weight_versions.tolist() == [
        0,
        1,
        2,
    ]
    assert cut.finish_reason == "stop"


def test_response_without_truncation_token_is_unchanged():
    whole = truncate_response(response(3, 4, 1), token_id=3, first_index=1)
    assert whole.tokens.tolist() == [8, 9, 3, 4, 1] and whole.finish_reason == "length"
