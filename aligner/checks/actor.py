"""The policy's layout, frozen weights and adapters against the model."""

from __future__ import annotations

from collections.abc import Iterator

from aligner.errors import ConfigError
from aligner.models.adapters import TARGETS
from aligner.models.frozen import frozen_names
from aligner.models.layouts import layout_problems
from aligner.models.model_source import critic_shape
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TensorSpec, weight_table
from aligner.schema import ActorConfig, Config, TrainedModelConfig


def layout_problems_of_roles(config: Config, shape: ModelShape) -> Iterator[str]:
    """Layouts and frozen weights of the roles that train."""
    layers, trainer = config.critic.num_layers, config.algorithm.trainer
    too_many = layers is not None and layers > shape.num_layers and (config.algorithm.has_critic or trainer == "reward_model")
    if too_many:
        yield f"critic.num_layers={layers}: the model has {shape.num_layers} layers"
    critic = shape if too_many else critic_shape(config, shape)
    trained = critic if trainer == "reward_model" else shape
    yield from layout_problems("actor.parallel", config.actor.parallel, trained)
    yield from _trained_weights(config, trained)
    if config.algorithm.has_critic and not too_many:
        yield from layout_problems("critic.parallel", config.critic.parallel, critic)
        yield from _frozen(config.critic, weight_table(critic, "scalar"), "critic")


def _trained_weights(config: Config, shape: ModelShape) -> Iterator[str]:
    yield from _frozen(config.actor, weight_table(shape), "actor")
    yield from lora_problems("actor", config.actor, shape)


def _frozen(settings: TrainedModelConfig, table: tuple[TensorSpec, ...], role: str) -> Iterator[str]:
    try:
        frozen_names(table, settings.frozen, f"{role}.frozen")
    except ConfigError as error:
        yield str(error)


def lora_problems(key: str, settings: ActorConfig, shape: ModelShape) -> Iterator[str]:
    """One line for each thing that keeps adapters from being trained; `key` is the role's key."""
    lora = settings.lora
    if not lora.rank:
        return
    unknown = [target for target in lora.targets if target not in TARGETS]
    if unknown or not lora.targets:
        yield f"{key}.lora.targets={lora.targets}: allowed are one or more of {', '.join(TARGETS)}"
    if "mlp" in lora.targets and shape.num_experts:
        yield (
            f"{key}.lora.targets={lora.targets}: the experts of a mixture have no adapters; train those of the attention with"
            f" {key}.lora.targets=[attention]"
        )
    if settings.frozen:
        yield f"{key}.frozen={settings.frozen}: with {key}.lora.rank={lora.rank} every weight of the model is frozen already"
