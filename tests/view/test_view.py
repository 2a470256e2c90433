"""Pages of the web viewer: access, run list, curves, samples, logs, hostile and damaged runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from aligner.cli import main
from tests.servers.test_idle_connections import IDLE_COUNT, open_idle
from tests.view.served import Answer, Viewer, serving
from tests.view.written_runs import (
    HOSTILE,
    begin,
    end,
    write_metrics,
    write_samples,
    write_timeline,
)

STEPS_WITH_SAMPLES = (1, 2, 3, 20)
MESSAGES = [
    {"role": "user", "content": "add 1 and 2"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "calculator", "arguments": '{"x": "1+2"}'}}],
    },
    {"role": "tool", "content": "3"},
]


def answers(step: int) -> list[dict[str, object]]:
    """Return two prompts with two samples each; later steps have higher scores."""
    texts = [
        ("what is one", f"it is one at {step}"),
        ("what is one", "no idea"),
        ("and two", "two of 100%"),
        ("and two", "deux"),
    ]
    parts = [("correct", 0.5), ("judge/clarity", -0.25)]
    known = {"metadata": json.dumps({"answer": "1"}), "score_parts": parts, "advantage": -0.5}
    return [
        {"prompt": prompt, "response": text, "score": (step + at) / 10, **known}
        for at, (prompt, text) in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, a failed run with only a few stored samples, a run with hostile texts, and a
    run with a damaged configuration."""
    root = tmp_path_factory.mktemp("runs")
    finished = begin(root / "finished", "experiment=tiny_ppo", name="finished")
    write_metrics(
        finished, ["reward/mean", "reward/std", "kl/reference", "odd/metric", "rollout/skipped"]
    )
    write_timeline(finished, 5)
    for step in STEPS_WITH_SAMPLES:
        write_samples(finished, step, answers(step), tokens=step > 1)
    write_samples(finished, 4, [{**answers(4)[0], "messages": json.dumps(MESSAGES)}])
    finished.log("reward", 0).write_text(
        "UserWarning: resource_tracker: There appear to be 1 leaked shared_memory\n"
    )
    finished.log("trainer", 0).write_text(
        "first line\n" + "x" * 300_000 + "\nall is well\nWARNING: slow\n"
    )
    end(finished)
    failed = begin(root / "below" / "failed", "experiment=tiny_ppo", "seed=7", name="failed")
    write_metrics(failed, ["reward/mean"], steps=3)
    failed.samples.write_text(
        '{"step": 1, "prompt": "hello", "response": "there \\ud800", "reward": 0.5}\n{"step": 2,'
        ' "pro'
    )
    failed.log("trainer", 0).write_text("begun\naligner: error: out of memory\n")
    raised = (
        'Traceback (most recent call last):\n  File "own.py", line 1, in score\nZeroDivisionError:'
        " division by zero\n"
    )
    failed.log("reward", 0).write_text("\x1b[1;33mready\x1b[0;39m\n" + 2 * raised)
    (failed.logs / "linked.log").symlink_to(failed.config)
    end(failed, exit_code=1, reason="trainer rank 0: out of memory")
    hostile = begin(root / "hostile", "experiment=tiny_ppo", name=HOSTILE)
    write_metrics(hostile, ["reward/mean", f"evil/{HOSTILE}"])
    long = HOSTILE + "A" * 1_000_000 + "\x00"
    write_samples(
        hostile,
        1,
        [
            {**answers(1)[0], "prompt": long, "response": long, "messages": text}
            for text in (None, HOSTILE)
        ],
    )
    calls = [{"function": {"name": HOSTILE, "arguments": [HOSTILE, 1]}}, 5]
    turns = json.dumps(
        [{"role": HOSTILE, "content": [HOSTILE, {"text": 1}], "tool_calls": calls}, 3]
    )
    write_samples(
        hostile,
        2,
        [
            {
                **answers(2)[0],
                "score_parts": [(HOSTILE, 1.0)],
                "metadata": HOSTILE,
                "messages": turns,
            }
        ],
    )
    hostile.log("trainer", 0).write_bytes(HOSTILE.encode() + b"\xff\n" + b"B" * 1_000_000)
    (hostile.logs / "<img src=x>-0.log").write_text(f"aligner: error: {HOSTILE}\n")
    end(hostile)
    begin(root / "damaged", "experiment=tiny_ppo").config.write_text("run: [")
    return root


