"""Reward sources: reading, checks, placement, tokenizers of reward models."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from aligner.checks.check import check
from aligner.config.compose import compose_config, load_config, save_config
from aligner.errors import ConfigError
from aligner.placement.placement_table import build_placements
from aligner.placement.roles import count_role_ranks
from aligner.schema import Config
from aligner.schema.reward_sources import (
    FunctionSource,
    JudgeSource,
    ModelSource,
    RemoteSource,
    parse_reward_sources,
)
from aligner.servers.reward_server import build_reward_rank

JUDGE = ("reward=judge", "reward.judge_url=http://judge:8000/v1", "reward.judge_model=tester")
COMBINED = ("reward.kind=combined", "+reward.sources.a={kind: function, function: digit_fraction}")


def compose(directory: Path, *overrides: str) -> Config:
    return compose_config(["experiment=tiny_ppo", f"run.dir={directory / 'run'}", *overrides])


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> Path:
    """Model directory with the config.json of the tiny model."""
    directory = tmp_path_factory.mktemp("reward_model")
    config = compose_config(["experiment=tiny_ppo", f"run.dir={directory / 'run'}"])
    (directory / "config.json").write_text(json.dumps(dict(config.model.config)))
    return directory


def test_reward_section_defines_a_single_source(tmp_path):
    reward = compose(tmp_path, "reward.gain=2", "reward.bias=-1").reward
    assert parse_reward_sources(reward) == (
        FunctionSource(name="function", key="reward", function="digit_fraction", gain=2, bias=-1),
    )
    remote = compose(tmp_path, "reward=remote", "reward.url=http://judge:5000/get_reward").reward
    judge = RemoteSource(
        name="remote", key="reward", url="http://judge:5000/get_reward", timeout_s=60
    )
    assert parse_reward_sources(remote) == (judge,)
    judge_reward = compose(tmp_path, *JUDGE, "reward.judge_lowest=1", "reward.gain=0.1").reward
    assert parse_reward_sources(judge_reward) == (
        JudgeSource(
            name="judge",
            key="reward",
            judge_url="http://judge:8000/v1",
            judge_model="tester",
            judge_lowest=1,
            gain=0.1,
        ),
    )


def test_sources_survive_saving_and_loading(tmp_path):
    sources = (
        (
            "+reward.sources.b={kind: model, path: somewhere, weight: 0.5, gain: 2, bias: 1,"
            " task_weights: {sums: 0}}"
        ),
        "+reward.sources.c={kind: remote, url: 'https://judge/score', timeout_s: 5, weight: -1}",
        (
            "+reward.sources.d={kind: judge, judge_url: 'http://judge/v1', judge_model: tester,"
            " judge_asks: ranking}"
        ),
        "+reward.sources.d.judge_template='{responses} and {rubric}, as {\"json\": 1}'",
    )
    config = compose(tmp_path, *COMBINED, *sources)
    save_config(config, tmp_path / "config.yaml")
    for reward in (config.reward, load_config(tmp_path / "config.yaml").reward):
        assert parse_reward_sources(reward) == (
            FunctionSource(name="a", key="reward.sources.a", function="digit_fraction"),
            ModelSource(
                name="b",
                key="reward.sources.b",
                path="somewhere",
                weight=0.5,
                gain=2,
                bias=1,
                task_weights={"sums": 0},
            ),
            RemoteSource(
                name="c", key="reward.sources.c", url="https://judge/score", timeout_s=5, weight=-1
            ),
            JudgeSource(
                name="d",
                key="reward.sources.d",
                judge_url="http://judge/v1",
                judge_model="tester",
                judge_asks="ranking",
                judge_template='{responses} and {rubric}, as {"json": 1}',
            ),
        )
        assert [
            source.record_fields
            for source in parse_reward_sources(reward)
            if isinstance(source, JudgeSource)
        ] == [("rubric",)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["reward.kind=combined"],
            "reward.sources: reward.kind=combined requires at least one source",
        ),
        ([COMBINED[1]], "has no effect with reward.kind=function; requires reward.kind=combined"),
        (
            [*COMBINED, "reward.combine=min"],
            "reward.combine=min: requires at least two reward.sources, got 1; add sources, or set",
        ),
        (
            [*COMBINED, "reward.combine=least"],
            "reward.combine=least: allowed: sum, mean, min, mean_minus_std, mean_minus_varian",
        ),
        ([*COMBINED, "reward.gain=2"], "reward.gain=2: has no effect with reward.kind=combined"),
        ([*COMBINED, "reward.bias=1"], "reward.bias=1: has no effect with reward.kind=combined"),
        ([*COMBINED, "+reward.sources.b=5"], "reward.sources.b=5: expected a mapping with kind"),
        (
            [*COMBINED, "+reward.sources.b={weight: 1}"],
            "reward.sources.b.kind: missing; allowed: function, model, remote, judge",
        ),
        (
            [*COMBINED, "+reward.sources.b.kind=jury"],
            "reward.sources.b.kind=jury: unknown kind; allowed: function, model",
        ),
        (
            [*COMBINED, "+reward.sources.b.kind=function"],
            "reward.sources.b.function: missing; required with kind=function",
        ),
        (
            [*COMBINED, "+reward.sources.a.wieght=2"],
            "unknown key with kind=function; did you mean reward.sources.a.weight?",
        ),
        (
            [*COMBINED, "+reward.sources.a.url=x"],
            "reward.sources.a.url: unknown key with kind=function; allowed in reward",
        ),
        (
            [*COMBINED, "+reward.sources.a.weight=nan"],
            "reward.sources.a.weight=nan: must be a finite number",
        ),
        (
            [*COMBINED, "+reward.sources.a.weight=true"],
            "reward.sources.a.weight=True: must be a finite number",
        ),
        (
            [*COMBINED, "+reward.sources.a.task_weights={sums: much}"],
            (
                "reward.sources.a.task_weights={'sums': 'much'}: must be a mapping from task names to finite"
                " numbers"
            ),
        ),
        (
            [*COMBINED, "+reward.sources.a.task_weights=2"],
            "task_weights=2: must be a mapping from task names to finite numbers",
        ),
        (["+reward.task_weights={sums: 2}"], "reward.task_weights"),
        (
            [*COMBINED, "+reward.sources.a.gain=much"],
            "reward.sources.a.gain=much: must be a finite number",
        ),
        ([*COMBINED, "+reward.sources.a.name=b"], "reward.sources.a.name: unknown key"),
        (
            [*COMBINED, "+reward.sources.b={kind: function, function: 3}"],
            "function=3: expected a string, got int",
        ),
        (
            ["reward.function=nope"],
            "reward.function=nope: must be one of digit_fraction, environment, exact_match, format",
        ),
        (
            ["reward.function=my_module:"],
            "reward.function=my_module:: must be one of digit_fraction",
        ),
        (
            [*COMBINED, "+reward.sources.b={kind: function, function: nope}"],
            "reward.sources.b.function=nope: must be one of",
        ),
        (["reward=remote"], "reward.url: missing; required with kind=remote"),
        (
            [
                *COMBINED,
                "+reward.sources.b={kind: remote, url: 'http://judge/a', skip_special_tokens: 1}",
            ],
            "reward.sources.b.skip_special_tokens=1: must be true or false",
        ),
        (
            ["reward=remote", "reward.url=judge:5000"],
            "reward.url=judge:5000: must be http://HOST[:PORT]/PATH",
        ),
        (
            ["reward=remote", "reward.url='http://a/b c'"],
            "reward.url=http://a/b c: must be http://HOST[:PORT]/PATH",
        ),
        (
            ["reward=remote", "reward.url='http://:80/a'"],
            "reward.url=http://:80/a: must be http://HOST[:PORT]/PATH",
        ),
        (
            ["reward=remote", "reward.url='http://a:99999/'"],
            "reward.url=http://a:99999/: must be http://HOST[:PORT]/PATH",
        ),
        (
            [*COMBINED, "+reward.sources.b={kind: remote, url: 'http://a', timeout_s: 0}"],
            "timeout_s=0: must be at least 0.1",
        ),
        (
            [*COMBINED, "+reward.sources.b={kind: model, path: nowhere}"],
            "reward.sources.b.path=nowhere: no such model dir",
        ),
        (
            [*COMBINED, "reward.parallel.data=2"],
            "reward.parallel: got 2 ranks, must be 1, because no reward source is a model",
        ),
        (
            ["critic.with_reward=true", "reward.parallel.data=2"],
            "reward.parallel: critic.with_reward=true runs the reward models with the layout",
        ),
        (
            ["critic.with_reward=true", "reward.replicas=2"],
            "reward.replicas=2: has no effect with critic.with_reward=true",
        ),
        (
            [
                "critic.with_reward=true",
                "critic.parallel.data=2",
                "reward=remote",
                "reward.url=http://a",
                "reward.timeout_s=600",
            ],
            "reward.timeout_s=600: must be below cluster.collective_timeout_s=600",
        ),
        (["reward=judge"], "reward.judge_url: missing; required with kind=judge"),
        ([*JUDGE[:2]], "reward.judge_model: missing; required with kind=judge"),
        (
            [*JUDGE, "reward.judge_url=judge:8000"],
            "reward.judge_url=judge:8000: must be http://HOST[:PORT]/PATH",
        ),
        (
            [*JUDGE, "reward.judge_asks=essay"],
            "reward.judge_asks=essay: allowed: score, yes_no, pairwise, ranking",
        ),
        (
            [*JUDGE, "reward.judge_pattern='('"],
            "reward.judge_pattern=(: invalid regular expression",
        ),
        (
            [*JUDGE, "reward.judge_pattern='[0-9]+'"],
            "reward.judge_pattern=[0-9]+: must contain a group, in parentheses",
        ),
        (
            [*JUDGE, "reward.judge_lowest=10"],
            "reward.judge_lowest=10: must be below reward.judge_highest=10",
        ),
        (
            [*JUDGE, "reward.judge_template='{prompt} {answer}'"],
            (
                "reward.judge_template: must contain {response} with judge_asks=score; available"
                " fields: {prompt}, {response}, {lowest}"
            ),
        ),
        (
            [
                *JUDGE,
                "reward.judge_asks=pairwise",
                "reward.judge_template='{response} {response_a}'",
            ],
            "reward.judge_template: must contain {response_b} with judge_asks=pairwise",
        ),
        (
            [*JUDGE, "reward.judge_key_variable=NO_SUCH_KEY"],
            (
                "reward.judge_key_variable=NO_SUCH_KEY: the environment variable is not set or is"
                " empty"
            ),
        ),
        (
            [*JUDGE, "reward.judge_timeout_s=100"],
            (
                "reward.judge_timeout_s=100, reward.judge_tries=3: one judgment may take 300 s,"
                " which must be below server.request_timeout_s=300"
            ),
        ),
        (
            [
                *JUDGE,
                "critic.with_reward=true",
                "critic.parallel.data=2",
                "cluster.collective_timeout_s=180",
            ],
            "one judgment may take 180 s, which must be below cluster.collective_timeout_s=180",
        ),
        (
            [*JUDGE, "reward.judge_asks=ranking", "rollout.samples_per_prompt=1"],
            (
                "reward.judge_asks=ranking: compares the samples of a prompt and requires at least"
                " 2 samples, got rollout.samples_per_prompt=1"
            ),
        ),
        (
            [*JUDGE, "reward.judge_asks=pairwise", "server.max_batch_size=6"],
            (
                "but server.max_batch_size=6 would split these samples over several requests; set"
                " server.max_batch_size to a multiple of rollout.samples_per_prompt=4"
            ),
        ),
        (
            [*JUDGE, "reward.judge_asks=pairwise", "environment.target=my_module:Game"],
            (
                "reward.judge_asks=pairwise: compares responses to one prompt, which is not"
                " supported with multi-turn episodes"
            ),
        ),
        (
            [*JUDGE, "reward.judge_asks=ranking", "evaluation.every=1", "evaluation.prompts=[a]"],
            (
                "but evaluation scores each response and each reference response separately; set"
                " evaluation.function"
            ),
        ),
        (
            [
                *COMBINED,
                (
                    "+reward.sources.b={kind: judge, judge_url: 'http://a/v1', judge_model: b,"
                    " judge_tries: 0}"
                ),
            ],
            "reward.sources.b.judge_tries=0: must be at least 1",
        ),
        (
            [
                *COMBINED,
                (
                    "+reward.sources.b={kind: judge, judge_url: 'http://a/v1', judge_model: b,"
                    " judge_tries: 1.5}"
                ),
            ],
            "reward.sources.b.judge_tries=1.5: must be an integer",
        ),
        (
            [
                *COMBINED,
                (
                    "+reward.sources.b={kind: judge, judge_url: 'http://a/v1', judge_model: b,"
                    " judge_asks: x}"
                ),
            ],
            "reward.sources.b.judge_asks=x: allowed: score, yes_no, pairwise, ranking",
        ),
        (
            [
                *COMBINED,
                "+reward.sources.b={kind: judge, judge_url: 'http://a/v1', judge_model: 3}",
            ],
            "reward.sources.b.judge_model=3: expected a string, got int",
        ),
        (
            [
                *COMBINED,
                (
                    "+reward.sources.b={kind: judge, judge_url: 'http://a/v1', judge_model: b,"
                    " judge_temperature: hot}"
                ),
            ],
            "reward.sources.b.judge_temperature=hot: must be a finite number",
        ),
    ],
)
def test_invalid_reward_source_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as caught:
        check(compose(tmp_path, *overrides))
    assert message in str(caught.value)


def test_valid_judge_settings_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_JUDGE_KEY", "sk-1")
    check(compose(tmp_path, *JUDGE, "reward.judge_key_variable=TEST_JUDGE_KEY"))
    check(compose(tmp_path, *JUDGE, "reward.judge_key_variable=NO_SUCH_KEY", "cluster=slurm"))
    check(compose(tmp_path, *JUDGE, "reward.judge_asks=pairwise", "server.max_batch_size=8"))
    evaluated = (
        "evaluation.every=1",
        "evaluation.prompts=[a]",
        "evaluation.function=digit_fraction",
    )
    check(compose(tmp_path, *JUDGE, "reward.judge_asks=ranking", *evaluated))


def test_check_does_not_import_reward_function(tmp_path):
    check(compose(tmp_path, "reward.function=no_such_module:score"))
    evaluated = (
        "evaluation.every=1",
        "evaluation.prompts=[a]",
        "evaluation.function=no_such_module:gold",
    )
    check(compose(tmp_path, *evaluated))


def test_all_problems_of_sources_are_listed(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check(
            compose(
                tmp_path,
                *COMBINED,
                "+reward.sources.b.kind=x",
                "+reward.sources.a.weight=inf",
                "run.steps=1000000",
            )
        )
    assert {"reward.sources.b.kind=x", "reward.sources.a.weight=inf"} <= {
        line.partition(":")[0] for line in str(caught.value).splitlines()
    }


def test_reward_model_may_use_layout_of_critic(tmp_path, reward_model):
    model = (f"reward.path={reward_model}", "reward.kind=model")
    check(compose(tmp_path, *model, "reward.parallel.tensor=2"))
    check(
        compose(
            tmp_path,
            *model,
            "critic.with_reward=true",
            "critic.parallel.tensor=2",
            "reward.parallel.tensor=2",
        )
    )
    with pytest.raises(
        ConfigError,
        match=r"reward\.parallel\.tensor=8: must divide the model's 4 attention heads",
    ):
        check(compose(tmp_path, *model, "reward.parallel.tensor=8"))
    with pytest.raises(
        ConfigError,
        match=r"critic\.parallel\.stage_layers=.*: the sum is 3, but must be the model's 4",
    ):
        check(
            compose(
                tmp_path,
                *model,
                "critic.with_reward=true",
                "critic.num_layers=3",
                "critic.parallel.pipeline=3",
                "critic.parallel.stage_layers=[1,1,1]",
            )
        )
    with pytest.raises(
        ConfigError,
        match=r"reward\.micro_batch_tokens=1: must be at least \d+ to hold the longest sequence",
    ):
        check(compose(tmp_path, *model, "reward.micro_batch_tokens=1"))


def test_placement_table_lists_reward_sources(tmp_path, reward_model):
    both = (*COMBINED, f"+reward.sources.b={{kind: model, path: '{reward_model}', weight: 0.5}}")
    config = compose(tmp_path, *both, "reward.parallel.data=2", "reward.replicas=2")
    shown = {
        place.role: (place.ranks, place.layout, place.runs) for place in build_placements(config)
    }
    runs = f"function digit_fraction + 0.5 x model {reward_model}"
    assert shown["reward"] == shown["reward.1"] == (2, "TP1 PP1 DP2", runs)
    ensemble = compose(tmp_path, *both, "reward.combine=min")
    of_both = runs.replace(" + ", ", ")
    assert {place.role: place.runs for place in build_placements(ensemble)}[
        "reward"
    ] == f"min of {of_both}"
    judged = compose(tmp_path, *JUDGE)
    assert {place.role: place.runs for place in build_placements(judged)}[
        "reward"
    ] == "judge http://judge:8000/v1"
    config = compose(tmp_path, *both, "critic.with_reward=true")
    assert [place.role for place in build_placements(config)] == ["trainer", "critic"]
    assert build_placements(config)[1].runs == f"value model, {runs}"
    assert list(count_role_ranks(config)) == ["critic", "trainer"]


def token(id):
    """Return the entry of a special token in tokenizer.json."""
    return {"id": id, "content": f"<{id}>"}


@pytest.mark.parametrize(
    ("written", "known", "message"),
    [
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}, None),
        (
            {"a": 0, "b": 1},
            {"b": 0, "a": 1},
            (
                "2 of the policy's 3 token ids are different tokens in this model's tokenizer, for"
                " example 0 (policy 'a', this model 'b'), 1"
            ),
        ),
        (
            {"a": 0, "b": 1},
            {"a": 0},
            (
                "2 of the policy's 3 token ids are different tokens in this model's tokenizer, for"
                " example 1 (policy 'b', this model '<end>'), 2 ("
            ),
        ),
        (
            {"a": 0},
            {"a": 0, "b": 1},
            (
                "1 of the policy's 2 token ids are different tokens in this model's tokenizer, for"
                " example 1 (policy '<end>', this model 'b')"
            ),
        ),
        ([("a", -1.5), ("b", -2.0)], {"a": 0, "b": 1}, None),
        (
            [("a", -1.5), ("b", -2.0)],
            [("a", 0.0), ("c", 0.0)],
            "for example 1 (policy 'b', this model 'c')",
        ),
    ],
)
def test_reward_model_tokenizer_must_match_policy(tmp_path, reward_model, written, known, message):
    policy, judge = tmp_path / "policy", tmp_path / "judge"
    for directory, words in ((policy, written), (judge, known)):
        shutil.copytree(reward_model, directory)
        model = (
            models.WordLevel(words, unk_token="a")
            if isinstance(words, dict)
            else models.Unigram(words, 0)
        )
        tokenizer = Tokenizer(model)
        tokenizer.add_special_tokens(["<end>"])
        tokenizer.save(str(directory / "tokenizer.json"))
    config = compose(
        tmp_path,
        "model.source=directory",
        f"model.path={policy}",
        "reward.kind=model",
        f"reward.path={judge}",
    )
    if message is None:
        check(config)
        return
    with pytest.raises(
        ConfigError, match=re.escape(f"reward.path={judge}: ") + ".*" + re.escape(message)
    ):
        check(config)
    # a reward server that is started separately checks this as well
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_reward_rank(config, lambda directory: None)


def test_padding_tokens_may_exceed_reward_vocabulary(tmp_path, reward_model):
    """The padding of embeddings differs between the sizes of a model family, so the check uses the
    policy's tokenizer instead of its vocabulary size."""
    policy = tmp_path / "policy"
    policy.mkdir()
    entries = json.loads((reward_model / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(entries | {"vocab_size": 96}))
    given = (
        "model.source=directory",
        f"model.path={policy}",
        "reward.kind=model",
        f"reward.path={reward_model}",
    )
    with pytest.raises(
        ConfigError, match="the model has 64 tokens in its vocabulary, but the policy generates 96"
    ):
        check(compose(tmp_path, *given))
    words = {
        "model": {"vocab": {chr(65 + token): token for token in range(60)}},
        "added_tokens": [token(59), token(63)],
    }
    (policy / "tokenizer.json").write_text(json.dumps(words))
    check(compose(tmp_path, *given))
    words["added_tokens"] = [*map(token, range(60, 70))]
    (policy / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(
        ConfigError, match="the model has 64 tokens in its vocabulary, but the policy generates 70"
    ):
        check(compose(tmp_path, *given))
