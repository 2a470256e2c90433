"""Checks that the sections of all Megatron models share.

They cover micro-batches, precision and vocabulary, and for trained models also the optimizer and
the frozen weights.
"""

from collections.abc import Iterator
from pathlib import Path

from aligner.errors import ConfigError
from aligner.models.model_source import first_layers, model_directory
from aligner.models.shape import ModelShape
from aligner.models.vocabulary import read_vocabulary, vocabulary_difference
from aligner.models.weight_slices import TensorSpec, frozen_names
from aligner.placement.roles import uses_gpus
from aligner.schema import ActorConfig, Config, MegatronModelConfig, TrainedModelConfig
from aligner.schema.derived import describe_max_sequence_length, get_max_sequence_length


def get_partial_shape(config: Config, model: ModelShape) -> ModelShape:
    """Return the shape of the critic or of the reward model that is trained.

    The shape has the first `critic.num_layers` layers of the model, or all layers if the model has
    fewer; the checks of the critic report that problem.
    """
    return (
        model if (config.critic.num_layers or 0) > model.num_layers else first_layers(config, model)
    )


def find_micro_batch_problems(
    config: Config, role: str, settings: MegatronModelConfig, num_sequences: int = 1
) -> Iterator[str]:
    """Yield a problem if a micro-batch is too small for the longest sequences.

    Args:
        config: Configuration of the run.
        role: Name of the role's section.
        settings: Settings of the role.
        num_sequences: Number of sequences that must be in the same micro-batch.
    """
    # A sequence is never split over micro-batches.
    tokens = settings.micro_batch_tokens
    max_length = get_max_sequence_length(config)
    if tokens < num_sequences * max_length:
        content = (
            "the longest sequence"
            if num_sequences == 1
            else f"{num_sequences} of the longest sequences, which must be in one micro-batch"
        )
        yield (
            f"{role}.micro_batch_tokens={tokens}: must be at least {num_sequences * max_length} to"
            f" hold {content} ({describe_max_sequence_length(config)})"
        )


def find_reader_problems(
    config: Config, policy: ModelShape | None, key: str, directory: Path, shape: ModelShape
) -> Iterator[str]:
    """Yield problems of a model that reads the policy's samples, such as a critic or a teacher.

    The model must have enough positions, and the policy's tokenizer and vocabulary.

    Args:
        config: Configuration of the run.
        policy: Shape of the policy; None if it could not be read.
        key: Dotted key that names the model's directory.
        directory: Directory of the model.
        shape: Shape of the model.
    """
    setting = f"{key}={directory}"
    max_length = get_max_sequence_length(config)
    if shape.max_positions < max_length:
        yield (
            f"{setting}: the model has {shape.max_positions} positions, but the longest sequence"
            f" has {max_length} tokens ({describe_max_sequence_length(config)}); set smaller"
            " lengths or another model"
        )
    if (difference := find_tokenizer_difference(config, directory)) is not None:
        yield (
            f"{setting}: {difference}; the model reads the policy's tokens and must have the"
            " policy's tokenizer"
        )
        return
    if policy is None or shape.vocab_size >= policy.vocab_size:
        return

    policy_directory = _find_policy_directory(config)
    tokens = None if policy_directory is None else read_vocabulary(policy_directory)
    # The embedding matrix of the policy may have more rows than its tokenizer has tokens.
    vocabulary = policy.vocab_size if tokens is None else min(policy.vocab_size, len(tokens))
    if shape.vocab_size < vocabulary:
        yield (
            f"{setting}: the model has {shape.vocab_size} tokens in its vocabulary, but the policy"
            f" generates {vocabulary}; set a model with the policy's vocabulary (model.path)"
        )


def find_tokenizer_difference(config: Config, directory: Path) -> str | None:
    """Return the difference between a directory's tokenizer and the policy's, in words.

    Returns None if there is no difference, or if a tokenizer cannot be read. See
    `vocabulary_difference`.
    """
    policy_directory = _find_policy_directory(config)
    return (
        None
        if policy_directory is None
        else vocabulary_difference(read_vocabulary(policy_directory), read_vocabulary(directory))
    )


def _find_policy_directory(config: Config) -> Path | None:
    """Return the policy's model directory; None if it cannot be determined.

    The check of the policy's shape reports that problem.
    """
    try:
        return model_directory(config)
    except ConfigError:
        return None


def find_precision_problems(
    config: Config, role: str, settings: MegatronModelConfig, shape: ModelShape | None
) -> Iterator[str]:
    """Yield settings with which fp8 matmuls are not supported."""
    if settings.precision != "fp8":
        return
    key = f"{role}.precision=fp8"
    if not uses_gpus(config):
        yield (
            f"{key}: requires GPUs with transformer-engine, but this run uses no GPUs; set auto,"
            " fp32 or bf16"
        )
    if isinstance(settings, ActorConfig) and settings.lora.rank:
        yield (
            f"{key}: is not supported with {role}.lora.rank={settings.lora.rank}, because layers"
            f" with LoRA do not use transformer-engine; set {role}.precision=bf16"
        )
    if shape is not None and shape.num_experts:
        yield (
            f"{key}: is not supported for mixture-of-experts models, whose experts receive varying"
            f" numbers of tokens; set {role}.precision=bf16"
        )


def find_frozen_problems(
    role: str, settings: TrainedModelConfig, table: tuple[TensorSpec, ...]
) -> Iterator[str]:
    """Yield problems of the patterns of frozen weights, such as a pattern without a match.

    Args:
        role: Name of the role's section.
        settings: Settings of the role.
        table: Weights of the model.
    """
    try:
        frozen_names(table, settings.frozen, f"{role}.frozen")
    except ConfigError as error:
        yield str(error)


def find_optimizer_problems(role: str, settings: TrainedModelConfig, steps: int) -> Iterator[str]:
    """Yield problems of the optimizer of a role.

    Args:
        role: Name of the role's section.
        settings: Settings of the role.
        steps: Number of optimizer steps of the role in the run.
    """
    optimizer = settings.optimizer
    key = f"{role}.optimizer"
    # The learning rate would never reach its peak.
    if optimizer.warmup_steps >= max(steps, 1):
        yield (
            f"{key}.warmup_steps={optimizer.warmup_steps}: must be below {steps}, the number of"
            " optimizer steps of the run"
        )
    if optimizer.min_learning_rate > optimizer.learning_rate:
        yield (
            f"{key}.min_learning_rate={optimizer.min_learning_rate}: must be at most"
            f" {key}.learning_rate={optimizer.learning_rate}"
        )
    if optimizer.kind == "muon":
        reason = (
            f"is not supported with {key}.kind=muon, which keeps its full state on the device of"
            " every data-parallel rank"
        )
        if optimizer.distributed:
            yield f"{key}.distributed=true: {reason}; set {key}.distributed=false"
        if optimizer.offload_fraction:
            yield (
                f"{key}.offload_fraction={optimizer.offload_fraction}: {reason}; set"
                f" {key}.offload_fraction=0"
            )
    # Megatron-LM has the same requirements: only the distributed optimizer gathers parameters.
    if optimizer.overlap_param_gather and not (
        optimizer.distributed and optimizer.overlap_grad_reduce
    ):
        yield (
            f"{key}.overlap_param_gather=true: requires {key}.distributed=true and"
            f" {key}.overlap_grad_reduce=true"
        )
    if optimizer.offload_fraction and not optimizer.distributed and optimizer.kind != "muon":
        yield (
            f"{key}.offload_fraction={optimizer.offload_fraction}: requires {key}.distributed=true"
        )
