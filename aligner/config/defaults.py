"""The values of keys that nobody gave (`run.automatic`): chosen from the model's size, the data and
the machine, with reasons.

`choose` goes through `RULES` in turn: each reads the configuration as the rules before it have left
it, so that a value which the user gave is what the others are fitted to.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aligner.config.layout_search import find_layout
from aligner.config.situation import Choice, Situation, counted
from aligner.errors import ConfigError
from aligner.schema import Config
from aligner.schema.derived import GROUPED, policy_updates
from aligner.schema.keys import is_read, with_values
from aligner.schema.reward_sources import has_reward_model


@dataclass(frozen=True)
class Size:
    """What goes with models of up to so many parameters."""

    parameters: float
    online: float
    """Learning rate of a policy that learns from its own samples."""
    critic: float
    imitation: float
    """Of demonstrations, and of a reward model."""
    preference: float
    """Of DPO."""
    samples_on_cpu: int
    """A step's on two cores, where it then takes some 20 s up to 3e8 parameters."""


SIZES = (
    Size(3e7, online=1e-4, critic=5e-4, imitation=1e-3, preference=1e-4, samples_on_cpu=256),
    Size(3e8, online=2e-5, critic=1e-4, imitation=1e-4, preference=1e-5, samples_on_cpu=16),
    Size(1e9, online=5e-6, critic=2e-5, imitation=5e-5, preference=2e-6, samples_on_cpu=16),
    Size(4e9, online=2e-6, critic=1e-5, imitation=2e-5, preference=1e-6, samples_on_cpu=16),
    Size(2e10, online=1e-6, critic=9e-6, imitation=1e-5, preference=5e-7, samples_on_cpu=16),
    Size(math.inf, online=5e-7, critic=9e-6, imitation=5e-6, preference=3e-7, samples_on_cpu=16),
)
_SAMPLES_ON_CPU = 256
"""Most of a step, however many cores there are."""
_SAMPLES_ON_GPUS = {1: 128, 2: 256, 8: 512, 64: 1024}
"""A step's, on at least so many GPUs."""
_LORA = 10.0
"""Adapters take learning rates that are so many times those of the weights themselves."""
_RANK = 16
"""Of adapters, where they are what fits."""
_GROUP, _ALONE = 8, 4
"""Samples a prompt of algorithms that compare them, and of others."""
UNREAD = "default, because the records could not be read or the tokenizer does not exist yet"
_LARGE = 5e9
"""Parameters from which reading weights takes minutes."""


def choose(config: Config, situation: Situation) -> tuple[Config, tuple[Choice, ...]]:
    """The configuration with values for keys that nobody gave and that the run reads, and which
    those are."""
    made: list[Choice] = []
    for rule in RULES:
        for choice in rule(config, situation):
            if choice.key not in situation.given and is_read(config, choice.key):
                config = with_values(config, {choice.key: choice.value})
                made.append(choice)
    return config, tuple(made)


def size_of(parameters: int) -> Size:
    """The row of `SIZES` for a model."""
    return next(size for size in SIZES if parameters <= size.parameters)


