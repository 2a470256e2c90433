"""Stand-in process for a role: `fake_role.py ROLE CONFIG BEHAVIOR`.

It imports only modules that its behavior needs, because every launch of a test starts four of them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from aligner.errors import RESUMABLE
from aligner.launcher.processes import LAUNCHER_PID_VARIABLE, terminate_with_launcher
from aligner.launcher.rank_heartbeat import start_heartbeat

RANK = int(os.environ["RANK"])


class Ready(BaseHTTPRequestHandler):
    model = ""
    requests = Path()
    """File with one line for each answered request for the model."""
    model_requested = threading.Event()

    def do_GET(self) -> None:
        ready = self.path in ("/v2/health/ready", f"/v2/models/{self.model}/ready")
        self.send_response(200 if ready else 404)
        self.end_headers()
        if "models" in self.path:
            with self.requests.open("a") as lines:
                lines.write("answered\n")
            self.model_requested.set()


def serve(role: str, run: Path) -> None:
    from aligner.launcher.rank_environment import SERVED_MODELS

    port = json.loads((run / "endpoints.json").read_text())[role]["http"]
    Ready.model = SERVED_MODELS[role.partition(".")[0]]
    Ready.requests = run / f"{role}_requests"
    HTTPServer(("127.0.0.1", port), Ready).serve_forever()


def live(role: str, run: Path) -> None:
    """Send heartbeats only while the rank's Triton answers, as real servers do."""
    from aligner.config.compose import load_config
    from aligner.launcher.heartbeats import require_triton_for_heartbeat

    require_triton_for_heartbeat(load_config(run / "config.yaml"), role)


def serve_from_helper(role: str, config: Path) -> None:
    """Serve from a helper that has its own session, ignores SIGTERM and holds the port."""
    environment = {
        name: value for name, value in os.environ.items() if name != LAUNCHER_PID_VARIABLE
    }
    command = [sys.executable, __file__, role, str(config), "ignore_sigterm"]
    subprocess.Popen(command, env=environment, start_new_session=True).wait()


def die_when_healthy(role: str, run: Path) -> None:
    """Exit with code 3 after the launcher has seen that the server is ready."""
    threading.Thread(target=serve, args=(role, run), daemon=True).start()
    Ready.model_requested.wait()
    time.sleep(0.2)  # the response must arrive first
    print("healthy, and dead", flush=True)
    (run / "died").touch()
    os._exit(3)


def wait() -> None:
    time.sleep(120)


def drain_with_helper(role: str, run: Path) -> None:
    """Serve with a helper in this rank's process group.

    After SIGTERM, the rank needs the helper for 0.3 s, and exits without ending the helper.
    """
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)", str(run)])

    def drain(*_: object) -> None:
        time.sleep(0.3)
        print("drained" if helper.poll() is None else "the helper ended before", flush=True)
        os._exit(0)

    signal.signal(signal.SIGTERM, drain)
    serve(role, run)


