"""Reference models, and reference results computed with only transformers and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aligner.proof.reference import compute_logprobs as logprobs
from tests.megatron.jobs import OPTIMIZER, loss, make_experience


def llama_config(tied: bool, vocab_size: int = 72, **more: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        vocab_size=vocab_size,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        initializer_range=0.15,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        **more,
    )


def save_llama(directory: Path, *, tied: bool, seed: int = 11, vocab_size: int = 72) -> Path:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(llama_config(tied, vocab_size))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # a norm that is not read changes the results
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return directory


def save_reward_llama(directory: Path) -> Path:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(5)
    LlamaForSequenceClassification(llama_config(tied=False, num_labels=1)).save_pretrained(
        directory
    )
    return directory


def policy_steps(directory: Path, steps: int = 2) -> dict[str, Any]:
    """Return the results of optimizer steps with torch's AdamW, clipping and a linear schedule."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    experience = make_experience(model.config.vocab_size)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=0.0,
    )
    first = logprobs(model, experience.tokens, experience.lengths).detach()
    stats = []
    for step in range(steps):
        optimizer.zero_grad()
        given = logprobs(model, experience.tokens, experience.lengths)
        value, _ = loss(given, given, experience, float(experience.mask.sum()))
        value.backward()
        if step == 0:
            gradients = {
                name: parameter.grad.clone() for name, parameter in model.named_parameters()
            }
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = OPTIMIZER.learning_rate * (1 - step / 4)
        optimizer.step()
        stats.append(
            {"loss": value.item(), "grad_norm": float(norm), "lr": optimizer.param_groups[0]["lr"]}
        )
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    after = logprobs(model, experience.tokens, experience.lengths).detach()
    return {
        "logprobs": first,
        "stats": stats,
        "gradients": gradients,
        "weights": weights,
        "after_logprobs": after,
    }
