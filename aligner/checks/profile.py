"""Checks of the section `profile`: its steps and ranks, and the profilers that need GPUs."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.placement.roles import count_role_ranks, uses_gpus
from aligner.schema import Config


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each step or rank that the run does not have, and for each profiler that it
    cannot use."""
    profile = config.profile
    steps = config.run.steps
    if wrong_steps := [step for step in profile.steps if not 1 <= step <= steps]:
        yield (
            f"profile.steps: got {', '.join(map(str, wrong_steps))}, must be from 1 to"
            f" run.steps={steps}"
        )
    ranks = count_role_ranks(config)["trainer"]
    if wrong_ranks := [rank for rank in profile.ranks if not 0 <= rank < ranks]:
        yield (
            f"profile.ranks: got {', '.join(map(str, wrong_ranks))}, must be from 0 to {ranks - 1},"
            " because these are the ranks of the trainer"
        )
    if uses_gpus(config):
        return
    if profile.tool == "nsys":
        yield (
            "profile.tool=nsys: marks the work of GPUs, but this run computes on CPUs; set"
            " profile.tool=torch"
        )
    if profile.memory:
        yield (
            "profile.memory=true: records the memory of GPUs, but this run computes on CPUs; set"
            " profile.memory=false"
        )
