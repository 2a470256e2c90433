"""Batches, weight versions and resumed runs of the asynchronous pipeline, on a simulated clock."""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.data.types import Prompt
from aligner.engines.engine_protocol import SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import RolloutConfig
from aligner.training.rollout_builder import RolloutBuilder
from aligner.training.rollout_pipeline import RolloutPipeline
from tests.training.clock import Clock, Deadlock
from tests.training.fakes import Digits, Scorers, Stream

EACH, PROMPTS = 2, 2
HELD_OUT = Prompt(2**40, "held out", torch.tensor([5]))
MEMORY = Path("/dev/shm")
"""A directory in memory, where writing a file takes no time."""


@dataclass
class World:
    """A generator and a trainer whose actions take random times, which may be 0."""

    seed: int
    max_staleness: int
    steps: int
    rounds: int = 0
    interrupts: bool = False
    evaluates: bool = False
    """Whether weight versions also generate evaluation samples."""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.engine = Digits(self.spend)
        self.copies: list[int] = []
        self.served = 0
        self.most_copies = 0
        self.reward = self.clock.worker("reward")
        self.settings = RolloutConfig(
            prompts_per_step=PROMPTS,
            samples_per_prompt=EACH,
            micro_batches=2,
            max_staleness=self.max_staleness,
        )

    def spend(self, longest=3.0):
        self.clock.sleep(self.random.choice((0.0, self.random.uniform(0, longest))))

    # The pipeline's interface to the trainer's weights.

    def publish(self, version):
        self.take_snapshot(version)
        self.serve(version)

    def take_snapshot(self, version):
        self.spend(0.1)
        self.copies.append(version)
        self.most_copies = max(self.most_copies, len(self.copies))

    def serve(self, version):
        assert version in self.copies
        self.spend(0.5)
        self.engine.version = self.served = version
        self.copies = [kept for kept in self.copies if kept >= version]

    @contextmanager
    def flow(self):
        """Yield a pipeline, which is closed at the end of the block."""
        flow = self.pipeline()
        try:
            yield flow
        finally:
            flow.close()
            self.reward.shutdown()

    def pipeline(self):
        def rollouts(**more):
            return RolloutBuilder(
                Stream(),
                self.engine,
                Scorers(
                    is_mixed,
                    lambda scores: self.reward.submit(lambda: (self.spend(1.0), scores)[1]),
                ),
                self.settings,
                SamplingOptions(max_new_tokens=2),
                pad_token_id=0,
                dynamic_sampling_rounds=self.rounds,
                **more,
            )

        return RolloutPipeline(
            rollouts(),
            rollouts(is_rank0_only=True) if self.max_staleness else None,
            self,
            Scorers(is_mixed),
            self.settings,
            self.steps,
            pad_token_id=0,
            publishes_during_generation=self.interrupts,
            create_executor=self.clock.worker,
        )

    def train(self, flow, first, last, save_at=None, place=None):
        """Train steps `first` to `last - 1`; return the samples, weight versions, scores and texts
        of each step, and the pass rates that selected its prompts.

        The pass rates after n steps are the number n.
        """
        flow.pass_rates = first
        flow.publish_weights(first)
        trained, evaluation = [], None
        for step in range(first, last):
            rollout = flow.take()
            assert [sample.prompt_id for sample in rollout.samples[::EACH]] == [
                int(p.id) for p in rollout.prompts[::EACH]
            ]
            batch, teacher_logprobs = (
                rollout.batch,
                rollout.teacher_logprobs.result(rollout.batch.tokens.shape[1] - 1),
            )
            assert torch.equal(teacher_logprobs, -batch.tokens[:, 1:].float()), (
                "the teacher's log-probs are the samples' own"
            )
            samples = [
                (s.prompt_id, s.sample_index, *s.weight_versions.tolist()) for s in rollout.samples
            ]
            texts = [prompt.text for prompt in rollout.prompts]
            scores, rates = (
                rollout.scores.result().tolist(),
                {prompt.metadata["rates"] for prompt in rollout.prompts},
            )
            trained.append(
                (step, samples, scores, rollout.all_scores.result().tolist(), texts, rates)
            )
            flow.pass_rates = step + 1
            if save_at == step and place is not None:
                self.position = flow.finish_save(place)
            self.spend()
            flow.publish_weights(step + 1, is_last=step + 1 == self.steps)
            if evaluation is not None:
                assert set(evaluation.result()[0].weight_versions.tolist()) == {step}, (
                    "no other version draws it"
                )
                evaluation = None
            if (
                self.evaluates
                and self.max_staleness
                and step + 1 < self.steps
                and self.random.random() < 0.5
            ):
                evaluation = flow.generate_extra(
                    lambda builder: builder.generate(
                        [HELD_OUT], 1, SamplingOptions(max_new_tokens=2)
                    )
                )
            if save_at == step + 1:
                flow.begin_save(step + 1)
        return trained


