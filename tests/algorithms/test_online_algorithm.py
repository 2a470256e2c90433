"""Test online algorithms: experience, losses, gradients, minibatches and score shaping."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aligner
from aligner.algorithms.online_algorithm import build_online_algorithm
from aligner.algorithms.selections import best, best_and_worst
from aligner.config.compose import compose_config
from aligner.data.types import FINISH_REASONS, Sample, SampleBatch, build_response_mask
from aligner.schema import ParallelConfig
from tests.algorithms import jobs
from tests.megatron import families

EACH, PROMPTS, LONGEST, PROMPT = 4, 3, 6, 2
ONLINE = sorted(
    path.stem
    for path in (Path(aligner.__file__).parents[1] / "conf/algorithm").glob("*.yaml")
    # test_distillation.py tests on_policy_distillation
    if "trainer:" not in path.read_text() and path.stem != "on_policy_distillation"
)


@functools.cache
def compose(name, *overrides):
    return compose_config(
        [
            "experiment=tiny_ppo",
            f"algorithm={name}",
            f"rollout.samples_per_prompt={EACH}",
            f"rollout.max_response_tokens={LONGEST}",
            *overrides,
        ]
    )


@pytest.fixture(scope="module", params=ONLINE)
def name(request):
    return request.param


def step(config, seed=0, cut=()):
    """Build an algorithm and its experience of random samples.

    Returns the algorithm, the experience, the scores, and log-probs after a small update.

    Args:
        cut: Rows whose responses are truncated.
    """
    algorithm = build_online_algorithm(config)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = EACH * PROMPTS
    lengths = PROMPT + torch.randint(1, LONGEST + 1, (rows,), generator=generator)
    prompt_lengths = torch.full((rows,), PROMPT)
    width = int(lengths.max())
    mask = build_response_mask(lengths, prompt_lengths, width)
    old = torch.where(mask, -2 + 0.3 * random(rows, width - 1), math.nan)
    engine = torch.where(mask, old + 0.05 * random(rows, width - 1), 0.0)
    batch = SampleBatch(
        torch.randint(9, (rows, width), generator=generator),
        lengths,
        mask,
        prompt_lengths,
        engine,
        torch.zeros_like(lengths)[:, None].expand(mask.shape),
        finish_reasons=torch.tensor(
            [FINISH_REASONS.index("length" if row in cut else "stop") for row in range(rows)]
        ),
        groups=torch.arange(rows) // EACH,
    )
    scores = random(rows).round(decimals=1)
    reference = old + 0.1 * random(rows, width - 1)
    values = 0.1 * random(rows, width) if config.algorithm.has_critic else None
    after = torch.where(mask, old + 0.2 * random(rows, width - 1), 0.0)
    if algorithm.select_by_score is not None:
        chosen = algorithm.select_by_score(scores, EACH)
        batch, scores, old, reference, after = (
            part[chosen] if torch.is_tensor(part) else part.select(chosen)
            for part in (batch, scores, old, reference, after)
        )
    shaped = algorithm.shaping(
        scores, [sample(length, "stop") for length in batch.mask.sum(1).tolist()]
    )
    samples = algorithm.build_scored_samples(
        batch, shaped, values, old, reference, config.algorithm.kl_coefficient
    )
    experience = algorithm.build_experience(samples)
    return algorithm, experience, scores, after


def gradient(algorithm, experience, after, parts):
    """Return loss, statistics and gradient of the log-probs, summed over parts of the rows."""
    logprobs = after.clone().requires_grad_()
    entropy = torch.zeros_like(after)
    loss = algorithm.build_loss(experience, 0.05)
    total, sums = torch.zeros((), dtype=after.dtype), {}
    for rows in parts:
        value, stats = loss(
            logprobs[rows],
            entropy[rows],
            experience.select(rows),
            algorithm.loss_denominator(experience),
        )
        total = total + value
        for key, number in stats.items():
            sums[key] = (
                max(sums[key], number)
                if key.endswith("_max") and key in sums
                else sums.get(key, 0.0) + number
            )
    total.backward()
    return total.detach(), sums, logprobs.grad


def test_conf_contains_every_online_algorithm():
    assert set(ONLINE) == {
        *(
            "ppo",
            "ppo_decoupled",
            "reinforce",
            "reinforce_plus_plus",
            "rloo",
            "proximal_rloo",
            "copg",
            "grpo",
            "dr_grpo",
        ),
        *("dapo", "gspo", "cispo", "online_dpo", "best_of_n"),
    }


@pytest.mark.promise("micro-batches-change-no-update")
def test_micro_batching_changes_no_gradient_or_statistic(name):
    algorithm, experience, _, after = step(compose(name))
    rows = torch.arange(experience.tokens.shape[0])
    units = rows.view(-1, algorithm.group_size)
    whole = gradient(algorithm, experience, after, [rows])
    shuffled = units[torch.randperm(len(units), generator=torch.Generator().manual_seed(1))]
    cut = gradient(algorithm, experience, after, [part.flatten() for part in shuffled.split(2)])
    torch.testing.assert_close(cut[0], whole[0])
    torch.testing.assert_close(cut[2], whole[2])
    assert cut[1].keys() == whole[1].keys()
    for key in whole[1]:
        torch.testing.assert_close(cut[1][key], whole[1][key], msg=key)
    assert whole[2].abs().max() > 0 and bool(whole[2].isfinite().all())


@pytest.mark.promise("old-logprobs-from-either-forward")
def test_single_update_uses_its_own_forward_logprobs(name):
    algorithm, experience, _, _ = step(compose(name))
    at_the_start = torch.where(experience.mask, experience.old_logprobs, 0.0)
    rows = [torch.arange(experience.tokens.shape[0])]
    known = gradient(algorithm, experience, at_the_start, rows)
    experience = replace(
        experience, old_logprobs=torch.full_like(experience.old_logprobs, math.nan)
    )
    found = gradient(algorithm, experience, at_the_start, rows)
    assert torch.equal(found[0], known[0])
    assert torch.equal(found[2], known[2])
    assert found[1] == known[1]


@pytest.mark.parametrize(
    ("algorithm", "overrides", "asks"),
    [
        ("grpo", [], False),
        ("rloo", ["algorithm.kl_coefficient=0"], False),
        ("rloo", [], True),
        ("grpo", ["algorithm.minibatches=2"], True),
        ("grpo", ["algorithm.epochs=2"], True),
    ],
)
def test_logprob_pass_runs_only_if_needed(algorithm, overrides, asks):
    given = ["algorithm.minibatches=1", "algorithm.epochs=1", *overrides]
    algorithm, experience, scores, _ = step(compose(algorithm, *given))
    assert algorithm.needs_old_logprobs == asks
    if not asks:
        batch = SampleBatch(
            **{name: getattr(experience, name) for name in SampleBatch.__dataclass_fields__}
        )
        unknown = torch.full_like(experience.old_logprobs, math.nan)
        samples = algorithm.build_scored_samples(
            batch, scores, None, unknown, experience.reference_logprobs, 0.0
        )
        assert torch.equal(algorithm.build_experience(samples).advantages, experience.advantages)


@pytest.mark.promise("branches-share-the-episode-score")
@pytest.mark.parametrize(
    "branching", [name for name in ONLINE if name not in ("copg", "online_dpo", "best_of_n")]
)
@pytest.mark.parametrize("over", ["batch", "prompt"])
def test_branch_trains_with_episode_score_counted_once(branching, over):
    """Each branch is a copy of its sample here, so both must have the same advantages."""
    config = compose(
        branching, "algorithm.whiten_advantages=false", "algorithm.whiten_rewards=false"
    )
    algorithm, alone, scores, _ = step(config)
    of = torch.tensor([0, 0, 5, 7])
    rows = torch.cat((torch.arange(len(scores)), of))
    batch = SampleBatch(
        **{name: getattr(alone, name) for name in SampleBatch.__dataclass_fields__}
    ).select(rows)
    batch = replace(batch, episodes=rows)
    given = alone.old_logprobs[rows], alone.reference_logprobs[rows]
    values = None if alone.values is None else torch.nn.functional.pad(alone.values[rows], (0, 1))
    shaped = algorithm.shaping(
        scores, [sample(length, "stop") for length in alone.mask.sum(1).tolist()]
    )
    scored = algorithm.build_scored_samples(
        batch, shaped, values, *given, config.algorithm.kl_coefficient
    )
    experience = algorithm.build_experience(scored)
    assert experience.samples_per_prompt == EACH
    if branching != "reinforce_plus_plus":  # this estimator whitens over the batch
        torch.testing.assert_close(experience.advantages, alone.advantages[rows])
    whitened = replace(
        algorithm, settings=replace(config.algorithm, whiten_advantages=True, whiten_over=over)
    )
    for learned in (experience, whitened.build_experience(scored)):
        torch.testing.assert_close(
            learned.advantages[len(scores) :], learned.advantages[of], rtol=0, atol=0
        )


def test_grpo_turns_adds_the_rest_of_the_episode_after_a_branch():
    """The branch of the first episode has a reward of its own, and the episode another one."""
    config = compose("grpo", "algorithm.advantage=grpo_turns", "algorithm.gamma=0.5")
    algorithm, alone, _, _ = step(config)
    rows = torch.cat((torch.arange(len(alone.tokens)), torch.tensor([0])))
    batch = SampleBatch(
        **{name: getattr(alone, name) for name in SampleBatch.__dataclass_fields__}
    ).select(rows)
    # the branch has two turns of one token each
    mask = batch.mask.clone()
    mask[-1] = False
    mask[-1, [PROMPT, PROMPT + 2]] = True
    turn_rewards = torch.zeros(mask.shape)
    turn_rewards[-1, PROMPT] = 0.25
    batch = replace(batch, episodes=rows, mask=mask, turn_rewards=turn_rewards)
    scores = torch.zeros(len(alone.tokens))
    scores[0] = 1.0
    scored = algorithm.build_scored_samples(
        batch, scores, None, alone.old_logprobs[rows], alone.reference_logprobs[rows], 0.0
    )
    advantages = algorithm.build_experience(scored).advantages
    # returns of the group: the sample, the other samples of the prompt, and the branch's turns
    returns = torch.tensor(
        [1.0] + [0.0] * (EACH - 1) + [0.25 + 0.5 * 0.75, 0.75], dtype=advantages.dtype
    )
    expected = (returns - returns.mean()) / (returns.std() + 1e-4)
    torch.testing.assert_close(advantages[-1, [PROMPT, PROMPT + 2]], expected[-2:])
    torch.testing.assert_close(advantages[0][mask[0]], expected[0].expand(int(mask[0].sum())))


def test_gradient_is_zero_outside_the_responses(name):
    algorithm, experience, _, after = step(compose(name))
    _, _, slope = gradient(algorithm, experience, after, [torch.arange(experience.tokens.shape[0])])
    assert (slope[~experience.mask] == 0).all()


def test_minibatches_keep_compared_rows_together(name):
    algorithm, experience, _, _ = step(compose(name))
    seen = []
    for part in algorithm.iterate_minibatches(experience, epochs=1, count=3, seed=5):
        assert part.tokens.shape[0] % algorithm.group_size == 0
        for unit in part.tokens.unflatten(0, (-1, algorithm.group_size)):
            (place,) = [
                index
                for index, own in enumerate(
                    experience.tokens.unflatten(0, (-1, algorithm.group_size))
                )
                if torch.equal(own, unit)
            ]
            seen.append(place)
    assert sorted(seen) == list(range(experience.tokens.shape[0] // algorithm.group_size))


def by_hand(experience, advantages, after, token_weight, low=0.2, high=0.2):
    """-Σ weight · min(r·A, clip(r)·A), token by token."""
    total = 0.0
    for row in range(experience.tokens.shape[0]):
        for place in experience.mask[row].nonzero().flatten().tolist():
            ratio = math.exp(float(after[row, place] - experience.old_logprobs[row, place]))
            advantage = float(advantages[row])
            clipped = min(max(ratio, 1 - low), 1 + high)
            total -= token_weight(int(experience.mask[row].sum())) * min(
                ratio * advantage, clipped * advantage
            )
    return total


def grouped(scores, baseline):
    return torch.cat([baseline(group) for group in scores.view(-1, EACH)])


def normalized(group):
    return (group - group.mean()) / (group.std() + 1e-4)


def test_grpo_loss_equals_loop_with_k3_penalty():
    algorithm, experience, scores, after = step(compose("grpo"))
    advantages = grouped(scores, normalized)
    rows = len(scores)
    expected = by_hand(experience, advantages, after, lambda length: 1 / (rows * length))
    for row in range(rows):
        inside = experience.mask[row]
        log_ratio = experience.reference_logprobs[row][inside] - after[row][inside]
        expected += 0.05 * float((log_ratio.exp() - log_ratio - 1).mean()) / rows
    loss, _, _ = gradient(algorithm, experience, after, [torch.arange(rows)])
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "baseline", "weight", "low", "high"),
    [
        (
            "dr_grpo",
            lambda group: group - group.mean(),
            lambda rows, tokens, length: 1 / (rows * LONGEST),
            0.2,
            0.2,
        ),
        ("dapo", normalized, lambda rows, tokens, length: 1 / tokens, 0.2, 0.28),
    ],
)
def test_dr_grpo_and_dapo_losses_equal_formulas(name, baseline, weight, low, high):
    algorithm, experience, scores, after = step(
        compose(name, "algorithm.truncated_importance=none")
    )
    if name == "dapo":
        lengths = experience.mask.sum(1)
        # The overlong buffer is a fifth of 6 tokens, rounded to one token.
        scores = scores - ((lengths - (LONGEST - 1)) / 1).clamp(0, 1)
    rows, tokens = len(scores), int(experience.mask.sum())
    advantages = grouped(scores, baseline)
    expected = by_hand(
        experience, advantages, after, lambda length: weight(rows, tokens, length), low, high
    )
    loss, _, _ = gradient(algorithm, experience, after, [torch.arange(rows)])
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("above", "most"), [("truncate", 1.1), ("drop", 0.0)])
def test_online_dpo_weights_pairs_by_importance(above, most):
    overrides = (
        "algorithm.truncated_importance_cap=1.1",
        f"algorithm.above_importance_cap={above}",
    )
    algorithm, experience, _, after = step(compose("online_dpo", *overrides))
    pairs, expected, weights = len(after) // 2, 0.0, []

    def answer(row, logprobs):
        return math.fsum(logprobs[row][experience.mask[row]].tolist())

    for better in range(0, 2 * pairs, 2):
        worse = better + 1
        margin = answer(better, after) - answer(worse, after)
        margin -= answer(better, experience.reference_logprobs) - answer(
            worse, experience.reference_logprobs
        )
        drawn = [
            answer(row, experience.old_logprobs) - answer(row, experience.engine_logprobs)
            for row in (better, worse)
        ]
        weights.append(math.exp(sum(drawn)))
        expected += (
            (weights[-1] if weights[-1] <= 1.1 else most)
            * math.log1p(math.exp(-0.1 * margin))
            / pairs
        )
    loss, stats, _ = gradient(algorithm, experience, after, [torch.arange(2 * pairs)])
    assert min(weights) < 1.1 < max(weights)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(stats["importance_truncated"]) == pytest.approx(
        sum(weight > 1.1 for weight in weights) / pairs
    )


def test_online_rpo_uses_score_differences():
    kind = (
        "algorithm.preference.kind=rpo_sq",
        "algorithm.preference.reward_scale=3",
        "algorithm.truncated_importance=none",
    )
    algorithm, experience, _, after = step(compose("online_dpo", *kind))
    pairs, expected = len(after) // 2, 0.0
    assert (experience.scores[::2] > experience.scores[1::2]).all()
    for better in range(0, 2 * pairs, 2):
        log_ratios = [
            math.fsum((after - experience.reference_logprobs)[row][experience.mask[row]].tolist())
            for row in (better, better + 1)
        ]
        ahead = float(experience.scores[better] - experience.scores[better + 1])
        expected += (0.1 * (log_ratios[0] - log_ratios[1]) - 3 * ahead) ** 2 / pairs
    loss, _, _ = gradient(algorithm, experience, after, [torch.arange(2 * pairs)])
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def ratios(experience, after, of_row):
    """Return `of_row` of the log-ratios of each response's tokens."""
    difference = after - experience.old_logprobs
    return [of_row(difference[row][experience.mask[row]]) for row in range(len(difference))]