def train(run: Path, steps: int, pause_s: float) -> None:
    if RANK != 0:
        return
    from aligner.observability.metrics import MetricsWriter, RecordWriter
    from aligner.paths import RunPaths

    paths = RunPaths(run)
    metrics, samples = MetricsWriter(paths), RecordWriter(paths.samples)
    for step in range(1, steps + 1):
        time.sleep(pause_s)
        sample = {
            "prompt": "prompt [red]text[/red]",
            "response": f"answer {step}\n\x1b[2J",
            "reward": step / 10,
        }
        samples.write(step, [sample])
        stats = {
            "reward/mean": step / 10,
            "kl/reference": 0.01,
            "time/step": 0.5,
            "time/train": 0.25,
        }
        metrics.write(
            step, {**stats, "mismatch/logprob_abs": 1e-6 * step, "throughput/samples_per_s": 4.0}
        )
    # A text search for algorithm.trainer, because the import of OmegaConf is slow.
    if "\n  trainer: preferences\n" in (run / "config.yaml").read_text():
        paths.preferences.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
        paths.responses.write_text('{"prompt": "a", "response": "b"}\n')


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def main(role: str, config: Path, behavior: str) -> None:
    if behavior == "never_beats":
        wait()
    start_heartbeat()
    terminate_with_launcher()
    run = config.parent
    print(f"{role} rank {RANK} of {os.environ['WORLD_SIZE']}: {behavior}", flush=True)
    match behavior:
        case "prepare":
            (run / "initial_model").mkdir(exist_ok=True)
        case "prepare_slowly" | "prepare_and_hang":
            (run / "stages").mkdir(exist_ok=True)
            for percent in range(0, 100, 10):
                (run / "stages" / role).write_text(f"tokenizing: {percent}%")
                time.sleep(0.6)
            if behavior == "prepare_and_hang":
                wait()
            (run / "initial_model").mkdir(exist_ok=True)
        case "open_files":
            files = []
            while True:
                files.append(Path(__file__).open())  # noqa: SIM115
        case "fill_shared_memory":
            with open("/dev/shm/aligner-test-fill", "wb+") as file:  # noqa: PTH123
                file.truncate(1 << 30)
                mapped = mmap.mmap(file.fileno(), 1 << 30)
                for place in range(0, 1 << 30, 4096):
                    mapped[place] = 1
        case "fill_memory":
            filled = []
            while True:
                filled.append(bytearray(os.urandom(1 << 20)))
        case "stop_at_first":
            if not (run / "died").exists():
                (run / "died").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            (run / "initial_model").mkdir(exist_ok=True)
        case "stop_at_once":
            for server in ("critic", "reward"):
                wait_for(run / f"{server}_requests")  # the server responds to the launcher
            os.kill(os.getpid(), signal.SIGSTOP)
        case "serve":
            serve(role, run)
        case "never_healthy" | "hang":
            print("loading something that never loads", flush=True)
            wait()
        case "ignore_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (run / f"{role}_ignores_sigterm").touch()
            serve(role, run)
        case "drain_with_helper":
            drain_with_helper(role, run)
        case "live":
            live(role, run)
            if role.partition(".")[0] in ("critic", "reward") and RANK == 0:
                serve_from_helper(role, config)
            wait_for(run / "done")
        case "late":
            if RANK == 0:
                print(
                    "RuntimeError: Timed out waiting 1000ms for recv operation to complete",
                    flush=True,
                )
                sys.exit(1)
            if RANK in (1, 3):
                print("RuntimeError: Connection closed by peer [127.0.0.1]:1234", flush=True)
                time.sleep(RANK / 2)
                sys.exit(1)
            wait()
        case "serve_from_helper":
            print(f"master port {os.environ['MASTER_PORT']}", flush=True)
            if RANK == 0:
                serve_from_helper(role, config)
            wait()
        case "die_when_healthy":
            die_when_healthy(role, run)
        case "healthy_once":
            if (run / "died").exists():
                print("loading something that never loads again", flush=True)
                wait()
            die_when_healthy(role, run)
        case "crash_at_first":
            if not (run / "died").exists():
                (run / "died").touch()
                os._exit(RESUMABLE)
            serve(role, run)
        case "leave_grandchild":
            # The grandchild is an orphan with its own session, like a server that a server starts.
            # It also ignores SIGTERM.
            stubborn = (
                "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
                " time.sleep(120)"
            )
            subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    (
                        "import subprocess, sys; subprocess.Popen([sys.executable, '-c',"
                        f" '{stubborn}', '{run}'])"
                    ),
                ],
                start_new_session=True,
            ).wait()
            serve(role, run)
        case "train":
            train(run, steps=7, pause_s=0.02)
        case "train_slowly":
            train(run, steps=1, pause_s=0.1)
            wait()
        case "train_until_done":
            wait_for(run / "done")
            train(run, steps=1, pause_s=0)
        case "fail_with_the_server":
            wait_for(run / "died")
            print("aligner: error: step 3: the reward is nan", flush=True)
            sys.exit(1)
        case "flood":
            if RANK == 0:
                for number in range(20_000):
                    print(f"{number}: {'x' * 100}", flush=True)
                while os.fstat(1).st_size > 1 << 20:
                    time.sleep(0.05)
                print("aligner: error: step 3: the reward is nan", flush=True)
                sys.exit(1)
        case "print_without_end":
            while True:
                print("lines of a chatty process\n" * 1000, end="", flush=True)
        case "print_after_sigterm":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("started", flush=True)
            launcher_pid = os.getppid()
            while os.getppid() == launcher_pid:
                time.sleep(0.05)
            while True:
                print("lines after the launcher's death\n" * 1000, end="", flush=True)
        case "rank_1_hangs":
            if RANK == 1:
                wait()
        case "exit":
            sys.exit(0)
        case "fail_rank_1":
            # Rank 0 loses its peer and logs this first; rank 1 logs the cause later.
            if RANK == 1:
                (run / "both_run").touch()
                wait_for(run / "complained")
                time.sleep(0.2)
                print("aligner: error: step 3: the reward is nan for the prompt 'abc'", flush=True)
            else:
                wait_for(run / "both_run")
                print("RuntimeError: Connection closed by peer [127.0.0.1]:1234", flush=True)
                (run / "complained").touch()
            os._exit(1)
        case "raise":
            try:
                raise LookupError("nothing there")
            except LookupError as error:
                raise ValueError("the scorer returned nan\nfor a prompt") from error
        case "fill_disk":
            for log in (run / "logs" / f"{server}-0.log" for server in ("critic", "reward")):
                # A server that cannot write its first line would exit, too.
                while not log.exists() or not log.stat().st_size:
                    time.sleep(0.02)
            with contextlib.suppress(OSError), (run / "large").open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 512)
            try:
                print("x" * 5000, flush=True)  # more than the free rest of the log's last page
            finally:
                os._exit(1)
        case "killed_after_checkpoint" | "killed_at_first":
            if RANK == 0 and not (run / "died").exists():
                wait_for(run / "both_run")
                (run / "died").touch()
                if behavior == "killed_after_checkpoint":
                    (run / "checkpoints" / "step_2").mkdir(parents=True)
                    (run / "checkpoints" / "step_2" / "manifest.json").write_text("{}")
                os.kill(os.getpid(), signal.SIGKILL)
            if RANK == 1 and not (run / "died").exists():
                (run / "both_run").touch()
                wait()  # like a rank that waits for its peer in a collective
            train(run, steps=7, pause_s=0.02 if behavior == "killed_after_checkpoint" else 0.5)
        case "killed":
            print("about to be killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            raise ValueError(behavior)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
