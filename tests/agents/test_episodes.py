"""Episodes of generated turns and environment answers: their tokens, limits, failures and
transfers."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.data.conversations import build_transcript
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from aligner.schema.environment import EnvironmentConfig
from aligner.training.rollout_builder import compute_environment_scores
from tests.data.tokenizer_kinds import KINDS, write_kind
from tests.engines.engines import load_directory
from tests.megatron import families
from tests.megatron.reference import save_llama
from tests.rounds import bounds_seconds, slow

TURN_END = "]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = families.save("llama3", tmp_path_factory.mktemp("episodes"))
    build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
    return directory


def make_prompt(tokenizer: Tokenizer, at: int, *, is_chat: bool, fails: bool) -> Prompt:
    text = f"{at}+{at}="
    if not is_chat:
        return Prompt(at, text, tokenizer.encode(text), {"fails": fails})
    messages = [{"role": "user", "content": text}]
    text = tokenizer.chat_template.render(messages, add_generation_prompt=True)
    return Prompt(at, text, tokenizer.encode(text), {"messages": messages})


def episodes(
    model: Path,
    settings: dict[str, Any],
    prompts: int = 4,
    options: dict[str, Any] | None = None,
    fails: int | None = None,
    target: str = "tests.agents.teller:Teller",
    parts: tuple[int, ...] = (),
    by_steps: bool = False,
) -> tuple[list[Sample], Tokenizer]:
    """Run two episodes per prompt, and return the samples and the tokenizer.

    After each number of steps in `parts`, the episodes are transferred to a new engine and a new
    pool.
    """
    torch.set_num_threads(1)
    tokenizer = Tokenizer(model)
    chosen = EnvironmentConfig(
        target=target, **{"max_turn_tokens": 6, "turn_end": TURN_END, "deadline_s": 20.0} | settings
    )
    is_chat = (model / "chat_template.jinja").exists()
    requests = [
        GenerationRequest(make_prompt(tokenizer, at, is_chat=is_chat, fails=fails == at), index)
        for at in range(prompts)
        for index in range(2)
    ]
    # A model with random weights rarely samples one particular token.
    ends = (*tokenizer.eos_token_ids, *range(20, 60))
    sampling = SamplingOptions(**{"max_new_tokens": 48, "stop_token_ids": ends} | (options or {}))
    found: dict[int, Sample] = {}
    for steps in (*parts, None):
        places = [place for place in range(len(requests)) if place not in found]
        engine = EmbeddedEngine(
            directory_shape(model, "model.path"),
            EngineConfig(exact=True, batch_size=64),
            0,
            seed=2,
            tokenizer_directory=model,
        )
        load_directory(engine, model)
        pool = EnvironmentPool.from_config(chosen)
        try:
            pool.start()
            episode_engine = EnvironmentEpisodes(
                engine, pool, tokenizer, chosen, seed=3, should_deliver_by_steps=by_steps
            )
            generation = episode_engine.start([requests[place] for place in places], sampling)
            found |= {places[at]: sample for at, sample in run_steps(generation, steps).items()}
            for at, sample in [] if generation.is_done else generation.interrupt():
                begun = sample if len(sample.response) else None
                requests[places[at]] = replace(requests[places[at]], partial_sample=begun)
            generation.cancel()
        finally:
            pool.close()
    return [found[place] for place in range(len(requests))], tokenizer


@pytest.mark.slow
def test_sentencepiece_observations_get_no_extra_space(tmp_path: Path) -> None:
    directory = save_llama(tmp_path, tied=False, vocab_size=600)
    files = KINDS["mistral"]()
    write_kind(directory, {name: files[name] for name in files if name != "config.json"})
    samples, tokenizer = episodes(
        directory, {"max_turn_tokens": 8, "turn_end": ")"}, 1, {"stop_token_ids": (*range(600),)}
    )
    for sample in samples:
        texts = [text for turn in build_transcript(sample, tokenizer) for text in turn.values()]
        assert "".join(texts).startswith("s") and "n1;" in texts and "n2;" in texts
        for given in sample.split_turns()[1::2]:
            assert not tokenizer.decode_token(int(given[0])).startswith(" ")


def test_episode_alternates_policy_and_environment_turns(model):
    samples, tokenizer = episodes(model, {"max_turn_tokens": 40})
    for sample in samples:
        assert sample.rewards is not None and sample.generated_mask is not None
        turns = [tokenizer.decode(turn) for turn in sample.split_turns()]
        assert turns[1::2] == ["s", "n1;", "n2;"] and len(turns) == 7 and turns[0] == ""
        ends = sample.generated_mask.nonzero()[:, 0][sample.rewards[sample.generated_mask] != 0]
        assert (
            sample.rewards[ends].tolist() == [1.0, 2.0, 3.0] and float(sample.rewards.sum()) == 6.0
        )
        assert (
            not bool(sample.generated_mask[ends[0] + 1])
            and int(ends[-1]) == len(sample.response) - 1
        )
        assert (
            sample.finish_reason == "stop"
            and (sample.weight_versions[sample.generated_mask] == 0).all()
        )


@pytest.mark.promise("exact-episodes-ignore-timing")
@pytest.mark.parametrize(
    "settings",
    [{"arguments": {"delay_s": 0.05, "spread": 3}, "workers": 2}, {"episodes_per_worker": 2}],
)
def test_exact_episode_ignores_environment_delays(model, settings):
    expected, _ = episodes(model, {"max_turn_tokens": 40})
    for one, other in zip(
        expected, episodes(model, {"max_turn_tokens": 40} | settings)[0], strict=True
    ):
        assert torch.equal(one.tokens, other.tokens) and torch.equal(
            one.engine_logprobs, other.engine_logprobs
        )


@bounds_seconds
def test_environment_steps_run_concurrently(model):
    def seconds(delay_s: float) -> float:
        begin = time.perf_counter()
        episodes(model, {"arguments": {"delay_s": delay_s}, "max_turn_tokens": 40}, prompts=16)
        return time.perf_counter() - begin

    without = seconds(0.0)
    assert seconds(0.3) < without + 3 * 0.3 + 1.0  # sequential steps would take 29 seconds


@pytest.mark.promise("concurrent-episodes-wait-together")
@pytest.mark.slow
@bounds_seconds
def test_64_episodes_take_as_long_as_the_slowest(model):
    seconds = {}
    for name, delay_s, spread, prompts in (
        ("with", 0.4, 5, 32),
        ("without", 0.0, 1, 32),
        ("slowest", 2.0, 1, 1),
    ):
        begin = time.perf_counter()
        episodes(
            model,
            {"arguments": {"delay_s": delay_s, "spread": spread}, "max_turn_tokens": 40},
            prompts=prompts,
        )
        seconds[name] = time.perf_counter() - begin
    assert seconds["slowest"] > 3 * 2.0
    assert seconds["with"] < 1.1 * max(seconds["without"], seconds["slowest"]) + 0.5, seconds


def test_episode_is_cut_at_turn_and_token_limits(model):
    by_turns, _ = episodes(
        model, {"arguments": {"turns": 9}, "max_turns": 2, "max_turn_tokens": 40}
    )
    assert all(
        sample.finish_reason == "length" and float(sample.rewards.sum()) == 3.0
        for sample in by_turns
    )
    by_tokens, _ = episodes(
        model,
        {"arguments": {"turns": 99}, "max_turns": 99, "max_turn_tokens": 40},
        options={"max_new_tokens": 20},
    )
    assert all(
        sample.finish_reason == "length" and len(sample.response) <= 20 for sample in by_tokens
    )
    by_turn, _ = episodes(model, {"max_turn_tokens": 3}, options={"stop_token_ids": ()})
    assert {(sample.finish_reason, sample.generated_token_count) for sample in by_turn} == {
        ("length", 3)
    }


def test_only_generated_tokens_have_kept_token_ids(model):
    samples, _ = episodes(
        model, {"max_turn_tokens": 40}, options={"top_p": 0.9, "renormalize": True}
    )
    for sample in samples:
        assert sample.sampling_support is not None and sample.generated_mask is not None
        assert (sample.sampling_support.counts[~sample.generated_mask] == 0).all() and (
            sample.sampling_support.counts[sample.generated_mask] > 0
        ).all()


@pytest.mark.promise("failed-environment-skips-prompt")
def test_failed_environment_skips_its_prompt(model):
    samples, _ = episodes(model, {"max_turn_tokens": 40}, fails=1)
    scores = compute_environment_scores(samples, 2)
    assert scores is not None and scores.isnan().tolist() == [
        False,
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model that often ends its turns."""
    directory = save_llama(tmp_path_factory.mktemp("chats"), tied=False)
    shape = read_shape(directory)
    build_character_tokenizer(shape).save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}{% if"
        " add_generation_prompt %}a:{% endif %}"
    )
    (directory / "chat_template.jinja").write_text(template)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][shape.eos_token_ids[0]] *= 8
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_chat_messages_are_appended_after_generated_turn(chat_model):
    settings = {"turn_end": None, "max_turn_tokens": 20}
    options = {"stop_token_ids": Tokenizer(chat_model).eos_token_ids, "max_new_tokens": 100}
    samples, tokenizer = episodes(
        chat_model, settings, 8, options, target="tests.agents.teller:Caller"
    )
    whole = [sample for sample in samples if sample.finish_reason == "stop"]
    assert len(whole) > 4
    for sample in whole:
        turns = [tokenizer.decode(turn, skip_special_tokens=False) for turn in sample.split_turns()]
        assert turns[1::2] == ["u:n1<eos>a:", "u:n2<eos>a:"] and all(
            turn.endswith("<eos>") for turn in turns[::2]
        )
        assert float(sample.rewards.sum()) == 1.5