def test_gspo_clips_geometric_mean_of_ratios():
    algorithm, experience, scores, after = step(compose("gspo"))
    advantages = grouped(scores, normalized)
    terms = [
        min(ratio * float(advantage), min(max(ratio, 1 - 3e-4), 1 + 4e-4) * float(advantage))
        for ratio, advantage in zip(
            ratios(experience, after, lambda row: float(row.mean().exp())), advantages, strict=True
        )
    ]
    loss, _, _ = gradient(algorithm, experience, after, [torch.arange(len(scores))])
    assert float(loss) == pytest.approx(-sum(terms) / len(terms), rel=1e-5)


def test_cispo_clips_only_large_weights():
    algorithm, experience, scores, after = step(compose("cispo"))
    advantages = grouped(scores, normalized)
    weight = torch.where(experience.mask, (after - experience.old_logprobs).exp(), 0.0).clamp(
        max=1.28
    )
    expected = torch.where(experience.mask, -weight * advantages[:, None], 0.0) / int(
        experience.mask.sum()
    )
    _, _, slope = gradient(algorithm, experience, after, [torch.arange(len(scores))])
    torch.testing.assert_close(slope, expected)


def test_rloo_variants_agree_before_the_first_update():
    """Before an update, both have the gradient -A / B for a response with advantage A, B responses.

    After an update, proximal RLOO clips, so the gradient of clipped responses is zero.
    """
    slopes = {}
    for name in ("rloo", "proximal_rloo"):
        algorithm, experience, scores, _ = step(compose(name, "algorithm.kl_coefficient=0"))
        unmoved = torch.where(experience.mask, experience.old_logprobs, 0.0)
        _, _, slopes[name] = gradient(algorithm, experience, unmoved, [torch.arange(len(scores))])
        against = grouped(scores, lambda group: (group - group.mean()) * EACH / (EACH - 1))
        expected = torch.where(experience.mask, -against[:, None], 0.0) / len(scores)
        torch.testing.assert_close(slopes[name], expected)
    algorithm, experience, scores, after = step(
        compose("proximal_rloo", "algorithm.kl_coefficient=0")
    )
    _, stats, slope = gradient(algorithm, experience, after, [torch.arange(len(scores))])
    products = torch.tensor(ratios(experience, after, lambda row: float(row.sum().exp())))
    against = grouped(scores, lambda group: group - group.mean())
    clipped = ((products > 1.2) & (against > 0)) | ((products < 0.8) & (against < 0))
    assert 0 < int(clipped.sum()) < len(scores)
    assert ((slope == 0).all(1) == clipped).all()
    assert 0 < float(stats["clip_fraction"]) < 1


