"""Automatic values of keys that the user did not set (`run.automatic`), with the reasons.

The values depend on the model's size, the data and the machine. `choose` applies the rules in
`RULES` in order. Each rule reads the configuration with the choices of the earlier rules, so that
the automatic values fit the user's own values.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aligner.config.layout_search import find_layout
from aligner.config.situation import Choice, Situation, format_count
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.data import AUTO_LAYOUT
from aligner.schema.derived import GROUP_ESTIMATORS, count_policy_updates
from aligner.schema.keys import is_read, with_values
from aligner.schema.reward_sources import has_reward_model

Rule = Callable[[Config, Situation], Iterator[Choice]]
"""Function that yields the automatic values of some keys."""


@dataclass(frozen=True)
class Size:
    """Learning rates and batch size for models of one size class."""

    max_parameters: float
    """Maximum number of parameters of the size class."""
    online: float
    """Learning rate of a policy that trains on its own samples."""
    critic: float
    """Learning rate of the critic."""
    imitation: float
    """Learning rate of supervised fine-tuning and of reward models."""
    preference: float
    """Learning rate of DPO."""
    samples_on_cpu: int
    """Samples per step on two cores. Up to 3e8 parameters, a step then takes about 20 s."""


SIZES = (
    Size(3e7, online=1e-4, critic=5e-4, imitation=1e-3, preference=1e-4, samples_on_cpu=256),
    Size(3e8, online=2e-5, critic=1e-4, imitation=1e-4, preference=1e-5, samples_on_cpu=16),
    Size(1e9, online=5e-6, critic=2e-5, imitation=5e-5, preference=2e-6, samples_on_cpu=16),
    Size(4e9, online=2e-6, critic=1e-5, imitation=2e-5, preference=1e-6, samples_on_cpu=16),
    Size(2e10, online=1e-6, critic=9e-6, imitation=1e-5, preference=5e-7, samples_on_cpu=16),
    Size(math.inf, online=5e-7, critic=9e-6, imitation=5e-6, preference=3e-7, samples_on_cpu=16),
)
# Maximum number of samples per step on CPUs, for any number of cores.
_MAX_SAMPLES_ON_CPU = 256
# Samples per step, by the minimum number of GPUs.
_SAMPLES_ON_GPUS = {1: 128, 2: 256, 8: 512, 64: 1024}
# Learning rate of LoRA adapters as a multiple of the learning rate of full fine-tuning.
_LORA_RATE_FACTOR = 10.0
# Rank of the LoRA adapters for a model that does not fit into memory without LoRA.
_LORA_RANK = 16
# Samples per prompt of algorithms that compare these samples.
_GROUP_SIZE = 8
# Samples per prompt of other algorithms.
_SAMPLES_WITHOUT_GROUP = 4
UNREAD_REASON = "default, because the records could not be read or the tokenizer does not exist yet"
"""Reason of a choice that does not take the data into account."""
# Number of parameters from which loading the weights takes minutes.
_LARGE_MODEL = 5e9


def choose(
    config: Config, situation: Situation, rules: Sequence[Rule] | None = None
) -> tuple[Config, tuple[Choice, ...]]:
    """Choose values for the keys that the run reads and that the user did not set.

    Args:
        config: Composed configuration.
        situation: Model, data, machine, and the keys that the user set.
        rules: Rules to apply; None applies all of them.

    Returns:
        The configuration with the chosen values, and the choices in the order in which they were
        made.

    Raises:
        ConfigError: The run does not fit into memory with any layout.
    """
    choices: list[Choice] = []
    for rule in RULES if rules is None else rules:
        # A rule keeps the configuration that it was called with, without its own choices.
        for choice in rule(config, situation):
            if choice.key not in situation.user_keys and is_read(config, choice.key):
                config = with_values(config, {choice.key: choice.value})
                choices.append(choice)
    return config, tuple(choices)


def get_size(parameters: int) -> Size:
    """Return the size class of a model with this number of parameters."""
    return next(size for size in SIZES if parameters <= size.max_parameters)


def get_samples_per_step(situation: Situation) -> int:
    """Return the number of samples per step that suits the model's size and the machine."""
    gpus = situation.machine.gpus
    if not gpus:
        samples_on_two_cores = get_size(situation.parameters).samples_on_cpu
        return min(
            _MAX_SAMPLES_ON_CPU,
            max(samples_on_two_cores, samples_on_two_cores * situation.machine.cores // 2),
        )
    return max(samples for min_gpus, samples in _SAMPLES_ON_GPUS.items() if gpus >= min_gpus)


def _choose_record_layout(config: Config, situation: Situation) -> Iterator[Choice]:
    """Name the published layout of the records, to which all records must then conform."""
    data = situation.data
    if data is not None and data.layout and config.data.format == AUTO_LAYOUT:
        yield Choice("data.format", data.layout, f"in the records {data.layout_text}")


def _choose_fields(config: Config, situation: Situation) -> Iterator[Choice]:
    """Map the field names of the records to aligner's field names."""
    data = situation.data
    if data is not None and data.fields:
        descriptions = ", ".join(
            f"the {'template' if '{' in source else 'field'} {source!r} is the {name}"
            for name, source in data.fields.items()
        )
        yield Choice("data.fields", dict(data.fields), f"in the records {descriptions}")


def _choose_prompt_length(config: Config, situation: Situation) -> Iterator[Choice]:
    """Fit the maximum prompt length to the data."""
    data = situation.data
    # At least half of the model's positions are reserved for the response.
    upper_bound = max(1, situation.shape.max_positions // 2)
    if data is None:
        limit = min(config.data.max_prompt_tokens, upper_bound)
        yield Choice("data.max_prompt_tokens", limit, UNREAD_REASON)
        return

    # A few very long prompts must not determine the size of every batch.
    has_outliers = data.longest_prompt > 2 * data.prompt_length_p99
    prompt_length = data.prompt_length_p99 if has_outliers else data.longest_prompt

    limit = min(_round_up(prompt_length), upper_bound)
    reason = (
        f"the longest prompt of {data.read_records_text} has {data.longest_prompt} tokens; 99% of"
        f" the prompts have at most {data.prompt_length_p99} tokens"
    )
    yield Choice("data.max_prompt_tokens", limit, reason)
    if data.longest_prompt > limit or not data.is_complete:
        yield Choice("data.long_prompts", "drop", "longer prompts are dropped and counted")


def _choose_response_length(config: Config, situation: Situation) -> Iterator[Choice]:
    """Fit the maximum response length to the answers or responses in the data."""
    data = situation.data
    gpus = situation.machine.gpus
    available_tokens = situation.shape.max_positions - config.data.max_prompt_tokens
    answer = data.longest_answer if data is not None else 0
    if config.algorithm.generates_samples:
        if gpus:
            min_tokens = 1024 if situation.parameters > 4e9 else 512
            max_tokens = 2048
            device_text = "on GPUs"
        else:
            min_tokens = 64
            max_tokens = 128
            device_text = "on CPUs, where generation is slow"
        tokens = min(max_tokens, max(min_tokens, _round_up(2 * answer)))
        if answer:
            reason = (
                f"twice the longest answer in the records that were read ({answer} tokens), limited"
                f" to the range {min_tokens} to {max_tokens} {device_text}"
            )
        else:
            reason = f"the default {device_text}, because no answers were found in the data"
        key = "rollout.max_response_tokens"
    elif answer:
        # Records that were not read may have longer responses: a quarter is added for them.
        tokens = _round_up(answer if data is not None and data.is_complete else answer * 5 // 4)
        reason = f"the longest response in the records that were read has {answer} tokens"
        key = "data.max_response_tokens"
    else:
        tokens = config.data.max_response_tokens
        reason = UNREAD_REASON
        key = "data.max_response_tokens"

    if tokens > available_tokens:
        reason = (
            f"{reason}; the model has {situation.shape.max_positions} positions, of which"
            f" {available_tokens} are available for the response"
        )
    yield Choice(key, max(1, min(tokens, available_tokens)), reason)

    # Without this choice, the first longer record would end the run.
    if not config.algorithm.generates_samples and (
        tokens > available_tokens or (data is not None and not data.is_complete)
    ):
        yield Choice(
            "data.skip_bad_records",
            True,
            "records with longer responses are skipped and counted",
        )


def _choose_samples_per_prompt(config: Config, situation: Situation) -> Iterator[Choice]:
    """Choose the samples per prompt: more if the algorithm compares the samples of a prompt."""
    settings = config.algorithm
    compares_samples = (
        settings.advantage in GROUP_ESTIMATORS
        or settings.loss == "copg"
        or settings.train_on != "all"
    )
    compares_samples = compares_samples or settings.trainer == "preferences"
    verb = "compares" if compares_samples else "does not compare"
    reason = f"{settings.name} {verb} the samples of a prompt"
    yield Choice(
        "rollout.samples_per_prompt",
        _GROUP_SIZE if compares_samples else _SAMPLES_WITHOUT_GROUP,
        reason,
    )


def _choose_batch(config: Config, situation: Situation) -> Iterator[Choice]:
    """Choose the prompts per step, and the batch size of offline trainers."""
    gpus = situation.machine.gpus
    samples = get_samples_per_step(situation)
    machine_text = f"on {format_count(situation.machine.cores, 'core')}"
    if gpus:
        machine_text = (
            f"with {gpus} GPUs per node"
            if situation.machine.max_nodes > 1
            else f"on {format_count(gpus, 'GPU')}"
        )

    records = situation.data.records if situation.data is not None else None
    unit = max(1, gpus)  # so that all ranks have the same amount of work with any layout
    prompts = max(1, samples // config.rollout.samples_per_prompt)
    if records is not None and records < prompts:
        prompts = max(1, records)
    reason = (
        f"{samples} samples per step {machine_text} for a model with {situation.parameters_text}"
    )
    # -(-a // b) rounds the quotient up.
    yield Choice("rollout.prompts_per_step", -(-prompts // unit) * unit, reason)

    rows = samples // 4 if gpus else max(8, samples // 8)
    yield Choice(
        "data.batch_size",
        -(-rows // unit) * unit,
        f"sequences per step {machine_text} for a model with {situation.parameters_text}",
    )


def _choose_micro_batches(config: Config, situation: Situation) -> Iterator[Choice]:
    """Split the rollout into micro-batches if models score the samples."""
    has_scoring_models = (
        has_reward_model(config.reward) or config.algorithm.has_critic or config.has_teacher
    )
    # Each micro-batch must still divide into equal parts for all ranks.
    is_divisible = config.rollout.prompts_per_step % (2 * max(1, situation.machine.gpus)) == 0
    if has_scoring_models and is_divisible:
        micro_batches = 2
        reason = "models score one micro-batch while the next micro-batch is generated"
    else:
        micro_batches = 1
        reason = "generating all samples of a step in one batch is fastest"
    yield Choice("rollout.micro_batches", micro_batches, reason)


def _choose_steps(config: Config, situation: Situation) -> Iterator[Choice]:
    """Choose the number of steps from the number of records."""
    data = situation.data
    if data is None:
        yield Choice("run.steps", 100, UNREAD_REASON)
        return

    # Offline trainers read all their records; an online run may be longer or shorter.
    is_online = config.algorithm.trainer == "online"
    passes = 2 if config.algorithm.trainer in ("online", "sft") else 1
    rows = (
        config.rollout.prompts_per_step
        if config.algorithm.generates_samples
        else config.data.batch_size
    )
    needed_steps = max(1, math.ceil(passes * data.records / rows))
    min_steps, max_steps = (20, 500) if situation.machine.gpus else (20, 50)
    # Models of the smallest size class take less than a second per step.
    if not situation.machine.gpus and situation.parameters <= SIZES[0].max_parameters:
        min_steps = 50
        max_steps = 200
    steps = min(max_steps, max(min_steps, needed_steps)) if is_online else needed_steps
    reason = (
        f"{format_count(needed_steps, 'step')} of {rows} records"
        f" {'cover' if needed_steps > 1 else 'covers'} the {data.records} records"
        f" {'twice' if passes == 2 else 'once'}"
    )
    if is_online:
        reason = f"{reason}; limited to the range {min_steps} to {max_steps} on this machine"
    yield Choice("run.steps", steps, reason)


def _choose_adapters(config: Config, situation: Situation) -> Iterator[Choice]:
    """Use LoRA if the model fits into GPU memory only with LoRA."""
    if (
        not situation.machine.gpus
        or config.algorithm.trainer == "reward_model"
        or _has_layout(config, situation)
    ):
        return

    values: dict[str, Any] = {"actor.lora.rank": _LORA_RANK}
    if situation.shape.num_experts:  # LoRA does not support experts
        values["actor.lora.targets"] = ["attention"]
    if _has_layout(with_values(config, values), situation):
        reason = (
            "LoRA, because the weights, gradients and optimizer state of a model with"
            f" {situation.parameters_text} do not fit into GPU memory"
        )
        yield from (Choice(key, value, reason) for key, value in values.items())


def _has_layout(config: Config, situation: Situation) -> bool:
    """Return whether the run fits into memory with at least one layout."""
    try:
        find_layout(config, situation)
    except ConfigError:
        return False
    return True


def _choose_learning_rates(config: Config, situation: Situation) -> Iterator[Choice]:
    """Choose the learning rates from the model's size, the trainer and LoRA."""
    size = get_size(situation.parameters)
    trainer = config.algorithm.trainer
    rates = {"online": size.online, "dpo": size.preference}
    rate = rates.get(trainer, size.imitation)
    has_lora = config.actor.lora.rank > 0
    reason = (
        f"for algorithm.trainer={trainer} and a model with {situation.parameters_text}; larger"
        " models need lower rates"
    ) + (f"; multiplied by {_LORA_RATE_FACTOR:g} for LoRA" if has_lora else "")
    # Rounding avoids values such as 9.999999999999999e-06 instead of 1e-05.
    yield Choice(
        "actor.optimizer.learning_rate",
        float(f"{rate * _LORA_RATE_FACTOR:.3g}") if has_lora else rate,
        reason,
    )
    yield Choice(
        "critic.optimizer.learning_rate",
        size.critic,
        f"for a critic with {situation.parameters_text}",
    )


def _choose_warmup(config: Config, situation: Situation) -> Iterator[Choice]:
    """Choose the learning-rate warm-up of the policy."""
    updates = count_policy_updates(config)
    if warmup := min(10, updates // 10):
        yield Choice(
            "actor.optimizer.warmup_steps",
            warmup,
            f"10% of the {updates} updates, but at most 10, because Adam's statistics are"
            " unreliable in the first updates",
        )


def _choose_timeouts(config: Config, situation: Situation) -> Iterator[Choice]:
    """Raise the start timeouts for models that take minutes to load."""
    if situation.parameters < _LARGE_MODEL:
        return
    factor = 2 if situation.parameters > get_size(int(_LARGE_MODEL)).max_parameters else 1
    reason = f"loading a model with {situation.parameters_text} takes minutes"
    yield Choice("server.start_timeout_s", 900.0 * factor, reason)
    yield Choice("server.request_timeout_s", 1000.0 * factor, reason)
    yield Choice("cluster.collective_timeout_s", 1200.0 * factor, reason)


def _choose_device_memory(config: Config, situation: Situation) -> Iterator[Choice]:
    """Set the memory of one GPU, rounded down to whole GiB."""
    if situation.machine.gpus:
        gib = math.floor(situation.machine.gpu_memory_gib)
        yield Choice(
            "cluster.device_memory_gib", float(gib), "memory of one GPU, excluding the CUDA context"
        )


def _choose_layout(config: Config, situation: Situation) -> Iterator[Choice]:
    """Choose the fastest layout that fits into memory."""
    yield from find_layout(config, situation)


def _choose_staleness(config: Config, situation: Situation) -> Iterator[Choice]:
    """Generate synchronously if the engine is colocated."""
    if config.engine.placement == "colocated":
        reason = (
            "the engine shares the trainer's devices, so samples always come from the newest"
            " weights (docs/pipeline.md)"
        )
        yield Choice("rollout.max_staleness", 0, reason)


def _round_up(tokens: int) -> int:
    """Return a number of tokens, rounded up to a multiple of 16."""
    return max(16, -(-tokens // 16) * 16)


DATA_RULES: tuple[Rule, ...] = (
    _choose_record_layout,
    _choose_fields,
    _choose_prompt_length,
    _choose_response_length,
)
"""Rules of the keys that determine how records are read."""
RULES: tuple[Rule, ...] = (
    *DATA_RULES,
    _choose_samples_per_prompt,
    _choose_batch,
    _choose_micro_batches,
    _choose_steps,
    _choose_adapters,
    _choose_learning_rates,
    _choose_warmup,
    _choose_timeouts,
    _choose_device_memory,
    _choose_layout,
    _choose_staleness,
)
"""Rules of `choose`, in the order in which they are applied."""
