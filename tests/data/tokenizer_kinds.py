"""Model directories with tiny tokenizers of the kinds that published models have."""

# ruff: noqa: RUF001  (DeepSeek's special tokens contain fullwidth characters)

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_CORPUS = [
    "Hello world, this is a tokenizer. It's the model's 1st test!",
    "def add(a, b):\n    return a + b  # 12345 67",
    "  two spaces, naïve café, 日本語, emoji 🙂, tabs\tand\n\nlines",
    "The quick brown fox jumps over the lazy dog 0123456789 times.",
    "system user assistant tool question answer {\"name\": 'x'} <tag>",
]

TEXTS = (
    "Hello world, it's 12345!",
    "  leading and trailing  ",
    " one\n\n\ttwo\r\nthree ",
    "naïve café — 日本語 🙂 e\u0301 ﬁ \u00a0x",
    "",
    "▁odd▁",
    "isn't it ? Yes , it's ' quoted ' .",
)
"""Texts that tokenizers treat differently."""

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_NAMES = (
    "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOL_USE = "{{ tools | tojson(indent=2) }}{% for m in messages %}[{{ m.content }}]{% endfor %}"

_GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN = _GPT4.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(
    special: list[str], *, pattern: str | None = None, form: str | None = None
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE like those of GPT-2, GPT-NeoX, Llama 3, Qwen and DeepSeek."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if form == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _sentencepiece(special: list[str], style: str) -> tokenizers.Tokenizer:
    """Train a BPE with byte fallback like those of Llama 2, Mistral, Phi-3 and Gemma."""
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "always")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[*special, *pieces], show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)

    content = json.loads(tokenizer.to_str())
    # Training marks the byte tokens as special; here they must be ordinary vocabulary tokens.
    content["added_tokens"] = [e for e in content["added_tokens"] if e["content"] in special]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "legacy":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps.append(decoders.Strip(" ", 1, 0))
    elif style == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _unigram(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", "always")]
    )
    tokenizer.decoder = decoders.Metaspace("▁", "always")
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 2, trainer)
    return tokenizer


