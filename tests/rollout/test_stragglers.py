"""Prompts that take longer than others: what is trained on when, and what goes on from one batch to the next."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.schema import EngineParallel, Rollout
from aligner.engines.protocol import SamplingOptions
from aligner.errors import AlignerError
from aligner.rollout.rollouts import Rollouts
from aligner.rollout.samplers import ColocatedSampler
from aligner.rollout.stragglers import from_saved, to_saved
from tests.rollout.fakes import Stream, Writer, _now


class Recorded(Stream):
    """Knows the step that took each prompt."""

    def __init__(self):
        self.step, self.taken_at = 0, {}

    def take(self, start, count):
        prompts = [replace(prompt, metadata={"id": prompt.id}) for prompt in super().take(start, count)]
        self.taken_at |= {prompt.id: self.step for prompt in prompts}
        return prompts


class Scores:
    """All equal for every third prompt."""

    def __init__(self):
        self.asked = set()

    def ask_scores(self, tokens, lengths, prompt_lengths, metadata, rows_apart=None):
        self.asked |= (ids := {fields["id"] for fields in metadata})
        each = len(tokens) // len(ids)
        rows = [float(fields["id"] % 3 > 0 and row % each) for row, fields in enumerate(metadata)]
        return (_now(torch.tensor(rows)),)


@dataclass(frozen=True)
class Case:
    seed: int
    parts: int
    part: int
    """Prompts of a micro-batch."""
    each: int
    spare: int
    max_deferrals: int
    rounds: int

    def start(self, position=0, under_way=()):
        shape = Rollout(
            prompts_per_step=self.parts * self.part,
            samples_per_prompt=self.each,
            micro_batches=self.parts,
            spare_prompts=min(self.spare, self.parts * self.part),
            max_deferrals=self.max_deferrals,
            max_staleness=self.max_deferrals + 1,
        )
        return Run(self, shape, position, under_way)


class Run:
    def __init__(self, case, shape, position, under_way):
        self.shape, self.stream, self.engine, self.scorers = shape, Recorded(), Writer(case.seed), Scores()
        sampler = ColocatedSampler(self.engine, EngineParallel(tensor=1, data=1), rank=0)
        options, rounds = SamplingOptions(max_new_tokens=40), case.rounds
        self.rollouts = Rollouts(
            self.stream,
            sampler,
            self.scorers,
            shape,
            options,
            pad_token_id=0,
            dynamic_sampling_rounds=rounds,
            is_alone=True,
        )
        self.rollouts.position, self.rollouts.under_way = position, under_way

    def take(self, step):
        self.stream.step, self.engine.version = step, max(0, step - self.shape.steps_ahead)
        return self.rollouts.take()


def described(rollout):
    return [
        (s.prompt_id, s.sample_index, s.finish_reason, s.response.tolist(), s.weight_versions.tolist())
        for s in rollout.samples
    ]


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    parts=st.integers(1, 3),
    part=st.integers(1, 3),
    each=st.integers(2, 3),
    spare=st.integers(1, 4),
    max_deferrals=st.integers(1, 3),
    rounds=st.sampled_from([0, 6]),
)


@settings(max_examples=40, deadline=None)
@given(cases, st.integers(1, 6))
def test_every_prompt_is_trained_on_once_whole_and_within_its_deferrals(case, steps):
    run, trained = case.start(), {}
    for step in range(steps):
        rollout = run.take(step)
        ids = [prompt.id for prompt in rollout.prompts[:: case.each]]
        assert len(set(ids)) == len(ids) == run.shape.prompts_per_step
        assert not trained.keys() & ids
        trained |= dict.fromkeys(ids, step)
        for sample in rollout.samples:
            length = run.engine.length(sample.prompt_id, sample.sample_index)
            assert sample.finish_reason == "stop" and sample.response.tolist() == list(range(10, 10 + length))
            versions = sample.weight_versions.tolist()
            assert versions == sorted(versions)
            assert step - run.shape.max_staleness <= versions[0]
            assert step - run.stream.taken_at[sample.prompt_id] <= case.max_deferrals
        assert rollout.deferred == len(run.rollouts.under_way) == run.shape.spare_prompts
    under_way = {straggler.prompt.id for straggler in run.rollouts.under_way}
    assert not under_way & trained.keys()
    left_out = set(range(run.rollouts.position)) - under_way - trained.keys()
    assert left_out <= run.scorers.asked if case.rounds else not left_out  # dynamic sampling did, once they had scores


@settings(max_examples=25, deadline=None)
@given(cases, st.integers(1, 4))
def test_a_run_goes_on_with_what_was_under_way(case, stopped):
    whole = case.start()
    expected = [described(whole.take(step)) for step in range(stopped + 3)]
    first = case.start()
    trained = [described(first.take(step)) for step in range(stopped)]
    tensors, fields = to_saved(first.rollouts.under_way)
    under_way = from_saved({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(fields)))
    second = case.start(first.rollouts.position, under_way)
    assert trained + [described(second.take(step)) for step in range(stopped, stopped + 3)] == expected


def test_a_long_response_is_left_behind_and_goes_on_from_its_tokens():
    """Where nothing is spare every step waits for it."""
    case = Case(seed=0, parts=1, part=4, each=2, spare=2, max_deferrals=2, rounds=0)
    run, lags = case.start(), []
    for step in range(6):
        lags += [set(sample.weight_versions.tolist()) for sample in run.take(step).samples]
    assert any(len(versions) > 1 for versions in lags)


def test_prompts_under_way_of_another_run_are_refused():
    case = Case(seed=0, parts=1, part=2, each=2, spare=2, max_deferrals=1, rounds=0)
    run = case.start()
    run.take(0)
    other = Case(seed=0, parts=1, part=2, each=3, spare=2, max_deferrals=1, rounds=0)
    with pytest.raises(AlignerError, match=r"rollout.samples_per_prompt=3: the prompts under way have 2 samples"):
        other.start(0, run.rollouts.under_way)
