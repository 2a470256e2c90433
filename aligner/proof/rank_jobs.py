"""Results of trainer and engine for a proof; every rank of a layout runs these functions."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.data.collectives import broadcast_samples
from aligner.data.model_directory import read_shape, read_slices
from aligner.data.types import Experience, Prompt, Sample, collate
from aligner.engines.embedded.embedded_engine import EmbeddedEngine
from aligner.engines.engine_loop import SingleResponses, run_steps
from aligner.engines.engine_protocol import GenerationRequest, SamplingOptions
from aligner.megatron import world as worlds
from aligner.megatron.layer_outputs import compute_layer_outputs
from aligner.megatron.policy import Policy
from aligner.megatron.runner import ModelRunner
from aligner.models.weight_slices import Slice, compute_engine_slices, weight_table
from aligner.proof.reference import (
    OPTIMIZER,
    STEPS,
    TEMPERATURE,
    compute_loss,
    make_experience,
)
from aligner.schema import ActorConfig, EngineConfig, EngineParallelConfig, ParallelConfig

Slices = dict[str, tuple[Slice, Tensor]]
"""A rank's part of named tensors: the slice and its values."""

NEW_TOKENS = 12
"""Length of the generated responses."""
PROMPT_LENGTHS = (3, 9, 1, 6)
_MICRO_BATCH_TOKENS = 24  # several micro-batches per update
_TIMEOUT_S = 120


def build_policy(directory: Path, layout: Mapping[str, Any], **settings: Any) -> Policy:
    """Return a policy in float32 at a layout.

    Args:
        directory: Model directory.
        layout: Keys of `actor.parallel`.
        **settings: Other keys of the section `actor`.
    """
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=_TIMEOUT_S)
    defaults = {
        "micro_batch_tokens": _MICRO_BATCH_TOKENS,
        "logprob_chunk_tokens": 10,
        "optimizer": OPTIMIZER,
        "precision": "fp32",
    }
    section = ActorConfig(parallel=world.layout, **{**defaults, **settings})
    shape = read_shape(directory)
    return Policy(shape, world, section, directory, TEMPERATURE, total_updates=STEPS + 1)


def collect_gradients(runner: ModelRunner) -> Slices:
    """Return this rank's slices of the gradients, summed over all ranks.

    Call it between the backward pass and the optimizer step. Collective.
    """
    for chunk in runner.ddp:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets if chunk.ddp_config.use_distributed_optimizer else ():
                group = buffer.data_parallel_group  # each rank has only its own shard of the sum
                dist.all_gather_into_tensor(
                    bucket.grad_data,
                    bucket.grad_data.chunk(group.size())[group.rank()].clone(),
                    group=group,
                )
    weights = runner.trained_weights

    def read(name: str) -> Tensor:
        gradient: Tensor = weights.parameter(name).main_grad  # type: ignore[attr-defined]
        return weights.gather(name, gradient).clone()

    trained = [name for name in weights if weights.specs[name].is_trained]
    return {name: (weights.slices[name], read(name)) for name in trained}


def train_and_observe(policy: Policy, experience: Experience) -> tuple[dict[str, float], Slices]:
    """Run an update; return its statistics and the gradients that the optimizer receives."""
    gradients: Slices = {}
    optimizer, prepare = policy.runner.optimizer, policy.runner.optimizer.prepare_grads

    def observe_and_prepare() -> Any:
        gradients.update(collect_gradients(policy.runner))
        return prepare()

    optimizer.prepare_grads = observe_and_prepare
    try:
        return policy.train(experience, compute_loss), gradients
    finally:
        del optimizer.prepare_grads


