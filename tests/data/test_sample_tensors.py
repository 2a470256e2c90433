"""Token data of samples survives the conversion to tensors, to wire messages and to batches."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from aligner.data.collectives import samples_from_tensors, samples_to_tensors
from aligner.data.episode_reports import EpisodeReport, FailureKind
from aligner.data.types import Sample, SamplingSupport, collate, collate_episodes
from aligner.servers.wire_protocol import responses_from_tensors, responses_to_tensors
from aligner.training.rollout_builder import compute_environment_scores, truncate_response

EXPERTS = 3, 2
"""Number of layers, and experts per token."""


def a_sample(
    prompt: int,
    index: int,
    length: int,
    kept: list[list[int]] | None,
    *,
    routed: bool,
    seed: int = 0,
) -> Sample:
    """Return a sample with `prompt` prompt tokens and `length` response tokens.

    A sample of length 0 is unfinished.
    """
    draw = torch.Generator().manual_seed(seed + 10 * prompt + index)
    tokens = torch.randint(50, (prompt + length,), generator=draw)
    tokens[:prompt] = torch.arange(prompt)
    counts = None if kept is None else torch.tensor([len(ids) for ids in kept], dtype=torch.int64)
    return Sample(
        prompt_id=prompt,
        sample_index=index,
        tokens=tokens,
        prompt_length=prompt,
        engine_logprobs=torch.randn(length, generator=draw),
        weight_versions=torch.randint(9, (length,), generator=draw),
        finish_reason="length" if length else "unfinished",
        sampling_support=(
            None
            if counts is None
            else SamplingSupport.from_counts(
                counts, torch.tensor([token for ids in kept or [] for token in ids]).int()
            )
        ),
        expert_routing=(
            torch.randint(8, (prompt + length - 1, *EXPERTS), generator=draw).byte()
            if routed and length
            else None
        ),
    )


def samples(*, kept: bool, routed: bool) -> list[Sample]:
    return [
        a_sample(2, 0, 3, [[5, 6], [], [7]] if kept else None, routed=routed),
        a_sample(2, 1, 0, [] if kept else None, routed=routed),
        a_sample(4, 0, 2, [[], [1, 2, 3]] if kept else None, routed=routed),
        a_sample(4, 1, 1, [[9]] if kept else None, routed=routed),
    ]


def sets(kept: SamplingSupport | None) -> list[list[int]] | None:
    """Return the kept token ids of each token."""
    if kept is None:
        return None
    token, ids = kept.flatten_ids()
    found = [ids[token == place].tolist() for place in range(kept.counts.numel())]
    assert found == [each.tolist() for each in kept.split_ids()]
    return found


def assert_same(got: Sample, expected: Sample) -> None:
    for member in fields(Sample):
        value, wanted = getattr(got, member.name), getattr(expected, member.name)
        if isinstance(wanted, Tensor):
            assert value.dtype == wanted.dtype, member.name
            assert torch.equal(value, wanted), member.name
        elif member.name == "sampling_support":
            assert sets(value) == sets(wanted)
        else:
            assert value == wanted, member.name


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("routed", [False, True])
def test_samples_survive_tensor_and_wire_round_trip(kept: bool, routed: bool) -> None:
    given = samples(kept=kept, routed=routed)
    for got, expected in zip(samples_from_tensors(samples_to_tensors(given)), given, strict=True):
        assert_same(got, expected)
    wired = {
        name: torch.from_numpy(tensor.numpy().copy())
        for name, tensor in responses_to_tensors(given).items()
    }
    for got, expected in zip(responses_from_tensors(given, wired), given, strict=True):
        assert_same(got, expected)


def test_reports_survive_tensor_and_wire_round_trip() -> None:
    report = EpisodeReport(
        FailureKind.TIMEOUT, (FailureKind.ERROR, FailureKind.INFRASTRUCTURE), {"größe": 0.1 + 0.2}
    )
    first, *others = samples(kept=False, routed=False)
    given = [replace(first, branches=(a_sample(2, 0, 1, None, routed=False),)), *others]
    given[0] = replace(given[0], report=report)
    given[2] = replace(given[2], report=EpisodeReport(FailureKind.NO_TURN))
    assert samples_from_tensors(samples_to_tensors(given))[0].report == report
    for got, expected in zip(
        responses_from_tensors(given, responses_to_tensors(given)), given, strict=True
    ):
        assert got.report == expected.report


def test_empty_sample_list_survives_tensor_round_trip() -> None:
    assert samples_from_tensors(samples_to_tensors([])) == []


def test_selected_rows_keep_kept_tokens_and_expert_routing() -> None:
    given = [
        sample for sample in samples(kept=True, routed=True) if sample.finish_reason != "unfinished"
    ]
    batch = collate(given, pad_token_id=0)
    chosen = torch.tensor([2, 0])
    rows = batch.select(chosen, width=5)
    assert rows.sampling_support is not None
    assert rows.expert_routing is not None
    for row, place in enumerate(chosen.tolist()):
        sample = given[place]
        assert sample.expert_routing is not None
        responses = slice(sample.prompt_length - 1, sample.tokens.numel() - 1)
        assert sets(rows.sampling_support.select((row, responses))) == sets(sample.sampling_support)
        assert not rows.sampling_support.counts[row, : sample.prompt_length - 1].any(), (
            "prompts are not drawn"
        )
        assert torch.equal(
            rows.expert_routing[row, : len(sample.expert_routing)], sample.expert_routing
        )
    moved = rows.to(torch.device("cpu")).sampling_support
    assert moved is not None
    assert sets(moved) == sets(rows.sampling_support)
    assert (
        len(moved.ids) == int(rows.sampling_support.counts.sum()) < len(rows.sampling_support.ids)
    ), "other rows' ids stay where they are"


def test_truncated_response_keeps_data_of_its_tokens() -> None:
    sample = a_sample(2, 0, 3, [[5, 6], [], [7]], routed=True)
    cut = truncate_response(sample, int(sample.tokens[3]), 1)
    assert (sets(cut.sampling_support), cut.finish_reason) == ([[5, 6], []], "stop")
    assert sample.expert_routing is not None
    assert cut.expert_routing is not None
    assert torch.equal(cut.expert_routing, sample.expert_routing[:3])


def test_kept_token_counts_of_wrong_length_are_refused() -> None:
    with pytest.raises(ValueError, match="kept-token counts"):
        a_sample(2, 0, 3, [[5]], routed=False)


@pytest.mark.parametrize("order", [1, -1])
def test_partial_expert_routing_is_omitted(
    order: int,
) -> None:
    some = [a_sample(2, 0, 3, None, routed=True), a_sample(4, 0, 2, None, routed=False)][::order]
    assert collate(some, pad_token_id=0).expert_routing is None
    assert all(
        sample.expert_routing is None
        for sample in responses_from_tensors(some, responses_to_tensors(some))
    )


def an_episode() -> Sample:
    """Return an episode with two generated, two observation and one generated token."""
    sample = a_sample(3, 0, 5, None, routed=False)
    drawn, rewards = (
        torch.tensor([True, True, False, False, True]),
        torch.tensor([0.0, 0.5, 0.0, 0.0, -1.0]),
    )
    return replace(sample, generated_mask=drawn, rewards=rewards)


def test_episode_data_survives_tensor_round_trip():
    episode, plain = an_episode(), a_sample(2, 1, 4, None, routed=False)
    first, second = samples_from_tensors(samples_to_tensors([episode, plain]))
    assert torch.equal(first.generated_mask, episode.generated_mask) and torch.equal(
        first.rewards, episode.rewards
    )
    assert bool(second.generated_mask.all()) and not bool(second.rewards.any())
    (alone,) = samples_from_tensors(samples_to_tensors([plain]))
    assert alone.generated_mask is None and alone.rewards is None


def test_observation_tokens_are_masked_and_not_counted():
    episode, plain = an_episode(), a_sample(2, 1, 4, None, routed=False)
    batch = collate([episode, plain], pad_token_id=0)
    assert batch.mask.tolist() == [
        [False] * 2 + [True] * 2 + [False] * 2 + [True],
        [False] + [True] * 4 + [False] * 2,
    ]
    assert batch.turn_rewards.tolist() == [[0.0] * 3 + [0.5, 0.0, 0.0, -1.0], [0.0] * 7]
    assert torch.equal(batch.engine_logprobs[0, 2:], episode.engine_logprobs)
    assert (episode.generated_token_count, plain.generated_token_count) == (3, 4)
    assert [turn.tolist() for turn in episode.split_turns()] == [
        part.tolist() for part in episode.response.split([2, 2, 1])
    ]
    assert torch.equal(torch.cat(episode.truncate(3, "length").split_turns()), episode.response[:3])


def test_last_turn_starts_at_its_first_generated_token():
    episode, plain = an_episode(), a_sample(3, 1, 4, None, routed=False)
    alone = replace(episode, generated_mask=torch.tensor([False, True, True, True, True]))
    batch = collate([episode, plain, alone], 0)
    assert batch.last_turn_starts.tolist() == [
        episode.prompt_length + 4,
        3,
        alone.prompt_length + 1,
    ]


def test_lost_episode_leaves_its_prompt_without_score():
    lost = replace(an_episode(), rewards=torch.full((5,), torch.nan))
    scores = compute_environment_scores([an_episode(), an_episode(), lost, an_episode()], 2)
    assert scores[:2].tolist() == [-0.5, -0.5] and bool(scores[2:].isnan().all())
    assert compute_environment_scores([a_sample(2, 1, 4, None, routed=False)], 1) is None


def test_branches_survive_tensor_round_trip():
    plain = samples(kept=True, routed=False)
    branch = replace(
        a_sample(5, 0, 2, [[1], []], routed=False), generated_mask=torch.tensor([False, True])
    )
    branched = [plain[0], replace(plain[2], branches=(branch, plain[3])), plain[1]]
    found = samples_from_tensors(samples_to_tensors(branched))
    assert [len(sample.branches) for sample in found] == [0, 2, 0]
    for got, expected in zip(found[1].branches, branched[1].branches, strict=True):
        assert torch.equal(got.tokens, expected.tokens) and torch.equal(
            got.engine_logprobs, expected.engine_logprobs
        )
    assert torch.equal(found[1].branches[0].generated_mask, branch.generated_mask)
    assert "branches" not in samples_to_tensors(plain)


def test_selected_episodes_keep_their_branches():
    first, second, third = (
        replace(a_sample(4, index, 3, None, routed=False)) for index in range(3)
    )
    others = tuple(a_sample(7, index, 2, None, routed=False) for index in range(3))
    batch = collate_episodes(
        [first, replace(second, branches=others[:2]), replace(third, branches=others[2:])], 0
    )
    assert (
        batch.episode_indices.tolist() == [0, 1, 2, 1, 1, 2]
        and batch.is_branch.tolist() == [False] * 3 + [True] * 3
    )
    assert batch.samples_per_prompt == 3 and batch.groups.tolist() == [0] * 6
    assert batch.prompt_lengths.tolist() == [4, 4, 4, 7, 7, 7]
    chosen = batch.get_rows_with_branches(torch.tensor([2, 1]))
    assert chosen.tolist() == [2, 1, 3, 4, 5]
    selected = batch.select(chosen)
    assert selected.episode_indices.tolist() == [0, 1, 1, 1, 0] and selected.is_branch.tolist() == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert selected.get_rows_with_branches(torch.tensor([0])).tolist() == [0, 4]
    without = collate_episodes([first, second, third], 0)
    assert without.episodes is None and without.get_rows_with_branches(
        torch.tensor([1])
    ).tolist() == [1]
    assert without.episode_indices.tolist() == [0, 1, 2] and not without.is_branch.any()
