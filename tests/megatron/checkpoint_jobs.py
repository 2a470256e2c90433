"""What the worker ranks run for the tests of checkpoints and export."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.algorithms.losses import value_loss
from aligner.data import claim
from aligner.data.checkpoint_files import MOMENTS, MOMENTUM, WEIGHT, CheckpointReader
from aligner.data.checksums import FileRecord
from aligner.data.model_directory import read_shape
from aligner.megatron import model_checkpoint as checkpoints
from aligner.megatron import world as worlds
from aligner.megatron.policy import Policy
from aligner.megatron.value_model import ValueModel
from aligner.models.trained_weights import is_layer_matrix
from aligner.schema import ActorConfig, Config, CriticConfig, LoraConfig, ParallelConfig, RunConfig
from tests.megatron.jobs import OPTIMIZER, TEMPERATURE, loss, make_experience

Settings = dict[str, Any]
"""Keys of the actor's section: `parallel` as a layout, `optimizer` and `lora` as what differs."""


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
    """This rank's slices of the model's own weights and of its adapters, as the parameters have
    them."""
    found = {}
    for weights in {
        id(weights): weights for weights in (policy.runner.weights, policy.runner.trained)
    }.values():
        found |= {
            name: weights.gather(name, weights.parameter(name).data).clone() for name in weights
        }
    return found


def save_and_go_on(directory: str, settings: Settings, checkpoint: str) -> dict[str, Any]:
    """Two updates, a checkpoint, and the losses of the next five, which begin while it is
    written."""
    policy = actor(directory, settings)
    losses(policy, 2)
    policy.begin_save(Path(checkpoint))
    result = {"losses": losses(policy, 5), "end": weights_of(policy)}
    assert not Path(checkpoint).exists(), "it has its final name only when it is complete"
    policy.finish_save()
    worlds.shutdown()
    return result


def load_and_go_on(directory: str, settings: Settings, checkpoint: str) -> dict[str, Any]:
    """The losses of five updates from a checkpoint; and the tensors that are not, bit for bit, what
    lies in the files."""
    policy = actor(directory, settings)
    policy.load(Path(checkpoint))
    runner, reader = policy.runner, CheckpointReader(Path(checkpoint))
    state = runner.optimizer_state()
    different = []
    for weights in {id(weights): weights for weights in (runner.weights, runner.trained)}.values():
        for name in weights:
            parameter = weights.parameter(name)
            found = {WEIGHT: parameter.data}
            if parameter in state:
                # Brought together on every rank in turn, so that each sees all of what it takes
                # part in.
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
    """A checkpoint after some updates; the log-probs by then."""
    policy = actor(directory, settings)
    losses(policy, updates)
    experience = make_experience(policy.runner.shape.vocab_size)
    logprobs = policy.logprobs(experience.tokens, experience.lengths)
    policy.save(Path(checkpoint))
    worlds.shutdown()
    return logprobs


def save_critic(directory: str, layout: dict[str, Any], num_layers: int, checkpoint: str) -> Tensor:
    """A critic of the first layers after two updates; its values by then."""
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    path = Path(directory)
    shape = dataclasses.replace(read_shape(path), num_layers=num_layers)
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
    """The error that a checkpoint gives; nothing of the model may have changed by then."""
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
    """The error of a save in which one rank's disk is full, or its memory, or it writes nothing, or
    too little."""
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


def save_of_a_lost_run(directory: str, settings: Settings, run: str) -> list[str]:
    """The errors of a checkpoint that is finished, and of one that is begun, when another has taken
    the run."""
    policy, config, errors = actor(directory, settings), Config(run=RunConfig(dir=run)), []
    try:
        if policy.world.rank == 0:
            claim.write_as(config, claim.take_run(config))
        policy.begin_save(Path(run) / "first")
        if policy.world.rank == 0:
            claim.take_run(config)
        for save in (policy.finish_save, lambda: policy.begin_save(Path(run) / "second")):
            try:
                save()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
        return errors
    finally:
        claim._own = None
        worlds.shutdown()
