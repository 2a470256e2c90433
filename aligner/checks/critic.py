"""Checks of the section `critic` against the model and the algorithm."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from aligner.checks.trained_model import (
    find_frozen_problems,
    find_micro_batch_problems,
    find_optimizer_problems,
    find_precision_problems,
    find_reader_problems,
    get_partial_shape,
)
from aligner.errors import ConfigError
from aligner.models.families import SCALAR_HEAD
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs, directory_shape, read_normalization
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table
from aligner.schema import Config
from aligner.schema.derived import count_critic_updates


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the critic.

    `critic.num_layers` is checked for a reward model that is trained, too.
    """
    critic = config.critic
    # From here on, `model` is the initial model of the critic.
    if config.algorithm.has_critic and critic.path is not None:
        policy = model
        directory = Path(critic.path)
        model = None
        try:
            model = directory_shape(directory, "critic.path", expected)
            read_normalization(directory)
        except ConfigError as error:
            yield str(error)
        else:
            yield from find_reader_problems(config, policy, "critic.path", directory, model)
    has_too_many_layers = model is not None and (critic.num_layers or 0) > model.num_layers
    if model is not None and has_too_many_layers:
        yield (
            f"critic.num_layers={critic.num_layers}: must be at most {model.num_layers}, the"
            " number of layers of the model"
        )
    if not config.algorithm.has_critic:
        return
    if model is not None and not has_too_many_layers:
        shape = get_partial_shape(config, model)
        yield from layout_problems("critic.parallel", critic.parallel, shape)
        yield from find_frozen_problems("critic", critic, weight_table(shape, "scalar"))
    # The head has a learning rate of its own, which freezing the head would make useless.
    if critic.head_learning_rate is not None and any(
        fnmatchcase(SCALAR_HEAD.name, pattern) for pattern in critic.frozen
    ):
        key = f"critic.head_learning_rate={critic.head_learning_rate:g}"
        yield (
            f"{key}: has no effect, because critic.frozen={critic.frozen} freezes the head;"
            " remove one of the two settings"
        )
    yield from find_micro_batch_problems(config, "critic", critic)
    yield from find_precision_problems(config, "critic", critic, model)
    yield from find_optimizer_problems("critic", critic, count_critic_updates(config))