@pytest.fixture(scope="module")
def viewer(runs: Path) -> Iterator[Viewer]:
    with serving(runs) as viewer:
        viewer.open()
        yield viewer


def paths_of(answer: Answer) -> dict[str, str]:
    """Return the page of each run in the list by the run's name."""
    found = re.findall(r'<td class="name"><a href="(/runs/\w+)"[^>]*>([^<]*)<', answer.text)
    return {unescape(name): path for path, name in found}


@pytest.fixture(scope="module")
def pages(viewer: Viewer) -> dict[str, str]:
    return paths_of(viewer.get("/"))


def rows(answer: Answer) -> list[str]:
    """Return the responses in a table of samples."""
    assert answer.status == 200, answer.text
    return [
        unescape(re.sub("</?mark>", "", text))
        for text in re.findall(
            r'<td class="text" data-label="response"><div class="clip">(.*?)</div></td>',
            answer.text,
        )
    ]


def test_viewer_requires_key_and_local_host(viewer: Viewer) -> None:
    stranger = Viewer(viewer.link)
    assert stranger.get("/").status == 403 and stranger.get("/static/view.js").status == 403
    assert stranger.get("/?key=wrong%20%ff").status == 403
    assert stranger.get("/", Cookie=f"{viewer._cookie.split('=')[0]}=wrong").status == 403
    assert viewer.get("/", Host="evil.example").status == 400
    # The host name of a request through `ssh -L`.
    assert viewer.get("/", Host=viewer.host.replace("127.0.0.1", "localhost")).status == 200
    own = f"http://{viewer.host}"
    assert viewer.get("/", method="POST", Origin=own).status == 405
    assert viewer.get("/", method="PUT", Origin=own).status == 405
    opened = stranger.open()
    assert (opened.status, opened.headers["location"]) == (303, "/")
    assert "HttpOnly" in opened.headers["set-cookie"] and "SameSite" in opened.headers["set-cookie"]


@pytest.mark.parametrize("path", ["//evil.example/a", "/%2F/evil.example", "///evil.example"])
def test_link_with_key_redirects_only_to_this_server(viewer: Viewer, path: str) -> None:
    key = viewer.link.partition("?key=")[2]
    answer = Viewer(viewer.link).get(f"{path}?key={key}&q=a")
    assert answer.status == 303
    assert re.match(r"/(?![/\\])", answer.headers["location"]), answer.headers["location"]


def test_viewer_answers_with_thousands_of_idle_connections(viewer: Viewer) -> None:
    with open_idle(int(viewer.host.rpartition(":")[2]), IDLE_COUNT):
        assert viewer.get("/").status == 200
    stranger = Viewer(viewer.link).get("/")
    assert (stranger.status, stranger.headers["connection"]) == (403, "close")


def test_pages_run_only_scripts_of_the_server(viewer: Viewer, pages: dict[str, str]) -> None:
    for path in ("/", pages["finished"]):
        page = viewer.get(path)
        policy = dict(
            part.split(maxsplit=1) for part in page.headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        scripts = re.findall(r"<script[^>]*>", page.text)
        assert len(scripts) == 3
        assert all(re.fullmatch(r'<script src="/static/[\w.]+"( defer)?>', tag) for tag in scripts)
        assert " style=" not in page.text and " onclick=" not in page.text
        assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page.text)
    assert viewer.get("/static/plotly.min.js").text.startswith("/**")
    assert (
        viewer.get("/static/..%2fpages.py").status == 404
        and viewer.get("/static/pages.py").status == 404
    )


