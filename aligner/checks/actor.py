"""Checks of the section `actor`: layout, micro-batches, precision, optimizer, frozen weights, LoRA.

The checks compare these settings with the model and the algorithm.
"""

from collections.abc import Iterator

from aligner.checks.trained_model import (
    find_frozen_problems,
    find_micro_batch_problems,
    find_optimizer_problems,
    find_precision_problems,
    get_partial_shape,
)
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import TARGETS, weight_table
from aligner.schema import ActorConfig, Config
from aligner.schema.derived import count_policy_updates, get_rows_per_group


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the policy, or of the reward model that is trained."""
    actor = config.actor
    trains_reward_model = config.algorithm.trainer == "reward_model"
    if model is not None:
        # A reward model may have only the first layers of the initial model.
        shape = get_partial_shape(config, model) if trains_reward_model else model
        yield from layout_problems("actor.parallel", actor.parallel, shape)
        yield from find_frozen_problems("actor", actor, weight_table(shape))
        yield from find_lora_problems("actor", actor, shape)
    # The new head starts as zeros, and adapters train only the linear layers before it.
    if trains_reward_model and actor.lora.rank:
        yield (
            f"actor.lora.rank={actor.lora.rank}: LoRA is not supported with"
            " algorithm.trainer=reward_model, because the new scalar head would not be trained;"
            " set actor.lora.rank=0"
        )
    yield from find_micro_batch_problems(config, "actor", actor, get_rows_per_group(config))
    yield from find_precision_problems(config, "actor", actor, model)
    yield from find_optimizer_problems("actor", actor, count_policy_updates(config))


def find_lora_problems(key: str, settings: ActorConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each reason why LoRA adapters cannot be trained.

    Args:
        key: Dotted key of the role, such as `actor`.
        settings: Settings of the role.
        shape: Shape of the model with the adapters.
    """
    lora = settings.lora
    if not lora.rank:
        return
    unknown_targets = [target for target in lora.targets if target not in TARGETS]
    if unknown_targets or not lora.targets:
        yield f"{key}.lora.targets={lora.targets}: must be one or more of {', '.join(TARGETS)}"
    if "mlp" in lora.targets and shape.num_experts:
        yield (
            f"{key}.lora.targets={lora.targets}: LoRA on the experts of a mixture-of-experts"
            f" model is not supported; set {key}.lora.targets=[attention]"
        )
    if settings.frozen:
        yield (
            f"{key}.frozen={settings.frozen}: is not supported with {key}.lora.rank={lora.rank},"
            f" which already freezes every weight of the base model; set {key}.frozen=[]"
        )
