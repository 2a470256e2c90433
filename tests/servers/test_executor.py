"""The executor runs the same commands in the same order on all ranks, joins them, and stops."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import deque

import pytest
import torch
import torch.distributed as dist

from aligner.errors import AlignerError, UnavailableError
from aligner.servers.executor import ServerStopping, SpmdExecutor
from aligner.servers.rank_commands import Command, RowBatcher, rank_handler, take_batch

UNAVAILABLE, SLOWLY_REFUSED = 99, -99


class Ranks:
    """Handlers that all ranks must run in the same order, because they run collectives."""

    described = 0

    def __init__(self):
        self.begun = []

    def note(self, op, number):
        """Record a position; check that all ranks are at the same position of the same command, and
        have recorded equally many positions."""
        self.begun.append((op, number))
        here = torch.tensor([len(self.begun), zlib.crc32(op.encode()), number])
        everywhere = [torch.empty_like(here) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, here)
        assert all(torch.equal(here, there) for there in everywhere)

    def plain(self, number):
        self.note("plain", number)
        return number

    def long(self, number, parts, refuses=False, rank=None, seconds=0.001):
        self.note("long", number)
        for part in range(parts if rank in (None, dist.get_rank()) else 1):
            yield
            self.note(f"long/{part}", number)
            time.sleep(seconds)
        if refuses:
            raise AlignerError(f"{number} is refused")
        return number

    @rank_handler(runs_at_pauses=True)
    def short(self, number, refuses=False):
        self.note("short", number)
        if refuses:
            raise AlignerError(f"{number} is refused")
        return number

    def double(self, tokens, lengths):
        if (tokens < 0).any():
            raise AlignerError("a negative token")
        total = tokens.clone()
        dist.all_reduce(total)
        return total

    @rank_handler(batcher=RowBatcher(("names",)))
    def describe(self, tokens, lengths, names, scale=1):
        """Return each row's scaled tokens, and the number of rows in the joined command."""
        self.described += 1
        if (tokens == UNAVAILABLE).any():
            raise UnavailableError("the scorer is gone")
        if (tokens == SLOWLY_REFUSED).any():
            time.sleep(0.4)
        if (tokens < 0).any():
            raise AlignerError("a negative token")
        assert len(names) == len(tokens) == len(lengths)
        total = tokens.clone()
        dist.all_reduce(total)
        return {"tokens": total * scale, "together": torch.full((len(tokens),), len(tokens))}

    def slow(self, seconds, rank=None):
        if rank in (None, dist.get_rank()):
            time.sleep(seconds)
        return dist.get_rank()

    def count(self):
        return self.described

    def quarrel(self):
        if dist.get_rank() == 1:
            raise AlignerError("only here")

    @rank_handler(runs_at_pauses=True)
    def crash(self):
        raise ZeroDivisionError("a bug")


def run_world(conversation, drain_s=0.0, timeout_s=60.0, ranks=None):
    """Run the executor; on rank 0, a thread runs the conversation.

    Returns (the conversation's answers or error, the error that ended the executor).
    """
    ranks = ranks or Ranks()
    names = ("double", "describe", "slow", "count", "quarrel", "crash", "plain", "long", "short")
    handlers = {name: getattr(ranks, name) for name in names}
    executor = SpmdExecutor(
        handlers, batch_tokens=40, drain_s=drain_s, heartbeat_s=0.3, collective_timeout_s=timeout_s
    )
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


def test_error_on_all_ranks_reaches_only_its_caller(pool):
    for answers, ended in pool.run(one_bad_world, 2)[:1]:
        assert answers == [["2", "a negative token", "4"]]
        assert ended is None


def idle(executor):
    time.sleep(1.5)
    return executor.submit("slow", seconds=0).result(10)


def idle_world():
    return run_world(idle)


def test_idle_executor_serves_next_command(pool):
    assert pool.run(idle_world, 2)[0] == ([0], None)


def quarrel(executor):
    return executor.submit("quarrel").result(10)


def quarrel_world():
    return run_world(quarrel)


def test_error_on_one_rank_ends_all_ranks_and_fails_caller(pool):
    rank_0, rank_1 = pool.run(quarrel_world, 2)
    assert rank_0[0] == ["ServerFailed: the server failed while running quarrel; see its log"]
    assert "1 of 2 ranks raised an error" in rank_0[1]
    assert "1 of 2 ranks raised an error, the other ranks did not; rank 1: only here" in rank_1[1]


