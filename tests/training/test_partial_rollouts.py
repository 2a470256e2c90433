"""Partial rollouts: when long prompts are trained on, carried over, saved and resumed."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import EngineConfig, RolloutConfig
from aligner.training.rollout_builder import RolloutBuilder
from aligner.training.rollout_pipeline import RolloutPipeline
from aligner.training.samplers import ColocatedSampler
from tests.training.clock import Clock
from tests.training.fakes import Stream, Writer, _now


class Recorded(Stream):
    """A stream that records the step in which each prompt was taken."""

    def __init__(self):
        self.step, self.taken_at = 0, {}

    def take(self, start, count):
        prompts = [
            replace(prompt, metadata={"id": prompt.id}) for prompt in super().take(start, count)
        ]
        self.taken_at |= {prompt.id: self.step for prompt in prompts}
        return prompts


class Scores:
    """A reward server whose scores are equal within every third prompt."""

    def __init__(self):
        self.asked = set()

    def request_scores(self, batch, metadata, retry_batch_rows=None):
        self.asked |= (ids := {fields["id"] for fields in metadata})
        each = len(batch.tokens) // len(ids)
        rows = [float(fields["id"] % 3 > 0 and row % each) for row, fields in enumerate(metadata)]
        return (_now(torch.tensor(rows)),)

    def request_teacher_logprobs(self, batch, metadata):
        return ()


@dataclass(frozen=True)
class Case:
    seed: int
    parts: int
    part: int
    """Prompts per micro-batch."""
    each: int
    spare: int
    max_deferrals: int
    rounds: int

    def start(self, position=0, under_way=()):
        shape = RolloutConfig(
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
        self.shape, self.stream, self.engine, self.scorers = (
            shape,
            Recorded(),
            Writer(case.seed),
            Scores(),
        )
        sampler = ColocatedSampler(self.engine, EngineConfig(), rank=0)
        options, rounds = SamplingOptions(max_new_tokens=40), case.rounds
        self.rollouts = RolloutBuilder(
            self.stream,
            sampler,
            self.scorers,
            shape,
            options,
            pad_token_id=0,
            dynamic_sampling_rounds=rounds,
            is_rank0_only=True,
        )
        self.rollouts.position, self.rollouts.partial_rollouts = position, under_way

    def take(self, step):
        self.stream.step, self.engine.version = step, max(0, step - self.shape.steps_ahead)
        return self.rollouts.take()


def describe_samples(rollout):
    return [
        (
            s.prompt_id,
            s.sample_index,
            s.finish_reason,
            s.response.tolist(),
            s.weight_versions.tolist(),
        )
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
def test_each_prompt_is_trained_once_within_max_deferrals(case, steps):
    run, trained = case.start(), {}
    for step in range(steps):
        rollout = run.take(step)
        ids = [prompt.id for prompt in rollout.prompts[:: case.each]]
        assert len(set(ids)) == len(ids) == run.shape.prompts_per_step
        assert not trained.keys() & ids
        trained |= dict.fromkeys(ids, step)
        for sample in rollout.samples:
            length = run.engine.length(sample.prompt_id, sample.sample_index)
            assert sample.finish_reason == "stop" and sample.response.tolist() == list(
                range(10, 10 + length)
            )
            versions = sample.weight_versions.tolist()
            assert versions == sorted(versions)
            assert step - run.shape.max_staleness <= versions[0]
            assert step - run.stream.taken_at[sample.prompt_id] <= case.max_deferrals
        assert rollout.deferred == len(run.rollouts.partial_rollouts) == run.shape.spare_prompts
    under_way = {rollout.prompt.id for rollout in run.rollouts.partial_rollouts}
    assert not under_way & trained.keys()
    left_out = set(range(run.rollouts.position)) - under_way - trained.keys()
    # Only dynamic sampling drops prompts, after they have scores.
    assert left_out <= run.scorers.asked if case.rounds else not left_out


class Trainer:
    """Trains on the batches of a pipeline; its weights serve immediately."""

    def __init__(self, case, steps):
        self.run = case.start()
        own = self.run.rollouts
        self.pipeline = RolloutPipeline(
            own, own, self, self, self.run.shape, steps, 0, create_executor=Clock().worker
        )

    def take_snapshot(self, version):
        pass

    def serve(self, version):
        self.run.engine.version = version

    def request_values(self, batch):
        return ()

    def train(self, first, last, save_at=None, place=None):
        self.pipeline.publish_weights(first)
        trained = []
        for step in range(first, last):
            rollout = self.pipeline.take()
            trained.append([*describe_samples(rollout), rollout.deferred])
            assert (
                min(int(sample.weight_versions[0]) for sample in rollout.samples)
                >= step - self.run.shape.max_staleness
            )
            self.pipeline.publish_weights(step + 1)
            if step + 1 == save_at:
                self.pipeline.begin_save(save_at)
                self.position = self.pipeline.finish_save(place)
        return trained


@settings(max_examples=15, deadline=None)
@given(cases, st.integers(1, 4))
def test_resumed_run_with_partial_rollouts_equals_whole_run(case, stopped):
    with closing((whole := Trainer(case, 7)).pipeline):
        expected = whole.train(0, 7)
    with tempfile.TemporaryDirectory() as directory:
        with closing((first := Trainer(case, 7)).pipeline):
            trained = first.train(0, stopped, stopped, Path(directory))
        with closing((second := Trainer(case, 7)).pipeline):
            second.pipeline.resume(Path(directory), stopped, first.position)
            trained += second.train(stopped, 7)
    assert trained == expected


@settings(max_examples=15, deadline=None)
@given(cases, st.integers(1, 4))
def test_extended_run_trains_on_its_partial_rollouts(case, finished):
    with tempfile.TemporaryDirectory() as directory:
        with closing((first := Trainer(case, finished)).pipeline):
            trained = first.train(0, finished, finished, Path(directory))
        with closing((second := Trainer(case, finished + 4)).pipeline):
            second.pipeline.resume(Path(directory), finished, first.position)
            trained += second.train(finished, finished + 4)
            under_way = {rollout.prompt.id for rollout in second.run.rollouts.partial_rollouts}
    ids = [sample[0] for step in trained for sample in step[: -1 : case.each]]
    assert len(set(ids)) == len(ids) and not under_way & {*ids}
    lost = set(range(second.run.rollouts.position)) - under_way - {*ids}
    assert lost <= first.run.scorers.asked | second.run.scorers.asked if case.rounds else not lost


def test_too_old_partial_rollouts_are_refused_at_resume(tmp_path):
    case = Case(seed=2, parts=1, part=4, each=2, spare=2, max_deferrals=2, rounds=0)
    with closing((first := Trainer(case, 9)).pipeline):
        first.train(0, 4, 4, tmp_path)
    other = Trainer(replace(case, max_deferrals=1), 9)
    refusal = pytest.raises(
        AlignerError,
        match=r"rollout\.max_staleness=2: .* partial rollouts of weight version 2, .*=3 or more",
    )
    with closing(other.pipeline), refusal:
        other.pipeline.resume(tmp_path, 4, first.position)


def test_carried_over_response_has_several_weight_versions():
    """Without spare prompts, every step would wait for its longest response."""
    case = Case(seed=0, parts=1, part=4, each=2, spare=2, max_deferrals=2, rounds=0)
    run, lags = case.start(), []
    for step in range(6):
        lags += [set(sample.weight_versions.tolist()) for sample in run.take(step).samples]
    assert any(len(versions) > 1 for versions in lags)


def test_partial_rollouts_with_other_group_size_are_refused():
    case = Case(seed=0, parts=1, part=2, each=2, spare=2, max_deferrals=1, rounds=0)
    run = case.start()
    run.take(0)
    other = Case(seed=0, parts=1, part=2, each=3, spare=2, max_deferrals=1, rounds=0)
    with pytest.raises(
        AlignerError, match=r"rollout.samples_per_prompt=3: the partial rollouts have 2 samples"
    ):
        other.start(0, run.rollouts.partial_rollouts)
