"""Pages of samples: the user's last message, chat bubbles, neighboring samples, differences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from aligner.observability.metrics import RecordWriter
from aligner.view.saved_page import write_report
from tests.view.served import Viewer, serving
from tests.view.test_view import paths_of
from tests.view.written_runs import begin, end, write_samples

SYSTEM = "You are a tutor. " * 60


def render_chat(question: str) -> str:
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with chat prompts, and a run of which only samples.jsonl is stored."""
    root = tmp_path_factory.mktemp("runs")
    chats = begin(root / "chats", "experiment=tiny_ppo", name="chats")
    for step in (1, 5, 9):
        write_samples(
            chats,
            step,
            [
                {
                    "prompt": render_chat(f"What is {place}?"),
                    "response": f"It is {step * place} now",
                    "score": (7 * step + 3 * place) % 10 / 10,
                }
                for place in range(3)
            ],
        )
    end(chats)
    few = begin(root / "few", "experiment=tiny_ppo", name="few")
    RecordWriter(few.samples).write(
        1, [{"prompt": render_chat("Why?"), "response": "So.", "reward": 0.5}] * 2
    )
    end(few)
    return root


@pytest.fixture(scope="module")
def viewer(runs: Path) -> Iterator[Viewer]:
    with serving(runs) as viewer:
        viewer.open()
        yield viewer


@pytest.fixture(scope="module")
def pages(viewer: Viewer) -> dict[str, str]:
    return paths_of(viewer.get("/"))


def list_links(page: str) -> list[str]:
    """Return the links to samples in a list, in their order."""
    return [unescape(link) for link in re.findall(r'data-label="sample"><a href="([^"]*)"', page)]


def find_link(page: str, relation: str) -> str | None:
    link = re.search(rf'<a class="button" rel="{relation}"[^>]* href="([^"]*)"', page)
    return None if link is None else unescape(link[1])


@pytest.mark.parametrize("run", ["chats", "few"])
def test_lists_show_last_user_message(viewer: Viewer, pages: dict[str, str], run: str) -> None:
    question = {"chats": "What is 2?", "few": "Why?"}[run]
    for query in ("", "?sort=-score", "?by=prompt"):
        page = viewer.get(f"{pages[run]}/samples{query}").text
        assert f">{question}<" in page and "You are a tutor" not in page


def test_report_shows_question_and_turns_of_samples(runs: Path, tmp_path: Path) -> None:
    page = write_report(runs / "chats", tmp_path / "page.html").read_text()
    page = page[page.index("<h2>Samples</h2>") :]
    titles = re.findall(r'<details class="card sample"><summary>(.*?)</summary>', page, re.DOTALL)
    assert len(titles) == 6
    assert ">What is 2?<" in titles[2] and "You are a tutor" not in "".join(titles)
    assert page.count('class="turn assistant"') == 6 and "It is 18 now" in page


def test_samples_are_filtered_by_length_and_end(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    texts = ["one two three", "one two", "one"]
    rows = [
        {"prompt": "count", "response": text, "score": 0.5, "cut": "three" in text}
        for text in texts
    ]
    write_samples(paths, 1, rows)
    end(paths)
    with serving(tmp_path) as viewer:
        viewer.open()
        samples = f"{paths_of(viewer.get('/'))['run']}/samples"
        found = {
            query: [int(link.rpartition("/")[2].partition("?")[0]) for link in list_links(page)]
            for query in ("shortest=2", "longest=2", "end=truncated", "end=complete", "end=odd")
            for page in [viewer.get(f"{samples}?{query}&sort=step").text]
        }
    assert found == {
        "shortest=2": [0, 1],
        "longest=2": [1, 2],
        "end=truncated": [0],
        "end=complete": [1, 2],
        "end=odd": [0, 1, 2],
    }


def test_found_text_is_marked(viewer: Viewer, pages: dict[str, str]) -> None:
    page = viewer.get(f"{pages['chats']}/samples?q=IS+10").text
    assert "It <mark>is 10</mark> now" in page
    (link, *_) = list_links(page)
    assert "It <mark>is 10</mark> now" in viewer.get(link).text


def test_group_page_shows_all_samples_of_prompt(tmp_path: Path) -> None:
    paths = begin(tmp_path / "run", "experiment=tiny_ppo", name="run")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    row = {"prompt": "Why?", "messages": json.dumps(messages), "score_parts": [("brief", 0.25)]}
    write_samples(
        paths,
        3,
        [
            {**row, "response": "So.", "score": 0.5, "advantage": -1.0, "cut": True},
            {**row, "response": "Because.", "score": 1.5, "advantage": 1.0},
            {**row, "response": "Other prompt", "score": 2.5},
        ],
    )
    end(paths)
    with serving(tmp_path) as own:
        own.open()
        sample = f"{paths_of(own.get('/'))['run']}/samples/3/0"
        assert f'href="{sample}/group"' in own.get(sample).text
        page = own.get(f"{sample}/group").text
        data = own.get(f"{sample}/sample.json").json()
    assert re.findall(r'class="turn (\w+)"', page) == ["user"]
    assert re.findall(r">(best|worst|truncated)</span>", page) == ["worst", "truncated", "best"]
    assert "Because." in page and "Other prompt" not in page
    assert "brief <span" in page and ">-1.000<" in page
    assert data["messages"] == messages and data["score_parts"] == {"brief": 0.25}
    assert data["step"] == 3 and "row" not in data


def test_sample_page_shows_bubble_for_each_turn(viewer: Viewer, pages: dict[str, str]) -> None:
    page = viewer.get(f"{pages['chats']}/samples/5/2").text
    assert re.findall(r'class="turn (\w+)"><h3>(\w+)<', page) == [
        *(("system", "system"), ("user", "user"), ("assistant", "assistant"))
    ]
    assert ">What is 2?<" in page and ">It is 10 now<" in page and "im_start" not in page
    assert "<details><summary" in page  # the long system prompt is collapsed


@pytest.mark.parametrize(
    "query", ["", "?sort=step", "?sort=score", "?q=now&least=0.2&sort=-score", "?first=5"]
)
def test_neighbors_follow_order_of_list(viewer: Viewer, pages: dict[str, str], query: str) -> None:
    links = list_links(viewer.get(f"{pages['chats']}/samples{query}").text)
    assert len(links) >= 6
    for place, link in enumerate(links):
        page = viewer.get(link).text
        assert find_link(page, "prev") == (links[place - 1] if place else None)
        assert find_link(page, "next") == (links[place + 1] if place + 1 < len(links) else None)
        assert f"{place + 1} of {len(links)} " in page


def test_sample_outside_of_filter_has_no_neighbors(viewer: Viewer, pages: dict[str, str]) -> None:
    for query in ("?first=9", "?q=nothing"):
        answer = viewer.get(f"{pages['chats']}/samples/1/0{query}")
        assert answer.status == 200 and find_link(answer.text, "next") is None


def test_changes_between_steps_are_marked_on_request(viewer: Viewer, pages: dict[str, str]) -> None:
    path = f"{pages['chats']}/samples/9/2/over-time?steps=1,9"
    page = viewer.get(f"{path}&differences=1").text
    assert "It is<del> 2</del><ins> 18</ins> now" in page
    plain = viewer.get(path).text
    assert "<del>" not in plain and "It is 18 now" in plain
