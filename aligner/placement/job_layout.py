"""The nodes and devices of each role in a job on a cluster.

The layout follows from the configuration alone and is the same for all clusters.
`aligner.launcher.slurm` renders it as options of `sbatch` and `srun`,
`aligner.launcher.kubernetes` as a JobSet, and `aligner.launcher.skypilot` as a task file.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from aligner.errors import ConfigError
from aligner.placement.local_devices import parse_devices
from aligner.placement.roles import (
    computes_on_devices,
    count_role_ranks,
    get_role,
    requests_gpus,
)
from aligner.schema import Config, NodeRoleConfig

# Name of a run's job in messages, by `cluster.kind`.
_JOB_NAMES = {"slurm": "Slurm job", "kubernetes": "JobSet", "skypilot": "SkyPilot task"}


@dataclass(frozen=True)
class RolePlacement:
    """Nodes and devices of one role or server group, within one component of the job."""

    component: int
    """Index of the component."""
    first_node: int
    """Index of the first node within the component."""
    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Number of the group's ranks on each node."""
    devices: tuple[int, ...] | None
    """Indices of the group's devices on each node; None for all devices of the job on the node."""

    @property
    def node_range(self) -> range:
        """Indices of the nodes within the component."""
        return range(self.first_node, self.first_node + self.nodes)

    def shares_node(self, other: "RolePlacement") -> bool:
        """Return whether both groups have ranks on the same node."""
        return self.component == other.component and not {*self.node_range}.isdisjoint(
            other.node_range
        )


@dataclass(frozen=True)
class Component:
    """A component of a heterogeneous job: nodes that are requested with the same options."""

    role: str
    """Role whose options the component has; the trainer, if all roles share one component."""
    nodes: int
    """Number of nodes."""
    ranks_per_node: int
    """Number of ranks of all roles on the node with the most ranks."""
    devices_per_node: int
    """Number of requested devices; 0 if no role needs one."""


@dataclass(frozen=True)
class JobLayout:
    """The components of a job, and the placement of each role or server group.

    The trainer's component is the first one.
    """

    components: tuple[Component, ...]
    placements: dict[str, RolePlacement]

    @property
    def node_count(self) -> int:
        """Number of nodes of all components."""
        return sum(component.nodes for component in self.components)

    def get_first_node(self, component: int) -> int:
        """Return the index of a component's first node among the nodes of all components."""
        return sum(earlier.nodes for earlier in self.components[:component])

    def get_nodes(self, placement: RolePlacement) -> range:
        """Return the indices of a group's nodes among the nodes of all components."""
        first = self.get_first_node(placement.component) + placement.first_node
        return range(first, first + placement.nodes)

    def is_shared(self, placement: RolePlacement) -> bool:
        """Return whether another role or server group has ranks on the nodes of a placement."""
        return sum(placement.shares_node(other) for other in self.placements.values()) > 1

    def describe(self, kind: str = "slurm") -> str:
        """Return a line with the nodes and GPUs of each component.

        Args:
            kind: Kind of the cluster (`cluster.kind`).

        For example: "Slurm job: 3 nodes; trainer: 2 nodes × 8 GPUs; reward: 1 node without GPUs".
        """
        total = self.node_count
        parts = [f"{_JOB_NAMES[kind]}: {_count(total, 'node')}"]
        for index, component in enumerate(self.components):
            roles = dict.fromkeys(
                get_role(group)
                for group, placement in self.placements.items()
                if placement.component == index
            )
            # The component's own role comes first.
            names = ", ".join(dict.fromkeys((component.role, *roles)))
            devices = component.devices_per_node
            devices_text = (
                f"\N{MULTIPLICATION SIGN} {_count(devices, 'GPU')}" if devices else "without GPUs"
            )
            parts.append(f"{names}: {_count(component.nodes, 'node')} {devices_text}")
        return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, for example `2 nodes`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def get_node_settings(config: Config, group: str) -> NodeRoleConfig:
    """Return the settings of the nodes of a role or server group."""
    settings: NodeRoleConfig = getattr(config.cluster.job.roles, get_role(group))
    return settings


def get_role_key(config: Config, role: str) -> str:
    """Return the dotted key of a role's section, such as `cluster.slurm.roles.critic`."""
    return f"cluster.{config.cluster.kind}.roles.{role}"


