"""A tiny model of chats that calls a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import AssistantTurn, ToolCall
from tests.data.chat_models import TEMPLATES, tokenizer_file, write_model
from tests.engines.agents import TOOLS


def saved(
    directory: Path,
    template: str,
    conversations: Sequence[list[dict[str, Any]]] | None = None,
    tools: Sequence[dict[str, Any]] = TOOLS,
) -> Path:
    """A tiny model of chats; with the template of tools it has learned to call one, or what
    conversations are given."""
    file = tokenizer_file("bytes")
    (directory / "tokenizer.json").write_text(file)
    write_model(directory, TEMPLATES[template], ("<|end|>", "</s>"))
    tokenizer = Tokenizer(directory)
    torch.manual_seed(11)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=list(tokenizer.eos_token_ids),
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    spoken = [conversation(at) for at in range(2)] if conversations is None else conversations
    parts = [written(tokenizer, each, tools) for each in spoken]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.cat(each) for each in parts], batch_first=True)
    labels = tokens.masked_fill(tokens == 0, -100)
    for row, each in zip(labels, parts, strict=True):
        # tools and a question are many tokens, and not for it to say
        row[: len(each[0]) if conversations else 0] = -100
    for _ in range(0 if template != "qwen" else 80 if conversations else 130):
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def conversation(at: int) -> list[dict[str, Any]]:
    """What the model learns from: a question, a call, its answer, and what is said to that."""
    return [
        *called(
            f"why {at}?",
            ToolCall("000010000", "look", {"at": "here"}),
            'saw {"at": "here"}',
            "yes.",
        ),
        {"role": "user", "content": f"so {at}?"},
        {"role": "assistant", "content": "yes yes."},
    ]


def called(asked: str, call: ToolCall, told: str, said: str) -> list[dict[str, Any]]:
    """A question that a call helps to answer."""
    turns = [*AssistantTurn("", "", (call,)).messages[:1], call.answered(told)]
    return [{"role": "user", "content": asked}, *turns, {"role": "assistant", "content": said}]


def written(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[torch.Tensor]:
    """A conversation's tokens, in parts that begin where the policy speaks."""
    text = tokenizer.chat_template.render(messages, tools, add_generation_prompt=False)
    # A turn is not tokenized with what is before it, when it is drawn.
    return [tokenizer.encode(part) for part in re.split(r"(?<=<\|user\|>assistant\n)", text)]
