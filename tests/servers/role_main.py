"""Runs one rank of a server role with the tiny model or a test scorer.

Arguments: ROLE RUN_DIR HTTP GRPC METRICS; the last three are ports.
"""

from __future__ import annotations

import json
import os
import string
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from aligner.observability.logs import configure_logs
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.sources import CombinedReward, ModelSource, RewardSource, TextSource
from aligner.schema import Config, PortsConfig, TLSConfig
from aligner.schema.reward_sources import FunctionSource
from aligner.servers.critic_server import run_critic
from aligner.servers.reward_server import RewardRank, run_reward
from aligner.servers.validation import Limits
from tests.servers.tiny_model import VOCAB_SIZE, TinyValueModel

CHARACTERS = string.digits + string.ascii_lowercase + " "
LIMITS = Limits(VOCAB_SIZE, max_sequence_length=40)


def character_tokenizer() -> Tokenizer:
    vocabulary = {
        "<pad>": 0,
        "<eos>": 1,
        **{character: 2 + place for place, character in enumerate(CHARACTERS)},
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    return tokenizer


def length_scorer(requests: Sequence[ScoringRequest]) -> list[float | None]:
    """Return the response's length + 100 × the prompt's length + the metadata's `extra`.

    A response that contains a 7 scores NaN, and the response "abstain" is an abstention.
    """
    return [None if request.response == "abstain" else _length(request) for request in requests]


def _length(request: ScoringRequest) -> float:
    if "7" in request.response:
        return float("nan")
    extra = request.metadata.get("extra", 0)
    return len(request.response) + 100.0 * len(request.prompt) + extra


def scoring(
    source: RewardSource, limits: Limits = LIMITS, tokenizer: Tokenizer | None = None
) -> RewardRank:
    """Return the scoring service of one source, without shaping."""
    settings = FunctionSource(name="lengths", key="reward", function="own:score")
    return RewardRank(
        CombinedReward([(settings, source)]), tokenizer or character_tokenizer(), limits
    )


class SlowModel(TinyValueModel):
    """A model that takes a quarter of a second per row."""

    def values(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        time.sleep(len(tokens) / 4)
        return super().values(tokens, lengths)


def serve_configured(role: str, run_directory: str, ports: PortsConfig) -> None:
    """Serve a role of the package with the configuration overrides in OVERRIDES."""
    from aligner.config.compose import compose_config
    from aligner.servers import generator_server, teacher_server

    config = compose_config([*os.environ["OVERRIDES"].split(), f"run.dir={run_directory}"])
    config.engine.ports = config.teacher.ports = ports
    {"generator": generator_server.serve_generator, "teacher": teacher_server.serve_teacher}[role](
        config
    )


def main(role: str, run_directory: str, *ports: str) -> None:
    if role in ("generator", "teacher"):
        serve_configured(role, run_directory, PortsConfig(*map(int, ports)))
        return
    config = Config()
    config.run.dir = run_directory
    config.server.max_batch_size = 16
    config.server.accept_unnumbered = os.environ.get("ACCEPT_UNNUMBERED") == "1"
    config.server.request_timeout_s = 20
    config.server.guard = os.environ.get("GUARD", "key")
    config.server.concurrent_requests = int(os.environ.get("CONCURRENT_REQUESTS", "2"))
    config.server.drain_timeout_s = 5
    if "TLS" in os.environ:
        config.server.tls = TLSConfig(*json.loads(os.environ["TLS"]), mutual=True)
    config.cluster.collective_timeout_s = float(os.environ.get("COLLECTIVE_TIMEOUT_S", "90"))
    config.critic.ports = config.reward.ports = PortsConfig(*map(int, ports))
    configure_logs(config.logging.format, role)
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group(
            "gloo", timeout=timedelta(seconds=config.cluster.collective_timeout_s)
        )
    if role == "critic":
        run_critic(config, SlowModel() if "SLOW" in os.environ else TinyValueModel(), LIMITS)
    elif role == "reward_model":
        run_reward(config, scoring(ModelSource("tiny", TinyValueModel())))
    elif role == "combined":
        run_critic(config, TinyValueModel(), LIMITS, scoring(TextSource("lengths", length_scorer)))
    else:
        run_reward(config, scoring(TextSource("lengths", length_scorer)))
    if dist.is_initialized():
        dist.destroy_process_group()  # threads that still run at exit would abort the process


if __name__ == "__main__":
    main(*sys.argv[1:])
