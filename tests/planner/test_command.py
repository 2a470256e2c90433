from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from aligner.cli import main

BOTH = ["--phases", "generate=21,train=33"]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments, "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_reproduces_the_published_times(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, *BOTH, "--steps", "233")
    minutes = {bound: it["run_s"] / 60 for bound, it in plan["by_max_staleness"].items()}
    assert (int(minutes["0"]), int(minutes["1"])) == (209, 128)
    assert plan["bottleneck"] == "trainer" and plan["one_more"] == {"trainer": 21, "generator": 33}
    plan = planned(capsys, "--phases", "generate=12.2,score@trainer=0.1,train=12.8")
    assert plan["by_max_staleness"]["0"]["step_s"] == pytest.approx(25.5, rel=0.02)
    assert plan["step_s"] == pytest.approx(12.9) == plan["ideal_s"]


def test_the_tables_say_where_the_time_goes_and_what_would_help() -> None:
    """The real command; it needs no torch."""
    command = (
        "import sys; from aligner.cli import main\ntry: main()\nfinally: assert 'torch' not in"
        " sys.modules"
    )
    arguments = ["plan", "--phases", "generate=20,train=10,score@host=1", "--max-staleness", "1"]
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "bottleneck: generator, busy for 100% of a step" in done.stdout
    assert "buy first: 1 more for generator, 10.5 s (-47.5%)" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "max_staleness=0" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]] == [
        "max_staleness=0",
        "trainer 1, generator 1",
        "31 s",
        "51.7 min",
        "155%",
    ]


def test_devices_are_split_as_they_were_as_is_best_or_as_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    scaled = planned(capsys, *BOTH, "--placement", "trainer=4,generator=4", "--devices", "16")
    assert scaled["devices"] == {"trainer": 8, "generator": 8} and scaled["step_s"] == 16.5
    best = planned(
        capsys, *BOTH, "--placement", "trainer=4,generator=4", "--devices", "16", "--sweep"
    )
    assert best["devices"] == {"trainer": 10, "generator": 6} and best["step_s"] == pytest.approx(
        21 * 4 / 6
    )
    assert best["synchronous_colocated"]["devices"] == {"trainer": 16}
    nodes = planned(capsys, *BOTH, "--unit", "trainer=8,generator=8", "--devices", "64", "--sweep")
    assert nodes["devices"] == {"trainer": 40, "generator": 24}
    given = planned(capsys, *BOTH, "--devices", "trainer=2,generator=1")
    assert given["devices"] == {"trainer": 2, "generator": 1} and given["step_s"] == 21


