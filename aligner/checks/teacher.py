"""The teacher against the policy, the layout and the algorithm."""

from collections.abc import Iterator
from pathlib import Path

from aligner.checks.algorithm import OWN_TARGET
from aligner.checks.trained_model import micro_batch_problems, precision_problems, reader_problems
from aligner.errors import ConfigError
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs, directory_shape, teacher_shape
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.teacher_sources import TeacherSource, teacher_sources


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What a teacher cannot be, or an algorithm cannot learn from one."""
    if not config.has_teacher:
        return
    settings = config.algorithm
    try:
        sources = teacher_sources(config.teacher)
    except ConfigError as error:
        yield str(error)
        return
    if settings.loss in OWN_TARGET:
        yield (
            f"{sources[0].key}.path={sources[0].path}: what a teacher says is an advantage of each token, and"
            f" algorithm.loss={settings.loss} takes no advantages; give clip, cispo or reinforce"
        )
    if settings.advantage == "none" and settings.kl_coefficient and settings.kl_placement == "reward":
        yield (
            f"algorithm.kl_coefficient={settings.kl_coefficient:g}: with algorithm.advantage=none no rewards are read; give"
            " kl_placement=loss, or kl_coefficient=0"
        )
    yield from micro_batch_problems(config, "teacher", config.teacher)
    for source in sources:
        yield from _model_problems(config, source, model, expected)


def _model_problems(
    config: Config, source: TeacherSource, policy: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    key, path = f"{source.key}.path", Path(source.path)
    try:
        shape = directory_shape(path, key, expected) if policy is None else teacher_shape(config, source, policy, expected)
    except ConfigError as error:
        yield str(error)
        return
    yield from precision_problems(config, "teacher", config.teacher, shape)
    yield from layout_problems("teacher.parallel", config.teacher.parallel, shape)
    yield from reader_problems(config, policy, key, path, shape)