def test_constant_aggregation_keeps_statistics():
    small, large = (
        step(compose("dr_grpo", f"algorithm.aggregation={kind}")) for kind in ("constant", "token")
    )
    stats = [
        gradient(algorithm, experience, after, [torch.arange(12)])[1]
        for algorithm, experience, _, after in (small, large)
    ]
    for name in ("approx_kl", "clip_fraction", "ratio_max"):
        assert stats[0][name] == stats[1][name]
    assert stats[0]["loss"] != stats[1]["loss"]


def test_uneven_rows_fill_requested_minibatches():
    algorithm, experience, _, _ = step(compose("ppo"))
    parts = list(algorithm.iterate_minibatches(experience, epochs=1, count=5, seed=1))
    assert sorted(part.tokens.shape[0] for part in parts) == [2, 2, 2, 3, 3]


def test_entropy_bonus_is_subtracted_from_the_loss():
    config = compose("ppo", "algorithm.entropy_coefficient=0.5")
    algorithm, experience, _, after = step(config)
    entropy = torch.where(
        experience.mask, torch.rand(after.shape, dtype=after.dtype), 0.0
    ).requires_grad_()
    loss = algorithm.build_loss(experience, 0.0)
    with_bonus, stats = loss(after, entropy, experience, algorithm.loss_denominator(experience))
    without, _ = loss(
        after, torch.zeros_like(after), experience, algorithm.loss_denominator(experience)
    )
    mean = float(entropy[experience.mask].mean().detach())
    assert float(with_bonus.detach()) == pytest.approx(float(without) - 0.5 * mean, rel=1e-6)
    assert stats["loss"] == with_bonus.detach()
    with_bonus.backward()
    assert entropy.grad[experience.mask].allclose(
        torch.tensor(-0.5 / float(experience.mask.sum()), dtype=after.dtype)
    )