def compute_job_layout(config: Config) -> JobLayout:
    """Return the placement of all roles.

    Raises:
        ConfigError: The roles cannot be placed as configured; the error names the keys.
    """
    groups = count_role_ranks(config)
    roles = list(dict.fromkeys(get_role(group) for group in ("trainer", *groups)))
    if problems := [*_find_role_problems(config, roles)]:
        raise ConfigError("\n".join(problems))

    # Each role with nodes of its own has one component; other roles share the nodes of such a role.
    hosts = [role for role in roles if get_node_settings(config, role).shares_nodes_with is None]
    placements: dict[str, RolePlacement] = {}
    for role in roles:
        host = get_node_settings(config, role).shares_nodes_with or role
        placements |= _place_role(config, role, hosts.index(host))

    components = []
    for index, host in enumerate(hosts):
        component_placements = {
            group: placement
            for group, placement in placements.items()
            if placement.component == index
        }
        _check_shared_nodes(config, host, component_placements)
        components.append(_build_component(config, host, component_placements))

    # Placements were computed by role; a layout lists the groups in the order of their start.
    layout = JobLayout(tuple(components), {group: placements[group] for group in groups})
    return layout if _has_components(config) else _merge_components(layout)


def _has_components(config: Config) -> bool:
    """Return whether the roles of a job may request different nodes."""
    # The nodes of a SkyPilot task are all the same.
    return {
        "slurm": config.cluster.slurm.heterogeneous,
        "kubernetes": True,
        "skypilot": False,
    }[config.cluster.kind]


def _find_role_problems(config: Config, roles: list[str]) -> Iterator[str]:
    """Yield an error for each invalid setting of a single role."""
    for role in roles:
        settings = get_node_settings(config, role)
        key = get_role_key(config, role)
        host = settings.shares_nodes_with
        if host is not None:
            setting = f"{key}.shares_nodes_with={host}"
            if host not in roles:
                yield f"{setting}: the run has no such role; must be one of {', '.join(roles)}"
            elif host == role or get_node_settings(config, host).shares_nodes_with is not None:
                yield f"{setting}: must be another role whose own `shares_nodes_with` is null"
            if settings.nodes is not None:
                yield (
                    f"{key}.nodes={settings.nodes}: is not supported with {setting}, which places"
                    f" the role on the nodes of {host}; remove one of the two settings"
                )
        try:
            _get_configured_devices(config, role)
        except ConfigError as error:
            yield str(error)


def _get_configured_devices(config: Config, role: str) -> tuple[int, ...] | None:
    """Return the configured device indices of a role; None if the key is null.

    Raises:
        ConfigError: The value is not a list of devices, or a node lacks one of them.
    """
    text = get_node_settings(config, role).devices
    devices_per_node = config.cluster.devices_per_node
    if text is None:
        return None
    return parse_devices(
        f"{get_role_key(config, role)}.devices",
        text,
        devices_per_node,
        f"cluster.devices_per_node={devices_per_node}",
    )


def _place_role(config: Config, role: str, component: int) -> dict[str, RolePlacement]:
    """Return the placement of each group of a role.

    A role has one group, or one group per replica. All replicas have the same number of ranks.

    Args:
        config: The run's configuration.
        role: The role.
        component: Index of its component.

    Raises:
        ConfigError: The ranks cannot be distributed evenly over the nodes.
    """
    replicas = {
        group: ranks for group, ranks in count_role_ranks(config).items() if get_role(group) == role
    }
    ranks = next(iter(replicas.values()))
    nodes = get_node_settings(config, role).nodes
    chosen_devices = _get_configured_devices(config, role)
    slots = (
        tuple(range(config.cluster.devices_per_node)) if chosen_devices is None else chosen_devices
    )
    packing = _pack_replicas(ranks, len(replicas), len(slots), nodes)
    if packing is None:
        ranks_text = (
            f"{len(replicas)} replicas of {ranks} ranks" if len(replicas) > 1 else f"{ranks} ranks"
        )
        limit_key = (
            "cluster.devices_per_node"
            if chosen_devices is None
            else f"{get_role_key(config, role)}.devices"
        )
        raise ConfigError(
            f"{get_role_key(config, role)}.nodes={'null' if nodes is None else nodes}: {ranks_text}"
            f" cannot be distributed evenly over nodes with {len(slots)} devices ({limit_key});"
            " change one of the two keys, or the layout"
        )

    nodes_per_replica, replicas_per_node = packing
    ranks_per_node = ranks // nodes_per_replica
    # None means all devices of the node; a replica that shares its node gets a part of them.
    uses_some_devices = chosen_devices is not None or replicas_per_node > 1
    placements = {}
    for index, group in enumerate(replicas):
        first_slot = index % replicas_per_node * ranks_per_node
        devices = slots[first_slot : first_slot + ranks_per_node] if uses_some_devices else None
        # Either several replicas share a node, or a replica has several nodes: one factor is 1.
        first_node = index // replicas_per_node * nodes_per_replica
        placements[group] = RolePlacement(
            component, first_node, nodes_per_replica, ranks_per_node, devices
        )
    return placements


