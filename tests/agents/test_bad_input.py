"""Agents that send too much, too often or too late do not disturb other episodes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from aligner.agents.agent_endpoint import AgentServer, AgentSession
from aligner.data.tokenizer import Tokenizer
from aligner.open_files import OTHER_FILES, raise_open_file_limit
from tests.agents.answering_sessions import Answering, serving
from tests.agents.poking_agents import send_request
from tests.data.chat_models import TEMPLATES, tokenizer_file, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "tokenizer.json").write_text(tokenizer_file("bytes"))
    write_model(directory, TEMPLATES["qwen"], ("<|end|>", "</s>"))
    return directory


@pytest.fixture
def answering(model: Path) -> Answering:
    return Answering(Tokenizer(model))


def body_of(text: str, **fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()


def chat(
    server: AgentServer, session: AgentSession, key: str | None, text: str
) -> tuple[int, dict[str, dict[str, str]]]:
    url = f"{server.get_session_url(session)}/v1/chat/completions"
    return send_request(url, str(key), body_of(text))


async def send_in_parallel(addresses: Sequence[tuple[str, str]], count: int) -> Counter[int]:
    """Send requests to sessions at the same time, and return how often each status occurs.

    `addresses` are the URL and the key of each session.
    """
    body = body_of("why?")

    async def send(url: str, key: str) -> int:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(
            f"POST {address.path}/v1/chat/completions HTTP/1.1\r\nHost: test\r\n"
            f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        writer.write(body)
        answer = await reader.read()
        writer.close()
        return int(answer.split(maxsplit=2)[1])

    requests = (send(*addresses[number % len(addresses)]) for number in range(count))
    return Counter(await asyncio.gather(*requests))


def list_addresses(server: AgentServer, sessions: list[AgentSession]) -> list[tuple[str, str]]:
    """Return the URL and the key of each session."""
    return [(server.get_session_url(session), str(session.agent_key)) for session in sessions]


@contextlib.contextmanager
def does_not_delay(server: AgentServer, session: AgentSession) -> Iterator[None]:
    """Send requests of another session meanwhile, and check that none of them has to wait for the
    block."""
    latencies_s: list[float] = []
    is_sending = threading.Event()

    def ping() -> None:
        while is_sending.is_set():
            start_s = time.monotonic()
            assert chat(server, session, session.agent_key, "hi")[0] == 200
            latencies_s.append(time.monotonic() - start_s)

    is_sending.set()
    thread = threading.Thread(target=ping)
    thread.start()
    start_s = time.monotonic()
    yield
    duration_s = time.monotonic() - start_s
    is_sending.clear()
    thread.join()
    # A blocked server would not answer until the block has ended. A busy machine is slow, too. A
    # fast one processes a megabyte in 0.1 s, which is no noticeable delay.
    assert latencies_s and max(latencies_s) < max(0.5, 0.75 * duration_s)


def test_large_schema_does_not_delay_other_sessions(model: Path, answering: Answering) -> None:
    properties = {
        f"p{number}": {"enum": [f"value {number} {other}" for other in range(400)]}
        for number in range(100)
    }
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    with serving(model, answering, 2, max_turns=100_000) as (server, (large, small)):
        url = f"{server.get_session_url(large)}/v1/chat/completions"
        body = body_of("hi", guided_json=schema)
        with does_not_delay(server, small):
            status, _ = send_request(url, str(large.agent_key), body)
        assert status == 200


def test_megabyte_message_does_not_delay_other_sessions(model: Path, answering: Answering) -> None:
    text = "word and so on " * 80_000
    with serving(model, answering, 2, max_turns=100_000) as (server, (large, small)):
        with does_not_delay(server, small):
            status, answer = chat(server, large, large.agent_key, text)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"

        url = f"{server.get_session_url(large)}/v1/messages/count_tokens"
        with does_not_delay(server, small):
            status, count = send_request(url, str(large.agent_key), body_of(text, model="m"))
        assert status == 200 and count["input_tokens"] > 80_000

        status, answer = chat(server, large, large.agent_key, "x" * 3_000_000)
        assert status == 413 and answer["error"]["code"] == "request_too_large"
        assert not large.turns


def test_turn_of_a_cut_stream_is_kept_and_continued(model: Path, answering: Answering) -> None:
    with serving(model, answering, 1) as (server, (session,)):
        address = urlsplit(server.get_session_url(session))
        connection = http.client.HTTPConnection(address.netloc)
        headers = {"Authorization": f"Bearer {session.agent_key}"}
        path = f"{address.path}/v1/chat/completions"
        connection.request("POST", path, body_of("why?", stream=True), headers)
        assert connection.getresponse().read(20).startswith(b"data: ")
        connection.close()
        assert len(session.turns) == 1

        messages = [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "and?"},
        ]
        body = json.dumps({"messages": messages}).encode()
        status, _ = send_request(f"http://{address.netloc}{path}", str(session.agent_key), body)
        assert status == 200 and len(session.turns) == 2 and not session.branch_counts


def test_stream_that_is_read_to_its_last_event_was_received(
    model: Path, answering: Answering
) -> None:
    with serving(model, answering, 1) as (server, (session,)):
        address = urlsplit(server.get_session_url(session))
        body = body_of("why?", stream=True)
        headers = {"Authorization": f"Bearer {session.agent_key}"}
        for _ in range(2):
            connection = http.client.HTTPConnection(address.netloc)
            connection.request("POST", f"{address.path}/v1/chat/completions", body, headers)
            # some clients close the connection after this event
            response = connection.getresponse()
            while b"[DONE]" not in response.read1():
                pass
            connection.close()
        assert len(session.turns) == answering.completions == 2


@pytest.mark.parametrize("words", [1, 60_000])
@pytest.mark.parametrize("stream", [True, False])
def test_request_repeated_after_a_cut_response_gets_the_same_turn(
    model: Path, words: int, stream: bool
) -> None:
    # the long response does not fit into the buffers of the connection
    answering = Answering(Tokenizer(model), text=f"{'yes ' * words}<|end|>")
    with serving(model, answering, 1, max_turns=2) as (server, (session,)):
        address = urlsplit(server.get_session_url(session))
        path = f"{address.path}/v1/chat/completions"
        body = body_of("why?", stream=stream)
        head = (
            f"POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {session.agent_key}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((str(address.hostname), int(address.port or 0))) as client:
            client.sendall(head.encode() + body)
            assert client.recv(40).startswith(b"HTTP/1.1 200")
        (turn,) = session.turns

        key = str(session.agent_key)
        url = f"http://{address.netloc}{path}"
        status, response = send_request(url, key, body_of("why?"))
        assert status == 200 and response["choices"][0]["message"]["content"] == "yes " * words
        assert session.turns == [turn] and answering.completions == 1
        reward = {"reward": 0.5, "completion_id": response["id"]}
        reward_url = url.replace("chat/completions", "reward")
        assert send_request(reward_url, key, json.dumps(reward).encode())[0] == 200
        assert [each.reward for each in session.get_rewarded_turns()] == [0.5]

        # the response was received, so the same request is a new one
        status, _ = send_request(url, key, body_of("why?"))
        assert status == 200 and len(session.turns) == answering.completions == 2


def test_untrained_request_repeated_after_a_cut_has_the_same_random_stream(model: Path) -> None:
    answering = Answering(Tokenizer(model), delay_s=0.2, text=f"{'yes ' * 60_000}<|end|>")
    with serving(model, answering, 1) as (server, (session,)):
        address = urlsplit(server.get_session_url(session))
        headers = {"Authorization": f"Bearer {session.agent_key}", "X-Aligner-Train": "false"}
        # cut before the response, in the response, and not at all
        for received in (0, 20, None, None):
            connection = http.client.HTTPConnection(address.netloc)
            path = f"{address.path}/v1/chat/completions"
            connection.request("POST", path, body_of("why?"), headers)
            if received == 0:
                time.sleep(0.1)
            else:
                response = connection.getresponse()
                assert response.status == 200 and response.read(received)
            connection.close()
            time.sleep(0.1)
        first, second, third, last = answering.streams
        assert first == second == third != last and not session.turns


def test_refused_client_gets_its_response_if_it_sends_the_body_late(
    model: Path, answering: Answering
) -> None:
    with serving(model, answering, 1) as (server, (session,)):
        address = urlsplit(server.get_session_url(session))
        assert address.hostname is not None and address.port is not None
        with socket.create_connection((address.hostname, address.port), 10) as client:
            client.sendall(
                f"POST {address.path}/v1/chat/completions HTTP/1.1\r\nHost: test\r\n"
                "Authorization: Bearer wrong\r\nContent-Length: 4000\r\n\r\n".encode()
            )
            time.sleep(0.3)
            for _ in range(4):
                client.sendall(b"x" * 1000)
                time.sleep(0.05)
            assert client.recv(100).startswith(b"HTTP/1.1 401 ")


def test_agent_that_ignores_errors_gets_no_further_turns(model: Path, answering: Answering) -> None:
    with serving(model, answering, 2, max_turns=4) as (server, (session, other)):
        key = session.agent_key
        statuses = [chat(server, session, key, f"and {number}?")[0] for number in range(50)]
        # the fifth request ends the episode; its key is then unknown
        assert statuses == [200] * 4 + [400] + [401] * 45
        assert len(session.turns) == answering.completions == 4 and session.is_truncated
        assert chat(server, other, other.agent_key, "hi")[0] == 200


@pytest.mark.parametrize("count", [480, pytest.param(8_000, marks=pytest.mark.slow)])
def test_parallel_requests_of_one_agent_are_bounded(model: Path, count: int) -> None:
    answering = Answering(Tokenizer(model), delay_s=0.2)
    with serving(model, answering, 1, max_turns=16) as (server, (session,)):
        addresses = list_addresses(server, [session])
        statuses = asyncio.run(send_in_parallel(addresses, count))
        assert sum(statuses.values()) == count and {*statuses} <= {200, 400, 401}
        assert answering.completions == 16 and len(session.turns) <= 16


@pytest.mark.parametrize("count", [480, pytest.param(8_000, marks=pytest.mark.slow)])
def test_parallel_requests_of_many_agents_are_answered(model: Path, count: int) -> None:
    answering = Answering(Tokenizer(model), delay_s=0.2)
    with serving(model, answering, count // 8, max_turns=8) as (server, sessions):
        addresses = list_addresses(server, sessions)
        assert asyncio.run(send_in_parallel(addresses, count)) == {200: count}
        assert answering.completions == count
        assert all(len(session.turns) == 8 for session in sessions)


@pytest.mark.slow
def test_ten_thousand_requests_in_flight_are_answered(model: Path) -> None:
    # the client and the server need a file for each connection
    if raise_open_file_limit() < 10_000 + OTHER_FILES:
        pytest.skip("the hard limit of open files is too low")
    command = [sys.executable, "-m", "tests.agents.crowded_server", str(model), "100", "10000"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        assert asyncio.run(send_in_parallel(addresses, 10_000)) == {200: 10_000}
        process.stdin.close()
        figures = json.loads(process.stdout.readline())
    print(figures)
    assert figures["turns"] == 10_000
    # measured: 27 KiB for each connection with its request
    assert figures["full_mib"] - figures["start_mib"] < 1_000