def test_best_and_worst_selection_skips_ties():
    scores = torch.tensor([0.0, 1.0, 0.5, 0.2, 1.0, 1.0, 1.0, 1.0, 3.0, 2.0, 4.0, 1.0])
    assert best_and_worst(scores, 4).tolist() == [1, 0, 10, 11]
    assert best(scores, 4).tolist() == [1, 10]


def sample(length, finish_reason):
    tokens = torch.zeros(PROMPT + length, dtype=torch.int64)
    return Sample(
        0,
        0,
        tokens,
        PROMPT,
        torch.zeros(length),
        torch.zeros(length, dtype=torch.int64),
        finish_reason,
    )


def test_shaping_penalizes_missing_end_and_length():
    config = compose(
        "ppo",
        "rollout.stop_at_eos=true",
        "reward.missing_end_score=-1",
        "algorithm.overlong_fraction=0.67",
    )
    shaping, scores = build_online_algorithm(config).shaping, torch.ones(4)
    samples = [sample(2, "stop"), sample(3, "length"), sample(4, "stop"), sample(6, "stop")]
    assert shaping(scores, samples).tolist() == pytest.approx([1.0, -1.25, 0.5, 0.0])
    assert shaping.penalize_missing_ends(scores, samples).tolist() == [1.0, -1.0, 1.0, 1.0]
    assert build_online_algorithm(compose("ppo")).shaping(scores, samples).tolist() == [1.0] * 4
    config = compose("ppo", "algorithm.length_penalty=0.25", "algorithm.target_length=4")
    # The policy generated five of its six tokens.
    given = replace(samples[3], generated_mask=torch.tensor([True] * 5 + [False]))
    shaping = build_online_algorithm(config).shaping
    assert shaping(scores, [*samples[:3], given]).tolist() == [0.5, 0.75, 1.0, 0.75]
    assert shaping.penalize_missing_ends(scores, samples).tolist() == [1.0] * 4


