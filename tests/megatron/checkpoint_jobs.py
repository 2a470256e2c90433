"""Functions that worker ranks run in the tests of checkpoints and export."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.policy_losses import value_loss
from aligner.data import fencing
from aligner.data.checkpoint_files import MOMENTS, MOMENTUM, WEIGHT, CheckpointReader
from aligner.data.checksums import FileRecord
from aligner.data.model_directory import read_shape
from aligner.megatron import model_checkpoint as checkpoints
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.megatron.value_model import ValueModel
from aligner.models.weight_slices import is_layer_matrix
from aligner.schema import ActorConfig, Config, CriticConfig, LoraConfig, ParallelConfig, RunConfig
from tests.megatron.jobs import OPTIMIZER, TEMPERATURE, loss, make_experience

Settings = dict[str, Any]
"""Keys of the actor's section; `optimizer` and `lora` contain only changes of the defaults."""


def actor(directory: str, settings: Settings) -> Policy:
    world = worlds.initialize(ParallelConfig(**settings["parallel"]), seed=1, timeout_s=120)
    schedule = {"schedule": "cosine", "warmup_steps": 3}
    chosen = {
        **{key: value for key, value in settings.items() if key in ("frozen", "precision")},
        "optimizer": dataclasses.replace(OPTIMIZER, **schedule, **settings.get("optimizer", {})),
        "lora": LoraConfig(**settings.get("lora", {})),
    }
    section = ActorConfig(parallel=world.layout, micro_batch_tokens=24, **chosen)
    path = Path(directory)
    return Policy(read_shape(path), world, section, path, TEMPERATURE, total_updates=10)


def losses(policy: Policy, steps: int) -> list[float]:
    experience = make_experience(policy.runner.shape.vocab_size)
    return [policy.train(experience, loss)["loss"] for _ in range(steps)]


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """Return this rank's slices of the base weights and of the adapters, in the parameters'
    dtype."""
    found = {}
    for weights in {
        id(weights): weights for weights in (policy.runner.weights, policy.runner.trained_weights)
    }.values():
        found |= {
            name: weights.gather(name, weights.parameter(name).data).clone() for name in weights
        }
    return found


def save_and_continue(directory: str, settings: Settings, checkpoint: str) -> dict[str, Any]:
    """Save a checkpoint after two updates; return losses and weights of five more updates, which
    begin while it is written."""
    policy = actor(directory, settings)
    losses(policy, 2)
    policy.begin_save(Path(checkpoint))
    result = {"losses": losses(policy, 5), "end": weights_of(policy)}
    assert not Path(checkpoint).exists(), "it has its final name only when it is complete"
    policy.finish_save()
    worlds.shutdown()
    return result


def load_and_continue(directory: str, settings: Settings, checkpoint: str) -> dict[str, Any]:
    """Load a checkpoint; return the losses and weights of five updates, and the tensors that differ
    from the files in any bit."""
    policy = actor(directory, settings)
    policy.load(Path(checkpoint))
    runner, reader = policy.runner, CheckpointReader(Path(checkpoint))
    state = runner.optimizer_state()
    different = []
    for weights in {
        id(weights): weights for weights in (runner.weights, runner.trained_weights)
    }.values():
        for name in weights:
            parameter = weights.parameter(name)
            found = {WEIGHT: parameter.data}
            if parameter in state:
                # Gather on every rank in turn, because `gather` is collective; each rank keeps the
                # result of its own turn.
                for rank in range(policy.world.size):
                    found = state.gather(parameter, rank) or found
            muon = settings["optimizer"].get("kind") == "muon" and is_layer_matrix(
                weights.specs[name]
            )
            kept = (MOMENTUM if muon else MOMENTS) if parameter in state else ()
            assert found.keys() == {WEIGHT, *kept}
            for kind, tensor in found.items():
                if not torch.equal(
                    weights.gather(name, tensor), reader.read(kind, weights.slices[name])
                ):
                    different.append((name, kind))
            if not torch.equal(parameter.data, found[WEIGHT].to(parameter.dtype)):
                different.append((name, "parameter"))
    result = {"different": different, "losses": losses(policy, 5), "end": weights_of(policy)}
    worlds.shutdown()
    return result


def save(directory: str, settings: Settings, checkpoint: str, updates: int = 0) -> Tensor:
    """Save a checkpoint after some updates; return the log-probs after them."""
    policy = actor(directory, settings)
    losses(policy, updates)
    experience = make_experience(policy.runner.shape.vocab_size)
    logprobs = policy.logprobs(experience.tokens, experience.lengths)
    policy.save(Path(checkpoint))
    worlds.shutdown()
    return logprobs


def save_critic(directory: str, layout: dict[str, Any], num_layers: int, checkpoint: str) -> Tensor:
    """Save a critic of the first layers after two updates; return its values."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    path = Path(directory)
    shape = read_shape(path).with_layers(num_layers)
    settings = CriticConfig(parallel=world.layout, optimizer=OPTIMIZER, micro_batch_tokens=24)
    critic = ValueModel(
        shape, world, path, settings, total_updates=4, loss=functools.partial(value_loss, clip=0.2)
    )
    experience = make_experience(shape.vocab_size)
    for _ in range(2):
        critic.train(
            experience.tokens, experience.returns, experience.values, experience.mask.float()
        )
    values = critic.values(experience.tokens, experience.lengths)
    critic.save(Path(checkpoint))
    worlds.shutdown()
    return values


def refusal(directory: str, settings: Settings, checkpoint: str) -> str:
    """Return the error of loading a checkpoint, which must leave the model unchanged."""
    policy = actor(directory, settings)
    before = weights_of(policy)
    try:
        policy.load(Path(checkpoint))
    except Exception as error:
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(policy).items())
        return f"{type(error).__name__}: {error}"
    finally:
        worlds.shutdown()
    return "no error"


def failing_save(
    directory: str, settings: Settings, checkpoint: str, failing_rank: int, failure: str
) -> str:
    """Return the error of a save in which one rank fails: full disk, no memory, no file or a short
    file."""
    policy, write = actor(directory, settings), checkpoints.write_safetensors

    def fail(file: Path, *_: object) -> FileRecord | None:
        if failure == "full":
            raise OSError(28, "No space left on device")
        if failure == "memory":
            raise MemoryError
        if failure == "nothing":
            return None
        file.write_bytes(bytes(8))
        return FileRecord(9, "")

    try:
        if policy.world.rank == failing_rank:
            checkpoints.write_safetensors = fail
        policy.begin_save(Path(checkpoint))
        policy.finish_save()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpoints.write_safetensors = write
        worlds.shutdown()
    return "no error"


def save_after_takeover(directory: str, settings: Settings, run: str) -> list[str]:
    """Return the errors of finishing one checkpoint and beginning another after another trainer has
    taken over the run."""
    policy, config, errors = actor(directory, settings), Config(run=RunConfig(dir=run)), []
    try:
        if policy.world.rank == 0:
            fencing.set_writer_claim(config, fencing.claim_run(config))
        policy.begin_save(Path(run) / "first")
        if policy.world.rank == 0:
            fencing.claim_run(config)
        for save in (policy.finish_save, lambda: policy.begin_save(Path(run) / "second")):
            try:
                save()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        return errors
    finally:
        fencing._writer_claim = None
        worlds.shutdown()
