"""Measure the overhead of serving the critic, and the request rate with many clients.

    python -m benchmarks.server --json
    python -m benchmarks.server --soak 300 --clients 16 --json

`overhead_fraction` is the time of a request to the server divided by the time of the same
computation without a server, minus one: the median over pairs of consecutive measurements. The soak
test sends requests of random shapes and occasional updates for `--soak` seconds, and reports errors
and the memory of the server processes. The exit code is 1 if the soak test had errors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
from numpy.typing import NDArray

from aligner.config.compose import compose_config, load_config, save_config
from aligner.errors import ConfigError
from aligner.launcher.rank_environment import FreePorts
from aligner.placement.addresses import Endpoint, load_access
from aligner.schema import Config
from aligner.servers.remote_client import Connection, RemoteError
from aligner.servers.wire_protocol import CRITIC_INFER, CRITIC_TRAIN
from benchmarks.models import MODELS, write_model
from benchmarks.processes import Group, Way

_SHAPES = {"tiny": (64, 512), "smollm2_135m": (32, 128)}
_REPEATS = {"tiny": 30, "smollm2_135m": 5}
_SMALL = (2, 32)
_START_S = 180.0
_T = TypeVar("_T")


class Served:
    """A critic that `aligner serve` serves. A context manager, which stops the processes on
    exit."""

    def __init__(self, directory: Path, model: str, *overrides: str) -> None:
        self._directory, self._log = directory, directory / "server.log"
        self._ports = FreePorts()
        *ports, self._master_port = itertools.islice(self._ports, 4)
        self.config = compose_config(
            [
                *(
                    "experiment=tiny_ppo",
                    "model.source=directory",
                    f"model.path={directory / model}",
                    f"run.dir={directory}",
                ),
                *(
                    f"critic.ports.{name}={port}"
                    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)
                ),
                *("server.accept_unnumbered=true", "critic.micro_batch_tokens=4096", *overrides),
            ]
        )
        self.endpoint = Endpoint("127.0.0.1", *ports)
        self.vocab_size = MODELS[model]["vocab_size"]

    def __enter__(self) -> Served:
        file = self._directory / "config.yaml"
        save_config(self.config, file)
        with self._log.open("w") as log:
            command = [
                sys.executable,
                "-m",
                "aligner",
                "serve",
                "role=critic",
                "--config",
                str(file),
            ]
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **_ONE_THREAD, "MASTER_PORT": str(self._master_port)},
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self._stop()

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            # The server, or its access key, does not exist yet.
            with contextlib.suppress(RemoteError, ConfigError):
                self.connection = Connection("critic", self.endpoint, load_access(self.config))
                self.connection.check_ready(1.0)
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"the critic exited, or did not start within {_START_S:g} s; end of its log:\n"
                    f"{self._log.read_text()[-3000:]}"
                )
            time.sleep(0.2)

    def values(self, rows: int, width: int, tokens: NDArray | None = None) -> float:
        """Request the values of `rows` sequences of `width` tokens, and return the time in
        seconds."""
        tokens = some_tokens(self.vocab_size, rows, width) if tokens is None else tokens
        arrays = {"tokens": tokens, "sequence_lengths": np.full((rows, 1), width)}
        start = time.perf_counter()
        self.connection.infer(CRITIC_INFER, arrays, 300)
        return time.perf_counter() - start

    def train(self, rows: int, width: int) -> None:
        """Request one update without an update number."""
        targets = np.ones((rows, width - 1), dtype=np.float32)
        arrays = {
            "tokens": some_tokens(self.vocab_size, rows, width),
            "returns": targets,
            "prev_values": targets,
            "mask": targets,
        }
        self.connection.infer(CRITIC_TRAIN, arrays, 300)

    def memory_mib(self) -> float:
        """Return the resident memory of the server's processes, including Triton's, in MiB."""
        root = psutil.Process(self._process.pid)
        return (
            sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))
            / 2**20
        )


class Direct:
    """The same critic in this process, without a server."""

    def __init__(self, config_file: Path) -> None:
        from aligner.algorithms.policy_losses import value_loss
        from aligner.megatron.value_model import build_critic
        from aligner.megatron.world import initialize

        config: Config = load_config(config_file)
        world = initialize(config.critic.parallel, config.seed, 60)
        self._model = build_critic(
            config, world, functools.partial(value_loss, clip=config.algorithm.value_clip)
        )

    def values(self, rows: int, width: int) -> float:
        import torch

        tokens = torch.from_numpy(some_tokens(self._model.vocab_size, rows, width))
        lengths = torch.full((rows,), width)
        start = time.perf_counter()
        self._model.values(tokens, lengths)
        return time.perf_counter() - start


def some_tokens(vocab_size: int, rows: int, width: int) -> NDArray:
    """Return random token ids, int64 [rows, width]."""
    return np.random.default_rng(0).integers(0, vocab_size, (rows, width))


def measure_overhead(directory: Path, model: str) -> dict[str, object]:
    """Measure the served and the direct critic in pairs, and return the figures."""
    rows, width = _SHAPES[model]
    with Served(directory, model) as served:
        make = functools.partial(Direct, directory / "config.yaml")
        with Group(Way("direct", threads=1), make) as direct:
            served.values(rows, width)
            direct.call("values", rows, width)
            pairs = [
                (direct.call("values", rows, width), served.values(rows, width))
                for _ in range(_REPEATS[model])
            ]
    times = sorted(served for _, served in pairs)
    return {
        "measure": "critic_infer",
        "model": model,
        "shape": [rows, width],
        "repeats": len(pairs),
        "direct_s": round(statistics.median(direct for direct, _ in pairs), 4),
        "p50_s": round(statistics.median(times), 4),
        "p99_s": round(times[min(len(times) - 1, int(0.99 * len(times)))], 4),
        "overhead_fraction": round(
            statistics.median(served / direct for direct, served in pairs) - 1, 4
        ),
    }


def measure_clients(directory: Path, clients: int, seconds: float) -> dict[str, object]:
    """Measure the request rate of one client, of many clients, and of many clients without
    batching."""
    rates = {}
    for name, overrides in (("joined", ()), ("alone", ("server.batch_tokens=1",))):
        with Served(directory, "tiny", *overrides) as served:
            served.values(*_SMALL)
            rates[name, 1] = requests_per_s(served, 1, seconds)
            rates[name, clients] = requests_per_s(served, clients, seconds)
    return {
        "measure": "clients",
        "model": "tiny",
        "shape": list(_SMALL),
        "clients": clients,
        "one_client_per_s": round(rates["joined", 1], 1),
        "many_clients_per_s": round(rates["joined", clients], 1),
        "many_clients_unbatched_per_s": round(rates["alone", clients], 1),
        "concurrency_gain": round(rates["joined", clients] / rates["joined", 1], 2),
        "batching_gain": round(rates["joined", clients] / rates["alone", clients], 2),
    }


def requests_per_s(served: Served, clients: int, seconds: float) -> float:
    """Return the number of small requests per second that the server answers to concurrent
    clients."""
    tokens = some_tokens(served.vocab_size, *_SMALL)
    start = time.perf_counter()

    def ask(_: int) -> int:
        count = 0
        while time.perf_counter() - start < seconds:
            served.values(*_SMALL, tokens)
            count += 1
        return count

    return sum(in_threads(ask, clients)) / (time.perf_counter() - start)


def in_threads(work: Callable[[int], _T], count: int) -> list[_T]:
    """Call `work(0)` to `work(count - 1)` in a thread each, and return the results.

    Raises the error of a call that failed.
    """
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def soak(directory: Path, clients: int, seconds: float) -> dict[str, object]:
    """Send requests of random shapes and occasional updates from many clients, and return the
    number of errors and the memory."""
    errors: Counter[str] = Counter()
    first_error = None
    counts = {"values": 0, "updates": 0}
    lock = threading.Lock()
    with Served(directory, "tiny") as served:
        for _ in range(20):
            served.values(16, 256)
            served.train(16, 256)
        memory = {"start": served.memory_mib()}
        started = time.monotonic()

        def ask(client: int) -> None:
            nonlocal first_error
            chance = random.Random(client)
            while (passed := time.monotonic() - started) < seconds:
                update = client == 0 and chance.random() < 0.1
                try:
                    if update:
                        served.train(chance.randint(1, 16), chance.randint(2, 256))
                    else:
                        served.values(chance.randint(1, 16), chance.randint(1, 256))
                except Exception as error:  # count it, and let the other clients continue
                    with lock:
                        errors[
                            error.kind if isinstance(error, RemoteError) else type(error).__name__
                        ] += 1
                        first_error = first_error or repr(error)
                with lock:
                    counts["updates" if update else "values"] += 1
                    if passed > seconds / 2 and "middle" not in memory:
                        memory["middle"] = served.memory_mib()

        in_threads(ask, clients)
        memory["end"] = served.memory_mib()
    return {
        "measure": "soak",
        "model": "tiny",
        "clients": clients,
        "seconds": round(seconds),
        **counts,
        "errors": errors.total(),
        "error_kinds": dict(errors),
        "first_error": first_error,
        **{f"memory_mib_{when}": round(size, 1) for when, size in memory.items()},
    }


def measurements(arguments: argparse.Namespace) -> Iterator[dict[str, object]]:
    """Run the requested measurements, and yield the figures of each."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for model in ("tiny",) if arguments.soak else arguments.models:
            write_model(str(directory / model), model)
        if arguments.soak:
            yield soak(directory, arguments.clients or 16, arguments.soak)
            return
        for model in arguments.models:
            yield measure_overhead(directory, model)
        if "tiny" in arguments.models:
            yield measure_clients(directory, arguments.clients or 32, arguments.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=_SHAPES, default=list(_SHAPES), help="models (all)"
    )
    parser.add_argument(
        "--clients", type=int, help="number of concurrent clients (32; with --soak 16)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per request rate (5)")
    parser.add_argument(
        "--soak", type=float, metavar="SECONDS", help="run the soak test for this time instead"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    arguments = parser.parse_args()
    failed = False
    for measured in measurements(arguments):
        failed |= bool(measured.get("errors"))
        text = (
            json.dumps(measured)
            if arguments.json
            else "  ".join(f"{key}={value}" for key, value in measured.items())
        )
        print(text, flush=True)
    raise SystemExit(failed)


_ONE_THREAD = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}

if __name__ == "__main__":
    main()
