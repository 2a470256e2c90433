"""What is drawn when, by which weights, and what a resumed run trains on."""

from __future__ import annotations

import shutil
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aligner.config.schema import Rollout
from aligner.engines.protocol import SamplingOptions
from aligner.errors import AlignerError
from aligner.rollout.pipeline import Pipeline
from aligner.rollout.rollouts import Rollouts
from tests.rollout.fakes import Digits, Scorers, Stream

EACH, PROMPTS = 2, 2
MEMORY = Path("/dev/shm")
"""Where a file is on disk at once."""


def pipeline(engine, max_staleness, steps, rounds=0, is_mixed=lambda number: number % 3 > 0):
    def rollouts(**more):
        return Rollouts(
            Stream(),
            engine,
            Scorers(is_mixed),
            Rollout(prompts_per_step=PROMPTS, samples_per_prompt=EACH, micro_batches=1),
            SamplingOptions(max_new_tokens=2),
            pad_token_id=0,
            dynamic_sampling_rounds=rounds,
            **more,
        )

    ahead = rollouts(is_alone=True) if max_staleness else None
    return Pipeline(rollouts(), ahead, Scorers(is_mixed), max_staleness, steps, pad_token_id=0)


def train(engine, flow, first, last):
    """What a trainer does; the samples of every step, with their versions and scores."""
    engine.version = first
    flow.admit(first)
    trained = []
    for step in range(first, last):
        rollout = flow.take()
        samples = [(s.prompt_id, s.sample_index, int(s.weight_versions[0])) for s in rollout.samples]
        everything = rollout.all_scores.result().tolist()
        trained.append((step, samples, rollout.scores.result().tolist(), everything, [p.text for p in rollout.prompts]))
        flow.settle()
        engine.version = step + 1  # a publish: whatever were still being drawn would be drawn by these
        if step + 1 < last:
            flow.admit(step + 1)
    return trained


@settings(max_examples=200, deadline=None)
@given(max_staleness=st.integers(0, 5), steps=st.integers(1, 8), stopped=st.integers(1, 8), rounds=st.sampled_from([0, 3]))
def test_staleness_is_what_it_may_be_and_a_resumed_run_trains_on_the_same_samples(max_staleness, steps, stopped, rounds):
    """Of any run that is killed after any step: nothing is lost, nothing trained on twice, and all in the same order."""
    engine = Digits()
    with closing(pipeline(engine, max_staleness, steps, rounds)) as flow:
        trained = train(engine, flow, 0, steps)
    prompts = [number for _, samples, *_ in trained for number, index, _ in samples if index == 0]
    wanted = [number for number in range(3 * PROMPTS * steps) if number % 3 or not rounds]
    assert prompts == wanted[: PROMPTS * steps]
    for step, samples, scores, everything, texts in trained:
        assert {version for *_, version in samples} == {max(0, step - max_staleness)}
        assert texts == [f"prompt {number}" for number, *_ in samples]
        assert len(scores) == len(samples) <= len(everything)
    if stopped >= steps:
        return
    place = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    try:
        with closing(pipeline(engine, max_staleness, steps, rounds)) as flow:
            again = train(engine, flow, 0, stopped)
            flow.save(place, stopped)
            position = flow.position
        with closing(pipeline(engine, max_staleness, steps, rounds)) as flow:
            flow.resume(place, stopped, position)
            again += train(engine, flow, stopped, steps)
    finally:
        shutil.rmtree(place)
    assert again == trained


def test_generation_goes_on_while_a_step_trains_and_settling_waits_for_it():
    begun, may_end = threading.Semaphore(0), threading.Semaphore(0)

    class Slow(Digits):
        def sample(self, *arguments):
            begun.release()
            assert may_end.acquire(timeout=30)
            return super().sample(*arguments)

    with closing(pipeline(Slow(), max_staleness=1, steps=9)) as flow:
        flow.admit(0)
        may_end.release()
        flow.take()
        assert begun.acquire(timeout=30) and begun.acquire(timeout=30), "the next batch has been begun"
        settled = threading.Thread(target=flow.settle)
        settled.start()
        settled.join(0.1)
        assert settled.is_alive()
        may_end.release()
        settled.join(30)
        assert not settled.is_alive()
        assert not begun.acquire(blocking=False), "no third batch before the next version serves"


def test_an_engine_that_fails_ahead_is_told_when_its_samples_are_wanted():
    class Broken(Digits):
        def sample(self, prompts, *arguments):
            if prompts[0].id:
                raise AlignerError("generator: out of memory")
            return super().sample(prompts, *arguments)

    with closing(pipeline(Broken(), max_staleness=1, steps=4)) as flow:
        flow.admit(0)
        flow.take()
        with pytest.raises(AlignerError, match="generator: out of memory"):
            flow.settle()


def test_a_checkpoint_that_is_further_ahead_than_allowed_is_refused(tmp_path):
    engine = Digits()
    with closing(pipeline(engine, 2, 9)) as flow:
        train(engine, flow, 0, 3)
        flow.save(tmp_path, 3)
        position = flow.position
    for allowed in (0, 1):
        with (
            closing(pipeline(engine, allowed, 9)) as flow,
            pytest.raises(AlignerError, match=r"the checkpoint holds 2 batches .* go on with rollout\.max_staleness=2"),
        ):
            flow.resume(tmp_path, 3, position)
    (tmp_path / "rollouts.safetensors").write_bytes(b"half")
    with closing(pipeline(engine, 2, 9)) as flow, pytest.raises(AlignerError, match="drawn ahead cannot be read"):
        flow.resume(tmp_path, 3, position)
