"""Functions that worker ranks run in the tests of routing replay."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.types import Prompt, SampleBatch, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.megatron import world as worlds
from aligner.megatron.packing import PackedBatch
from aligner.megatron.policy import Policy
from aligner.models.model_source import directory_shape
from aligner.schema import EngineConfig
from tests.engines.engines import generate, load_directory
from tests.megatron import jobs


def random_routes(
    batch: int, tokens: int, layers: int = 4, experts: int = 4, chosen: int = 2
) -> Tensor:
    """Return random expert ids, uint8 [B, T, L, K], independent of any router."""
    draws = torch.rand(batch, tokens, layers, experts, generator=torch.Generator().manual_seed(8))
    return draws.argsort(-1)[..., :chosen].byte()


def routing_of_tokens(
    actor: Policy, tokens: Tensor, lengths: Tensor, routes: Tensor | None = None
) -> Tensor:
    """Return the experts of each token except the last, most probable first.

    The result is uint8 [B, S-1, L, K], 0 at padding.
    """
    seen: list[Tensor] = []

    def observe(router: Any, _: Any, output: tuple[Tensor, Tensor]) -> None:
        seen.append(output[0].topk(router.topk, -1).indices)

    def read(_: Tensor, batch: PackedBatch) -> Tensor:
        experts = torch.stack(seen, 1)
        seen.clear()
        return batch.unpack_targets(experts[batch.target_index])

    layers = actor.runner.chunks[0].decoder.layers
    routers = [layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")]
    hooks = [router.register_forward_hook(observe) for router in routers]
    result = torch.zeros(
        len(tokens), tokens.shape[1] - 1, len(routers), routers[0].topk, dtype=torch.uint8
    )
    batches = actor.runner.pack(tokens, lengths, expert_routing=routes)
    for batch, part in zip(batches, actor.runner.forward(batches, read), strict=True):
        result[batch.batch_rows, : part.shape[1]] = part.byte()
    for hook in hooks:
        hook.remove()
    return result


def replay_own(directory: str, settings: dict[str, Any], *, replayed: bool) -> dict[str, Any]:
    """Return log-probs and the results of an update; if `replayed`, with the trainer's own routing
    replayed."""
    actor = jobs.policy(directory, {}, settings)
    experience = jobs.make_experience(actor.runner.shape.vocab_size)
    if replayed:
        routes = routing_of_tokens(actor, experience.tokens, experience.lengths)
        experience = dataclasses.replace(experience, expert_routing=routes)
    logprobs = actor.logprobs(
        experience.tokens, experience.lengths, expert_routing=experience.expert_routing
    )
    differing = actor.runner.routing_mismatch
    stats, gradients = jobs.observed_train(actor, experience)
    result = {
        "logprobs": logprobs,
        "stats": stats,
        "gradients": gradients,
        "after": jobs.slices(actor.runner.weights),
    }
    worlds.shutdown()
    return result | {"differing": differing, "updating": actor.runner.routing_mismatch}


def sample_with_engine(directory: str) -> SampleBatch:
    """Return samples of a bf16 engine with their expert routing."""
    generator = torch.Generator().manual_seed(5)
    shape = directory_shape(Path(directory), "model.path")
    prompts = [
        Prompt(at, "", torch.randint(2, shape.vocab_size, (3 + at,), generator=generator))
        for at in range(4)
    ]
    engine = EmbeddedEngine(shape, EngineConfig(precision="bf16", batch_size=5), 0, seed=2)
    load_directory(engine, Path(directory))
    requests = [GenerationRequest(prompt, index) for prompt in prompts for index in range(4)]
    options = SamplingOptions(40, temperature=jobs.TEMPERATURE, routes=True)
    return collate(generate(engine, requests, options), pad_token_id=0)


def bf16_engine_and_fp32_trainer(directory: str) -> dict[str, Any]:
    """Return the mismatch of trainer and engine with and without the engine's routing."""
    batch = sample_with_engine(directory)
    actor = jobs.policy(directory, {}, {"micro_batch_tokens": 128})
    assert batch.expert_routing is not None
    inside = torch.arange(batch.expert_routing.shape[1]) < batch.lengths[:, None] - 1
    result: dict[str, Any] = {}
    for name, routes in (("own", None), ("replayed", batch.expert_routing)):
        logprobs = actor.logprobs(batch.tokens, batch.lengths, expert_routing=routes)
        experts = routing_of_tokens(actor, batch.tokens, batch.lengths, routes)
        elsewhere = (experts.sort(-1).values != batch.expert_routing.sort(-1).values).any(-1)
        result[name] = {
            "differing": float(elsewhere[inside].float().mean()),
            "mismatch": float((logprobs - batch.engine_logprobs)[batch.mask].abs().mean()),
        }
    result["differing_share"] = actor.runner.routing_mismatch
    worlds.shutdown()
    return result


def differing_share_and_logprobs(
    directory: str, layout: dict[str, Any], routes: Tensor
) -> tuple[list[float], Tensor, Tensor]:
    """Return the share of differing routes per pass, and policy and reference log-probs."""
    actor = jobs.policy(directory, layout, {"recompute": "full"})
    experience = jobs.make_experience(actor.runner.shape.vocab_size)
    shares = []
    logprobs = actor.logprobs(experience.tokens, experience.lengths, expert_routing=routes)
    shares.append(actor.runner.routing_mismatch)
    reference = actor.reference_logprobs(
        experience.tokens, experience.lengths, expert_routing=routes
    )
    shares.append(actor.runner.routing_mismatch)
    actor.train(dataclasses.replace(experience, expert_routing=routes), jobs.loss)
    shares.append(actor.runner.routing_mismatch)
    worlds.shutdown()
    return shares, logprobs, reference


def refused_routes(directory: str, routes: Tensor) -> str:
    """Return the error of log-probs with this expert routing."""
    actor = jobs.policy(directory, {})
    experience = jobs.make_experience(actor.runner.shape.vocab_size)
    try:
        actor.logprobs(experience.tokens, experience.lengths, expert_routing=routes)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        worlds.shutdown()
    return "no error"
