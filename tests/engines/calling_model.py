"""A tiny model of chats that calls a tool."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aligner.data.tokenizer import Tokenizer
from aligner.data.tool_calls import AssistantTurn, ToolCall
from tests.data.chat_models import TEMPLATES, tokenizer_file, write_model
from tests.engines.agents import TOOLS


def saved(directory: Path, template: str) -> Path:
    """A tiny model of chats; with the template of tools it has learned to call one, and to say that it has."""
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
    tokens = torch.nn.utils.rnn.pad_sequence([conversation(tokenizer, at) for at in range(2)], batch_first=True)
    for _ in range(130 if template == "qwen" else 0):
        model(input_ids=tokens, labels=tokens.masked_fill(tokens == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def conversation(tokenizer: Tokenizer, at: int) -> torch.Tensor:
    """What the model learns from: a question, a call, its answer, and what is said to that."""
    call = ToolCall("000010000", "look", {"at": "here"})
    messages = [
        {"role": "user", "content": f"why {at}?"},
        *AssistantTurn("", "", (call,)).messages[:1],
        call.answered('saw {"at": "here"}'),
        {"role": "assistant", "content": "yes."},
        {"role": "user", "content": f"so {at}?"},
        {"role": "assistant", "content": "yes yes."},
    ]
    text = tokenizer.chat_template.render(messages, TOOLS, add_generation_prompt=False)
    # A turn is not tokenized with what is before it, when it is drawn.
    return torch.cat([tokenizer.encode(part) for part in re.split(r"(?<=<\|user\|>assistant\n)", text)])
