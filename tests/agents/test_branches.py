"""Branches of episodes whose messages cannot be appended: each token is generated or the chat
template's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from aligner.agents.environment_pool import EnvironmentPool
from aligner.agents.episode_journal import EpisodeJournal
from aligner.agents.episodes import EnvironmentEpisodes
from aligner.agents.generate import generate, plan_job
from aligner.data.chat_turns import Conversation
from aligner.data.conversations import build_conversation
from aligner.data.examples import open_demonstrations
from aligner.data.export import find_source
from aligner.data.model_directory import read_shape
from aligner.data.records import Record
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from aligner.data.tool_calls import detect_tool_format
from aligner.data.types import Prompt, Sample, collate_episodes
from aligner.engines.engine_loop import run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.errors import AlignerError
from aligner.schema import DataConfig, EngineConfig
from aligner.schema.environment import EnvironmentConfig
from aligner.training.rollout_builder import compute_environment_scores
from tests.agents.scripted import Scripted
from tests.agents.test_agents import generated_spans
from tests.agents.test_episodes import assert_equal, episodes
from tests.data.chat_models import TEMPLATES, TOKENIZERS, chat_model
from tests.data.test_chat_turns import (
    PLAIN,
    TOOLS,
    WITHOUT_TOOLS,
    check_growth,
    drawn_turn,
    rendered,
    smollm2,
    turns_of,
)
from tests.megatron.reference import save_llama

pytestmark = pytest.mark.promise("unappendable-messages-branch")

CONVERSANT = EnvironmentConfig(
    target="tests.agents.teller:Conversant", tools=["tests.agents.tool_samples:multiply"]
)
"""An environment with tools, so that the policy's special tokens reach it."""


@pytest.fixture(scope="module")
def journal() -> EpisodeJournal:
    return EpisodeJournal()


@pytest.fixture(scope="module")
def environments(journal: EpisodeJournal) -> Iterator[EnvironmentPool]:
    pool = EnvironmentPool.from_config(CONVERSANT, journal)
    try:
        pool.start()
        yield pool
    finally:
        pool.close()


