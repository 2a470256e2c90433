"""Model directories without weights: common chat templates, tokenizers with many merges."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from aligner.data.tokenizer import Tokenizer

SPECIAL = [
    "<s>",
    "</s>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|head_end|>",
    "[INST]",
    "[/INST]",
]
SPECIAL += ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|python_tag|>"]
"""Control tokens; `<tool_call>` and `<think>` are plain text here, as they are in a template."""

QUESTION = {"role": "user", "content": "Is it raining in Lyon?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city"}},
            "required": ["city"],
        },
    },
}
"""A question and the tool that answers it, in the form that templates expect."""

_BLOCK = "<|user|>{{ m.role }}\n{{ %s }}<|end|>\n"
_CHATML = "{% for m in messages %}" + _BLOCK % "m.content" + "{% endfor %}"
_CHATML += "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"

# Tool calls in Hermes format; consecutive tool messages form one user turn.
_CALLS = (
    "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif"
    ' %}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments |'
    " tojson }}}\n</tool_call>{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|end|>\n{%"
    " endif %}"
)
_RESULT = (
    "{% if loop.first or loop.previtem.role != 'tool' %}<|user|>user{% endif %}{{ '\n'"
    " }}<tool_response>\n{{ m.content }}\n</tool_response>{% if loop.last or loop.nextitem.role !="
    " 'tool' %}<|end|>{{ '\n' }}{% endif %}"
)
_QWEN = (
    _TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + _RESULT
    + "{% else %}<|user|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "<|end|>{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n{%"
    " endif %}"
)
# Reasoning is kept only in turns after the last user message, where the template reformats it.
_REASONS = (
    _TOOLS
    + "{% set ns = namespace(asked=0) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif"
    " %}{% endfor %}"
    + "{% for m in messages %}{% if m.role == 'tool' %}"
    + _RESULT
    + "{% else %}{% set thought, said = '', m.content %}"
    + "{% if m.role == 'assistant' and '</think>' in m.content %}"
    + "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    + "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}<|user|>{{ m.role"
    " }}\n" + "{% if loop.index0 > ns.asked and (loop.last or thought) %}<think>\n{{ thought"
    " }}\n</think>\n\n{% endif %}{{ said }}"
    + _CALLS.replace("m.content", "said")
    + "<|end|>{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<|user|>assistant\n%s{% endif %}"
)
# Reasoning is a separate field of the message, and is kept in all turns.
_APART = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{"
    " m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    + _CALLS
    + "<|end|>{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|user|>assistant\n<think>\n{%"
    " endif %}"
)
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length > 1"
    " %}{{ raise_exception('one call at a time') }}{% endif %}{% set call ="
    ' m.tool_calls[0].function %}<|assistant|>assistant<|head_end|>\n\n{"name": "{{ call.name }}",'
    ' "parameters": {{ call.arguments | tojson }}}<|end|>{% else %}<|{{ m.role }}|>{{ m.role'
    " }}<|head_end|>\n\n{{ m.content | trim }}<|end|>{% endif %}{% endfor %}{% if"
    " add_generation_prompt %}<|assistant|>assistant<|head_end|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(before='') %}{% for m in messages %}{% if m.role =="
    " 'user' %}{% if ns.before == 'user' %}{{ raise_exception('turns must alternate') }}{% endif"
    " %}[INST] {{ m.content }} [/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ {'content':"
    " m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% elif m.tool_calls"
    ' %}[TOOL_CALLS] [{% for call in m.tool_calls %}{"name": "{{ call.function.name }}",'
    ' "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}{% if not'
    " loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}{% else %} {{ m.content | trim }}{{"
    " eos_token }}{% endif %}{% set ns.before = m.role %}{% endfor %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ 'model' if m.role == 'assistant' else m.role"
    " }}\n{{ m.content | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|user|>model\n{% endif %}"
)
_PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# The role token of the next turn ends a turn, so the model generates that token.
_GLM = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEMPLATES = {
    "chatml": _CHATML,
    "qwen": _QWEN,
    "reasons": _REASONS.replace("%s", ""),
    "begins_to_reason": _REASONS.replace("%s", "<think>\n"),
    "reasons_apart": _APART,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "phi": _PHI,
    "glm": _GLM,
}
# The tokenizer is trained on these texts so that it merges across turn boundaries, and merges the
# spaces at the start and end of turns.
_ADVERSARIAL = [
    "\n\nuser\n",
    "assistant\n\n",
    " yes.\n",
    "?\n\n\n",
    "</think>\n\n<think>",
    "\n<tool_call>\n",
    "  yes  no  ",
    "{}\n",
]


@cache
def tokenizer_file(kind: str) -> str:
    """Return a trained tokenizer as JSON text."""
    byte_level, spaces = (
        kind in ("bytes", "composing", "stripping"),
        ("first" if kind == "first" else "always"),
    )
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=not byte_level))
    if byte_level:
        # Text between special tokens is one word, so that merges may cross everything else.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=spaces, split=False)]
        )
        alphabet = [chr(code) for code in range(33, 127)] + ["\n", "▁"]
    if kind == "prepending":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.pre_tokenizer = None
        parts = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        tokenizer.decoder = decoders.Sequence(parts)
    if kind == "composing":
        tokenizer.normalizer = normalizers.NFC()
    bytes_ = [] if byte_level else [f"<0x{byte:02X}>" for byte in range(256)]
    special = [
        AddedToken(token, special=True, normalized=False, rstrip=kind == "stripping")
        for token in SPECIAL
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=1,
        special_tokens=[*special, *bytes_],
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(_ADVERSARIAL * 3, trainer)
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    # Training marks the byte tokens as special; here they must be ordinary vocabulary tokens.
    description["added_tokens"] = [
        token for token in description["added_tokens"] if token["content"] in SPECIAL
    ]
    return json.dumps(description)


TOKENIZERS = ("bytes", "composing", "stripping", "first", "always", "prepending")


@cache
def chat_model(
    kind: str, template: str, ends: tuple[str, ...] = ("<|end|>", "</s>", "<|user|>", "<|tool|>")
) -> Tokenizer:
    """Return a tokenizer with a chat template.

    Args:
        kind: One of `TOKENIZERS`.
        template: A name in `TEMPLATES`, or the text of a template.
        ends: The EOS tokens of config.json.
    """
    with TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "tokenizer.json").write_text(tokenizer_file(kind))
        write_model(directory, TEMPLATES.get(template, template), ends)
        tokenizer = Tokenizer(directory)
        assert tokenizer.chat_template  # loaded lazily: read it before the directory is deleted
        return tokenizer


def write_model(directory: Path, template: str, ends: Iterable[str]) -> None:
    """Write the files of a model directory other than tokenizer.json and weights."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config |= {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": [tokenizer.token_to_id(end) for end in ends],
    }
    config |= {
        "intermediate_size": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    (directory / "chat_template.jinja").write_text(template)
