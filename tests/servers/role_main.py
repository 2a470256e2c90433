"""One rank of a server role over the tiny model or a test's scorer, by ROLE RUN_DIR HTTP GRPC METRICS."""

from __future__ import annotations

import os
import string
import sys
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aligner.config.schema import Config, Ports
from aligner.rewards.scorers import ScoringRequest
from aligner.servers.critic import run_critic
from aligner.servers.reward import run_function_reward, run_model_reward
from aligner.servers.validation import Limits
from tests.servers.tiny_model import VOCAB_SIZE, TinyValueModel

CHARACTERS = string.digits + string.ascii_lowercase + " "
LIMITS = Limits(VOCAB_SIZE, max_sequence_length=40, max_batch_size=16)


def character_tokenizer() -> Tokenizer:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{character: 2 + place for place, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def length_scorer(requests: Sequence[ScoringRequest]) -> list[float]:
    """The response's length plus 100 times the prompt's; NaN when the response has a 7."""
    return [float("nan") if "7" in r.response else len(r.response) + 100.0 * len(r.prompt) for r in requests]


def main(role: str, run_directory: str, *ports: str) -> None:
    config = Config()
    config.run.dir = run_directory
    config.server.max_batch_size = LIMITS.max_batch_size
    config.server.accept_unnumbered = os.environ.get("ACCEPT_UNNUMBERED") == "1"
    config.server.request_timeout_s = 20
    config.cluster.collective_timeout_s = 30
    config.critic.ports = config.reward.ports = Ports(*map(int, ports))
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=config.cluster.collective_timeout_s))
    if role == "critic":
        run_critic(config, TinyValueModel(), LIMITS)
    elif role == "reward_model":
        run_model_reward(config, TinyValueModel(), character_tokenizer(), LIMITS)
    else:
        run_function_reward(config, length_scorer, character_tokenizer(), LIMITS)


if __name__ == "__main__":
    main(*sys.argv[1:])