class Conversing:
    """One episode with random turns and a model's tokenizer, which checks every token of the
    episode."""

    def __init__(
        self,
        data: st.DataObject,
        tokenizer: Tokenizer,
        template: str,
        environments: EnvironmentPool,
    ) -> None:
        self.data, self.tokenizer, self.template, self.environments = (
            data,
            tokenizer,
            template,
            environments,
        )
        self.turns, self.read, self.drawn = turns_of(tokenizer), list[Tensor](), list[Tensor]()
        self.branches, self.refused = 0, False
        tools = TOOLS if template not in WITHOUT_TOOLS and data.draw(st.booleans()) else None
        self.conversation = self.turns.begin([{"role": "user", "content": data.draw(PLAIN)}], tools)
        roles = ["user"] if template in WITHOUT_TOOLS else ["user", "tool"]
        script = data.draw(st.lists(st.tuples(st.sampled_from(roles), PLAIN), max_size=3))
        metadata = {
            "messages": [*self.conversation.messages],
            "tools": tools,
            "form": detect_tool_format(tokenizer),
            "script": script,
        }
        self.prompt = Prompt(0, "", self.conversation.tokens, metadata)

    def says(self, journal: EpisodeJournal, turn: int, read: Tensor) -> list[int]:
        """Return a random turn, after checking the tokens that the engine received for it."""
        if turn:
            self.hear(journal, turn)
        assert read.tolist() == self.conversation.tokens.tolist()
        self.read.append(read)
        self.drawn.append(drawn_turn(self.data, self.tokenizer, self.conversation, self.template))
        return self.drawn[-1].tolist()

    def hear(self, journal: EpisodeJournal, turn: int) -> None:
        """Add the environment's messages: append their rendered tokens, or render the whole
        conversation again."""
        before, drawn = self.conversation, self.drawn[-1]
        new = journal.answers("0/0")[turn].observation
        assert isinstance(new, list)
        found = self.turns.append_turn(before, drawn, new)
        if isinstance(found, Conversation):
            check_growth(
                self.tokenizer, before, drawn, found, self.turns.parse_turn(before, drawn).text
            )
            self.conversation = found
            return
        self.branches, self.conversation = self.branches + 1, found.conversation
        assert (
            found.conversation.tokens.tolist()
            == self.tokenizer.encode(rendered(self.tokenizer, found.conversation)).tolist()
        )

    def episode(self, journal: EpisodeJournal) -> Sample:
        journal.forget(["0/0"])
        policy = Scripted(lambda turn, read: self.says(journal, turn, read))
        engine = EnvironmentEpisodes(policy, self.environments, self.tokenizer, CONVERSANT, seed=1)  # type: ignore[arg-type]
        ends = self.tokenizer.eos_token_ids
        generation = engine.start(
            [GenerationRequest(self.prompt, 0)], SamplingOptions(20_000, stop_token_ids=ends)
        )
        try:
            return run_steps(generation)[0]
        finally:
            generation.cancel()

    def check(self, sample: Sample, journal: EpisodeJournal) -> None:
        """Check that the sample's sequences consist of the turns in order, each after the tokens
        that it read."""
        assert torch.equal(sample.initial_prompt, self.prompt.tokens)
        if sample.finish_reason == "length":  # the template refuses the messages
            new = journal.answers("0/0")[len(self.drawn)].observation
            with pytest.raises(AlignerError, match="alternate"):
                self.turns.append_turn(self.conversation, self.drawn[-1], new)  # type: ignore[arg-type]
        assert len(sample.branches) == self.branches
        sequences = iter(sample.sequences)
        now, at, marks = next(sequences), 0, list[bool]()
        for read, drawn in zip(self.read, self.drawn, strict=True):
            if len(read) <= at or not torch.equal(now.tokens[: len(read)], read):
                assert at == len(now.tokens) and now.finish_reason == "stop"
                now, at, marks = next(sequences), 0, []
            size = now.prompt_length
            assert torch.equal(now.tokens[: len(read)], read) and (at or len(read) == size)
            marks += [False] * (len(read) - max(at, size)) + [True] * len(drawn)
            at = len(read) + len(drawn)
            assert torch.equal(now.tokens[len(read) : at], drawn)
            assert (
                [True] * at
                if now.generated_mask is None
                else now.generated_mask[: at - size].tolist() == marks
            )
            assert now.rewards is not None and float(now.rewards[at - size - 1]) in (0.25, 1.0)
        assert at == len(now.tokens) and next(sequences, None) is None
        given = 0.25 * (len(self.drawn) - 1) + (1.0 if sample.finish_reason == "stop" else 0.25)
        scores = compute_environment_scores([sample], 1)
        assert (
            scores is not None and float(scores) == given and sample.turn_count == len(self.drawn)
        )
        rows = collate_episodes([sample], 0)
        assert int(rows.mask.sum()) == sum(map(len, self.drawn)), (
            "each token that was drawn is learned from once"
        )


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(TOKENIZERS), template=st.sampled_from([*TEMPLATES]))
def test_episode_has_generated_and_template_tokens(
    environments: EnvironmentPool,
    journal: EpisodeJournal,
    data: st.DataObject,
    kind: str,
    template: str,
) -> None:
    talk = Conversing(data, chat_model(kind, template), template, environments)
    sample = talk.episode(journal)
    talk.check(sample, journal)
    if sample.finish_reason == "stop":
        answers = [outcome.observation for outcome in journal.answers("0/0")]
        messages = build_conversation(
            sample, talk.prompt, answers, talk.tokenizer, lambda: talk.turns
        )["messages"]
        if any(answers):
            assert [each["role"] for each in messages].count("assistant") == len(talk.drawn)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_smollm2_episode_has_generated_and_template_tokens(
    environments: EnvironmentPool, journal: EpisodeJournal, data: st.DataObject
) -> None:
    talk = Conversing(data, smollm2(), "smollm2", environments)
    talk.check(talk.episode(journal), journal)


FORGETFUL = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content[:KEPT] if m.role == 'assistant' else"
    " m.content }}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
"""A chat template that keeps only the first KEPT characters of each assistant turn."""
CALLER = "tests.agents.teller:Caller"
SETTINGS: dict[str, Any] = {"turn_end": None, "max_turn_tokens": 20}


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return forgetful_model(tmp_path_factory.mktemp("forgetful"))


def forgetful_model(directory: Path, kept: int = 3) -> Path:
    """Save a model that often ends its turns, with a chat template that is not append-only.

    The template keeps only the first `kept` characters of each assistant turn.
    """
    save_llama(directory, tied=False)
    shape = read_shape(directory)
    build_character_tokenizer(shape).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(FORGETFUL.replace("KEPT", str(kept)))
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][shape.eos_token_ids[0]] *= 8
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def run_episodes(
    model: Path, parts: tuple[int, ...] = (), tokens: int = 100, **given: Any
) -> tuple[list[Sample], Tokenizer]:
    options = {"stop_token_ids": Tokenizer(model).eos_token_ids, "max_new_tokens": tokens}
    return episodes(
        model, SETTINGS | given, 8, options, target=CALLER, parts=parts, by_steps=bool(parts)
    )


def assert_same_episode(one: Sample, other: Sample) -> None:
    assert len(one.branches) == len(other.branches)
    for mine, its in zip(one.sequences, other.sequences, strict=True):
        assert_equal(mine, its)
        assert mine.prompt_length == its.prompt_length


