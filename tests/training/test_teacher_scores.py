"""Test stored teacher scores of demonstrations: writing, lookup, and refusal of wrong files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as AnyTokenizer
from tokenizers import models

from aligner.checks.check import check
from aligner.config.compose import compose_config
from aligner.data.examples import Demonstration, open_run_data
from aligner.data.model_directory import prepare_model, read_shape
from aligner.data.teacher_scores import TeacherScores, assemble_teacher_scores
from aligner.data.tokenizer import Tokenizer, build_character_tokenizer
from aligner.errors import ConfigError
from aligner.observability.metrics import read_metrics
from aligner.paths import RunPaths
from aligner.schema import Config
from aligner.training.offline import pad_demonstrations
from tests.megatron.reference import save_llama
from tests.rounds import typical
from tests.training import offline_jobs
from tests.training.offline_jobs import examples
from tests.worker_pool import WorkerPool

LAYOUTS = {"single": {}, "tp2": {"tensor": 2}, "pp2": {"pipeline": 2}}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_llama(tmp_path_factory.mktemp("teacher"), tied=True, seed=5)
    build_character_tokenizer(read_shape(directory)).save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.promise("stored-teacher-scores")
@pytest.mark.parametrize("layout", typical(LAYOUTS, ["single", "tp2"]))
def test_stored_scores_equal_the_teachers_logprobs(
    pool: WorkerPool, teacher: Path, tmp_path: Path, layout: str
) -> None:
    from transformers import LlamaForCausalLM

    ranks = 2 if LAYOUTS[layout] else 1
    paths = RunPaths(tmp_path / "run")
    (_, ids, outcomes), *_ = pool.run(
        offline_jobs.score, ranks, str(teacher), LAYOUTS[layout], str(paths.root)
    )
    made = examples("sft")
    scores = TeacherScores(paths.teacher_scores)
    scores.require_undamaged()
    found = [
        row for each in made[::-1] if (row := scores.find(each.tokens, each.loss_mask)) is not None
    ]
    rows = pad_demonstrations(made[::-1], pad_token_id=0)
    taught = assemble_teacher_scores(found, rows.mask)
    backwards = torch.cat(list(reversed(ids.split([row.count for row in found[::-1]]))))
    assert torch.equal(taught.ids[rows.mask], backwards) and not taught.ids[~rows.mask].any()
    expected_outcomes = torch.cat(
        list(reversed(outcomes.split([row.count for row in found[::-1]])))
    )
    torch.testing.assert_close(taught.outcomes[rows.mask], expected_outcomes, rtol=1e-5, atol=1e-5)
    model = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    for place, each in enumerate(made[::-1]):
        with torch.no_grad():
            every = model(each.tokens[None]).logits[0, :-1].log_softmax(-1)[each.loss_mask[1:]]
        of_row, at = found[place].read(), each.tokens[1:][each.loss_mask[1:]]
        torch.testing.assert_close(
            of_row[0].double(), every.gather(-1, at[:, None])[:, 0], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            of_row[2][:, :-1].double(), every.topk(5)[0], rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(of_row[2].exp().sum(-1), torch.ones(len(at)), rtol=0, atol=1e-5)
    steps = read_metrics(paths.metrics)
    assert len(steps) == 4 and all(0 < step["teacher_scores/covered"] < 1 for step in steps)


def test_resumed_scoring_continues_after_last_part(
    pool: WorkerPool, teacher: Path, tmp_path: Path
) -> None:
    paths = RunPaths(tmp_path / "run")
    pool.run(offline_jobs.score, 1, str(teacher), {}, str(paths.root), stop_after=2)
    with pytest.raises(ConfigError, match=r"teacher\.scores.*index\.json"):
        TeacherScores(paths.teacher_scores)
    first = (paths.teacher_scores / "part_00001_of_00004.safetensors").stat().st_mtime_ns
    ((done, ids, _),) = pool.run(
        offline_jobs.score, 1, str(teacher), {}, str(paths.root), resume="true"
    )
    assert (
        done == 2
        and (paths.teacher_scores / "part_00001_of_00004.safetensors").stat().st_mtime_ns == first
    )
    made, scores = examples("sft"), TeacherScores(paths.teacher_scores)
    assert sum(
        row.count for each in made if (row := scores.find(each.tokens, each.loss_mask))
    ) == len(ids)


def test_row_lookup_uses_tokens_and_learned_mask(tmp_path: Path) -> None:
    made = offline_jobs.with_scores(examples("taught"), tmp_path / "scores")
    scores, some = TeacherScores(tmp_path / "scores"), made[1]
    assert all(
        each.teacher_row == scores.find(each.tokens, each.loss_mask) is not None for each in made
    )
    assert scores.find(some.tokens, replace(some, response_mask=None).loss_mask) is None
    assert scores.find(torch.cat([some.tokens[:-1], some.tokens[-1:] + 1]), some.loss_mask) is None


def test_damaged_scores_are_refused(tmp_path: Path) -> None:
    offline_jobs.with_scores(examples("taught"), tmp_path / "scores")
    scores, file = (
        TeacherScores(tmp_path / "scores"),
        tmp_path / "scores" / "part_00001_of_00001.safetensors",
    )
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"teacher\.scores=.*part_00001_of_00001\.safetensors is damaged"
    ):
        scores.require_undamaged()
    index = tmp_path / "scores" / "index.json"
    index.write_text(index.read_text().replace('"top_k": 5', '"top_k": 4'))
    with pytest.raises(ConfigError, match=r"teacher\.scores: .*index\.json: damaged"):
        TeacherScores(tmp_path / "scores")


@pytest.fixture
def student(tmp_path: Path) -> Config:
    """Configuration with two demonstrations, of which only the first has teacher scores."""
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "1+1=", "response": "2"}\n{"prompt": "1+2=", "response": "3"}\n'
    )
    overrides = (
        "experiment=tiny_ppo",
        "algorithm=sft",
        f"run.dir={tmp_path / 'run'}",
        f"data.path={tmp_path / 'sums.jsonl'}",
    )
    config = compose_config(
        [*overrides, f"teacher.scores={tmp_path / 'scores'}", "teacher.loss=forward_kl"]
    )
    directory = prepare_model(config)
    tokens = Tokenizer(directory).encode("1+1=2")
    made = Demonstration(
        torch.cat([tokens, torch.tensor([read_shape(directory).eos_token_ids[0]])]), 4
    )
    offline_jobs.with_scores([made], tmp_path / "scores", vocabulary=64)
    (tmp_path / "scores" / "tokenizer.json").write_bytes(
        (directory / "tokenizer.json").read_bytes()
    )
    return config


def test_record_without_scores_is_refused_or_skipped(
    student: Config,
) -> None:
    tokenizer = Tokenizer(RunPaths(Path(str(student.run.dir))).initial_model)
    with pytest.raises(
        ConfigError, match=r"sums\.jsonl:2: teacher\.scores=.* has no scores for this record"
    ):
        open_run_data(student, tokenizer)
    data = open_run_data(
        replace(student, data=replace(student.data, skip_bad_records=True)), tokenizer
    )
    (only,) = data.examples.iterate_examples()
    assert only.teacher_row is not None and only.teacher_row.count == 2


def test_other_tokenizer_is_refused(student: Config) -> None:
    check(student)
    scores = Path(str(student.teacher.scores))
    AnyTokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "zebra": 2}, unk_token="<pad>")).save(
        str(scores / "tokenizer.json")
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"teacher\.scores=.* of the policy's .* token ids are different tokens in this"
            " model's tokenizer, for example"
        ),
    ):
        check(student)
    with pytest.raises(ConfigError, match=r"teacher\.scores=.* token ids are different tokens"):
        open_run_data(student, Tokenizer(RunPaths(Path(str(student.run.dir))).initial_model))


def test_token_ids_beyond_vocabulary_are_refused(student: Config, tmp_path: Path) -> None:
    scores = tmp_path / "larger"
    offline_jobs.with_scores(examples("taught"), scores, vocabulary=65)
    config = replace(student, teacher=replace(student.teacher, scores=str(scores)))
    with pytest.raises(
        ConfigError, match=r"larger: contains token ids up to 64, but the policy's vocab_size is 64"
    ):
        open_run_data(config, Tokenizer(RunPaths(Path(str(student.run.dir))).initial_model))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"loss": "advantage"},
            (
                r"is not supported with teacher\.loss=advantage, which requires samples of the"
                r" policy; set teacher\.loss to forward_kl"
            ),
        ),
        ({"scores": "nowhere"}, r"teacher\.scores=nowhere: has no index\.json"),
    ],
)
def test_unusable_score_settings_are_refused(
    student: Config, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(replace(student, teacher=replace(student.teacher, **changes)))
