"""A tiny chat model that is trained to call a tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import AssistantTurn, ToolCall
from tests.agents.openai_agents import TOOLS
from tests.data.chat_models import TEMPLATES, tokenizer_file, write_model


def saved(
    directory: Path,
    template: str,
    conversations: Sequence[list[dict[str, Any]]] | None = None,
    tools: Sequence[dict[str, Any]] = TOOLS,
    head_dim: int = 8,
    steps: int | None = None,
) -> Path:
    """Save a tiny chat model. With the tool template, it is trained to call a tool, or on the given
    conversations, for `steps` steps."""
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
        head_dim=head_dim,
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
    parts = [tokenize_parts(tokenizer, each, tools) for each in spoken]
    tokens = torch.nn.utils.rnn.pad_sequence([torch.cat(each) for each in parts], batch_first=True)
    labels = tokens.masked_fill(tokens == 0, -100)
    for row, each in zip(labels, parts, strict=True):
        # The model does not learn the prompt: tools and the question are many tokens.
        row[: len(each[0]) if conversations else 0] = -100
    if steps is None:
        steps = 0 if template != "qwen" else 80 if conversations else 130
    for _ in range(steps):
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def conversation(at: int) -> list[dict[str, Any]]:
    """A training conversation: a question, a tool call, its result, and the final answer."""
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


def called(question: str, call: ToolCall, result: str, answer: str) -> list[dict[str, Any]]:
    """A conversation whose question is answered with one tool call."""
    turns = [*AssistantTurn("", "", (call,)).messages[:1], call.to_message(result)]
    return [{"role": "user", "content": question}, *turns, {"role": "assistant", "content": answer}]


def tokenize_parts(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[torch.Tensor]:
    """Tokens of a conversation, split where each turn of the policy starts."""
    text = tokenizer.chat_template.render(messages, tools, add_generation_prompt=False)
    # A generated turn is not tokenized together with the text before it.
    return [tokenizer.encode(part) for part in re.split(r"(?<=<\|user\|>assistant\n)", text)]
