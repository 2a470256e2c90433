"""Checks of the section `critic` against the model and the algorithm."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from aligner.checks.trained_model import (
    cut_shape,
    frozen_problems,
    micro_batch_problems,
    optimizer_problems,
    precision_problems,
    reader_problems,
)
from aligner.errors import ConfigError
from aligner.models.families import SCALAR_HEAD
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs, directory_shape, read_normalization
from aligner.models.shape import ModelShape
from aligner.models.weight_slices import weight_table
from aligner.schema import Config
from aligner.schema.derived import critic_updates


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """Yield a line for each problem of the critic.

    `critic.num_layers` is checked for a reward model that is trained, too.
    """
    critic = config.critic
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
            yield from reader_problems(config, policy, "critic.path", directory, model)
    has_too_many_layers = model is not None and (critic.num_layers or 0) > model.num_layers
    if model is not None and has_too_many_layers:
        yield (
            f"critic.num_layers={critic.num_layers}: must be at most {model.num_layers}, the"
            " number of layers of the model"
        )
    if not config.algorithm.has_critic:
        return
    if model is not None and not has_too_many_layers:
        shape = cut_shape(config, model)
        yield from layout_problems("critic.parallel", critic.parallel, shape)
        yield from frozen_problems("critic", critic, weight_table(shape, "scalar"))
    if critic.head_learning_rate is not None and any(
        fnmatchcase(SCALAR_HEAD.name, pattern) for pattern in critic.frozen
    ):
        key = f"critic.head_learning_rate={critic.head_learning_rate:g}"
        yield (
            f"{key}: has no effect, because critic.frozen={critic.frozen} freezes the head;"
            " remove one of the two settings"
        )
    yield from micro_batch_problems(config, "critic", critic)
    yield from precision_problems(config, "critic", critic, model)
    yield from optimizer_problems("critic", critic, critic_updates(config))