def is_mixed(number):
    """Return whether a prompt's samples have different scores."""
    return number % 3 > 0


def versions(trained):
    """Return (step, weight versions of its tokens) per step."""
    return [
        (step, {version for sample in samples for version in sample[2:]})
        for step, samples, *_ in trained
    ]


schedules = {
    "seed": st.integers(0, 2**32),
    "max_staleness": st.integers(0, 5),
    "steps": st.integers(1, 8),
    "rounds": st.sampled_from([0, 3]),
}


@pytest.mark.promise("async-batches-ignore-timing")
@settings(max_examples=1000, deadline=None)
@given(**schedules)
@pytest.mark.slow
def test_batches_do_not_depend_on_timing(seed, max_staleness, steps, rounds):
    """No prompt is lost or trained on twice, prompts stay in order, and no threads deadlock."""
    world = World(seed, max_staleness, steps, rounds, evaluates=True)
    with world.flow() as flow:
        trained = world.train(flow, 0, steps)
    prompts = [number for _, samples, *_ in trained for number, index, *_ in samples if index == 0]
    wanted = [number for number in range(3 * PROMPTS * steps) if is_mixed(number) or not rounds]
    assert prompts == wanted[: PROMPTS * steps]
    assert versions(trained) == [(step, {max(0, step - max_staleness)}) for step in range(steps)]
    for step, samples, scores, everything, texts, rates in trained:
        assert rates == {max(0, step - max_staleness)}, (
            "which prompts are drawn follows from the step alone"
        )
        assert texts == [f"prompt {number}" for number, *_ in samples]
        assert scores == [float(is_mixed(number) and index == 1) for number, index, *_ in samples]
        assert len(scores) <= len(everything)
    assert world.most_copies <= max_staleness + 2, (
        "that which serves, and one of each step that may be ahead of it"
    )


@pytest.mark.promise("staleness-is-bounded")
@pytest.mark.slow
@settings(max_examples=700, deadline=None)
@given(**schedules)
def test_no_token_exceeds_max_staleness(seed, max_staleness, steps, rounds):
    world = World(seed, max(1, max_staleness), steps, rounds, interrupts=True, evaluates=True)
    with world.flow() as flow:
        trained = world.train(flow, 0, steps)
    for step, used in versions(trained):
        assert step - world.max_staleness <= min(used) <= max(used) <= step
    prompts = [number for _, samples, *_ in trained for number, index, *_ in samples if index == 0]
    assert (
        prompts
        == [number for number in range(3 * PROMPTS * steps) if is_mixed(number) or not rounds][
            : PROMPTS * steps
        ]
    )


@pytest.mark.promise("killed-async-run-keeps-samples")
@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(**schedules, stopped=st.integers(1, 8))
def test_killed_run_resumes_with_the_same_samples(seed, max_staleness, steps, rounds, stopped):
    stopped = min(stopped, steps)
    undisturbed = World(seed, max_staleness, steps, rounds)
    with undisturbed.flow() as flow:
        expected = undisturbed.train(flow, 0, steps)
    place = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        killed = World(seed + 1, max_staleness, steps, rounds)
        with killed.flow() as flow:
            trained = killed.train(flow, 0, min(steps, stopped + 1), save_at=stopped, place=place)[
                :stopped
            ]
            position = killed.position if stopped < steps else flow.finish_save(place)
        resumed = World(seed + 2, max_staleness, steps, rounds)
        with resumed.flow() as flow:
            flow.resume(place, stopped, position)
            resumed.engine.drop_journal_before(killed.engine.first)
            trained += resumed.train(flow, stopped, steps)
    finally:
        shutil.rmtree(place)
    assert trained == expected