def test_advantages_are_whitened_over_step_or_prompt():
    for over, groups in (("step", 1), ("prompt", PROMPTS)):
        _, experience, _, _ = step(compose("ppo", f"algorithm.whiten_over={over}"))
        masks, whitened = (
            part.unflatten(0, (groups, -1)) for part in (experience.mask, experience.advantages)
        )
        for mask, values in zip(masks, whitened, strict=True):
            assert float(values[mask].mean()) == pytest.approx(0, abs=1e-6)
            assert float(values[mask].std(unbiased=False)) == pytest.approx(1, rel=1e-4)


@pytest.mark.promise("micro-batches-change-no-update")
@pytest.mark.slow
def test_updates_do_not_depend_on_layout_or_packing(pool, tmp_path):
    """Run updates through Megatron, split over ranks and into micro-batches of a few rows."""
    directory = str(families.save("llama3", tmp_path))
    configs = {name: compose(name, "rollout.samples_per_prompt=2") for name in ONLINE}
    (whole,) = pool.run(jobs.updates, 1, directory, {}, 1000, configs)
    assert all(stats["grad_norm"] > 1e-3 for stats in whole.values())
    for layout in ({}, {"data": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}):
        for cut in pool.run(
            jobs.updates, ParallelConfig(**layout).ranks, directory, layout, 30, configs
        ):
            for name, stats in cut.items():
                for key in ("loss", "grad_norm"):
                    assert stats[key] == pytest.approx(whole[name][key], rel=1e-5, abs=1e-6), (
                        name,
                        layout,
                        key,
                    )


