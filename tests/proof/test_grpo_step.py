"""A GRPO step of every family equals a step with transformers on the engine's samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aligner.proof.reference import (
    OPTIMIZER,
    compute_logprobs,
    compute_loss,
    load_reference,
)
from tests.megatron import families
from tests.proof import grpo_jobs
from tests.rounds import covering


def with_trained_padding(model: Any) -> Any:
    """Return the model with the embedding of an ordinary token for its padding token.

    The engine samples this token, too. transformers does not train its embedding, and initializes
    it with zeros, whose norm has a huge gradient.
    """
    embedding = model.get_input_embeddings()
    embedding.padding_idx = None
    if not embedding.weight.data[0].any():
        embedding.weight.data[0] = -embedding.weight.data[1]
    return model


@pytest.mark.parametrize(
    "family", covering(families.CONFIGS, ("qwen3", "glm4_moe"), families.parts)
)
def test_grpo_step_equals_transformers(pool, tmp_path, family):
    directory = families.save(family, tmp_path)
    with_trained_padding(load_reference(directory)).save_pretrained(directory)
    (first, second) = pool.run(grpo_jobs.grpo_step, 2, str(directory), {"data": 2}, 2)
    assert torch.equal(first["after"], second["after"])
    experience = first["experience"]

    model = with_trained_padding(load_reference(directory))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=0.0,
    )
    before = compute_logprobs(model, experience.tokens, experience.lengths)
    # the engine's log-probs are those of transformers, so that every importance ratio is 1
    generated = before.detach()[experience.mask]
    engine_logprobs = experience.engine_logprobs[experience.mask]
    torch.testing.assert_close(engine_logprobs, generated, rtol=1e-5, atol=1e-5)
    loss, _ = compute_loss(before, before, experience, float(experience.mask.sum()))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad_norm)
    optimizer.step()
    after = compute_logprobs(model, experience.tokens, experience.lengths).detach()

    assert first["stats"]["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    torch.testing.assert_close(first["after"], after, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-3
