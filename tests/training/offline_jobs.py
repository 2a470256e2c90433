"""Functions that worker ranks run for the tests of the offline trainers."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aligner.data.examples import Demonstration, LabeledAnswer, LabeledSteps, Preference, RunData
from aligner.data.prompts import ExampleStream
from aligner.data.teacher_scores import TeacherScores, part_name, write_index, write_part
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import TeacherTopK
from aligner.errors import STOP_SIGNAL
from aligner.megatron import world as worlds
from aligner.megatron.value_model import build_reward_model
from aligner.proof.rank_jobs import collect_gradients
from aligner.schema import (
    ActorConfig,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PreferenceConfig,
    RewardConfig,
    RunConfig,
    TeacherConfig,
)
from aligner.servers.reward_server import build_reward_rank
from aligner.training.offline import OfflineTrainer, TeacherScorer, pad_demonstrations
from aligner.training.services import Services
from aligner.training.setup import build_task, build_trainer
from tests.megatron.jobs import Slices, slices

OPTIMIZER = OptimizerConfig(learning_rate=1e-3, epsilon=1e-6, clip_grad_norm=0.0)
VOCABULARY = 72
PREFERENCES = {
    "dpo": PreferenceConfig(),
    "orpo": PreferenceConfig(kind="orpo", beta=0.3),
    "rpo_sq": PreferenceConfig(kind="rpo_sq", reward_scale=2.0, imitation_weight=0.5),
    "kto": PreferenceConfig(kind="kto", beta=0.5, undesirable_weight=0.75),
}
TASKS = ("sft", "taught", *PREFERENCES, "reward_model", "steps")
TEACHER = TeacherConfig(
    scores="scores", loss="jensen_shannon", beta=0.3, weight=2.0, imitation_weight=0.5
)
"""Teacher settings of the task `taught`."""
_TRAINERS = dict.fromkeys(PREFERENCES, "dpo") | {"steps": "reward_model", "taught": "sft"}


def examples(task: str) -> list[Any]:
    """Return six examples of different lengths for a task."""
    generator = torch.Generator().manual_seed(8)

    def whole(length: int) -> Tensor:
        return torch.randint(2, VOCABULARY, (length,), generator=generator)

    def answered(prompt: Tensor, length: int) -> Demonstration:
        return Demonstration(torch.cat([prompt, whole(length)]), prompt.numel())

    made: list[Any] = []
    for index in range(6):
        prompt = whole(1 + index)
        if task in ("sft", "taught"):
            demonstration = answered(prompt, 9 - index)
            # Some are conversations with other turns between the learned tokens.
            learned = torch.arange(demonstration.tokens.numel()) % 3 != 0 if index % 2 else None
            made.append(replace(demonstration, response_mask=learned))
        elif task == "kto":
            made.append(LabeledAnswer(answered(prompt, 2 + index), is_desirable=index % 3 == 0))
        elif task == "steps":
            labels = torch.tensor([1.0, 0.0, 1.0][: 1 + index % 3])
            positions = index + torch.tensor([2, 5, 6][: 1 + index % 3])
            made.append(
                LabeledSteps(torch.cat([prompt, whole(6)]), prompt.numel(), positions, labels)
            )
        else:
            margin = [0.25 if task == "rpo_sq" else None, 0.5, 2.0][index % 3]
            made.append(
                Preference(answered(prompt, 2 + index), answered(prompt, 7 - index), margin)
            )
    return made


def teacher_logits(made: Sequence[Demonstration]) -> Tensor:
    """Return random teacher logits of all learned tokens, float64 [M, V]."""
    generator = torch.Generator().manual_seed(21)
    count = sum(int(each.loss_mask.sum()) for each in made)
    return 2 * torch.randn(count, VOCABULARY, generator=generator, dtype=torch.float64)


def with_scores(
    made: Sequence[Demonstration], directory: Path, vocabulary: int = VOCABULARY
) -> list[Demonstration]:
    """Store the teacher's top-5 log-probs in the directory; return the examples with them."""
    every = teacher_logits(made).log_softmax(-1)
    logprobs, ids = every.topk(5)
    rest = every.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    rows = pad_demonstrations(made, pad_token_id=0)
    taught = TeacherTopK(
        torch.zeros(rows.mask.shape),
        torch.zeros(*rows.mask.shape, 5).int(),
        torch.zeros(*rows.mask.shape, 6),
    )
    taught.ids[rows.mask], taught.outcomes[rows.mask] = (
        ids.int(),
        torch.cat([logprobs, rest], -1).float(),
    )
    directory.mkdir(parents=True)
    write_part(directory / part_name(1, 1), rows, taught)
    (directory / "teacher.json").write_text("{}")
    write_index(directory, 1, 5, vocabulary, directory / "teacher.json")
    scores = TeacherScores(directory)
    return [replace(each, teacher_row=scores.find(each.tokens, each.loss_mask)) for each in made]


def configuration(
    directory: str, layout: dict[str, Any], task: str, root: str | None = None, **sections: Any
) -> Config:
    """Return the configuration of a run of four steps over all examples."""
    taught = {"teacher": TEACHER} if task == "taught" else {}
    return Config(
        run=RunConfig(name="tested", steps=4, dir=root, **sections.pop("run", {})),
        model=ModelConfig(path=directory),
        data=DataConfig(**({"batch_size": 6, "shuffle": False} | sections.pop("data", {}))),
        algorithm=AlgorithmConfig(
            trainer=_TRAINERS.get(task, task), preference=PREFERENCES.get(task, PreferenceConfig())
        ),
        actor=ActorConfig(
            parallel=ParallelConfig(**layout),
            micro_batch_tokens=32,
            logprob_chunk_tokens=10,
            optimizer=OPTIMIZER,
        ),
        logging=LoggingConfig(tensorboard=False),
        **(taught | sections),
    )