def assert_equal(one: Sample, other: Sample) -> None:
    for name in ("tokens", "engine_logprobs", "weight_versions", "generated_mask", "rewards"):
        first, second = getattr(one, name), getattr(other, name)
        assert (first is None and second is None) or torch.equal(first, second), name
    assert one.finish_reason == other.finish_reason


@pytest.mark.promise("episodes-equal-on-every-placement")
@pytest.mark.parametrize("parts", [slow((1,)), slow((4,)), slow((9,)), (2, 3, 2, 30)], ids=str)
@pytest.mark.parametrize(("target", "turn_tokens"), [("Teller", 5), ("Quiet", 3)])
def test_transferred_episode_continues_unchanged(model, target, turn_tokens, parts):
    settings, target = {"max_turn_tokens": turn_tokens}, f"tests.agents.teller:{target}"
    stayed, _ = episodes(model, settings, target=target)
    assert {sample.finish_reason for sample in stayed} == {"stop", "length"}
    for by_steps in (False, True):
        moved, _ = episodes(model, settings, target=target, parts=parts, by_steps=by_steps)
        for one, other in zip(stayed, moved, strict=True):
            assert_equal(one, other)


def test_stop_strings_end_turns_as_stop_tokens_do(model):
    """The tokens of this model are characters, so that each stop token is also a string."""
    tokenizer = Tokenizer(model)
    settings = {"turn_end": None}
    # The texts of special tokens contain some of the characters.
    stops = [token for token in range(20, 60) if tokenizer.decode_token(token) not in "<pad><eos>"]
    options = {"stop_token_ids": (*tokenizer.eos_token_ids, *stops)}
    stayed, _ = episodes(model, settings, options=options)
    strings = tuple(map(tokenizer.decode_token, stops))
    options = {"stop_token_ids": tokenizer.eos_token_ids, "stop": strings}
    for parts in ((), (1,), (4,), (2, 3, 2, 30)):
        for one, other in zip(
            stayed, episodes(model, settings, options=options, parts=parts)[0], strict=True
        ):
            assert_equal(one, other)


