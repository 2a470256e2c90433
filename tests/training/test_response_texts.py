"""Test that rewards, evaluations and files contain the exact text after a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aligner.data.examples import open_demonstrations, open_preferences
from aligner.data.tokenizer import Tokenizer
from aligner.data.tokenizer_files import read_tokenizer
from aligner.data.types import Prompt, Sample, collate
from aligner.paths import RunPaths
from aligner.rewards.final_answers import extract_final_answer
from aligner.rewards.function_forms import ScoringRequest
from aligner.rewards.scorers import resolve_scorer
from aligner.rewards.sources import CombinedReward, TextSource
from aligner.schema import DataConfig
from aligner.schema.reward_sources import FunctionSource
from aligner.servers.reward_server import RewardRank
from aligner.servers.validation import Limits
from aligner.training.evaluator import build_scoring_requests
from aligner.training.preference_sampling import PairWriter, build_preferences
from aligner.training.rollout_builder import RolloutBatch
from aligner.training.services import PendingRows
from tests.data.test_response_decoder import SENTENCEPIECE, model

KINDS = (*SENTENCEPIECE, "qwen")
ANSWERS = (" four", "four", " a\n b", "\n4")


def samples(tokenizer: Tokenizer) -> list[Sample]:
    """Return one sample per answer to the same prompt, with an end-of-sequence token."""
    prompt = tokenizer.encode("2+2=", add_bos=True)
    found = []
    for index, text in enumerate(ANSWERS):
        response = torch.cat([tokenizer.encode_after("2+2=", prompt, text), torch.tensor([2])])
        count = len(response)
        found.append(
            Sample(
                prompt_id=0,
                sample_index=index,
                tokens=torch.cat([prompt, response]),
                prompt_length=len(prompt),
                engine_logprobs=torch.zeros(count),
                weight_versions=torch.zeros(count, dtype=torch.int64),
                finish_reason="stop",
            )
        )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_reward_server_scores_text_after_prompt(tmp_path: Path, kind: str) -> None:
    tokenizer = model(tmp_path, kind)
    batch = collate(samples(tokenizer), 0)
    requests: list[ScoringRequest] = []

    def score(given: list[ScoringRequest]) -> list[float]:
        requests.extend(given)
        return [0.0] * len(given)

    source = FunctionSource(name="own", key="reward", function="own:score")
    reward = CombinedReward([(source, TextSource("own", score))])
    scoring = RewardRank(reward, read_tokenizer(tmp_path), Limits(600, 64, 4096))
    scoring.score(batch.tokens, batch.lengths, batch.prompt_lengths)

    assert [(each.prompt, each.response) for each in requests] == [
        ("2+2=", answer) for answer in ANSWERS
    ]
    for row, answer in enumerate(ANSWERS):
        place = scoring._find_token(
            batch.tokens, batch.lengths, batch.prompt_lengths, row, len(answer)
        )
        assert tokenizer.decode(batch.tokens[row, : place + 1]) == "2+2=" + answer
        assert tokenizer.decode(batch.tokens[row, :place]) != "2+2=" + answer


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_scores_text_after_prompt(tmp_path: Path, kind: str) -> None:
    tokenizer = model(tmp_path, kind)
    prompt = Prompt(0, "2+2=", tokenizer.encode("2+2=", add_bos=True))
    drawn = samples(tokenizer)
    requests = build_scoring_requests([prompt] * len(drawn), drawn, tokenizer)

    assert [(each.prompt, each.response) for each in requests] == [
        ("2+2=", answer) for answer in ANSWERS
    ]


@pytest.mark.parametrize("answer", ("4", "The answer is 4.", r"\boxed{4}", "#### 4", "5"))
def test_leading_space_of_a_response_does_not_change_its_score(answer: str) -> None:
    """Checks exact_match, gsm8k and `extract_final_answer`, which math compares."""
    for function in ("exact_match", "gsm8k"):
        scorer = resolve_scorer(function, "reward.function")
        alone, behind = (
            scorer([ScoringRequest("2+2=", text, {"answer": "4"})])
            for text in (answer, f" {answer}")
        )
        assert alone == behind
    assert extract_final_answer(answer) == extract_final_answer(f" {answer}")


@pytest.mark.parametrize("uses_tokens", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_preferences_are_read_back_with_the_same_tokens(
    tmp_path: Path, kind: str, uses_tokens: bool
) -> None:
    """Checks reading from the stored token ids and from the texts alone."""
    tokenizer = model(tmp_path, kind)
    prompt = Prompt(0, "2+2=", tokenizer.encode("2+2=", add_bos=True))
    drawn = samples(tokenizer)
    none = PendingRows(())
    rollout = RolloutBatch([prompt] * len(drawn), drawn, collate(drawn, 0), none, none)
    scores = torch.tensor([4.0, 3.0, 2.0, 1.0])
    records, without_pair = build_preferences(rollout, scores, len(drawn), tokenizer)
    assert without_pair == 0
    assert (records[0]["chosen"], records[0]["rejected"]) == (ANSWERS[0], ANSWERS[-1])

    writer = PairWriter(RunPaths(tmp_path / "run"), tokenizer)
    writer.paths.root.mkdir()
    writer.write(1, records, rollout, scores)
    writer.finish()
    responses = [json.loads(line) for line in writer.paths.responses.read_text().splitlines()]
    assert [each["response"] for each in responses] == list(ANSWERS)

    settings = {"shuffle": False, "generated_tokens": uses_tokens}
    data = DataConfig(path=str(writer.paths.preferences), **settings)
    (pair,) = open_preferences(data, tokenizer, 1).take(0, 1)
    assert torch.equal(pair.chosen.tokens, drawn[0].tokens)
    assert torch.equal(pair.rejected.tokens, drawn[-1].tokens)
    data = DataConfig(path=str(writer.paths.responses), **settings)
    for found, sample in zip(
        open_demonstrations(data, tokenizer, 1).take(0, len(drawn)), drawn, strict=True
    ):
        assert torch.equal(found.tokens, sample.tokens)