def _word_piece(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _word_level(special: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _around(tokenizer: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Let the post-processor add tokens before and after a text."""
    parts = [*([before] if before else []), "$A", *([after] if after else [])]
    texts = {text for text in (before, after) if text}
    template = processors.TemplateProcessing(
        single=parts, special_tokens=[(text, tokenizer.token_to_id(text)) for text in texts]
    )
    is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    tokenizer.post_processor = (
        processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        if is_byte_level
        else template
    )


Files = dict[str, Any]
"""File contents by file name: JSON objects or text."""

_QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@cache
def _trained(kind: str) -> str:
    """Return the content of a tokenizer.json."""
    after = {"xlm": "</s>", "t5": "</s>", "bert": "[SEP]"}.get(kind)
    before = {
        "llama3": "<|begin_of_text|>",
        "llama2": "<s>",
        "mistral": "<s>",
        "gemma": "<bos>",
        "deepseek": "<｜begin▁of▁sentence｜>",
        "xlm": "<s>",
        "bert": "[CLS]",
    }.get(kind)
    make: dict[str, Callable[[], tokenizers.Tokenizer]] = {
        "gpt2": lambda: _byte_level(["<|endoftext|>"]),
        "neox": lambda: _byte_level(["<|endoftext|>", "<|padding|>"], form="NFC"),
        "qwen": lambda: _byte_level(_QWEN_TOKENS, pattern=_QWEN, form="NFC"),
        "llama3": lambda: _byte_level(
            ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], pattern=_GPT4
        ),
        "deepseek": lambda: _byte_level(
            ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"],
            pattern=r"\s?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+",
        ),
        "llama2": lambda: _sentencepiece(["<unk>", "<s>", "</s>"], "legacy"),
        "mistral": lambda: _sentencepiece(["<unk>", "<s>", "</s>"], "metaspace"),
        "phi3": lambda: _sentencepiece(
            ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>"], "legacy"
        ),
        "gemma": lambda: _sentencepiece(
            ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<end_of_turn>"], "gemma"
        ),
        "t5": lambda: _unigram(["<pad>", "</s>", "<unk>"]),
        "xlm": lambda: _unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"]),
        "bert": lambda: _word_piece(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
        "words": lambda: _word_level(["<unk>", "<pad>", "<s>", "</s>"]),
    }
    tokenizer = make[kind]()
    if before or after:
        _around(tokenizer, before, after)
    return tokenizer.to_str()


def _file(kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_trained(kind))
    return content


def _vocabulary_files(kind: str) -> Files:
    """Return the vocabulary as vocab.json and merges.txt."""
    model = _file(kind)["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {
        "vocab.json": model["vocab"],
        "merges.txt": "\n".join(["#version: 0.2", *merges]) + "\n",
    }


def _kind(file: str, model_type: str, settings: Mapping[str, Any] | None, **files: Any) -> Files:
    """Return the files of a kind: tokenizer.json, config.json and tokenizer_config.json."""
    named = {name.replace("__", "."): content for name, content in files.items()}
    settings_file = {} if settings is None else {"tokenizer_config.json": dict(settings)}
    return {
        "tokenizer.json": _file(file),
        "config.json": {"model_type": model_type},
        **settings_file,
        **named,
    }


def _qwen_settings() -> dict[str, Any]:
    added = {
        str(id): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for id, text in enumerate(_QWEN_TOKENS)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": _QWEN_TOKENS[1:],
        "bos_token": None,
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 1024,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


def _more(content: dict[str, Any], id: int, text: str, **flags: Any) -> dict[str, Any]:
    """Return the tokenizer.json with one more added token."""
    token = {
        "id": id,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
        **flags,
    }
    return {**content, "added_tokens": [*content["added_tokens"], token]}


def _kinds() -> dict[str, Callable[[], Files]]:
    fast = "PreTrainedTokenizerFast"
    angle = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = {"chat_template": SPECIAL_NAMES}
    llama3 = {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "tokenizer_class": fast,
        **template,
    }
    token = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": True}
    legacy = {**angle, **template, "legacy": True, "tokenizer_class": "LlamaTokenizer"}
    return {
        "gpt2": lambda: _kind("gpt2", "gpt2", {"tokenizer_class": "GPT2Tokenizer", **template}),
        "gpt2 without settings": lambda: _kind(
            "gpt2", "gpt2", None, chat_template__jinja=SPECIAL_NAMES
        ),
        "gpt2 with prefix space": lambda: _kind(
            "gpt2", "gpt2", {"add_prefix_space": True, **template}
        ),
        "gpt2 files": lambda: {
            **_vocabulary_files("gpt2"),
            "config.json": {"model_type": "gpt2"},
            "tokenizer_config.json": dict(template),
        },
        "gpt2 files with bos": lambda: {
            **_vocabulary_files("gpt2"),
            "config.json": {"model_type": "gpt2"},
            "tokenizer_config.json": {"add_bos_token": True, **template},
        },
        "neox": lambda: _kind(
            "neox",
            "gpt_neox",
            {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "<|endoftext|>", **template},
        ),
        "neox files": lambda: {
            **_vocabulary_files("neox"),
            "config.json": {"model_type": "gpt_neox"},
            "tokenizer_config.json": dict(template),
        },
        "qwen": lambda: _kind("qwen", "qwen2", _qwen_settings()),
        "qwen without settings": lambda: _kind(
            "qwen", "qwen3", None, chat_template__jinja=SPECIAL_NAMES
        ),
        "qwen with another regex": lambda: _kind("llama3", "qwen3", template),
        "qwen files": lambda: {
            **_vocabulary_files("qwen"),
            "config.json": {"model_type": "qwen2"},
            "tokenizer_config.json": _qwen_settings(),
        },
        "deepseek qwen": lambda: _kind(
            "qwen",
            "qwen2",
            {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<|im_end|>", **template},
        ),
        "llama3": lambda: _kind("llama3", "llama", llama3),
        "llama3 as LlamaTokenizer": lambda: _kind(
            "llama3", "llama", {**llama3, "tokenizer_class": "LlamaTokenizer"}
        ),
        "deepseek": lambda: _kind(
            "deepseek",
            "llama",
            {
                "tokenizer_class": "LlamaTokenizerFast",
                "add_bos_token": True,
                "bos_token": {**token, "content": "<｜begin▁of▁sentence｜>"},
                "eos_token": {**token, "content": "<｜end▁of▁sentence｜>"},
                "clean_up_tokenization_spaces": True,
                "legacy": True,
                **template,
            },
        ),
        "llama2": lambda: _kind(
            "llama2",
            "llama",
            {
                **angle,
                "eos_token": token,
                "add_bos_token": False,
                "add_eos_token": True,
                "legacy": False,
                "tokenizer_class": "LlamaTokenizer",
                **template,
            },
        ),
        "llama2 legacy": lambda: _kind("llama2", "llama", legacy),
        "llama2 without prefix space": lambda: _kind(
            "llama2", "llama", {**legacy, "add_prefix_space": False}
        ),
        "llama2 without settings": lambda: _kind("llama2", "llama", None),
        "mistral": lambda: _kind(
            "mistral", "mistral", {**legacy, "tokenizer_class": "LlamaTokenizer"}
        ),
        "llama2 in mistral": lambda: _kind("llama2", "mistral", legacy),
        "phi3": lambda: _kind(
            "phi3", "phi3", {**angle, "tokenizer_class": "LlamaTokenizer", **template}
        ),
        "gemma": lambda: _kind("gemma", "llama", {"tokenizer_class": "GemmaTokenizer", **template}),
        "gemma plain": lambda: _kind("gemma", "llama", {"bos_token": "<bos>", **template}),
        "t5": lambda: _kind(
            "t5", "llama", {"tokenizer_class": "T5Tokenizer", "extra_ids": 3, **template}
        ),
        "xlm": lambda: _kind(
            "xlm", "llama", {"tokenizer_class": "XLMRobertaTokenizerFast", **template}
        ),
        "unigram plain": lambda: _kind(
            "xlm", "llama", {"tokenizer_class": fast, "clean_up_tokenization_spaces": True, **angle}
        ),
        "bert": lambda: _kind(
            "bert", "llama", {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
        ),
        "bert plain": lambda: _kind(
            "bert",
            "llama",
            {"tokenizer_class": fast, "clean_up_tokenization_spaces": True, "pad_token": "[PAD]"},
        ),
        "words": lambda: _kind("words", "llama", {**angle, "pad_token": "<pad>", **template}),
        "special tokens map": lambda: _kind(
            "llama2",
            "mistral",
            {"chat_template": SPECIAL_NAMES, "bos_token": "<unk>"},
            special_tokens_map__json={
                "bos_token": {"content": "<s>", "lstrip": False, "normalized": False},
                "eos_token": "</s>",
                "image_token": "<image>",
                "additional_special_tokens": ["<extra>"],
            },
        ),
        "added tokens": lambda: _kind(
            "llama2",
            "mistral",
            {**angle, **template},
            added_tokens__json={"<tool>": len(_file("llama2")["model"]["vocab"])},
        ),
        "added special tokens": lambda: _kind(
            "llama2",
            "mistral",
            {**angle, "additional_special_tokens": ["<Tool>"], **template},
            added_tokens__json={"<Tool>": len(_file("llama2")["model"]["vocab"])},
        ),
        "tokens added by the settings": lambda: _kind(
            "llama3",
            "llama",
            {
                **llama3,
                "image_token": "<image>",
                "additional_special_tokens": ["<tool>"],
                "pad_token": "<pad>",
            },
        ),
        "named extra tokens": lambda: _kind(
            "llama2",
            "mistral",
            {
                **angle,
                "extra_special_tokens": {"image_token": "<image>"},
                "additional_special_tokens": [
                    "<tool>",
                    {**token, "content": "<tool>", "special": True},
                ],
                **template,
            },
            special_tokens_map__json={"image_token": "<unk>", "pad_token": "</s>"},
        ),
        "lstrip from the settings": lambda: _kind(
            "llama3",
            "llama",
            {
                **llama3,
                "added_tokens_decoder": {
                    "2": {"content": "<|eot_id|>", "lstrip": True, "rstrip": True, "special": True}
                },
            },
        ),
        "added token that is not special": lambda: {
            **_kind("llama3", "llama", llama3),
            "tokenizer.json": _more(
                _file("llama3"), len(_file("llama3")["model"]["vocab"]), "<think>", special=False
            ),
        },
        "padding names the pad token": lambda: {
            **_kind("words", "llama", {**angle, **template}),
            "tokenizer.json": {
                **_file("words"),
                "padding": {
                    "strategy": {"Fixed": 4},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 1,
                    "pad_type_id": 0,
                    "pad_token": "<pad>",
                },
                "truncation": {
                    "direction": "Right",
                    "max_length": 3,
                    "strategy": "LongestFirst",
                    "stride": 0,
                },
            },
        },
        "named templates": lambda: _kind(
            "llama3",
            "llama",
            {
                **llama3,
                "chat_template": [
                    {"name": "default", "template": SPECIAL_NAMES},
                    {"name": "tool_use", "template": TOOL_USE},
                ],
            },
        ),
        "templates in files": lambda: {
            **_kind("llama3", "llama", llama3, chat_template__jinja=CHATML),
            "additional_chat_templates/tool_use.jinja": TOOL_USE,
        },
    }


KINDS = _kinds()
"""Functions that return the files of a model directory, by the name of the kind."""


def write_kind(directory: Path, files: Files) -> None:
    """Write the files of a kind into a directory."""
    for name, content in files.items():
        file = directory / name
        file.parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text, encoding="utf-8")
