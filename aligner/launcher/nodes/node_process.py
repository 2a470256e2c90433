"""`aligner supervise` on a node of a Kubernetes or SkyPilot job.

Every node runs an agent. On the first node, the process supervises the run, and the agent of the
node is a child process.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from aligner.errors import FINISHED, STOP_SIGNAL, get_exit_code
from aligner.launcher.job_systems import get_job_system
from aligner.launcher.nodes.node_agent import STOP_SIGNALS, run_agent
from aligner.launcher.nodes.node_list import NodeList, read_node_list
from aligner.launcher.nodes.node_ranks import NodeCluster, NodeRanks
from aligner.launcher.processes import Interrupts
from aligner.launcher.supervisor import Supervisor
from aligner.observability.console import RunConsole
from aligner.paths import get_run_paths
from aligner.placement.job_layout import JobLayout, compute_job_layout
from aligner.schema import Config

# Seconds to wait until `aligner launch`, which submitted the job, or the supervisor of an earlier
# attempt releases the run directory.
_LOCK_TIMEOUT_S = 60.0
# Seconds until the agent of the first node has exited, after its ranks have ended.
_AGENT_TIMEOUT_S = 10.0


def run_node(config: Config, console: RunConsole, *, is_agent: bool) -> None:
    """Supervise the run on the first node of its job; run the agent on all other nodes.

    Args:
        config: The run's configuration.
        console: Console for the output of the supervisor.
        is_agent: Whether to run only the agent, on the first node, too.

    Raises:
        Stopped: The run was stopped, or lost a node, and can be resumed.
        AlignerError: A role failed. `aligner.launcher.local.launch` describes the other errors.
    """
    layout = compute_job_layout(config)
    nodes = read_node_list(layout)
    if is_agent or nodes.index:
        run_agent(config, nodes)
    else:
        _supervise(config, console, layout, nodes)


def _supervise(config: Config, console: RunConsole, layout: JobLayout, nodes: NodeList) -> None:
    """Supervise the run on this node. See `run_node`."""
    system = get_job_system(config)
    should_requeue = config.cluster.is_requeued
    resume_hint = (
        f"{system.name} starts the {system.job_noun} again, which resumes the run"
        if should_requeue
        else f"resume the run with: {system.get_start_command(config)}"
    )
    job = system.get_own_job(config)
    print(f"{system.job_noun} {job}; run directory: {get_run_paths(config).root}", flush=True)
    hosts = {
        group: nodes.addresses[layout.get_nodes(placement)[0]]
        for group, placement in layout.placements.items()
    }
    # A cluster sends SIGTERM before a preemption, and the run has time to save a checkpoint.
    with (
        Interrupts(console, resume_hint, STOP_SIGNALS) as interrupts,
        NodeCluster(config, nodes, interrupts) as cluster,
        _run_own_agent(config),
    ):
        try:
            cluster.wait_for_nodes()
            Supervisor(
                config,
                console,
                interrupts,
                partial(NodeRanks, layout, cluster, interrupts),
                hosts,
                job,
                # The exit code of this process makes the cluster start the job again.
                (lambda: None) if should_requeue else None,
                _LOCK_TIMEOUT_S,
            ).run()
        except BaseException as error:
            cluster.end(get_exit_code(error))
            raise
        cluster.end(FINISHED)


@contextlib.contextmanager
def _run_own_agent(config: Config) -> Iterator[None]:
    """Run the agent of this node as a child process in a `with` block."""
    directory = str(get_run_paths(config).root)
    command = [sys.executable, "-m", "aligner", "supervise", directory, "--agent"]
    agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        # The agent exits when the supervisor ends the run; without that message, on this signal.
        try:
            agent.wait(_AGENT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            agent.send_signal(STOP_SIGNAL)
            agent.kill()
            agent.wait()
