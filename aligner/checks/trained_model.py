"""What concerns every model in Megatron: its micro-batches, and of one that is trained its optimizer and frozen weights."""

from collections.abc import Iterator

from aligner.errors import ConfigError
from aligner.models.model_source import critic_shape
from aligner.models.shape import ModelShape
from aligner.models.trained_weights import frozen_names
from aligner.models.weight_slices import TensorSpec
from aligner.schema import Config, MegatronModelConfig, TrainedModelConfig
from aligner.schema.derived import longest_sequence, longest_sequence_keys


def cut_shape(config: Config, model: ModelShape) -> ModelShape:
    """The shape of the critic, or reward model that is trained; of the whole model where critic.num_layers is too many."""
    return model if (config.critic.num_layers or 0) > model.num_layers else critic_shape(config, model)


def micro_batch_problems(config: Config, role: str, settings: MegatronModelConfig, together: int = 1) -> Iterator[str]:
    """A micro-batch that cannot hold so many of the longest sequence together."""
    tokens, longest = settings.micro_batch_tokens, longest_sequence(config)
    if tokens < together * longest:
        what = "the longest sequence" if together == 1 else f"{together} of the longest sequence together"
        yield (
            f"{role}.micro_batch_tokens={tokens}: must hold {what}, {together * longest} tokens"
            f" ({longest_sequence_keys(config)})"
        )


def frozen_problems(role: str, settings: TrainedModelConfig, table: tuple[TensorSpec, ...]) -> Iterator[str]:
    """Patterns of frozen weights that do not fit the model's."""
    try:
        frozen_names(table, settings.frozen, f"{role}.frozen")
    except ConfigError as error:
        yield str(error)


def optimizer_problems(role: str, settings: TrainedModelConfig, steps: int) -> Iterator[str]:
    """The optimizer of a role that takes so many of its steps."""
    optimizer, key = settings.optimizer, f"{role}.optimizer"
    if optimizer.warmup_steps >= max(steps, 1):
        yield f"{key}.warmup_steps={optimizer.warmup_steps}: the run has {steps} optimizer steps"
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"{key}.min_learning_rate={optimizer.min_learning_rate}: it is above {key}.learning_rate={optimizer.learning_rate}"
        )
    if optimizer.offload_fraction and not optimizer.distributed:
        yield f"{key}.offload_fraction={optimizer.offload_fraction}: needs {key}.distributed=true"