@pytest.mark.promise("generation-overlaps-training")
def test_longer_phase_sets_pace_of_asynchronous_run():
    """Training takes 3 s and generation 2 × 1 s per step, then 1 s and 2 × 3 s. A synchronous step
    takes the sum of both phases."""
    for train_s, generate_s, pace in ((3.0, 1.0, 3.0), (1.0, 3.0, 6.0)):
        spent = {}
        for max_staleness in (0, 1):
            world = World(0, max_staleness, 20)
            world.spend = lambda longest=None, world=world, s=train_s: world.clock.sleep(
                s if longest is None else 0.0
            )
            world.engine.spend = lambda world=world, s=generate_s: world.clock.sleep(s)
            with world.flow() as flow:
                world.train(flow, 0, 20)
            spent[max_staleness] = world.clock.now
        assert spent[0] == 20 * (train_s + 2 * generate_s)
        assert spent[1] == 20 * pace + min(train_s, 2 * generate_s)


def test_more_staleness_smooths_uneven_step_times():
    """With varying phase times, each step waits for the longer phase if samples are one step old;
    with more staleness, the times average out."""
    spent = []
    for max_staleness in (0, 1, 4):
        world = World(1, max_staleness, 60)
        # Called twice per step; on average, generation takes as long as training.
        world.engine.spend = functools.partial(world.spend, 1.5)
        with world.flow() as flow:
            world.train(flow, 0, 60)
        spent.append(world.clock.now)
    assert spent[0] > 1.2 * spent[1] and spent[1] > 1.05 * spent[2]


@pytest.mark.parametrize("interrupts", [False, True])
def test_failed_evaluation_does_not_block_batches(interrupts):
    def fail(builder):
        raise AlignerError("generator: out of memory")

    world = World(0, 1, 4, interrupts=interrupts)
    with world.flow() as flow:
        flow.publish_weights(0)
        evaluation = flow.generate_extra(fail)
        flow.take()
        flow.publish_weights(1)
        flow.take()
        with pytest.raises(AlignerError, match="out of memory"):
            evaluation.result()


def test_simulated_clock_detects_deadlock():
    world = World(0, 1, 4)
    with world.flow() as flow:
        world.train(flow, 0, 1)
        flow.take()
        never = world.clock.worker("").submit(world.clock.wait)
        with pytest.raises(Deadlock):
            never.result()


def test_engine_error_is_raised_when_failed_batch_is_taken():
    world = World(0, 1, 4)
    drawn = world.engine.sample

    def broken(samples, *arguments):
        if samples[0].prompt_id >= PROMPTS:
            raise AlignerError("generator: out of memory")
        return drawn(samples, *arguments)

    world.engine.sample = broken
    with world.flow() as flow:
        flow.publish_weights(0)
        flow.take()
        with pytest.raises(AlignerError, match="generator: out of memory"):
            flow.take()


def test_too_stale_or_damaged_checkpoint_is_refused(tmp_path):
    world = World(0, 2, 9)
    with world.flow() as flow:
        world.train(flow, 0, 4, save_at=3, place=tmp_path)
    for allowed in (0, 1):
        with (
            World(0, allowed, 9).flow() as flow,
            pytest.raises(
                AlignerError,
                match=r"the checkpoint contains 2 rollout batches .* resume with rollout\.max_staleness=2",
            ),
        ):
            flow.resume(tmp_path, 3, world.position)
    (tmp_path / "rollouts.safetensors").write_bytes(b"half")
    with (
        World(0, 2, 9).flow() as flow,
        pytest.raises(
            AlignerError,
            match="cannot read the rollout batches that were generated ahead of training",
        ),
    ):
        flow.resume(tmp_path, 3, world.position)


@pytest.mark.parametrize("awaited", [False, True])
def test_last_version_is_served_only_if_awaited(awaited):
    world = World(0, 1, 4)
    with world.flow() as flow:
        world.train(flow, 0, 4)
        if awaited:
            flow.await_published()
    assert world.served == (4 if awaited else 3)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_next_checkpoint_frees_state_of_earlier_prompts(max_staleness, tmp_path):
    world = World(0, max_staleness, 9)
    with world.flow() as flow:
        world.train(flow, 0, 4, save_at=3, place=tmp_path)
        assert world.engine.first == 0
        flow.begin_save(4)
        assert world.engine.first == world.position >= 3 * PROMPTS