def run_trainer(directory: str, layout: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """Run the updates of `train_reference` in Megatron, and save the initial model.

    Args:
        directory: Model directory.
        layout: Keys of `actor.parallel`.
        checkpoint: Directory of the model's checkpoint before the first update.

    Returns:
        `logprobs` [B, S-1], `layers` [layers, B, S, H], the statistics of the first update, and
        this rank's slices of `gradients` and, after all updates, of `weights`.
    """
    policy = build_policy(Path(directory), layout)
    runner = policy.runner
    experience = make_experience(runner.shape.vocab_size)
    policy.save(Path(checkpoint))
    result: dict[str, Any] = {
        "logprobs": policy.logprobs(experience.tokens, experience.lengths),
        "layers": compute_layer_outputs(runner, experience.tokens, experience.lengths),
    }
    result["stats"], gradients = train_and_observe(policy, experience)
    for _ in range(STEPS - 1):
        policy.train(experience, compute_loss)
    weights = runner.weights
    trained = {name: (weights.slices[name], weights.read(name)) for name in weights}
    result |= {"gradients": _as_arrays(gradients), "weights": _as_arrays(trained)}
    worlds.shutdown()
    return result


def _as_arrays(slices: Slices) -> dict[str, tuple[Slice, Any]]:
    # Arrays are sent in one message; each tensor would need a shared file.
    return {name: (cut, tensor.cpu().float().numpy()) for name, (cut, tensor) in slices.items()}


def make_prompts(vocab_size: int) -> list[Prompt]:
    """Return the prompts of a proof."""
    generator = torch.Generator().manual_seed(5)
    return [
        Prompt(index, "", torch.randint(2, vocab_size, (length,), generator=generator))
        for index, length in enumerate(PROMPT_LENGTHS)
    ]


def run_engine(directory: str, tensor: int) -> dict[str, Any]:
    """Generate with the embedded engine on all ranks, and score the samples in Megatron.

    Args:
        directory: Model directory.
        tensor: Number of ranks, and tensor-parallel size of the engine.

    Returns:
        `tokens` of the greedy responses, and the largest difference `error` between the log-probs
        of the engine and of the trainer for sampled responses.
    """
    path = Path(directory)
    engine = build_engine(path, tensor)
    greedy = generate(engine, 1, SamplingOptions(NEW_TOKENS, greedy=True))
    samples = generate(engine, 2, SamplingOptions(NEW_TOKENS, temperature=TEMPERATURE))
    batch = collate(samples, pad_token_id=0)
    policy = build_policy(path, {"data": tensor})
    scored = policy.logprobs(batch.tokens, batch.lengths)
    difference = torch.where(batch.mask, scored - batch.engine_logprobs, 0.0)
    worlds.shutdown()
    return {
        "tokens": [sample.tokens[sample.prompt_length :].tolist() for sample in greedy],
        "error": float(difference.abs().max()),
    }


def build_engine(directory: Path, tensor: int) -> EmbeddedEngine:
    """Return this rank's part of an engine with the weights of a model directory. Collective.

    Args:
        directory: Model directory.
        tensor: Number of ranks, and tensor-parallel size.
    """
    settings = EngineConfig(
        # Fewer rows than responses, so that some start while others are in flight.
        parallel=EngineParallelConfig(tensor=tensor),
        batch_size=3,
        precision="fp32",
    )
    if not dist.is_initialized():
        worlds.join(tensor, _TIMEOUT_S)
    rank = int(os.environ["RANK"])
    shape = read_shape(directory)
    engine = EmbeddedEngine(shape, settings, rank, seed=2, group=dist.group.WORLD)
    _load(engine, directory, rank)
    return engine


def generate(engine: EmbeddedEngine, samples: int, options: SamplingOptions) -> list[Sample]:
    """Return responses to each prompt of a proof, on every rank. Collective.

    Args:
        engine: The engine.
        samples: Number of responses per prompt.
        options: Sampling parameters.
    """
    requests = [
        GenerationRequest(prompt, index)
        for prompt in make_prompts(engine._shape.vocab_size)
        for index in range(samples)
    ]
    generation = SingleResponses(engine).start(requests, options)
    found = run_steps(generation)
    return broadcast_samples([found[index] for index in range(len(requests))])


def _load(engine: EmbeddedEngine, directory: Path, rank: int) -> None:
    """Write this rank's slices of the weights into the engine, as a weight sync does."""
    table = weight_table(read_shape(directory))
    layout = engine.weight_format.layout
    update = engine.begin_update(0)
    for name, tensor in read_slices(directory, table, compute_engine_slices(table, layout, rank)):
        update.views([name])[name].copy_(tensor)
        update.load([name])
    update.commit()


def replace_tensors(value: Any) -> Any:
    """Return a result of a rank with arrays instead of tensors."""
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {key: replace_tensors(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) or not isinstance(value, list | tuple):
        return value
    return type(value)(replace_tensors(each) for each in value)
