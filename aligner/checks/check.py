"""All checks of a configuration: bounds first, then every section against the others, the model and
this machine.

Everything is checked before anything starts, and everything wrong is reported at once.
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
from aligner.errors import ConfigError
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
"""One line for each thing about a section that does not fit other sections, the model (None where
it could not be read) or this machine. What is expected need not be there yet."""

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
"""In the schema's order."""


def check(
    config: Config, expected: ExpectedInputs = NOTHING_EXPECTED, also: Iterable[str] = ()
) -> ModelShape:
    """Check what the run reads of the configuration against itself, the model and this machine;
    returns the policy's shape.

    What is `expected` need not be there yet; `also` are problems that are reported with the others.
    Raises ConfigError with one line for each thing that is wrong.
    """
    # Bounds come first: the checks after them divide by these numbers.
    _raise_all(_value_problems(config))
    config = only_read(config)
    expected = {**expected, **random_reward_models(config)}
    shape, problems = None, []
    try:
        shape = read_shape(config, expected)
    except ConfigError as error:
        problems.append(str(error))
    problems += weight_file_problems(config, expected)
    for section in SECTIONS:
        problems += section(config, shape, expected)
    _raise_all([*problems, *also])
    if shape is None:  # its problem was raised above
        raise AssertionError
    # Last: what is counted must fit together.
    _raise_all(memory_problems(config, shape, expected))
    return shape


def _raise_all(problems: Iterable[str]) -> None:
    if found := list(problems):
        raise ConfigError("\n".join(found))


def _value_problems(config: Config) -> Iterator[str]:
    yield from value_problems(config)
    yield from suite_problems(config.evaluation)
