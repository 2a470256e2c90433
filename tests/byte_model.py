"""A tiny Llama with random weights, whose tokens are bytes and ChatML's control tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model

_CONTROL_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
_SHAPE = ("num_hidden_layers=1", "max_position_embeddings=2048")


def write_byte_model(directory: Path, template: str | None) -> None:
    """Write the model with a chat template, or without one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_CONTROL_TOKENS, *alphabet])}
    with TemporaryDirectory() as scratch:
        keys = [f"model.config.{entry}" for entry in (*_SHAPE, f"vocab_size={len(vocabulary)}")]
        config = compose_config(
            ["experiment=tiny_ppo", "model=tiny_random", f"run.dir={scratch}/run", *keys]
        )
        shutil.copytree(prepare_model(config), directory)

    for file in directory.glob("*token*"):
        file.unlink()
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _CONTROL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
