"""What is drawn when, by which weights, and what a resumed run trains on; schedules on a simulated
clock."""

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
from aligner.rollout.rollout_builder import RolloutBuilder
from aligner.rollout.rollout_pipeline import RolloutPipeline
from aligner.schema import RolloutConfig
from tests.rollout.clock import Clock, Deadlock
from tests.rollout.fakes import Digits, Scorers, Stream

EACH, PROMPTS = 2, 2
HELD_OUT = Prompt(2**40, "held out", torch.tensor([5]))
MEMORY = Path("/dev/shm")
"""Where a file is on disk at once."""


@dataclass
class World:
    """A generator and a trainer whose every action takes a random time, 0 included."""

    seed: int
    max_staleness: int
    steps: int
    rounds: int = 0
    interrupts: bool = False
    evaluates: bool = False
    """Whether versions draw something beside the batches."""
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

    # What the pipeline takes for the trainer's weights.

    def publish(self, version):
        self.offer(version)
        self.serve(version)

    def offer(self, version):
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
        """A pipeline, which ends with the block."""
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
            rollouts(is_alone=True) if self.max_staleness else None,
            self,
            Scorers(is_mixed),
            self.settings,
            self.steps,
            pad_token_id=0,
            interrupts=self.interrupts,
            workers=self.clock.worker,
        )

    def train(self, flow, first, last, save_at=None, place=None):
        """What a trainer does; the samples of every step, with versions, scores and the pass rates
        that they were drawn by.

        The pass rates after so many steps are their number.
        """
        flow.pass_rates = first
        flow.publish_weights(first)
        trained, beside = [], None
        for step in range(first, last):
            rollout = flow.take()
            assert [sample.prompt_id for sample in rollout.samples[::EACH]] == [
                int(p.id) for p in rollout.prompts[::EACH]
            ]
            batch, taught = (
                rollout.batch,
                rollout.teacher_logprobs.result(rollout.batch.tokens.shape[1] - 1),
            )
            assert torch.equal(taught, -batch.tokens[:, 1:].float()), (
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
            flow.publish_weights(step + 1, last=step + 1 == self.steps)
            if beside is not None:
                assert set(beside.result()[0].weight_versions.tolist()) == {step}, (
                    "no other version draws it"
                )
                beside = None
            if (
                self.evaluates
                and self.max_staleness
                and step + 1 < self.steps
                and self.random.random() < 0.5
            ):
                beside = flow.draw_beside(
                    lambda builder: builder.generate(
                        [HELD_OUT], 1, SamplingOptions(max_new_tokens=2)
                    )
                )
            if save_at == step + 1:
                flow.begin_save(step + 1)
        return trained


def is_mixed(number):
    """Whether a prompt's samples have different scores."""
    return number % 3 > 0


def versions(trained):
    """By step, all versions of its tokens."""
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
    """None lost, none trained on twice, all in order; and no two threads wait for each other."""
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
            resumed.engine.forget(killed.engine.first)
            trained += resumed.train(flow, stopped, steps)
    finally:
        shutil.rmtree(place)
    assert trained == expected


@pytest.mark.promise("generation-overlaps-training")
def test_the_longer_phase_alone_sets_the_pace():
    """Steps of 3 s training and 2 + 2 s generation and the other way round; a step in turn takes
    their sum."""
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


def test_more_staleness_evens_out_steps_that_take_longer_than_others():
    """Of phases whose times vary, the longer of the two is waited for in every step only where
    samples are one step old."""
    spent = []
    for max_staleness in (0, 1, 4):
        world = World(1, max_staleness, 60)
        # twice a step: as long as training, on average
        world.engine.spend = functools.partial(world.spend, 1.5)
        with world.flow() as flow:
            world.train(flow, 0, 60)
        spent.append(world.clock.now)
    assert spent[0] > 1.2 * spent[1] and spent[1] > 1.05 * spent[2]


@pytest.mark.parametrize("interrupts", [False, True])
def test_what_fails_beside_the_batches_holds_up_neither_them_nor_the_next_version(interrupts):
    def fail(builder):
        raise AlignerError("generator: out of memory")

    world = World(0, 1, 4, interrupts=interrupts)
    with world.flow() as flow:
        flow.publish_weights(0)
        beside = flow.draw_beside(fail)
        flow.take()
        flow.publish_weights(1)
        flow.take()
        with pytest.raises(AlignerError, match="out of memory"):
            beside.result()


def test_who_waits_for_weights_that_never_come_is_found_out():
    world = World(0, 1, 4)
    with world.flow() as flow:
        world.train(flow, 0, 1)
        flow.take()
        never = world.clock.worker("").submit(world.clock.wait)
        with pytest.raises(Deadlock):
            never.result()


def test_an_engine_that_fails_ahead_is_told_when_its_samples_are_wanted():
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


def test_a_checkpoint_that_is_further_ahead_than_allowed_is_refused(tmp_path):
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
def test_the_last_version_is_served_only_where_it_is_awaited(awaited):
    world = World(0, 1, 4)
    with world.flow() as flow:
        world.train(flow, 0, 4)
        if awaited:
            flow.await_published()
    assert world.served == (4 if awaited else 3)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_what_no_checkpoint_needs_is_forgotten_once_the_next_one_is_taken(max_staleness, tmp_path):
    world = World(0, max_staleness, 9)
    with world.flow() as flow:
        world.train(flow, 0, 4, save_at=3, place=tmp_path)
        assert world.engine.first == 0
        flow.begin_save(4)
        assert world.engine.first == world.position >= 3 * PROMPTS
