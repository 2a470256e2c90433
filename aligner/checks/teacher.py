"""Checks of the section `teacher` against the policy, the layout and the algorithm."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from aligner.checks.algorithm import LOSSES_WITHOUT_ADVANTAGES
from aligner.checks.trained_model import (
    find_micro_batch_problems,
    find_precision_problems,
    find_reader_problems,
    find_tokenizer_difference,
)
from aligner.errors import ConfigError
from aligner.models.layouts import layout_problems
from aligner.models.model_source import ExpectedInputs, directory_shape, is_expected, teacher_shape
from aligner.models.shape import ModelShape
from aligner.paths import TEACHER_SCORES_INDEX
from aligner.schema import Config
from aligner.schema.teacher_sources import TeacherSource, parse_teacher_sources


def find_problems(
    config: Config, model: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield a line for each problem of the teachers, of their scores, and of the algorithm."""
    if config.teacher.scores is not None:
        yield from _find_scores_problems(config, Path(config.teacher.scores), expected)
    if not config.has_teacher:
        return
    settings = config.algorithm
    try:
        sources = parse_teacher_sources(config.teacher)
    except ConfigError as error:
        yield str(error)
        return
    if config.teacher.loss != "advantage":
        yield from _find_divergence_problems(config, sources)
    elif settings.loss in LOSSES_WITHOUT_ADVANTAGES:
        yield (
            f"{sources[0].key}.path={sources[0].path}: teacher.loss=advantage adds an advantage"
            f" to each token, but algorithm.loss={settings.loss} does not use advantages; set"
            " algorithm.loss to clip, cispo or reinforce, or set another teacher.loss"
        )
    if (
        settings.advantage == "none"
        and settings.kl_coefficient
        and settings.kl_placement == "reward"
    ):
        yield (
            f"algorithm.kl_coefficient={settings.kl_coefficient:g}: with algorithm.advantage=none"
            " a KL penalty in the reward has no effect; set algorithm.kl_placement=loss or"
            " algorithm.kl_coefficient=0"
        )
    yield from find_micro_batch_problems(config, "teacher", config.teacher)
    for source in sources:
        yield from _find_model_problems(config, source, model, expected)


def _find_scores_problems(config: Config, scores: Path, expected: ExpectedInputs) -> Iterator[str]:
    """Yield problems of stored teacher scores.

    The content of the scores is not checked here, but when the run is prepared.
    """
    if config.teacher.loss == "advantage":
        yield (
            f"teacher.scores={scores}: is not supported with teacher.loss=advantage, which"
            " requires samples of the policy; set teacher.loss to forward_kl, reverse_kl or"
            " jensen_shannon"
        )
    if is_expected(scores, expected):
        return
    if not (scores / TEACHER_SCORES_INDEX).is_file():
        yield (
            f"teacher.scores={scores}: has no {TEACHER_SCORES_INDEX}; expected the output of a"
            " completed run of algorithm=teacher_scores"
        )
    elif (difference := find_tokenizer_difference(config, scores)) is not None:
        yield (
            f"teacher.scores={scores}: {difference}; the scores must come from a teacher with the"
            " policy's tokenizer"
        )


def _find_divergence_problems(config: Config, sources: Sequence[TeacherSource]) -> Iterator[str]:
    """Yield settings that are not supported with a divergence from the teacher in the loss."""
    key = f"teacher.loss={config.teacher.loss}"
    loss = config.algorithm.loss
    rollout = config.rollout
    if loss in ("copg", "dpo"):
        yield (
            f"{key}: is a mean over tokens and is not supported with algorithm.loss={loss}, which"
            " compares whole responses; set another algorithm.loss"
        )
    # The divergence compares distributions over the teacher's most probable tokens.
    excludes_tokens = {
        "top_k": rollout.top_k > 0,
        "top_p": rollout.top_p < 1,
        "min_p": rollout.min_p > 0,
    }
    for name in (name for name, is_excluding in excludes_tokens.items() if is_excluding):
        yield (
            f"{key}: rollout.{name}={getattr(rollout, name):g} excludes tokens that may be"
            " probable under the teacher's distribution; sample from all tokens with"
            " rollout.top_k=0 rollout.top_p=1 rollout.min_p=0"
        )
    # A divergence needs one teacher distribution per position; advantages of teachers can be mixed.
    for first, second in itertools.combinations(sources, 2):
        if not first.tasks or not second.tasks or set(first.tasks) & set(second.tasks):
            yield (
                f"{key}: {first.key} and {second.key} apply to the same prompts; set different"
                " tasks for each teacher"
            )


def _find_model_problems(
    config: Config, source: TeacherSource, policy: ModelShape | None, expected: ExpectedInputs
) -> Iterator[str]:
    """Yield problems of the model of a teacher."""
    key = f"{source.key}.path"
    path = Path(source.path)
    try:
        # If the policy's shape is known, teacher_shape accepts the policy's initial model as a
        # teacher even before its directory exists.
        shape = (
            directory_shape(path, key, expected)
            if policy is None
            else teacher_shape(config, source, policy, expected)
        )
    except ConfigError as error:
        yield str(error)
        return
    yield from find_precision_problems(config, "teacher", config.teacher, shape)
    yield from layout_problems("teacher.parallel", config.teacher.parallel, shape)
    yield from find_reader_problems(config, policy, key, path, shape)