def test_run_list_shows_state_and_can_be_sorted_and_filtered(
    viewer: Viewer, pages: dict[str, str]
) -> None:
    assert set(pages) == {
        "finished",
        "failed",
        "damaged",
        r"</td><script>alert('sample')</script><img src=x onerror=alert(1)>\x1b[2J\u202e\x00",
    }
    whole = viewer.get("/").text
    assert re.findall(r'class="badge (\w+)"', whole).count("finished") == 2
    assert "trainer rank 0: out of memory" in whole and "not the configuration of a run" in whole
    assert (
        set(paths_of(viewer.get("/?q=FAIL")))
        == set(paths_of(viewer.get("/?state=failed")))
        == {"failed"}
    )
    assert next(iter(paths_of(viewer.get("/?sort=step")))) == "failed"
    assert list(paths_of(viewer.get("/?sort=-step")))[-1] == "damaged"  # its step is unknown
    assert viewer.get("/?sort=__class__").status == 400
    assert "None of the 4 runs matches the filter" in viewer.get("/?q=nothing").text


def test_every_metric_has_a_curve_over_steps_and_time(
    viewer: Viewer, pages: dict[str, str]
) -> None:
    answer = viewer.get(f"{pages['finished']}/curves.json")
    plots = {plot["key"]: plot for plot in answer.json()}
    band, line = plots["reward"]["traces"]
    assert band["fill"] == "toself" and len(line["y"]) == 30
    assert line["x"][:3] == [1, 2, 3] and line["seconds"][:3] == [1.5, 3, 4.5]
    assert plots["odd/metric"]["group"] == "odd" and plots["reward"]["about"] == "reward/mean"
    assert plots["reward"]["description"] == "Mean score of the samples, before shaping."
    assert (
        viewer.get(f"{pages['finished']}/curves.json", If_None_Match=answer.headers["etag"]).status
        == 304
    )
    timeline = viewer.get(f"{pages['finished']}/timeline.json").json()
    assert [plot["key"] for plot in timeline] == ["utilization", "timeline"]


def test_configuration_page_marks_automatic_values(tmp_path: Path) -> None:
    begin(
        tmp_path / "run",
        "experiment=tiny_ppo",
        "run.chosen=[run.steps]",
        "algorithm.whiten_advantages=false",
    )
    (tmp_path / "run" / "metrics.jsonl").touch()
    with serving(tmp_path) as viewer:
        viewer.open()
        page = viewer.get(f"{paths_of(viewer.get('/'))['run']}/configuration").text
    changed = dict(
        re.findall(r'<th scope="row" class="code">(.*?)</th><td class="code">(.*?)</td>', page)
    )
    marked = {re.sub("<.*", "", key).strip(): ">automatic<" in key for key in changed}
    assert marked["run.steps"] and not marked["algorithm.whiten_advantages"]
    assert changed["algorithm.whiten_advantages"] == "false"
    assert "run.chosen" not in marked and "model.config" not in marked


def test_runs_are_compared_in_curves_and_configuration(
    viewer: Viewer, pages: dict[str, str]
) -> None:
    keys = "&".join(f"run={pages[name].rpartition('/')[2]}" for name in ("finished", "failed"))
    page = viewer.get(f"/compare?{keys}")
    assert page.status == 200 and re.search(
        r">seed</th>\s*<td class=\"code\">1</td><td class=\"code\">7</td>", page.text
    )
    assert "run.dir" not in page.text
    reward = next(
        plot
        for plot in viewer.get(f"/compare/curves.json?{keys}").json()
        if plot["key"] == "reward"
    )
    assert [(trace["name"], len(trace["x"])) for trace in reward["traces"]] == [
        ("finished", 30),
        ("failed", 3),
    ]
    assert (
        viewer.get("/compare?run=none").status == 404
        and viewer.get(f"/compare?{keys.split('&')[0]}").status == 400
    )


