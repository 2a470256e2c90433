"""Pages of samples: the user's last message, chat bubbles, neighboring samples, differences."""

from __future__ import annotations

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


def test_report_shows_last_user_message(runs: Path, tmp_path: Path) -> None:
    page = write_report(runs / "chats", tmp_path / "page.html").read_text()
    assert ">What is 2?<" in page and "You are a tutor" not in page


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