def test_rerendered_conversation_starts_branch_and_logs_once(forgetful: Path, caplog) -> None:
    caplog.set_level("INFO")
    samples, tokenizer = run_episodes(forgetful)
    assert {len(sample.branches) for sample in samples} >= {1, 2}
    assert sum("starts a new branch" in message for message in caplog.messages) == 1
    logged = next(message for message in caplog.messages if "starts a new branch" in message)
    assert "the chat template renders the turn differently from the model's output" in logged
    whole = [sample for sample in samples if sample.finish_reason == "stop"]
    assert len(whole) > 4
    for sample in whole:
        assert sample.turn_count == 3 and float(sample.environment_reward or 0) == 1.5
        texts = [
            tokenizer.decode(each.tokens, skip_special_tokens=False) for each in sample.sequences
        ]
        for before, after in pairwise(texts):  # earlier turns are cut to three characters
            shortened = re.sub("(?<=a:)([^<]{0,3})[^<]*", r"\1", before)
            assert (
                before.endswith("<eos>")
                and after.startswith(f"{shortened}u:n")
                and not after.startswith(before)
            )


def test_branches_have_own_random_numbers_and_model_logprobs(
    forgetful: Path,
) -> None:
    samples, _ = run_episodes(forgetful)
    reference = LlamaForCausalLM.from_pretrained(forgetful).eval()
    turns = [
        tokens.tolist()
        for sample in samples
        for each in sample.sequences
        for _, tokens, _ in generated_spans(each)
    ]
    assert len({tuple(turn) for turn in turns if len(turn) > 3}) == sum(
        len(turn) > 3 for turn in turns
    )
    for sequence in (each for sample in samples for each in sample.sequences):
        with torch.no_grad():
            logprobs = reference(sequence.tokens[None]).logits[0].log_softmax(-1)
        for start, tokens, recorded in generated_spans(sequence):
            expected = logprobs[start - 1 : start - 1 + len(tokens)].gather(1, tokens[:, None])[
                :, 0
            ]
            assert torch.allclose(expected, recorded, atol=1e-4)


def test_branches_do_not_depend_on_environment_workers(
    forgetful: Path,
) -> None:
    expected, _ = run_episodes(forgetful)
    for otherwise in ({"workers": 2}, {"episodes_per_worker": 2}):
        for one, other in zip(expected, run_episodes(forgetful, **otherwise)[0], strict=True):
            assert_same_episode(one, other)


@pytest.mark.parametrize("parts", [(1,), (7, 11), (12, 1, 1, 1, 9)], ids=str)
def test_transferred_episode_in_branch_continues_unchanged(forgetful: Path, parts) -> None:
    stayed, _ = run_episodes(forgetful)
    for one, other in zip(stayed, run_episodes(forgetful, parts)[0], strict=True):
        assert_same_episode(one, other)


def test_episode_is_cut_when_rerendered_prompt_does_not_fit(forgetful: Path, caplog) -> None:
    caplog.set_level("INFO")
    samples, _ = run_episodes(forgetful, tokens=22)
    assert any(
        "re-rendered conversation has" in message and "leaves no room for a response" in message
        for message in caplog.messages
    )
    assert any(sample.finish_reason == "length" for sample in samples)
    for sample in samples:
        assert all(
            len(each.tokens) <= len(sample.initial_prompt) + 22 and len(each.response) <= 22
            for each in sample.sequences
        )


def test_generated_branches_are_read_as_demonstrations(
    tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    model = forgetful_model(tmp_path / "model", kept=1)
    records = [
        Record({"messages": [{"role": "user", "content": f"{at}?"}]}, "here") for at in range(4)
    ]
    lines: dict[bool, list[dict[str, Any]]] = {}
    for as_messages in (False, True):
        job = plan_job(
            *(find_source(model), records),
            samples=2,
            seed=2,
            stop_at_eos=True,
            max_new_tokens=100,
            temperature=1.0,
            environment=EnvironmentConfig(target=CALLER, **SETTINGS),
        )
        output = tmp_path / f"{as_messages}.jsonl"
        generate(
            job,
            EngineConfig(exact=True),
            output,
            min_score=1.5,
            as_messages=as_messages,
            progress=lambda done: None,
        )
        lines[as_messages] = [json.loads(line) for line in output.read_text().splitlines()]
    episodes_of = [(line["prompt_index"], line["sample_index"]) for line in lines[True]]
    assert len(lines[False]) > len(episodes_of) > 2
    assert [
        *dict.fromkeys((line["prompt_index"], line["sample_index"]) for line in lines[False])
    ] == episodes_of
    assert all(line["score"] == 1.5 for line in lines[False])
    for episode_line in lines[True]:
        assert [each["role"] for each in episode_line["messages"]] == ["user", "assistant"] * 3
        assert [each["content"] for each in episode_line["messages"]][2::2] == ["n1", "n2"]
    data = DataConfig(
        path=str(tmp_path / "False.jsonl"),
        max_prompt_tokens=110,
        max_response_tokens=110,
        shuffle=False,
    )
    learned = open_demonstrations(data, Tokenizer(model), 1).take(0, len(lines[False]))
    for example, line in zip(learned, lines[False], strict=True):
        assert example.tokens.tolist() == line["prompt_tokens"] + line["tokens"]