def test_lengths_serial_shares_parts_and_interruption_reach_the_forecast(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shares = planned(capsys, *BOTH, "--serial", "train=0.5", "--devices", "trainer=3")
    assert shares["step_s"] == pytest.approx(33 * (0.5 + 0.5 / 3))
    lengths = [
        "--lengths",
        "mean=50,deviation=40,longest=300,samples=64,slots=16",
        "--max-staleness",
        "2",
    ]
    generating = ["--phases", "generate=40,train=5,load=1"]
    finishing = planned(capsys, *generating, *lengths)
    interrupting = planned(capsys, *generating, *lengths, "--transfer", "interrupt")
    assert finishing["step_s"] == pytest.approx(41)
    assert interrupting["step_s"] < 35
    parts = planned(
        capsys,
        "--phases",
        "generate=20,score=20,train=1",
        "--max-staleness",
        "0",
        "--micro-batches",
        "5",
    )
    assert parts["step_s"] == pytest.approx(20 + 4 + 1)


def test_a_publish_is_told_of_a_configuration_with_its_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    apart = [*BOTH, "experiment=tiny_ppo", "engine.placement=server"]
    fast = planned(capsys, *apart, "--link", "2")["publish"]
    assert fast["bytes"] == fast["sent"] == fast["received"] == 2e9 * fast["seconds"]
    two = planned(capsys, *apart, "engine.parallel.data=2", "engine.bucket_mib=1")["publish"]
    assert (
        two["bytes"] == 2 * fast["bytes"]
        and two["rounds"] > fast["rounds"]
        and two["seconds"] is None
    )
    assert "publish" not in planned(capsys, *BOTH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --measured RUN, or --phases generate=SECONDS,train=SECONDS"),
        (
            ["--phases", "generat=21,train=33"],
            "--phases generat=21: unknown phase; allowed: load, generate, score",
        ),
        (["--phases", "generate=21"], "--phases generate=21: train is missing"),
        (
            ["--phases", "generate=21,train=0"],
            "--phases generate=21,train=0: train is missing, or takes no time",
        ),
        (
            ["--phases", "generate=21,train=x"],
            "--phases train=x: must be a number from 0 to 1000000000",
        ),
        (["--phases", "generate=21,train=inf"], "--phases train=inf: must be a number"),
        (["--phases", "generate=21,train"], "--phases generate=21,train: train is not NAME=VALUE"),
        (["--phases", "generate=21,train=1,train=2"], "train is given twice"),
        (
            ["--phases", "generate=21,train=1,score@moon=2"],
            "--phases score@moon=2: moon does not run score; allowed: reward",
        ),
        (
            [BOTH[0], f"{BOTH[1]},values@trainer=1,critic_train=2"],
            "are of one critic, on one role; got critic and trainer",
        ),
        (
            [*BOTH, "--max-staleness", "-1"],
            "--max-staleness=-1: must be a whole number from 0 to 100",
        ),
        (
            ["--phases", "generate@trainer=2,train=3", "--max-staleness", "1"],
            "--max-staleness 1: with generate@trainer",
        ),
        ([*BOTH, "--link", "5"], "--link 5: needs --measured RUN, or experiment=NAME"),
        ([*BOTH, "--link", "0"], "--link=0: must be above 0"),
        (
            [*BOTH, "experiment=arithmetic_sft"],
            "algorithm.trainer=sft: it has no engine to publish to; allowed: online",
        ),
        (
            [*BOTH, "experiment=tiny_ppo", "engine.parallel.tensor=3"],
            "the weights do not divide as the layouts say",
        ),
        ([*BOTH, "--sweep"], "--sweep: it needs --devices N"),
        (
            [*BOTH, "--devices", "1"],
            "--devices 1: too few, at least 2 are needed (trainer 1 + generator 1)",
        ),
        (
            [*BOTH, "--devices", "many"],
            "--devices=many: must be a whole number from 1 to 1000000000",
        ),
        (
            [*BOTH, "--devices", "critic=3"],
            "--devices critic=3: no role that runs a phase; allowed: trainer, generator",
        ),
        (
            [*BOTH, "--unit", "trainer=4", "--placement", "trainer=6"],
            "--placement trainer=6: its devices come in units of 4",
        ),
        ([*BOTH, "--serial", "train=2"], "--serial train=2: must be a number from 0 to 1"),
        (
            [*BOTH, "--serial", "values=0.5"],
            "--serial values=0.5: no such phase here; allowed: generate, train",
        ),
        (
            [*BOTH, "--lengths", "mean=3"],
            "--lengths mean=3: needed are mean=, deviation=, longest=, samples=, slots=",
        ),
        (
            [*BOTH, "--lengths", "mean=30,deviation=1,longest=20,samples=4,slots=4"],
            "--lengths mean=30: must be between 1 and longest=20",
        ),
        (
            [*BOTH, "--micro-batches", "0"],
            "--micro-batches=0: must be a whole number from 1 to 1000",
        ),
        # What would be computed for ever, or be too large to compute with.
        (
            [*BOTH, "--micro-batches", "100000000"],
            "--micro-batches=100000000: must be a whole number from 1 to 1000",
        ),
        (
            [*BOTH, "--max-staleness", "100000000"],
            "--max-staleness=100000000: must be a whole number from 0 to 100",
        ),
        (
            [*BOTH, "--lengths", "mean=3,deviation=1,longest=9,samples=100000000,slots=4"],
            "--lengths samples=100000000: must be a whole number from 1 to 100000",
        ),
        (
            [*BOTH, "--lengths", "mean=3,deviation=1e308,longest=9,samples=8,slots=4"],
            "--lengths deviation=1e308: must be a number from 0 to 1000000000",
        ),
        (
            ["--phases", "generate=1e308,train=1e308"],
            "--phases generate=1e308: must be a number from 0 to 1000000000",
        ),
        (
            [*BOTH, "--steps", "100000000000"],
            "--steps=100000000000: must be a whole number from 1 to 1000000000",
        ),
        ([*BOTH, "--seed", "9" * 5000], "99: must be a whole number from 0 to 1000000000000000000"),
        (["--measured", "nowhere"], "nowhere/config.yaml: no such configuration file"),
    ],
)
def test_a_mistake_is_named_with_what_is_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
