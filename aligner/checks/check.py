"""All checks of a configuration.

The bounds of single values come first, then the checks of each section against the other sections,
the model and this machine. A run is checked before any of its processes starts, and all problems
are reported together.
"""

from collections.abc import Callable, Iterable, Iterator

from aligner.checks import (
    actor,
    algorithm,
    checkpoint,
    cluster,
    critic,
    data,
    engine,
    environment,
    evaluation,
    logging,
    profile,
    reward,
    rollout,
    run,
    server,
    teacher,
)
from aligner.errors import ConfigError, collect_problems
from aligner.models.model_source import (
    NOTHING_EXPECTED,
    ExpectedInputs,
    random_reward_models,
    read_shape,
    weight_file_problems,
)
from aligner.models.shape import ModelShape
from aligner.placement.memory.role_memory import find_memory_problems
from aligner.schema import Config
from aligner.schema.evaluation_suites import find_suite_problems
from aligner.schema.key_validation import find_value_problems
from aligner.schema.keys import with_unread_defaults

SectionCheck = Callable[[Config, ModelShape | None, ExpectedInputs], Iterator[str]]
"""Function that yields a line for each conflict of a section with other sections, the model or this
machine. The model is None if its shape could not be read. Expected inputs need not exist yet."""

SECTION_CHECKS: tuple[SectionCheck, ...] = (
    run.find_problems,
    data.find_problems,
    rollout.find_problems,
    algorithm.find_problems,
    actor.find_problems,
    critic.find_problems,
    reward.find_problems,
    teacher.find_problems,
    environment.find_problems,
    engine.find_problems,
    server.find_problems,
    cluster.find_problems,
    checkpoint.find_problems,
    evaluation.find_problems,
    logging.find_problems,
    profile.find_problems,
)
"""Checks of all sections, in the order of the schema."""


def check(
    config: Config,
    expected: ExpectedInputs = NOTHING_EXPECTED,
    further_problems: Iterable[str] = (),
) -> ModelShape:
    """Check a configuration against itself, the model and this machine.

    Only the keys that the run reads are checked.

    Args:
        config: Configuration of the run.
        expected: Inputs that need not exist yet.
        further_problems: Further problems, which are reported together with the others.

    Returns:
        The shape of the policy.

    Raises:
        ConfigError: There are problems; the message has one line for each of them.
    """
    # Bounds come first, because later checks divide by these numbers.
    _raise_all(_find_value_problems(config))

    # Values that the run does not read must not cause problems.
    config = with_unread_defaults(config)
    expected = {**expected, **random_reward_models(config)}
    shape = None
    problems: list[str] = []
    with collect_problems(problems):
        shape = read_shape(config, expected)
    problems += weight_file_problems(config, expected)
    for section in SECTION_CHECKS:
        problems += section(config, shape, expected)
    _raise_all([*problems, *further_problems])
    if shape is None:  # impossible: _raise_all has raised the problem of read_shape
        raise AssertionError

    # Memory comes last, because its computation requires sizes without conflicts.
    _raise_all(find_memory_problems(config, shape, expected))
    return shape


def _raise_all(problems: Iterable[str]) -> None:
    """Raise ConfigError with all problems if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def _find_value_problems(config: Config) -> Iterator[str]:
    """Yield problems of single values, including those of evaluation suites."""
    yield from find_value_problems(config)
    yield from find_suite_problems(config)