def samples_at_once(situation: Situation) -> int:
    """A step's samples, or rows, that suit the machine."""
    gpus = situation.machine.gpus
    if not gpus:
        on_two_cores = size_of(situation.parameters).samples_on_cpu
        return min(_SAMPLES_ON_CPU, max(on_two_cores, on_two_cores * situation.machine.cores // 2))
    return max(samples for least, samples in _SAMPLES_ON_GPUS.items() if gpus >= least)


def _fields(config: Config, situation: Situation) -> Iterator[Choice]:
    data = situation.data
    if data is not None and data.fields:
        named = ", ".join(
            f"the {'template' if '{' in theirs else 'field'} {theirs!r} is the {ours}"
            for ours, theirs in data.fields.items()
        )
        yield Choice("data.fields", dict(data.fields), f"in the records {named}")


def _prompt_lengths(config: Config, situation: Situation) -> Iterator[Choice]:
    data = situation.data
    # Half of the positions at least are for what follows.
    room = max(1, situation.shape.max_positions // 2)
    if data is None:
        limit = min(config.data.max_prompt_tokens, room)
        yield Choice("data.max_prompt_tokens", limit, UNREAD)
        return
    wanted = (
        data.longest_prompt if data.longest_prompt <= 2 * data.most_prompts else data.most_prompts
    )
    limit = min(_rounded(wanted), room)
    why = (
        f"the longest prompt of {data.looked_at} has {data.longest_prompt} tokens; 99% of the"
        f" prompts have at most {data.most_prompts} tokens"
    )
    yield Choice("data.max_prompt_tokens", limit, why)
    if data.longest_prompt > limit or not data.is_whole:
        yield Choice("data.long_prompts", "drop", "longer prompts are dropped and counted")


def _response_lengths(config: Config, situation: Situation) -> Iterator[Choice]:
    data, gpus = situation.data, situation.machine.gpus
    room = situation.shape.max_positions - config.data.max_prompt_tokens
    answer = data.longest_answer if data is not None else 0
    if config.algorithm.generates:
        usual = (1024 if situation.parameters > 4e9 else 512) if gpus else 64
        most, where = (2048, "on GPUs") if gpus else (128, "on CPUs, where generation is slow")
        wanted = min(most, max(usual, _rounded(2 * answer)))
        why = (
            f"twice the longest answer in the records that were read ({answer} tokens), limited to"
            f" the range {usual} to {most} {where}"
            if answer
            else f"the default {where}, because no answers were found in the data"
        )
        key = "rollout.max_response_tokens"
    elif answer:
        wanted = _rounded(answer if data is not None and data.is_whole else answer * 5 // 4)
        why = f"the longest response in the records that were read has {answer} tokens"
        key = "data.max_response_tokens"
    else:
        wanted, why, key = config.data.max_response_tokens, UNREAD, "data.max_response_tokens"
    if wanted > room:
        why = (
            f"{why}; the model has {situation.shape.max_positions} positions, of which {room} are"
            " available for the response"
        )
    yield Choice(key, max(1, min(wanted, room)), why)
    if not config.algorithm.generates and (
        wanted > room or (data is not None and not data.is_whole)
    ):
        yield Choice(
            "data.skip_bad_records",
            True,
            "records with longer responses are skipped and counted",
        )


def _samples(config: Config, situation: Situation) -> Iterator[Choice]:
    settings = config.algorithm
    compares = (
        settings.advantage in GROUPED or settings.loss == "copg" or settings.train_on != "all"
    )
    compares = compares or settings.trainer == "preferences"
    why = (
        f"{settings.name} compares the samples of a prompt"
        if compares
        else f"{settings.name} does not compare the samples of a prompt"
    )
    yield Choice("rollout.samples_per_prompt", _GROUP if compares else _ALONE, why)


def _batch(config: Config, situation: Situation) -> Iterator[Choice]:
    gpus, samples = situation.machine.gpus, samples_at_once(situation)
    where = f"on {counted(situation.machine.cores, 'core')}"
    if gpus:
        where = (
            f"with {gpus} GPUs per node"
            if situation.machine.most_nodes > 1
            else f"on {counted(gpus, 'GPU')}"
        )
    records = situation.data.records if situation.data is not None else None
    unit = max(1, gpus)  # every rank, at any layout, has as much to do
    prompts = max(1, samples // config.rollout.samples_per_prompt)
    if records is not None and records < prompts:
        prompts = max(1, records)
    why = f"{samples} samples per step {where} for a model with {situation.billions}"
    yield Choice("rollout.prompts_per_step", -(-prompts // unit) * unit, why)
    rows = samples // 4 if gpus else max(8, samples // 8)
    yield Choice(
        "data.batch_size",
        -(-rows // unit) * unit,
        f"sequences per step {where} for a model with {situation.billions}",
    )


def _parts(config: Config, situation: Situation) -> Iterator[Choice]:
    scores = has_reward_model(config.reward) or config.algorithm.has_critic or config.has_teacher
    parts = (
        2
        if scores and config.rollout.prompts_per_step % (2 * max(1, situation.machine.gpus)) == 0
        else 1
    )
    why = (
        "models score one micro-batch while the next micro-batch is generated"
        if parts > 1
        else "generating all samples of a step in one batch is fastest"
    )
    yield Choice("rollout.micro_batches", parts, why)


def _steps(config: Config, situation: Situation) -> Iterator[Choice]:
    data = situation.data
    if data is None:
        yield Choice("run.steps", 100, UNREAD)
        return
    online = config.algorithm.trainer == "online"
    passes = 2 if config.algorithm.trainer in ("online", "sft") else 1
    rows = config.rollout.prompts_per_step if config.algorithm.generates else config.data.batch_size
    wanted = max(1, math.ceil(passes * data.records / rows))
    least, most = (20, 500) if situation.machine.gpus else (20, 50)
    # a step takes less than a second
    if not situation.machine.gpus and situation.parameters <= SIZES[0].parameters:
        least, most = 50, 200
    steps = min(most, max(least, wanted)) if online else wanted
    why = (
        f"{counted(wanted, 'step')} of {rows} records {'cover' if wanted > 1 else 'covers'} the"
        f" {data.records} records {'twice' if passes == 2 else 'once'}"
    )
    yield Choice(
        "run.steps",
        steps,
        f"{why}; limited to the range {least} to {most} on this machine" if online else why,
    )


def _adapters(config: Config, situation: Situation) -> Iterator[Choice]:
    if (
        not situation.machine.gpus
        or config.algorithm.trainer == "reward_model"
        or _has_layout(config, situation)
    ):
        return
    values: dict[str, Any] = {"actor.lora.rank": _RANK}
    if situation.shape.num_experts:  # which have no adapters
        values["actor.lora.targets"] = ["attention"]
    if _has_layout(with_values(config, values), situation):
        why = (
            "LoRA, because the weights, gradients and optimizer state of a model with"
            f" {situation.billions} do not fit into GPU memory"
        )
        yield from (Choice(key, value, why) for key, value in values.items())


def _has_layout(config: Config, situation: Situation) -> bool:
    try:
        find_layout(config, situation)
    except ConfigError:
        return False
    return True


def _learning_rates(config: Config, situation: Situation) -> Iterator[Choice]:
    size, trainer = size_of(situation.parameters), config.algorithm.trainer
    rate = {"online": size.online, "dpo": size.preference}.get(trainer, size.imitation)
    adapted = config.actor.lora.rank > 0
    why = (
        f"for algorithm.trainer={trainer} and a model with {situation.billions}; larger models"
        " need lower rates"
    ) + (f"; multiplied by {_LORA:g} for LoRA" if adapted else "")
    # As a person would write it: 1e-05, not 9.999999999999999e-06.
    yield Choice(
        "actor.optimizer.learning_rate", float(f"{rate * _LORA:.3g}") if adapted else rate, why
    )
    yield Choice(
        "critic.optimizer.learning_rate", size.critic, f"for a critic with {situation.billions}"
    )


def _warmup(config: Config, situation: Situation) -> Iterator[Choice]:
    updates = policy_updates(config)
    if warmup := min(10, updates // 10):
        yield Choice(
            "actor.optimizer.warmup_steps",
            warmup,
            f"10% of the {updates} updates, but at most 10, because Adam's statistics are"
            " unreliable in the first updates",
        )


def _patience(config: Config, situation: Situation) -> Iterator[Choice]:
    if situation.parameters < _LARGE:
        return
    factor = 2 if situation.parameters > size_of(int(_LARGE)).parameters else 1
    why = f"loading a model with {situation.billions} takes minutes"
    yield Choice("server.start_timeout_s", 900.0 * factor, why)
    yield Choice("server.request_timeout_s", 1000.0 * factor, why)
    yield Choice("cluster.collective_timeout_s", 1200.0 * factor, why)


def _device_memory(config: Config, situation: Situation) -> Iterator[Choice]:
    if situation.machine.gpus:
        gib = math.floor(situation.machine.gpu_memory_gib)
        yield Choice(
            "cluster.device_memory_gib", float(gib), "memory of one GPU, excluding the CUDA context"
        )


def _layout(config: Config, situation: Situation) -> Iterator[Choice]:
    yield from find_layout(config, situation)


def _staleness(config: Config, situation: Situation) -> Iterator[Choice]:
    if config.engine.placement == "colocated":
        why = (
            "the engine shares the trainer's devices, so samples always come from the newest"
            " weights (docs/pipeline.md)"
        )
        yield Choice("rollout.max_staleness", 0, why)


def _rounded(tokens: int) -> int:
    """Up to whole sixteens."""
    return max(16, -(-tokens // 16) * 16)


RULES = (
    _fields,
    _prompt_lengths,
    _response_lengths,
    _samples,
    _batch,
    _parts,
    _steps,
    _adapters,
    _learning_rates,
    _warmup,
    _patience,
    _device_memory,
    _layout,
    _staleness,
)