def test_samples_are_filtered_sorted_and_grouped(viewer: Viewer, pages: dict[str, str]) -> None:
    samples = f"{pages['finished']}/samples"
    assert len(rows(viewer.get(samples))) == 17
    assert rows(viewer.get(samples))[0] == "it is one at 20"
    assert rows(viewer.get(f"{samples}?sort=step"))[0] == "it is one at 1"
    assert rows(viewer.get(f"{samples}?q=IS+ONE&first=2&last=3&sort=step"))[::2] == [
        "it is one at 2",
        "it is one at 3",
    ]
    assert (
        rows(viewer.get(f"{samples}?q=100%25"))[0] == "two of 100%"
        and len(rows(viewer.get(f"{samples}?q=100%25"))) == 4
    )
    assert rows(viewer.get(f"{samples}?least=0.35&most=0.45&sort=score&last=2")) == [
        "deux",
        "two of 100%",
    ]
    assert rows(viewer.get(f"{samples}?sort=-score"))[0] == "deux"
    assert "has not generated any samples yet" in viewer.get(f"{pages['damaged']}/samples").text
    assert (
        "No sample matches the filter"
        in viewer.get(f"{samples}?q=' OR 1=1 --".replace(" ", "+")).text
    )
    assert (
        viewer.get(f"{samples}?least=x").status == 400
        and viewer.get(f"{samples}?page=1e99").status == 400
    )
    grouped = viewer.get(f"{samples}?by=prompt&sort=-mean").text
    assert [unescape(prompt) for prompt in re.findall(r'<span class="clip">([^<]*)<', grouped)] == [
        "and two",
        "what is one",
    ]


def test_sample_page_shows_turns_scores_and_tokens(viewer: Viewer, pages: dict[str, str]) -> None:
    page = viewer.get(f"{pages['finished']}/samples/4/0").text
    assert re.findall(r'class="turn (\w+)"', page) == ["user", "assistant", "tool"]
    assert "calculator" in page and "{&#34;x&#34;: &#34;1+2&#34;}" in page
    assert "judge/clarity" in page and "-0.250" in page and "&#34;answer&#34;: &#34;1&#34;" in page
    tokens = viewer.get(f"{pages['finished']}/samples/4/0/tokens.json").json()
    assert tokens["text"] == ["it", "is", "one", "at", "4"] and tokens["columns"][
        "from environment"
    ] == [
        1,
        0,
        0,
        0,
        0,
    ]
    assert set(tokens["columns"]) == {
        *(
            "engine log-prob",
            "trainer log-prob",
            "reference log-prob",
            "advantage",
            "weight version",
            "from environment",
        ),
        *("engine \N{MINUS SIGN} trainer log-prob", "trainer \N{MINUS SIGN} reference log-prob"),
    }
    assert tokens["columns"]["engine \N{MINUS SIGN} trainer log-prob"] == [1.0] * 5
    assert (
        "token data of step 1 is no longer stored"
        in viewer.get(f"{pages['finished']}/samples/1/0").text
    )
    assert viewer.get(f"{pages['finished']}/samples/1/0/tokens.json").status == 404
    assert (
        viewer.get(f"{pages['finished']}/samples/1/99").status
        == viewer.get(f"{pages['finished']}/samples/99/0").status
        == 404
    )


def test_over_time_page_shows_prompt_at_chosen_steps(viewer: Viewer, pages: dict[str, str]) -> None:
    over_time = f"{pages['finished']}/samples/20/0/over-time"
    assert re.findall(r'aria-label="step (\d+)"', viewer.get(over_time).text) == ["1", "3", "20"]
    page = viewer.get(f"{over_time}?steps=2,20,99,x").text
    assert re.findall(r'aria-label="step (\d+)"', page) == ["2", "20"]
    assert (
        "it is one at 2<" in page
        and "it is one at 20<" in page
        and "it is one at 3<" not in page
        and "deux" not in page
    )
    (plot,) = viewer.get(f"{pages['finished']}/samples/20/0/scores.json").json()
    assert plot["traces"][0]["x"] == [1, 2, 3, 4, 20]


def test_run_with_few_stored_samples_is_marked(viewer: Viewer, pages: dict[str, str]) -> None:
    page = viewer.get(f"{pages['failed']}/samples")
    assert len(rows(page)) <= 1 and "stored only a few samples of some steps" in page.text
    assert viewer.get(f"{pages['failed']}/samples/1/0").status in (200, 404)


