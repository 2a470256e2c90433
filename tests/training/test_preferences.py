"""Pairs out of samples: which prompts give one."""

from __future__ import annotations

import torch

from aligner.config.compose import compose_config
from aligner.data.model_directory import prepare_model
from aligner.data.tokenizer import Tokenizer
from aligner.data.types import Prompt, Sample, collate
from aligner.rollout.rollout_builder import RolloutBatch
from aligner.rollout.services import PendingRows
from aligner.training.preference_sampling import preferences


def test_a_prompt_gives_a_pair_where_one_text_is_better_than_another(tmp_path) -> None:
    tokenizer = Tokenizer(prepare_model(compose_config(["experiment=tiny_ppo", f"run.dir={tmp_path}"])))
    end = tokenizer.eos_token_ids[0]

    def sample(prompt: int, index: int, text: str, *special: int) -> Sample:
        response = torch.cat([tokenizer.encode(text), torch.tensor(special, dtype=torch.int64)])
        tokens, length = torch.cat([tokenizer.encode("ab"), response]), len(response)
        return Sample(prompt, index, tokens, 2, torch.zeros(length), torch.zeros(length, dtype=torch.int64), "length")

    groups = [
        [sample(0, 0, "1"), sample(0, 1, "22", end), sample(0, 2, "333")],
        [sample(1, 0, "1"), sample(1, 1, "2"), sample(1, 2, "3")],  # all score the same
        [sample(2, 0, "1"), sample(2, 1, "1", end), sample(2, 2, "2")],  # the best and the worst say the same
        [sample(3, 0, "1"), sample(3, 1, "", end), sample(3, 2, "2")],  # the worst says nothing
    ]
    scores = torch.tensor([0.5, 2.0, -1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 0.0, 0.5])
    samples = [each for group in groups for each in group]
    prompts = [Prompt(each.prompt_id, "ab", tokenizer.encode("ab")) for each in samples]
    pending = PendingRows(())
    rollout = RolloutBatch(prompts, samples, collate(samples, tokenizer.pad_token_id), pending, pending)
    assert preferences(rollout, scores, 3, tokenizer) == (
        [{"prompt": "ab", "chosen": "22", "rejected": "333", "margin": 3.0, "scores": [2.0, -1.0]}],
        3,
    )