def test_transferred_episode_with_long_stop_strings_continues_unchanged(model):
    tokenizer = Tokenizer(model)
    characters = [tokenizer.decode_token(token) for token in range(3, 60)]
    pairs = tuple(map("".join, itertools.product(characters[::2], characters)))
    settings = {"turn_end": None, "max_turn_tokens": 12}
    options = {"stop_token_ids": tokenizer.eos_token_ids, "stop": pairs}
    stayed, _ = episodes(model, settings, options=options)
    assert any(len(sample.split_turns()) > 2 for sample in stayed)
    for parts in ((1,), (3,), (5, 6)):
        moved, _ = episodes(model, settings, options=options, parts=parts)
        for one, other in zip(stayed, moved, strict=True):
            assert_equal(one, other)


def test_transferred_conversation_continues_unchanged(chat_model):
    settings = {"turn_end": None, "max_turn_tokens": 20}
    options = {"stop_token_ids": Tokenizer(chat_model).eos_token_ids, "max_new_tokens": 100}
    target = "tests.agents.teller:Caller"
    stayed, _ = episodes(chat_model, settings, 4, options, target=target)
    for one, other in zip(
        stayed,
        episodes(chat_model, settings, 4, options, target=target, parts=(7, 11))[0],
        strict=True,
    ):
        assert_equal(one, other)


def test_nondeterministic_environment_fails_transferred_episode(model, caplog):
    target = "tests.agents.teller:Fickle"
    samples, _ = episodes(model, {"max_turn_tokens": 40}, target=target, parts=(12,), by_steps=True)
    lost = [sample for sample in samples if bool(sample.rewards.isnan().any())]
    assert lost and len(lost) == sum(
        "returned a different answer after" in message for message in caplog.messages
    )
    assert all(len(sample.response) == 1 for sample in lost)


def test_by_steps_completion_does_not_depend_on_timing(
    model,
):
    def ends(settings: dict[str, Any]) -> list[list[int]]:
        torch.set_num_threads(1)
        tokenizer, chosen = (
            Tokenizer(model),
            EnvironmentConfig(target="tests.agents.teller:Teller", max_turn_tokens=40, **settings),
        )
        engine = EmbeddedEngine(
            directory_shape(model, "model.path"), EngineConfig(exact=True), 0, seed=2
        )
        load_directory(engine, model)
        pool = EnvironmentPool.from_config(chosen)
        try:
            pool.start()
            requests = [
                GenerationRequest(make_prompt(tokenizer, at, is_chat=False, fails=False), 0)
                for at in range(6)
            ]
            sampling = SamplingOptions(
                48, stop_token_ids=(*tokenizer.eos_token_ids, *range(20, 60))
            )
            generation, steps = (
                EnvironmentEpisodes(
                    engine, pool, tokenizer, chosen, 3, should_deliver_by_steps=True
                ).start(requests, sampling),
                [],
            )
            while not generation.is_done:
                steps.append(sorted(place for place, _ in generation.step()))
            return steps
        finally:
            pool.close()

    assert ends({}) == ends({"arguments": {"delay_s": 0.1, "spread": 3}})
