"""Data sets and a model for benchmarks.data: conversations and prompts of synthetic English text.

The words are random, with the word frequencies of natural language (Zipf's law), so that the
model's tokenizer splits the text into tokens as it splits English.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from benchmarks.models import MODELS, write_model

MODEL = "llama_3m"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with the system message left to the data."""
# Size of the pool of sentences, from which the texts are composed.
_SENTENCES = 20_000
_WORDS = 5_000


def write_conversations(file: Path, count: int) -> None:
    """Write conversations of one question and one answer, about 1 kB each, as JSON Lines."""
    generator = random.Random(0)
    sentences = list(_iterate_sentences(generator, _SENTENCES))
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            question = " ".join(generator.choices(sentences, k=generator.randint(1, 6)))
            answer = " ".join(generator.choices(sentences, k=generator.randint(4, 17)))
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            stream.write(json.dumps({"messages": messages}) + "\n")


def write_prompts(file: Path, count: int) -> None:
    """Write arithmetic questions with answers, about 140 bytes each, as JSON Lines."""
    generator = random.Random(0)
    sentences = list(_iterate_sentences(generator, _SENTENCES))
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(count):
            first, second = generator.randrange(1000), generator.randrange(1000)
            prompt = f"{generator.choice(sentences)} What is {first} plus {second}?"
            stream.write(json.dumps({"prompt": prompt, "answer": str(first + second)}) + "\n")


def write_chat_model(directory: Path) -> None:
    """Write a small model with a byte-level BPE tokenizer and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    write_model(str(directory), MODEL)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Token 2 is LlamaConfig's EOS token.
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=MODELS[MODEL]["vocab_size"],
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_iterate_sentences(random.Random(0), _SENTENCES), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _iterate_sentences(generator: random.Random, count: int) -> Iterator[str]:
    """Yield sentences of 4 to 16 words, whose frequencies are in proportion to 1/rank."""
    syllables = [
        consonant + vowel + ending
        for consonant in ("", "b", "d", "f", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr")
        for vowel in "aeiou"
        for ending in ("", "n", "r", "s", "ng")
    ]
    words = [
        "".join(generator.choices(syllables, k=generator.randint(1, 3))) for _ in range(_WORDS)
    ]
    weights = [1 / rank for rank in range(1, _WORDS + 1)]
    for _ in range(count):
        sentence = " ".join(generator.choices(words, weights, k=generator.randint(4, 16)))
        yield sentence.capitalize() + "."
