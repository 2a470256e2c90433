"""Agents through the endpoint: what they ask for is drawn once, and learned from as it was drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample
from aligner.engines.agents import AgentEngine
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions, advance
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from aligner.schema.environment import EnvironmentConfig
from tests.data.chat_models import TEMPLATES, tokenizer_file
from tests.engines.engines import load_directory

CONTEXT = 700


def saved(directory: Path, template: str) -> Path:
    """A tiny model of chats that likes to end its turns."""
    file = tokenizer_file("bytes")
    tokenizer = tokenizers.Tokenizer.from_str(file)
    ends = [tokenizer.token_to_id(end) for end in ("<|end|>", "</s>")]
    torch.manual_seed(11)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=ends,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][ends[0]] = weights["lm_head.weight"].abs().amax(0) * weights["lm_head.weight"][ends[0]].sign() * 3
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "tokenizer.json").write_text(file)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATES[template])
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: saved(tmp_path_factory.mktemp(name), name) for name in ("qwen", "reasons")}


def episodes(
    model: Path, tasks: list[dict[str, Any]], settings: dict[str, Any], exact: bool = True
) -> tuple[list[Sample], Tokenizer]:
    """A sample of each task."""
    torch.set_num_threads(1)
    tokenizer = Tokenizer(model)
    engine = EmbeddedEngine(directory_shape(model, "model.path"), EngineConfig(exact=exact, batch_size=16), 0, seed=2)
    load_directory(engine, model)
    chosen = EnvironmentConfig(**{"max_turns": 12, "max_turn_tokens": 24, "deadline_s": 60.0} | settings)
    prompt = tokenizer.encode("task")
    requests = [
        GenerationRequest(Prompt(at, "task", prompt, {"at": at, "asked": f"why {at}?", **task}), 0)
        for at, task in enumerate(tasks)
    ]
    drawn = AgentEngine.begin(engine, tokenizer, chosen, 3, CONTEXT)
    try:
        found = advance(drawn.start(requests, SamplingOptions(100, stop_token_ids=tokenizer.eos_token_ids)))
    finally:
        drawn.close()
    return [found[place] for place in range(len(requests))], tokenizer


def agent(name: str) -> dict[str, Any]:
    return {"agent": f"tests.engines.agents:{name}"}


def drawn_parts(sample: Sample) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Where each stretch of drawn tokens begins, its tokens and their log-probs."""
    marks = torch.ones(len(sample.response), dtype=torch.bool) if sample.drawn is None else sample.drawn
    borders = [0, *((marks[1:] != marks[:-1]).nonzero()[:, 0] + 1).tolist(), len(marks)]
    return [
        (sample.prompt_length + start, sample.response[start:end], sample.engine_logprobs[start:end])
        for start, end in zip(borders, borders[1:], strict=False)
        if marks[start]
    ]


def said(tokenizer: Tokenizer, tokens: torch.Tensor) -> str:
    ended = bool(tokenizer.ends(tokens[-1:]))
    return tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("template", ["qwen", "reasons"])
def test_samples_have_the_tokens_that_were_drawn_and_answers_are_their_text(models, template, tmp_path):
    log = tmp_path / "log"
    samples, tokenizer = episodes(models[template], [{"log": str(log)}] * 4, agent("looks"))
    whole = 0
    for at, sample in enumerate(samples):
        told = [entry for entry in lines(log) if entry["task"] == at]
        parts = [part for each in (sample, *sample.branches) for part in drawn_parts(each)]
        assert len(parts) == len(told) == 3
        texts = {said(tokenizer, tokens): logprobs for _, tokens, logprobs in parts}
        for entry in told:
            if entry["text"] is not None:
                assert texts[entry["text"]].tolist() == pytest.approx(entry["logprobs"], abs=1e-6)
        assert float(sample.rewards.sum()) == 0.5 and all(branch.rewards is None for branch in sample.branches)
        whole += not sample.branches
    assert whole >= 2 if template == "qwen" else whole <= 4


def test_the_log_probs_are_those_of_the_model_on_the_samples_own_tokens(models):
    samples, _ = episodes(models["qwen"], [{}], agent("branches"))
    reference = LlamaForCausalLM.from_pretrained(models["qwen"]).eval()
    assert samples[0].branches
    for sample in (samples[0], *samples[0].branches):
        with torch.no_grad():
            logprobs = reference(sample.tokens[None]).logits[0].log_softmax(-1)
        for start, tokens, told in drawn_parts(sample):
            expected = logprobs[start - 1 : start - 1 + len(tokens)].gather(1, tokens[:, None])[:, 0]
            assert torch.allclose(expected, told, atol=1e-4)


def test_no_bit_hangs_on_the_order_in_which_parallel_requests_arrive(models):
    forwards, _ = episodes(models["qwen"], [{}] * 3, agent("branches"))
    backwards, _ = episodes(models["qwen"], [{"forwards": False}] * 3, agent("branches"))
    for one, other in zip(forwards, backwards, strict=True):
        assert len(one.branches) == len(other.branches) >= 3
        for mine, its in zip((one, *one.branches), (other, *other.branches), strict=True):
            assert torch.equal(mine.tokens, its.tokens) and mine.prompt_length == its.prompt_length
            assert torch.equal(mine.engine_logprobs, its.engine_logprobs)
        # The first turn, three answers and one more behind the third, and the end; each is learned from once.
        parts = [part for each in (one, *one.branches) for part in drawn_parts(each)]
        assert len(parts) == 6
    assert not torch.equal(forwards[0].tokens, forwards[1].tokens)


def test_an_agent_in_a_process_of_its_own_is_trained_as_it_is(models):
    settings = {"agent_command": [sys.executable, "-m", "tests.engines.agents"]}
    samples, _ = episodes(models["qwen"], [{}] * 2, settings)
    assert all(not sample.rewards.isnan().any() and sample.drawn_count for sample in samples)
