from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from aligner.errors import AlignerError
from aligner.servers.executor import ServerStopping, SpmdExecutor


class Ranks:
    """Handlers that all ranks must run together: each has a collective in it."""

    def double(self, tokens, lengths):
        if (tokens < 0).any():
            raise AlignerError("a negative token")
        total = tokens.clone()
        dist.all_reduce(total)
        return total

    def slow(self, seconds):
        time.sleep(seconds)
        return dist.get_rank()

    def quarrel(self):
        if dist.get_rank() == 1:
            raise AlignerError("only here")

    def crash(self):
        raise ZeroDivisionError("a bug")


def run_world(conversation):
    """On rank 0 a thread runs the conversation; returns (its answer or error, what ended the world)."""
    ranks = Ranks()
    handlers = {name: getattr(ranks, name) for name in ("double", "slow", "quarrel", "crash")}
    executor = SpmdExecutor(handlers, heartbeat_s=0.3)
    answers = []

    def talk():
        try:
            answers.append(conversation(executor))
        except BaseException as error:
            answers.append(f"{type(error).__name__}: {error}")
        executor.shutdown()

    talker = threading.Thread(target=talk) if dist.get_rank() == 0 else None
    if talker:
        talker.start()
    ended = None
    try:
        executor.run()
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    if talker:
        talker.join(30)
    return answers, ended


def request(value, rows, width):
    return {"tokens": torch.full((rows, width), value), "lengths": torch.full((rows,), width)}


def one_bad(executor):
    executor.submit("slow", seconds=0.3)
    futures = [executor.submit("double", request(value, 1, 3)) for value in (1, -1, 2)]
    return [str(future.exception(10) or future.result().max().item()) for future in futures]


def one_bad_world():
    return run_world(one_bad)


def test_an_error_of_all_ranks_goes_to_its_caller_alone(pool):
    for answers, ended in pool.run(one_bad_world, 2)[:1]:
        assert answers == [["2", "a negative token", "4"]]
        assert ended is None


def idle(executor):
    time.sleep(1.5)
    return executor.submit("slow", seconds=0).result(10)


def idle_world():
    return run_world(idle)


def test_an_idle_world_keeps_in_touch_and_serves_again(pool):
    assert pool.run(idle_world, 2)[0] == ([0], None)


def quarrel(executor):
    return executor.submit("quarrel").result(10)


def quarrel_world():
    return run_world(quarrel)


def test_ranks_that_disagree_end_the_world_and_the_caller_is_told(pool):
    rank_0, rank_1 = pool.run(quarrel_world, 2)
    assert rank_0[0] == ["AlignerError: the server failed while it ran quarrel; see its log"]
    assert "1 of 2 ranks refused it" in rank_0[1]
    assert "1 of 2 ranks refused it, this one: only here" in rank_1[1]


def crash(executor):
    first, second = executor.submit("crash"), executor.submit("slow", seconds=0)
    return [type(future.exception(10)).__name__ for future in (first, second)]


def crash_world():
    return run_world(crash)


def test_a_bug_in_a_handler_ends_every_rank_with_it_and_leaves_no_caller_waiting(pool):
    rank_0, rank_1 = pool.run(crash_world, 2)
    assert rank_0[0] == [["AlignerError", "ServerStopping"]]
    assert rank_0[1] == rank_1[1] == "ZeroDivisionError: a bug"


def test_a_stopping_server_refuses_new_work():
    executor = SpmdExecutor({})
    executor.shutdown()
    executor.run()
    with pytest.raises(ServerStopping):
        executor.submit("infer")
