"""What an offline trainer's keys must fit: each other, and the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from aligner.config.algorithms import preference_loss_problems
from aligner.config.model_shape import ModelShape
from aligner.config.model_source import NOTHING, Coming, is_coming
from aligner.config.schema import Config


def offline_problems(config: Config, shape: ModelShape | None, coming: Coming = NOTHING) -> Iterator[str]:
    """One line for each thing about a run of algorithm.trainer=sft, dpo or reward_model that does not fit together."""
    yield from _length_problems(config, shape)
    if config.algorithm.trainer == "dpo":
        yield from preference_loss_problems(config.algorithm.preference)
    yield from _normalization_problems(config, coming)
    trainer, data = config.algorithm.trainer, config.data
    if trainer == "reward_model" and config.actor.lora.rank:
        yield (
            f"actor.lora.rank={config.actor.lora.rank}: with adapters the new head of a reward model would not be trained;"
            " leave it 0 with algorithm.trainer=reward_model"
        )
    if config.evaluation.every and not data.held_out:
        yield f"evaluation.every={config.evaluation.every}: there is nothing to evaluate on; give data.held_out=ROWS"


def _length_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    trainer, data, budget = config.algorithm.trainer, config.data, config.actor.micro_batch_tokens
    longest = data.max_prompt_tokens + data.max_response_tokens
    described = f"data.max_prompt_tokens={data.max_prompt_tokens} + data.max_response_tokens={data.max_response_tokens}"
    if shape is not None and longest > shape.max_positions:
        yield f"{described}: {longest} tokens, but the model has {shape.max_positions} positions"
    together = 1 if trainer == "sft" else 2
    if budget < together * longest:
        what = "the longest row" if together == 1 else "a pair of the longest rows"
        yield f"actor.micro_batch_tokens={budget}: must hold {what}, {together * longest} tokens ({described})"


def _normalization_problems(config: Config, coming: Coming) -> Iterator[str]:
    given = config.data.normalization
    if given is None:
        return
    if config.algorithm.trainer != "reward_model":
        yield f"data.normalization={given}: read with algorithm.trainer=reward_model only"
    elif not is_coming(given, coming) and not Path(given).exists():
        yield f"data.normalization={given}: no such file"
