"""What concerns every model in Megatron: its micro-batches, the policy's tokens where it reads
these, and of one that is trained its optimizer and frozen weights.
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
from aligner.schema.derived import longest_sequence, longest_sequence_keys


def cut_shape(config: Config, model: ModelShape) -> ModelShape:
    """The shape of the critic, or reward model that is trained; of the whole model where
    critic.num_layers is too many."""
    return (
        model if (config.critic.num_layers or 0) > model.num_layers else first_layers(config, model)
    )


def micro_batch_problems(
    config: Config, role: str, settings: MegatronModelConfig, together: int = 1
) -> Iterator[str]:
    """A micro-batch that cannot hold so many of the longest sequence together."""
    tokens, longest = settings.micro_batch_tokens, longest_sequence(config)
    if tokens < together * longest:
        what = (
            "the longest sequence"
            if together == 1
            else f"{together} of the longest sequences, which must be in one micro-batch"
        )
        yield (
            f"{role}.micro_batch_tokens={tokens}: must be at least {together * longest} to hold"
            f" {what} ({longest_sequence_keys(config)})"
        )


def reader_problems(
    config: Config, policy: ModelShape | None, key: str, directory: Path, shape: ModelShape
) -> Iterator[str]:
    """A model that reads the policy's samples, but not as many tokens, or other ones; `key` names
    its directory."""
    named, longest = f"{key}={directory}", longest_sequence(config)
    if shape.max_positions < longest:
        yield (
            f"{named}: the model has {shape.max_positions} positions, but the longest sequence"
            f" has {longest} tokens ({longest_sequence_keys(config)}); set smaller lengths or"
            " another model"
        )
    if (difference := policys_difference(config, directory)) is not None:
        yield (
            f"{named}: {difference}; the model reads the policy's tokens and must have the"
            " policy's tokenizer"
        )
        return
    if policy is None or shape.vocab_size >= policy.vocab_size:
        return
    own = _policy_directory(config)
    written = None if own is None else read_vocabulary(own)
    # The policy may have embeddings to spare.
    vocabulary = policy.vocab_size if written is None else min(policy.vocab_size, len(written))
    if shape.vocab_size < vocabulary:
        yield (
            f"{named}: the model has {shape.vocab_size} tokens in its vocabulary, but the policy"
            f" generates {vocabulary}; set a model with the policy's vocabulary (model.path)"
        )


def policys_difference(config: Config, directory: Path) -> str | None:
    """How the tokens of a directory's tokenizer differ from the policy's, in words; see
    `vocabulary_difference`."""
    own = _policy_directory(config)
    return (
        None
        if own is None
        else vocabulary_difference(read_vocabulary(own), read_vocabulary(directory))
    )


def _policy_directory(config: Config) -> Path | None:
    """None where the model's directory cannot be had, which is told with the model."""
    try:
        return model_directory(config)
    except ConfigError:
        return None


def precision_problems(
    config: Config, role: str, settings: MegatronModelConfig, shape: ModelShape | None
) -> Iterator[str]:
    """What fp8 products cannot be had with."""
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


def frozen_problems(
    role: str, settings: TrainedModelConfig, table: tuple[TensorSpec, ...]
) -> Iterator[str]:
    """Patterns of frozen weights that do not fit the model's."""
    try:
        frozen_names(table, settings.frozen, f"{role}.frozen")
    except ConfigError as error:
        yield str(error)


def optimizer_problems(role: str, settings: TrainedModelConfig, steps: int) -> Iterator[str]:
    """The optimizer of a role that takes so many of its steps."""
    optimizer, key = settings.optimizer, f"{role}.optimizer"
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
        why = (
            f"is not supported with {key}.kind=muon, which keeps its full state on the device of"
            " every data-parallel rank"
        )
        if optimizer.distributed:
            yield f"{key}.distributed=true: {why}; set {key}.distributed=false"
        if optimizer.offload_fraction:
            yield (
                f"{key}.offload_fraction={optimizer.offload_fraction}: {why}; set"
                f" {key}.offload_fraction=0"
            )
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
