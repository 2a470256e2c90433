"""The task file of a run: all nodes of a SkyPilot task run `aligner supervise`.

SkyPilot gives all nodes of a task the same resources, so the roles share one list of nodes. The
fields are described at https://docs.skypilot.co/en/latest/reference/yaml-spec.html.
"""

import shlex
from typing import Any

from aligner.errors import RESUMABLE
from aligner.launcher.job_yaml import format_job
from aligner.launcher.nodes.node_list import FIRST_NODE, NODE_INDEX, NODES
from aligner.paths import get_cache_directory, get_run_paths
from aligner.placement.job_layout import compute_job_layout
from aligner.schema import Config


def render_task(config: Config) -> str:
    """Return the SkyPilot task of a run as YAML.

    Raises:
        ConfigError: A role cannot be placed on the nodes.
    """
    header = f"# aligner: run {config.run.name}, experiment {config.run.experiment}.\n"
    return header + format_job(build_task(config))


def build_task(config: Config) -> dict[str, Any]:
    """Return the SkyPilot task of a run.

    Raises:
        ConfigError: A role cannot be placed on the nodes.
    """
    skypilot = config.cluster.skypilot
    layout = compute_job_layout(config)
    (component,) = layout.components
    resources: dict[str, Any] = {
        "infra": skypilot.infra,
        "accelerators": (
            f"{skypilot.accelerator}:{component.devices_per_node}"
            if skypilot.accelerator is not None and component.devices_per_node
            else None
        ),
        "cpus": skypilot.cpus,
        "memory": skypilot.memory_gib,
        "image_id": skypilot.image,
        "use_spot": skypilot.use_spot,
        # SkyPilot starts a preempted task again in any case. The exit code is that of a run that
        # was stopped with a checkpoint or lost a node.
        "job_recovery": ({"recover_on_exit_codes": [RESUMABLE]} if skypilot.requeue else None),
    }
    supervise = shlex.join(("aligner", "supervise", str(get_run_paths(config).root)))
    run = [
        "set -e",
        f'export {NODES}="$(echo "$SKYPILOT_NODE_IPS" | paste -sd, -)"',
        f'export {NODE_INDEX}="$SKYPILOT_NODE_RANK" {FIRST_NODE}=0',
        f"exec {supervise}",
    ]
    optional: dict[str, Any] = {
        "volumes": dict(skypilot.volumes),
        "envs": {"ALIGNER_CACHE": str(get_cache_directory().absolute())},
        # SkyPilot reads a value that is null from the environment of its command.
        "secrets": dict.fromkeys(skypilot.secrets),
        "setup": "\n".join(skypilot.setup),
    }
    return {
        "name": str(config.run.name),
        "num_nodes": component.nodes,
        "resources": {name: value for name, value in resources.items() if value is not None},
        **{name: value for name, value in optional.items() if value},
        "run": "\n".join(run) + "\n",
    }