def _pack_replicas(
    ranks: int, replicas: int, slots: int, nodes: int | None
) -> tuple[int, int] | None:
    """Distribute the replicas of a role evenly over nodes.

    Args:
        ranks: Number of ranks of each replica.
        replicas: Number of replicas.
        slots: Number of ranks that fit on a node.
        nodes: Number of nodes; None to use as few as possible.

    Returns:
        The number of nodes of each replica, and the number of replicas on each node; None if an
        even distribution does not exist.
    """
    if nodes is None:
        nodes_per_replica = -(-ranks // slots)  # rounded up
        replicas_per_node = 1 if nodes_per_replica > 1 else min(replicas, slots // ranks)
    else:
        nodes_per_replica = max(1, nodes // replicas)
        replicas_per_node = 1 if nodes >= replicas else -(-replicas // nodes)
    # Every node has the same number of ranks, because a cluster gets one number for all nodes.
    fits = (
        ranks % nodes_per_replica == 0
        and ranks // nodes_per_replica * replicas_per_node <= slots
        and (nodes is None or nodes < replicas or nodes % replicas == 0)
    )
    return (nodes_per_replica, replicas_per_node) if fits else None


def _check_shared_nodes(config: Config, host: str, placements: Mapping[str, RolePlacement]) -> None:
    """Raise ConfigError if roles on the same nodes lack devices of their own or enough nodes.

    Args:
        config: The run's configuration.
        host: Role that determines the number of nodes.
        placements: Placements of all groups of the component.
    """
    if all(get_role(group) == host for group in placements):
        return
    nodes = 1 + max(
        placement.node_range[-1]
        for group, placement in placements.items()
        if get_role(group) == host
    )
    device_roles = {get_role(group) for group in placements if _needs_device(config, group)}
    # A role that alone needs devices may use all of them, without a list.
    is_divided = len(device_roles) > 1
    device_owners: dict[int, str] = {}
    for group, placement in placements.items():
        role = get_role(group)
        key = get_role_key(config, role)
        if placement.node_range[-1] >= nodes:
            raise ConfigError(
                f"{key}.shares_nodes_with={host}: requires {placement.node_range[-1] + 1} nodes,"
                f" but {host} has {nodes}"
            )
        if not _needs_device(config, group) or not is_divided:
            continue
        if placement.devices is None:
            raise ConfigError(
                f"{key}.devices=null: must list devices, such as 0-3, because several roles share"
                f" the nodes of {host}"
            )
        # Replicas of one role may share devices, different roles may not.
        for device in placement.devices:
            if device_owners.setdefault(device, role) != role:
                configured = get_node_settings(config, role).devices
                raise ConfigError(
                    f"{key}.devices={configured}: device {device} already belongs to"
                    f" {device_owners[device]}"
                )


def _needs_device(config: Config, group: str) -> bool:
    """Return whether the ranks of a group need a GPU that the cluster assigns."""
    return requests_gpus(config) and computes_on_devices(config, group)


def _build_component(
    config: Config, host: str, placements: Mapping[str, RolePlacement]
) -> Component:
    """Return a component with the ranks and devices that its groups need in total."""
    nodes = range(1 + max(placement.node_range[-1] for placement in placements.values()))

    def count_ranks_on_busiest_node(groups: Iterable[str]) -> int:
        """Return the number of the groups' ranks on the node that has the most of them."""
        group_placements = [placements[group] for group in groups]
        return max(
            sum(
                placement.ranks_per_node
                for placement in group_placements
                if node in placement.node_range
            )
            for node in nodes
        )

    on_devices = [group for group in placements if _needs_device(config, group)]
    # Device lists refer to all devices of a node, so all of them are requested.
    has_device_lists = any(
        get_node_settings(config, group).devices is not None for group in on_devices
    )
    devices = (
        config.cluster.devices_per_node
        if has_device_lists
        else count_ranks_on_busiest_node(on_devices)
    )
    return Component(host, len(nodes), count_ranks_on_busiest_node(placements), devices)


def _merge_components(layout: JobLayout) -> JobLayout:
    """Return a layout with a single component that has the nodes of all components in order."""
    # Node indices within a component become indices within the whole job.
    offsets = [layout.get_first_node(index) for index in range(len(layout.components))]
    # Nodes of one component have the same options, so each of them gets the most that a role needs.
    merged = Component(
        layout.components[0].role,
        layout.node_count,
        max(component.ranks_per_node for component in layout.components),
        max(component.devices_per_node for component in layout.components),
    )
    placements = {
        group: replace(
            placement, component=0, first_node=placement.first_node + offsets[placement.component]
        )
        for group, placement in layout.placements.items()
    }
    return JobLayout((merged,), placements)