def crash(executor):
    first, second = executor.submit("crash"), executor.submit("slow", seconds=0)
    return [type(future.exception(10)).__name__ for future in (first, second)]


def crash_world():
    return run_world(crash)


def test_handler_bug_ends_all_ranks_and_fails_waiting_callers(pool):
    rank_0, rank_1 = pool.run(crash_world, 2)
    assert rank_0[0] == [["ServerFailed", "ServerStopping"]]
    assert rank_0[1] == rank_1[1] == "ZeroDivisionError: a bug"


def test_stopping_server_refuses_new_commands():
    executor = SpmdExecutor({})
    executor.shutdown()
    executor.run()
    with pytest.raises(ServerStopping):
        executor.submit("infer")


def describe(executor, value, rows, width, **arguments):
    names = [f"{value}-{row}" for row in range(rows)]
    return executor.submit("describe", request(value, rows, width), names=names, **arguments)


def answers(futures):
    results = [future.result(10) for future in futures]
    return [
        (list(r["tokens"].shape), r["tokens"].unique().tolist(), r["together"][0].item())
        for r in results
    ]


def join(executor):
    executor.submit("slow", seconds=0.3)  # the other commands arrive while it runs
    futures = [
        describe(executor, 1, 2, 4),
        describe(executor, 2, 1, 6),
        describe(executor, 3, 8, 5),
    ]
    executor.submit("slow", seconds=0)
    futures += [
        describe(executor, 4, 1, 4),
        describe(executor, 5, 1, 4, scale=2),
        describe(executor, 6, 1, 4, scale=2),
    ]
    return answers(futures)


def join_world():
    return run_world(join)


def test_adjacent_compatible_commands_are_joined_within_budget(pool):
    (alone, _), *_ = pool.run(join_world, 2)
    assert alone == [
        [
            ([2, 4], [2], 3),
            ([1, 6], [4], 3),
            ([8, 5], [6], 8),  # joined with the others, it would be 11 rows of 6 tokens
            # not joined: another command precedes it, and the next ones have another scale
            ([1, 4], [8], 1),
            ([1, 4], [20], 2),
            ([1, 4], [24], 2),
        ]
    ]


def spoil(executor):
    executor.submit("slow", seconds=0.3)
    good, bad, other = [describe(executor, value, 1, 4) for value in (1, -1, 2)]
    return answers([good, other]), str(bad.exception(10))


def spoil_world():
    return run_world(spoil)


def test_refused_command_does_not_fail_joined_commands(pool):
    (outcomes, ended), *_ = pool.run(spoil_world, 2)
    assert (
        outcomes == [([([1, 4], [2], 1), ([1, 4], [4], 1)], "a negative token")] and ended is None
    )


def lose_the_scorer(executor):
    executor.submit("slow", seconds=0.3)
    futures = [describe(executor, value, 1, 4) for value in (1, UNAVAILABLE, 2)]
    return [str(future.exception(10)) for future in futures], executor.submit("count").result(10)


def lost_scorer_world():
    return run_world(lose_the_scorer)


def test_unavailable_error_refuses_all_joined_commands_at_once(pool):
    assert pool.run(lost_scorer_world, 2)[0] == ([(["the scorer is gone"] * 3, 1)], None)


def stop_between_parts(executor):
    executor.submit("slow", seconds=0.2)
    futures = [describe(executor, SLOWLY_REFUSED, 1, 4) for _ in range(3)]
    time.sleep(0.1)
    executor.shutdown()
    return [type(future.exception(10)).__name__ for future in futures]


def stopped_between_parts_world():
    return run_world(stop_between_parts, drain_s=0.3)


def test_drain_limit_applies_to_parts_of_refused_command(pool):
    assert pool.run(stopped_between_parts_world, 2)[0] == ([["ServerStopping"] * 3], None)


def stall(executor):
    return executor.submit("slow", seconds=1.5, rank=1).result(10)


def stalled_world():
    return run_world(stall, timeout_s=1.0)


def test_collective_timeout_of_slow_rank_ends_server(pool):
    outcomes, ended = pool.run(stalled_world, 2)[0]
    assert outcomes == ["ServerFailed: the server failed while running slow; see its log"]
    assert "Timed out waiting 1000ms" in ended


def stop_early(executor):
    futures = [executor.submit("slow", seconds=0.2) for _ in range(3)]
    time.sleep(0.1)
    executor.shutdown()
    with pytest.raises(ServerStopping):
        executor.submit("slow", seconds=0)
    return [type(future.exception(10)).__name__ for future in futures]