def run_data(made: Sequence[Any], held_out: int = 0, *, shuffle: bool = False) -> RunData:
    stream, kept = ExampleStream([made], seed=3, shuffle=shuffle).hold_out(held_out)
    return RunData(stream, kept, None, ())


def two_steps(directory: str, layout: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Train two updates of each task.

    Returns for each task the evaluation before, the statistics of both updates, and the gradients
    of the first update.
    """
    world = worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120)
    found = {}
    for name in TASKS:
        made = examples(name)
        if name == "taught":
            made = with_scores(made, Path(tempfile.mkdtemp()) / "scores")
        task = build_task(configuration(directory, layout, name), world, run_data(made))
        rows = task.build_rows(made)
        runner = task.model.runner
        head = slices(runner.weights).get("score.weight")
        seen: Slices = {}
        prepare = runner.optimizer.prepare_grads

        def record_gradients(
            runner: Any = runner, seen: Slices = seen, prepare: Any = prepare
        ) -> Any:
            seen.update(collect_gradients(runner))
            return prepare()

        before = task.evaluate(rows, task.compute_denominator(rows))
        runner.optimizer.prepare_grads = record_gradients
        first = task.train(rows)
        del runner.optimizer.prepare_grads
        found[name] = {
            "before": {key: float(value) for key, value in before.items()},
            "stats": [first, task.train(rows)],
            "gradients": seen,
            "head": None if head is None else head[1],
            "companions": task.build_companion_files(),
            "normalizer": getattr(task, "normalizer", None),
        }
    worlds.shutdown()
    return found


def served_scores(directory: str, answers: Sequence[Demonstration]) -> list[float]:
    """Score answers like the reward server of a run with the model in a directory."""
    world = worlds.initialize(ParallelConfig(), seed=1, timeout_s=120)
    config = Config(
        model=ModelConfig(path=directory),
        reward=RewardConfig(kind="model", path=directory, micro_batch_tokens=32),
    )
    scoring = build_reward_rank(config, lambda path: build_reward_model(config, path, world))
    rows = pad_demonstrations(answers, pad_token_id=0)
    prompts = torch.tensor([answer.prompt_length for answer in answers])
    scores = scoring.score(rows.tokens, rows.lengths, prompts)["rewards"].tolist()
    worlds.shutdown()
    return scores


def train(
    directory: str, task: str, root: str, told_after: int | None = None, **sections: Any
) -> bool:
    """Run the trainer with two held-out examples; return whether it stopped early.

    Args:
        told_after: Step in which the process receives the stop signal; 0: before the first step.
    """
    chosen = {
        "checkpoint": CheckpointConfig(every=2),
        "evaluation": EvaluationConfig(every=3),
        "data": {"batch_size": 3, "shuffle": True},
    }
    config = configuration(directory, {}, task, root, **(chosen | sections))
    world = worlds.initialize(ParallelConfig(), seed=1, timeout_s=120)
    data = run_data(examples(task), held_out=2, shuffle=True)
    trainer = build_trainer(config, world, Tokenizer(Path(directory)), data, Services(None, None))
    assert isinstance(trainer, OfflineTrainer)
    take = trainer.examples.take

    def take_and_stop(position: int, count: int) -> list[Any]:
        if told_after is not None and position == (told_after - 1) * count:
            signal.raise_signal(STOP_SIGNAL)
        return take(position, count)

    trainer.examples.take = take_and_stop  # type: ignore[method-assign]
    if told_after == 0:
        signal.raise_signal(STOP_SIGNAL)
    trainer.run()
    worlds.shutdown()
    assert not list(Path(root).rglob("*.tmp"))
    return trainer.stop_condition.is_early


def score(
    directory: str, layout: dict[str, Any], root: str, **run: Any
) -> tuple[int, Tensor, Tensor]:
    """Score the demonstrations of `sft` with a teacher, in four parts.

    Returns the number of steps of this run, and, computed in one batch for each learned token, the
    ids of the top 5 tokens, and their log-probs followed by that of all other tokens.
    """
    settings: dict[str, Any] = {"teacher": TeacherConfig(top_k=5), "run": run}
    config = configuration(directory, layout, "teacher_scores", root, **settings)
    world, made = (
        worlds.initialize(ParallelConfig(**layout), seed=1, timeout_s=120),
        examples("sft"),
    )
    trainer = build_trainer(
        config, world, Tokenizer(Path(directory)), run_data(made), Services(None, None)
    )
    assert isinstance(trainer, TeacherScorer)
    before = trainer.resume(())
    trainer.run()
    rows = pad_demonstrations(made, pad_token_id=0)
    taught = trainer.model.top_k_logprobs(rows.tokens, rows.lengths, 5, VOCABULARY, mask=rows.mask)
    worlds.shutdown()
    return (
        trainer.stop_condition.last_step - before,
        taught.ids[rows.mask],
        taught.outcomes[rows.mask],
    )
