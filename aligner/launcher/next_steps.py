"""What can be done with a run that has ended, as commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from aligner.config.compose import AUTOMATIC
from aligner.paths import can_resume, early_end, run_paths
from aligner.schema import Config


def resume_command(config: Config, *more: str) -> str:
    """What has a run go on that is no Slurm job."""
    experiment = config.run.experiment
    launched = (
        config.run.command
        or f"aligner launch {'' if experiment == AUTOMATIC else f'experiment={experiment}'}".strip()
    )
    for text in more:  # in the place of what was given before
        launched = re.sub(rf" {re.escape(text.partition('=')[0])}=\S+", "", launched)
    return " ".join(
        [
            launched,
            *map(shlex.quote, (*more, f"run.dir={run_paths(config).root}")),
            "run.resume=auto",
        ]
    )


def next_steps(config: Config, step: int) -> list[str]:
    """A line a command, with what it does, for a run that has ended after so many steps."""
    return ["next steps:", *(f"  {command}  # {does}" for command, does in _commands(config, step))]


def _commands(config: Config, step: int) -> Iterator[tuple[str, str]]:
    run, algorithm = shlex.quote(str(run_paths(config).root)), config.algorithm
    yield f"aligner view {run}", "view metrics, timeline and samples in a browser"
    has_model = algorithm.learns and can_resume(config)
    if has_model and algorithm.trainer != "reward_model" and not config.environment.draws_episodes:
        prompts = f"--prompts {shlex.quote(_prompts(config))}"
        yield f"aligner generate {run} {prompts} --output samples.jsonl", "generate responses"
        # evaluations read a number a response
        function = None if config.reward.step_rewards else config.reward.function
        if algorithm.generates and config.reward.kind == "function" and function is not None:
            yield (
                f"aligner evaluate {run} {prompts} --function {shlex.quote(function)}",
                "score greedy responses",
            )
    if has_model:
        yield f"aligner convert {run} MODEL", "export the model as a Hugging Face directory"
    if config.cluster.kind == "local":
        if early_end(run_paths(config)) is not None:
            without = [f"{key}=null" for key in config.run.ends]
            yield (
                resume_command(config, *without, f"run.changes=[{','.join(config.run.ends)}]"),
                "continue to the last step",
            )
        elif step < config.run.steps:
            yield resume_command(config), "resume the run"
        elif has_model:
            yield (
                resume_command(config, f"run.steps={2 * config.run.steps}"),
                f"train {config.run.steps} more steps",
            )


def _prompts(config: Config) -> str:
    """The run's own prompts where they are a file as the commands read it."""
    path = config.data.path
    is_file = (
        path is not None
        and Path(path).suffix in (".jsonl", ".txt")
        and Path(path).is_file()
        and not config.data.fields
    )
    return path if path is not None and is_file else "PROMPTS.jsonl"
