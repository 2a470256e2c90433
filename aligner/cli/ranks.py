"""The commands that the launcher calls: one rank of a role each."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.cli.configured import add_configured, run_plan
from aligner.errors import RESUMABLE, ConfigError
from aligner.launch.kernel import end_with_launcher
from aligner.observability.logs import configure_logs
from aligner.signals import STOP_SIGNAL

if TYPE_CHECKING:
    from aligner.data.tokenizer import Tokenizer
    from aligner.schema import Config


def add_ranks(commands: Any) -> None:
    """Add `aligner train`, `aligner serve` and `aligner prepare` to a parser's subcommands."""
    _add_rank(commands, "train", _train, "one trainer rank; the launcher calls it")
    roles = "role=generator, critic, reward, or a replica such as reward.1"
    _add_rank(commands, "serve", _serve, f"one server rank, {roles}; the launcher calls it")
    what = "make the model's directory; check it, the data and the scorer; the launcher calls it"
    _add_rank(commands, "prepare", _prepare, what)


def _add_rank(commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], what: str) -> None:
    command = add_configured(commands, name, run, what)
    command.add_argument("--config", type=Path, metavar="FILE", help="a run's config.yaml, instead of overrides")


def _train(parsed: argparse.Namespace) -> int:
    end_with_launcher()
    config = _config(parsed)
    configure_logs(config.logging.format, "trainer")
    from aligner.training.setup import train

    is_finished = train(config)
    signal.signal(STOP_SIGNAL, signal.SIG_IGN)  # the launcher may tell it again, and Python's own end would let it die of that
    return 0 if is_finished else RESUMABLE


def _serve(parsed: argparse.Namespace) -> None:
    end_with_launcher()
    roles = [text.partition("=")[2] for text in parsed.overrides if text.startswith("role=")]
    parsed.overrides = [text for text in parsed.overrides if not text.startswith("role=")]
    config = _config(parsed)
    from aligner.placement.roles import server_ranks

    if len(roles) != 1 or roles[0] not in server_ranks(config):
        raise ConfigError(f"role={','.join(roles)}: give one role; allowed: {', '.join(server_ranks(config))}")
    configure_logs(config.logging.format, roles[0])
    if roles[0] == "generator":
        from aligner.servers.generator_server import serve_generator

        serve_generator(config)
    elif roles[0] == "critic":
        from aligner.servers.critic_server import serve_critic

        serve_critic(config)
    else:
        from aligner.servers.reward_server import serve_reward

        serve_reward(config, roles[0])


def _prepare(parsed: argparse.Namespace) -> None:
    end_with_launcher()
    config = _config(parsed)
    configure_logs(config.logging.format, "prepare")
    from aligner.data.model_directory import prepare_model
    from aligner.data.tokenizer import Tokenizer
    from aligner.rewards.scorers import resolve_scorer
    from aligner.schema.reward_sources import FunctionSource, reward_sources

    directory = prepare_model(config)
    for notice in _check_data(config, Tokenizer(directory)):
        print(f"aligner: note: {notice}", file=sys.stderr)
    for source in reward_sources(config.reward):
        if isinstance(source, FunctionSource):
            resolve_scorer(source.function, f"{source.key}.function")
    if config.evaluation.function is not None:
        resolve_scorer(config.evaluation.function, "evaluation.function")


def _check_data(config: Config, tokenizer: Tokenizer) -> Sequence[str]:
    """Read and tokenize all that the run learns from and is evaluated on; returns what a person should know about it."""
    from aligner.data.prompts import open_evaluation_prompts, open_prompts
    from aligner.data.run_data import open_run_data

    if config.algorithm.trainer == "online" and config.evaluation.every:
        open_evaluation_prompts(config.evaluation, tokenizer, config.data.max_prompt_tokens)
    if config.algorithm.generates:
        tokenizer.single_token(config.rollout.truncate_token, "rollout.truncate_token")
        return open_prompts(config.data, tokenizer, config.seed).notices
    return open_run_data(config, tokenizer).notices


def _config(parsed: argparse.Namespace) -> Config:
    """A configuration for one rank, which runs nothing first."""
    from aligner.config.compose import load_config

    if parsed.config is None:
        plan = run_plan(parsed)
        if plan.config.dry_run.scale != "none":
            raise ConfigError(f"dry_run.scale={plan.config.dry_run.scale}: for `aligner launch` and `aligner validate` alone")
        if missing := ", ".join(first.name for first in plan.missing):
            raise ConfigError(
                f"{missing}: an experiment whose result is needed has not run yet; `aligner launch` runs it first"
            )
        return plan.config
    if parsed.overrides or parsed.config_dir:
        raise ConfigError("--config FILE is a whole configuration; give either it, or overrides")
    return load_config(parsed.config)
