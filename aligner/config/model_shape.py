"""A transformer's dimensions, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aligner.errors import ConfigError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForSequenceClassification")


@dataclass(frozen=True)
class ModelShape:
    """What a decoder-only transformer looks like, independent of any framework."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int

    @staticmethod
    def from_hf(config: Mapping[str, Any], origin: str) -> ModelShape:
        """Read a Hugging Face configuration; `origin` (a path or key) names it in errors.

        Raises ConfigError for an architecture that is not supported or a missing entry.
        """
        architectures = list(config.get("architectures") or ["<none>"])
        if architectures[0] not in SUPPORTED_ARCHITECTURES:
            raise ConfigError(
                f"{origin}: architecture {architectures[0]} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        required = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [key for key in required if key not in config]
        if missing:
            raise ConfigError(f"{origin}: the model's configuration lacks {', '.join(missing)}")
        # transformers 5 moved rope_theta into rope_parameters.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", "default")
        if rope_type != "default":
            raise ConfigError(f"{origin}: rope scaling {rope_type!r} is not supported; supported: default")
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ConfigError(f"{origin}: {key}=true is not supported")
        heads = config["num_attention_heads"]
        eos = config.get("eos_token_id")
        eos_ids = tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,)
        pad = config.get("pad_token_id")
        return ModelShape(
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_hidden_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            max_positions=config.get("max_position_embeddings", 2048),
            norm_epsilon=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            eos_token_ids=eos_ids,
            pad_token_id=0 if pad is None else pad,
        )
