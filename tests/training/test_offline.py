"""Test offline trainers against transformers, at several layouts, and across stops and resumes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid
from torch.nn.utils.rnn import pad_sequence

from aligner.data.checkpoint_files import CheckpointReader
from aligner.data.examples import Demonstration, LabeledSteps
from aligner.data.export import export, find_source
from aligner.data.model_directory import read_shape
from aligner.data.tokenizer import build_character_tokenizer
from aligner.models.model_source import NORMALIZATION
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths
from aligner.rewards.sources import RewardNormalizer
from aligner.schema import CheckpointConfig
from aligner.training.offline import (
    PairwiseRewardModel,
    ProcessRewardModel,
    mismatch_answers,
    pad_demonstrations,
)
from aligner.training.run_checkpoints import RunCheckpoints
from benchmarks.runs import checkpoint_differences, repeatable
from tests.megatron.reference import save_llama
from tests.rounds import typical
from tests.training import offline_jobs
from tests.training.offline_jobs import PREFERENCES, TASKS, configuration, examples
from tests.worker_pool import WorkerPool

LAYOUTS = {
    "tp2-sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
    "dp2": {"data": 2},
}
UNUSED: Any = None
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_llama(tmp_path_factory.mktemp("llama"), tied=True)
    build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def single(pool: WorkerPool, llama: Path) -> Found:
    return pool.run(offline_jobs.two_steps, 1, str(llama), {})[0]


def pad_rows(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return tokens [B, S], padded on the right, and their attention mask."""
    tokens = pad_sequence(rows, batch_first=True, padding_value=0)
    return tokens, torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def learned_places(answer: Demonstration) -> Tensor:
    """Return the positions of the learned tokens, int64 [R]."""
    places = torch.arange(answer.prompt_length, len(answer.tokens))
    return places if answer.response_mask is None else places[answer.response_mask[places]]


def answer_logprobs(model: Any, answers: list[Demonstration]) -> Tensor:
    """Return log-probs [B], summed over the learned tokens of each answer."""
    tokens, attended = pad_rows([answer.tokens for answer in answers])
    logprobs = model(tokens, attention_mask=attended).logits.log_softmax(-1)
    of_rows = []
    for row, answer in enumerate(answers):
        places = learned_places(answer)
        of_rows.append(logprobs[row, places - 1, answer.tokens[places]].sum())
    return torch.stack(of_rows)


def values(trunk: Any, head: Tensor, rows: list[Tensor]) -> Tensor:
    """Return the value head's outputs, [B, S]."""
    tokens, attended = pad_rows(rows)
    return (trunk(tokens, attention_mask=attended).last_hidden_state @ head.T)[..., 0]


def taught_loss(model: Any, made: list[Demonstration]) -> Tensor:
    """Compute the distillation loss in loops over outcomes.

    The outcomes of each token are the teacher's top 5 tokens, and all other tokens together.
    """
    settings, teacher = offline_jobs.TEACHER, offline_jobs.teacher_logits(made).softmax(-1)
    terms, beta = [], settings.beta
    for demonstration in made:
        policy = model(demonstration.tokens[None]).logits[0].softmax(-1)
        for place in learned_places(demonstration).tolist():
            one, other = teacher[len(terms)], policy[place - 1]
            ids = one.topk(5).indices.tolist()
            others = [token for token in range(len(one)) if token not in ids]
            apart = torch.zeros((), dtype=torch.float64)
            for outcome in (*([token] for token in ids), others):
                its, own = one[outcome].sum(), other[outcome].sum()
                mixture = beta * its + (1 - beta) * own
                apart = (
                    apart
                    + beta * its * (its / mixture).log()
                    + (1 - beta) * own * (own / mixture).log()
                )
            imitated = -other[demonstration.tokens[place]].log()
            terms.append(settings.weight * apart + settings.imitation_weight * imitated)
    return torch.stack(terms).mean()