def test_log_page_shows_log_ends_and_no_other_files(viewer: Viewer, pages: dict[str, str]) -> None:
    # Color codes are removed.
    assert ">ready\n" in viewer.get(f"{pages['failed']}/logs?file=reward-0.log").text
    log = viewer.get(f"{pages['finished']}/logs").text
    assert "all is well" in log and "first line" not in log and "bytes are not shown" in log
    for name in ("../config.yaml", "/etc/hostname", "linked.log", "%2e%2e/config.yaml"):
        assert viewer.get(f"{pages['failed']}/logs?file={name}").status == 404
    health = viewer.get(f"{pages['failed']}/health").text
    assert re.findall(r'class="text error">(.*?)</td>', health) == [
        "aligner: error: out of memory",
        'ZeroDivisionError: division by zero <span class="tag">\N{MULTIPLICATION SIGN} 2</span>',
    ]
    assert re.search(r"critic.*?gone.*?<td class=\"number\">2</td>", health, re.DOTALL)
    health = viewer.get(f"{pages['finished']}/health").text
    assert "rollout/skipped" in health and "WARNING: slow" in health
    assert "leaked" not in health  # Triton's helper processes log this in every run


@pytest.mark.promise("viewer-treats-texts-as-text")
def test_untrusted_texts_are_escaped_on_every_page(viewer: Viewer, pages: dict[str, str]) -> None:
    run = next(path for name, path in pages.items() if "script" in name)
    samples = [
        f"/samples/{place}{more}"
        for place in ("1/0", "1/1", "2/0")
        for more in ("", "/tokens.json", "/over-time")
    ]
    below = (
        "",
        "/state",
        "/timeline",
        "/configuration",
        "/logs",
        "/logs?file=%3Cimg%20src=x%3E-0.log",
        "/health",
        "/samples",
    )
    for path in ("/", *(run + each for each in (*below, "/samples?by=prompt", *samples))):
        page = viewer.get(path)
        assert page.status == 200, (path, page.text[:500])
        assert not set("\x00\x1b\u202e") & set(page.text), path
        assert len(page.text) < 600_000, path
        if not path.endswith(".json"):
            assert "<script>alert" not in page.text and "<img" not in page.text, path
    (evil,) = (plot for plot in viewer.get(f"{run}/curves.json").json() if plot["group"] == "evil")
    assert (
        "<" not in evil["traces"][0]["name"]
        and "\u202e" not in evil["title"] + evil["traces"][0]["name"]
    )


def test_damaged_or_missing_run_is_reported_on_page(viewer: Viewer, pages: dict[str, str]) -> None:
    for path in (f"{pages['damaged']}/configuration", f"{pages['damaged']}/health"):
        answer = viewer.get(path)
        assert answer.status == 500 and "config.yaml" in answer.text
    assert (
        viewer.get("/runs/none").status == 404
        and "This run does not exist" in viewer.get("/runs/none").text
    )


def test_viewer_shows_new_data_of_running_run(tmp_path: Path) -> None:
    with serving(tmp_path) as viewer:
        viewer.open()
        assert "No runs yet" in viewer.get("/").text
        paths = begin(tmp_path / "new", "experiment=tiny_ppo", name="new")
        page = paths_of(viewer.get("/"))["new"]
        assert viewer.get(f"{page}/curves.json").json() == []
        for steps in (1, 3, 2):  # the last: a run that resumed from an earlier checkpoint
            paths.metrics.unlink(missing_ok=True)
            write_metrics(paths, ["reward/mean"], steps)
            reward = next(
                plot for plot in viewer.get(f"{page}/curves.json").json() if plot["key"] == "reward"
            )
            assert reward["traces"][0]["x"] == [*range(1, steps + 1)]
            assert f"{steps} / 30" in viewer.get(f"{page}/state").text
        write_samples(paths, 1, answers(1))
        assert len(rows(viewer.get(f"{page}/samples"))) == 4


def test_missing_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["view", str(tmp_path / "nowhere")])
    assert "nowhere: no such directory" in capsys.readouterr().err
