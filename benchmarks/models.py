"""Models for benchmarks: shapes of real models with random weights."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

from aligner.models.hugging_face import read_config
from aligner.models.shape import ModelShape

MODELS: dict[str, dict[str, Any]] = {
    "smollm2_135m": {
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama_3m": {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 688,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama_125m": {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    },
    "llama_1b": {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "llama_8b": {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
"""Hugging Face configurations of Llama models, by name."""
MODELS["llama_8b_8_layers"] = {**MODELS["llama_8b"], "num_hidden_layers": 8}


def shape_of(model: str) -> ModelShape:
    """Return the dimensions of a model."""
    return read_config(
        {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", **MODELS[model]}, model
    )


def write_model(directory: str, model: str, precision: str = "fp32") -> None:
    """Write a model with random weights to a directory.

    A separate process writes it, because the threads of transformers would otherwise remain. Raises
    SystemExit if that process fails.
    """
    writer = multiprocessing.get_context("spawn").Process(
        target=_write, args=(directory, MODELS[model], precision)
    )
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit(f"the model's weights could not be written (exit code {writer.exitcode})")


def write_tokenizer(directory: str, model: str) -> None:
    """Write a tokenizer for a model. Token N is the word wN, so a text has as many tokens as
    words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{token}": token for token in range(MODELS[model]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(Path(directory, "tokenizer.json")))
    # Token 2 is LlamaConfig's EOS token.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "w0", "eos_token": "w2"}
    Path(directory, "tokenizer_config.json").write_text(json.dumps(settings))


def _write(directory: str, config: dict[str, Any], precision: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    if precision == "bf16":
        torch.set_default_dtype(torch.bfloat16)
    # Random numbers for billions of weights take long on a CPU.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.save_pretrained(directory)