def expected_loss(
    task: str, model: Any, head: Tensor, normalizer: RewardNormalizer | None
) -> Tensor:
    """Compute the loss of all examples with the papers' formulas."""
    made = examples(task)
    if task == "sft":
        return -answer_logprobs(model, made).sum() / sum(map(len, map(learned_places, made)))
    if task == "taught":
        return taught_loss(model, made)
    if task == "steps":
        found = values(model.model, head, [example.tokens for example in made])
        at_steps = torch.cat([found[row, example.positions] for row, example in enumerate(made)])
        return binary_cross_entropy_with_logits(
            at_steps, torch.cat([example.labels for example in made])
        )
    if task == "kto":  # the policy equals the reference, so the baseline is 0
        log_ratios = answer_logprobs(model, [example.answer for example in made])
        ahead = 0.5 * (log_ratios - log_ratios.detach())
        signs = torch.tensor([1.0 if example.is_desirable else -1.0 for example in made])
        weights = torch.tensor([1.0 if example.is_desirable else 0.75 for example in made])
        return (weights * (1 - (signs * ahead).sigmoid())).mean()
    chosen, rejected = [pair.chosen for pair in made], [pair.rejected for pair in made]
    if task in PREFERENCES:
        better, worse = answer_logprobs(model, chosen), answer_logprobs(model, rejected)
        margins = torch.tensor([pair.margin or 0.0 for pair in made])
        each, other = (
            of_answers / torch.tensor([len(learned_places(answer)) for answer in answers])
            for of_answers, answers in ((better, chosen), (worse, rejected))
        )
        if task == "orpo":
            odds = [side.exp() / (1 - side.exp()) for side in (each, other)]
            return (-each - 0.3 * logsigmoid((odds[0] / odds[1]).log())).mean()
        # The policy equals the reference.
        ahead = 0.1 * (better - worse - (better - worse).detach())
        return (
            -logsigmoid(ahead) if task == "dpo" else (ahead - 2 * margins).square() - 0.5 * each
        ).mean()
    assert normalizer is not None
    rewards = []
    for side in (chosen, rejected):
        found = values(model.model, head, [answer.tokens for answer in side])
        last = torch.stack([found[row, len(answer.tokens) - 1] for row, answer in enumerate(side)])
        rewards.append(normalizer.gain * last + normalizer.bias)
    margins = torch.tensor([pair.margin or 0.0 for pair in made])
    return -logsigmoid(rewards[0] - rewards[1] - margins).mean()


@pytest.mark.promise("stored-teacher-scores")
@pytest.mark.parametrize("task", TASKS)
def test_offline_gradients_equal_transformers(single: Found, llama: Path, task: str) -> None:
    from transformers import AutoModelForCausalLM

    # The expected values are in float64, so that all rounding errors are aligner's.
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64).eval()
    found = single[task]
    head = torch.zeros(1, 64) if found["head"] is None else found["head"].double().requires_grad_()
    loss = expected_loss(task, model, head, found["normalizer"])
    loss.backward()
    assert found["before"]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["stats"][0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()} | {
        "score.weight": head.grad
    }
    # Rounding errors are proportional to a tensor's largest gradient. The factor depends on the
    # processor's instructions: 1e-5 with AMX.
    errors = {
        name: float((gradient - gradients[name]).abs().max() / gradients[name].abs().max())
        for name, (_, gradient) in found["gradients"].items()
    }
    assert {name: error for name, error in errors.items() if not error < 3e-5} == {}
    assert ("score.weight" in found["gradients"]) == (task in ("reward_model", "steps"))


@pytest.mark.promise("stored-teacher-scores")
@pytest.mark.parametrize("layout", typical(LAYOUTS, ["tp2-sp"]))
def test_offline_losses_do_not_depend_on_the_layout(
    pool: WorkerPool, llama: Path, single: Found, layout: str
) -> None:
    for found in pool.run(offline_jobs.two_steps, 2, str(llama), LAYOUTS[layout]):
        # Before its first update the policy equals its reference, so rounding determines which
        # answer it prefers.
        for task in ("dpo", "rpo_sq", "kto"):
            del found[task]["stats"][0]["accuracy"]
        for task in TASKS:
            for got, want in zip(found[task]["stats"], single[task]["stats"], strict=True):
                assert got == pytest.approx(
                    {name: want[name] for name in got}, rel=1e-4, abs=1e-6
                ), task
            assert found[task]["companions"].keys() == single[task]["companions"].keys()
            for name, content in single[task]["companions"].items():
                assert found[task]["companions"][name] == pytest.approx(content, rel=1e-3)
            if found[task]["head"] is not None:
                assert torch.equal(found[task]["head"], single[task]["head"])


def test_new_reward_head_has_published_deviation(single: Found) -> None:
    head = single["reward_model"]["head"]
    assert float(head.std()) == pytest.approx(65**-0.5, rel=0.3)