CUT = (1, 4, 5, 6, 7, 10)
"""Rows with truncated responses: one of the first prompt, all of the second."""


def test_truncated_responses_bootstrap_with_critic_value():
    keys = (
        "algorithm.whiten_advantages=false",
        "algorithm.kl_coefficient=0",
        "algorithm.lam=1",
        "algorithm.gamma=0.9",
    )
    config = compose("ppo", "algorithm.bootstrap_cut=true", *keys)
    critic = torch.randn(
        EACH * PROMPTS, PROMPT + LONGEST, generator=torch.Generator().manual_seed(3)
    )
    algorithm, experience, _, _ = step(config, cut=CUT)
    batch = SampleBatch(
        **{name: getattr(experience, name) for name in SampleBatch.__dataclass_fields__}
    )
    nothing, scores = torch.zeros(batch.mask.shape), torch.arange(EACH * PROMPTS) / 8
    values = torch.where(
        torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None],
        critic[:, : batch.tokens.shape[1]],
        0.0,
    )
    for is_asked in (True, False):
        algorithm = build_online_algorithm(config if is_asked else compose("ppo", *keys))
        samples = algorithm.build_scored_samples(batch, scores, values, nothing, nothing, 0.0)
        returns = algorithm.build_experience(samples).returns
        for row, length in enumerate(batch.lengths.tolist()):
            follows = float(values[row, length - 1]) if row in CUT and is_asked else 0.0
            steps = range(length - PROMPT)
            expected = [
                0.9 ** (length - PROMPT - 1 - t) * (float(scores[row]) + 0.9 * follows)
                for t in steps
            ]
            assert returns[row, batch.mask[row]].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_filtered_responses_count_only_in_baseline(
    aggregation,
):
    keys = ("rollout.stop_at_eos=true", f"algorithm.aggregation={aggregation}")
    algorithm, experience, scores, after = step(
        compose("dr_grpo", "algorithm.overlong_filter=true", *keys), cut=CUT
    )
    _, whole, _, _ = step(compose("dr_grpo", *keys), cut=CUT)
    kept = [row for row in range(len(scores)) if row not in CUT]
    for name in ("tokens", "lengths", "advantages", "scores", "groups"):
        assert torch.equal(getattr(experience, name), getattr(whole, name)[kept]), name
    lengths = whole.mask.sum(1)[kept].tolist()
    weight = {
        "token": lambda length: 1 / sum(lengths),
        "sequence": lambda length: 1 / (len(kept) * length),
        "constant": lambda length: 1 / (len(kept) * LONGEST),
    }[aggregation]
    advantages = grouped(scores, lambda group: group - group.mean())[kept]
    expected = by_hand(experience, advantages, after[kept], weight)
    loss, _, _ = gradient(algorithm, experience, after[kept], [torch.arange(len(kept))])
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_step_of_truncated_responses_has_no_rows():
    keys = ("algorithm.overlong_filter=true", "rollout.stop_at_eos=true")
    for name in ("ppo", "grpo", "best_of_n"):
        _, experience, _, _ = step(compose(name, *keys), cut=range(EACH * PROMPTS))
        assert len(experience.tokens) == 0
