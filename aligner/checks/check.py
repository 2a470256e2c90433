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
from aligner.placement.memory.role_memory import memory_problems
from aligner.schema import Config
from aligner.schema.evaluation_suites import suite_problems
from aligner.schema.key_validation import value_problems
from aligner.schema.keys import only_read

SectionCheck = Callable[[Config, ModelShape | None, ExpectedInputs], Iterator[str]]
"""Function that yields a line for each conflict of a section with other sections, the model or this
machine. The model is None if its shape could not be read. Expected inputs need not exist yet."""

SECTIONS: tuple[SectionCheck, ...] = (
    run.problems,
    data.problems,
    rollout.problems,
    algorithm.problems,
    actor.problems,
    critic.problems,
    reward.problems,
    teacher.problems,
    environment.problems,
    engine.problems,
    server.problems,
    cluster.problems,
    checkpoint.problems,
    evaluation.problems,
    logging.problems,
)
"""Checks of all sections, in the order of the schema."""


def check(
    config: Config, expected: ExpectedInputs = NOTHING_EXPECTED, also: Iterable[str] = ()
) -> ModelShape:
    """Check a configuration against itself, the model and this machine.

    Only the keys that the run reads are checked.

    Args:
        config: Configuration of the run.
        expected: Inputs that need not exist yet.
        also: Further problems, which are reported together with the others.

    Returns:
        The shape of the policy.

    Raises:
        ConfigError: There are problems; the message has one line for each of them.
    """
    # Bounds come first, because later checks divide by these numbers.
    _raise_all(_value_problems(config))

    config = only_read(config)
    expected = {**expected, **random_reward_models(config)}
    shape = None
    problems: list[str] = []
    with collect_problems(problems):
        shape = read_shape(config, expected)
    problems += weight_file_problems(config, expected)
    for section in SECTIONS:
        problems += section(config, shape, expected)
    _raise_all([*problems, *also])
    if shape is None:  # impossible: _raise_all has raised the problem of read_shape
        raise AssertionError

    # Memory comes last, because its computation requires sizes without conflicts.
    _raise_all(memory_problems(config, shape, expected))
    return shape


def _raise_all(problems: Iterable[str]) -> None:
    """Raise ConfigError with all problems if there are any."""
    if lines := list(problems):
        raise ConfigError("\n".join(lines))


def _value_problems(config: Config) -> Iterator[str]:
    """Yield problems of single values, including those of evaluation suites."""
    yield from value_problems(config)
    yield from suite_problems(config.evaluation)