def drained_world():
    return run_world(stop_early, drain_s=5.0)


def hasty_world():
    return run_world(stop_early)


def test_stopping_server_finishes_queue_within_drain_time(pool):
    assert pool.run(drained_world, 2)[0] == ([["NoneType"] * 3], None)
    assert pool.run(hasty_world, 2)[0] == ([["NoneType", "ServerStopping", "ServerStopping"]], None)


def schedules(executor):
    """Submit commands at random moments; return (op, number, outcome) of each command per seed."""
    outcomes = []
    for seed in range(4):
        chance, sent = random.Random(seed), []
        for number in range(100 * seed, 100 * seed + 40):
            op, refuses = chance.choice(("plain", "long", "short", "short")), chance.random() < 0.2
            about = {
                "plain": {},
                "long": {"parts": chance.randrange(5), "refuses": refuses},
                "short": {"refuses": refuses},
            }
            sent.append((op, number, executor.submit(op, number=number, **about[op])))
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.005)
        outcomes.append(
            [
                (op, number, str(future.exception(10) or future.result()))
                for op, number, future in sent
            ]
        )
    return outcomes


def scheduled_world():
    ranks = Ranks()
    return run_world(schedules, ranks=ranks), ranks.begun


def test_ranks_run_same_order_and_only_pause_commands_overtake(pool):
    ((outcomes,), ended), begun = pool.run(scheduled_world, 2)[0]
    assert ended is None
    place = {one: at for at, one in enumerate(begun)}
    overtaken = between = 0
    for sent in outcomes:
        assert all(outcome in (str(number), f"{number} is refused") for _, number, outcome in sent)
        for at, (op, number, _) in enumerate(sent):
            for later, later_number, _ in sent[at + 1 :]:
                overtakes = place[later, later_number] < place[op, number]
                assert not overtakes or (later == "short" and op != "short")
                overtaken += overtakes
        for number in [number for op, number, _ in sent if op == "long"]:
            parts = [at for (op, of), at in place.items() if of == number and op.startswith("long")]
            inside = [begun[at][0] for at in range(parts[0], parts[-1]) if begun[at][1] != number]
            assert set(inside) <= {"short"}
            between += len(inside)
    assert overtaken and between  # otherwise the schedules test nothing


def part(executor):
    return executor.submit("long", number=1, parts=3, rank=0).result(10)


def parted_world():
    return run_world(part)


def test_pause_on_only_some_ranks_ends_server(pool):
    for _, ended in pool.run(parted_world, 2):
        assert "long: 1 of 2 ranks paused, the other ranks finished" in ended


def fail_at_a_pause(executor):
    executor.submit("slow", seconds=0.2)
    outer, inner = executor.submit("long", number=1, parts=2), executor.submit("crash")
    return [type(future.exception(10)).__name__ for future in (outer, inner)]


def failing_world():
    return run_world(fail_at_a_pause)


def test_handler_bug_at_pause_fails_both_callers(pool):
    assert pool.run(failing_world, 2)[0] == (
        [["ServerFailed", "ServerFailed"]],
        "ZeroDivisionError: a bug",
    )


def stop_in_the_middle(executor):
    long = executor.submit("long", number=1, parts=2, seconds=0.2)
    time.sleep(0.1)
    short = executor.submit("short", number=2)
    executor.shutdown()
    return [type(future.exception(10)).__name__ for future in (long, short)]


def drained_middle_world():
    return run_world(stop_in_the_middle, drain_s=5.0)


def hasty_middle_world():
    return run_world(stop_in_the_middle)


def test_drain_includes_running_command_and_commands_at_pauses(pool):
    assert pool.run(drained_middle_world, 2)[0] == ([["NoneType"] * 2], None)
    assert pool.run(hasty_middle_world, 2)[0] == ([["NoneType", "ServerStopping"]], None)


@pytest.mark.parametrize(
    ("budget", "widths"), [(0, [8]), (18, [8, 9]), (27, [8, 9, 4]), (20_000, [8, 9, 4, 4096])]
)
def test_join_takes_oldest_command_and_then_nearest_widths(budget, widths):
    waiting = deque(Command("describe", request(1, 1, width)) for width in (8, 4096, 4, 9))
    taken = take_batch(waiting, {"describe": RowBatcher()}, budget)
    assert [command.tensors["tokens"].shape[1] for command in taken] == widths
    assert len(waiting) == 4 - len(widths)