def test_new_reward_model_has_normalized_rewards(single: Found, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    trunk = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval().model
    answers = [
        answer for pair in examples("reward_model") for answer in (pair.chosen, pair.rejected)
    ]
    with torch.no_grad():
        found = values(trunk, single["reward_model"]["head"], [answer.tokens for answer in answers])
    raw = torch.stack([found[row, len(answer.tokens) - 1] for row, answer in enumerate(answers)])
    rewards = single["reward_model"]["normalizer"](raw)
    assert float(rewards.mean()) == pytest.approx(0, abs=1e-4)
    assert float(rewards.std(correction=0)) == pytest.approx(1, rel=1e-4)


def test_second_update_has_lower_loss(single: Found) -> None:
    for task in TASKS:
        first, second = (stats["loss"] for stats in single[task]["stats"])
        assert second < first, task


@pytest.fixture(scope="module")
def undisturbed(
    pool: WorkerPool, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, RunPaths]:
    """Complete runs of four steps, for two tasks."""
    runs = {task: tmp_path_factory.mktemp("whole") / task for task in ("dpo", "reward_model")}
    for task, run in runs.items():
        pool.run(offline_jobs.train, 1, str(llama), task, str(run))
    return {task: RunPaths(run) for task, run in runs.items()}


@pytest.mark.parametrize("task", ["dpo", "reward_model"])
def test_resumed_run_equals_undisturbed_run(
    pool: WorkerPool, llama: Path, undisturbed: dict[str, RunPaths], tmp_path: Path, task: str
) -> None:
    paths = RunPaths(tmp_path / task)
    pool.run(offline_jobs.train, 1, str(llama), task, str(paths.root), run={"stop_after": 2})
    pool.run(offline_jobs.train, 1, str(llama), task, str(paths.root), run={"resume": "true"})
    assert checkpoint_differences(undisturbed[task], paths, 4) == []
    # A run that stops also evaluates at the stop.
    trained = [
        {key: step[key] for key in step if not key.startswith("eval/")}
        for step in repeatable(read_metrics(paths.metrics))
    ]
    assert trained == [
        {key: step[key] for key in step if not key.startswith("eval/")}
        for step in repeatable(read_metrics(undisturbed[task].metrics))
    ]


def test_stopped_run_evaluates_on_resume(
    pool: WorkerPool, llama: Path, undisturbed: dict[str, RunPaths], tmp_path: Path
) -> None:
    paths, best = RunPaths(tmp_path / "dpo"), CheckpointConfig(every=2, best_metric="eval/loss")
    stopped = pool.run(
        offline_jobs.train, 1, str(llama), "dpo", str(paths.root), told_after=3, checkpoint=best
    )
    kept = RunCheckpoints(configuration(str(llama), {}, "dpo", str(paths.root), checkpoint=best))
    assert stopped == [True] and [state.owes_evaluation for state in kept.read_newest_states()] == [
        False,
        True,
    ]
    assert ["eval/loss" in step for step in read_metrics(paths.metrics)] == [False, True, False]
    assert kept.find_best() == 2
    pool.run(
        offline_jobs.train,
        1,
        str(llama),
        "dpo",
        str(paths.root),
        run={"resume": "true"},
        checkpoint=best,
    )
    whole, resumed = (repeatable(read_metrics(run.metrics)) for run in (undisturbed["dpo"], paths))
    assert resumed == whole and "eval/loss" in resumed[2]
    assert not any(state.owes_evaluation for state in kept.read_newest_states())
    losses = {step["step"]: step["eval/loss"] for step in resumed if step["step"] > 1}
    assert kept.find_best() == min(losses, key=lambda step: (losses[step], -step))


def test_timed_checkpoints_change_no_metric(
    pool: WorkerPool, llama: Path, undisturbed: dict[str, RunPaths], tmp_path: Path
) -> None:
    paths, often = (
        RunPaths(tmp_path / "dpo"),
        CheckpointConfig(every=2, every_minutes=1e-9, keep=9, best_metric="eval/loss"),
    )
    pool.run(offline_jobs.train, 1, str(llama), "dpo", str(paths.root), checkpoint=often)
    kept = RunCheckpoints(configuration(str(llama), {}, "dpo", str(paths.root), checkpoint=often))
    assert [(state.step, state.by_time) for state in kept.read_newest_states()] == [
        (1, True),
        (2, False),
        (3, True),
        (4, False),
    ]
    manifests = [
        json.loads((paths.checkpoints / f"step_{n}/manifest.json").read_text()) for n in range(1, 5)
    ]
    assert [manifest["metric"] is None for manifest in manifests] == [True, False, True, False]
    assert repeatable(read_metrics(paths.metrics)) == repeatable(
        read_metrics(undisturbed["dpo"].metrics)
    )
    (paths.checkpoints / "step_4").rename(tmp_path / "step_4")
    pool.run(offline_jobs.train, 1, str(llama), "dpo", str(paths.root), run={"resume": "true"})
    assert repeatable(read_metrics(paths.metrics)) == repeatable(
        read_metrics(undisturbed["dpo"].metrics)
    )
    assert checkpoint_differences(undisturbed["dpo"], paths, 4) == []


def test_run_stopped_before_first_step_trains_nothing(
    pool: WorkerPool, llama: Path, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "sft")
    assert pool.run(offline_jobs.train, 1, str(llama), "sft", str(paths.root), told_after=0) == [
        True
    ]
    assert read_metrics(paths.metrics) == [] and not paths.checkpoints.exists()


def test_offline_run_writes_the_documented_metrics(undisturbed: dict[str, RunPaths]) -> None:
    every = {
        "policy/grad_norm",
        "policy/lr",
        "time/step",
        "time/batch",
        "time/train",
        "throughput/tokens_per_s",
    }
    for task, paths in undisturbed.items():
        steps = read_metrics(paths.metrics)
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        for step in steps:
            assert step.keys() >= every | {
                f"{task}/{name}" for name in ("loss", "accuracy", "margin")
            }
        # Evaluations run every third step and at checkpoints.
        assert [{"eval/loss", "eval/accuracy"} <= step.keys() for step in steps] == [
            False,
            True,
            True,
            True,
        ]


def test_checkpoints_record_the_data_position(
    llama: Path, undisturbed: dict[str, RunPaths]
) -> None:
    config = configuration(str(llama), {}, "dpo", str(undisturbed["dpo"].root))
    assert [
        (state.step, state.position) for state in RunCheckpoints(config).read_newest_states()
    ] == [
        (2, 6),
        (4, 12),
    ]


def test_served_reward_model_keeps_normalization(
    pool: WorkerPool, undisturbed: dict[str, RunPaths], tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    paths = undisturbed["reward_model"]
    export(find_source(paths.root), tmp_path / "model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    trained = CheckpointReader(paths.checkpoint(4, "reward_model"))
    assert torch.equal(model.score.weight, trained.read_weight("score.weight"))
    normalizer = RewardNormalizer(**json.loads((tmp_path / "model" / NORMALIZATION).read_text()))
    # The stream contains all answers except those of the held-out pairs.
    stream = offline_jobs.run_data(examples("reward_model"), held_out=2, shuffle=True).examples
    answers = [
        answer for pair in stream.take(0, len(stream)) for answer in (pair.chosen, pair.rejected)
    ]
    with torch.no_grad():
        rewards = normalizer(
            torch.cat([model(answer.tokens[None]).logits[:, 0] for answer in answers])
        )
    (served,) = pool.run(offline_jobs.served_scores, 1, str(tmp_path / "model"), answers)
    torch.testing.assert_close(torch.tensor(served), rewards, rtol=1e-4, atol=1e-5)
    assert float(rewards.mean()) == pytest.approx(0, abs=1e-4)
    assert float(rewards.std(correction=0)) == pytest.approx(1, rel=1e-4)


def test_mask_contains_only_learned_response_tokens() -> None:
    made = examples("sft")
    for row, example in zip(pad_demonstrations(made, pad_token_id=0).mask, made, strict=True):
        assert row.nonzero()[:, 0].tolist() == (learned_places(example) - 1).tolist()
    assert len(learned_places(made[0])) == 9 and learned_places(made[1]).tolist() == [2, 4, 5, 7, 8]


def test_step_label_is_at_its_last_token() -> None:
    example = LabeledSteps(torch.arange(2, 9), 2, torch.tensor([3, 6]), torch.tensor([1.0, 0.0]))
    rows = ProcessRewardModel(UNUSED, pad_token_id=0).build_rows([example])
    assert rows.mask.nonzero().tolist() == [[0, 2], [0, 5]]
    assert rows.labels[0, [2, 5]].tolist() == [1.0, 0.0]


def test_prompt_gets_the_answer_of_the_next_row() -> None:
    rows = pad_demonstrations(
        [
            Demonstration(torch.arange(start, start + 5), prompt)
            for start, prompt in ((10, 2), (20, 4), (30, 1))
        ],
        0,
    )
    mixed = mismatch_answers(rows, pad_token_id=0)
    texts = [row[:length].tolist() for row, length in zip(mixed.tokens, mixed.lengths, strict=True)]
    assert texts == [[10, 11, 24], [20, 21, 22, 23, 31, 32, 33, 34], [30, 12, 13, 14]]
    assert mixed.mask.sum(1).tolist() == [1, 4, 3]


def test_margin_counts_for_both_rows_of_its_pair() -> None:
    pairs = examples("dpo")[:3]
    rows = PairwiseRewardModel(UNUSED, 0, UNUSED, UNUSED).build_rows(
        [*pairs, dataclasses.replace(pairs[0], margin=1.5)]
    )
    assert rows.margins.tolist() == [0.0, 0.0, 0.5, 0.5, 2.0, 2.0, 1.5, 1.5]
    assert rows.mask.sum(1).tolist() == [1] * 8
