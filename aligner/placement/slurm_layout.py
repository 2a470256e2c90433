"""Which nodes and devices of a Slurm job each role has: arithmetic on the configuration alone."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from aligner.errors import ConfigError
from aligner.paths import cache_directory, run_paths
from aligner.placement.device_lists import device_list
from aligner.placement.roles import computes_on_devices, role_of, role_ranks
from aligner.schema import Config, SlurmRoleConfig


def container_mounts(config: Config) -> list[str]:
    """What a container sees: the run directory and the cache, at their own places, and what is
    configured."""
    always = [str(path) for path in (run_paths(config).root, cache_directory())]
    return [*(f"{path}:{path}" for path in always), *config.cluster.slurm.mounts]


@dataclass(frozen=True)
class Place:
    """Where the ranks of a role or server group run: so many on each of some nodes of a
    component."""

    component: int
    first_node: int
    nodes: int
    ranks_per_node: int
    devices: tuple[int, ...] | None
    """Which of a node's devices they see; None: all that the job has there."""

    @property
    def node_range(self) -> range:
        """Its nodes' places in the component."""
        return range(self.first_node, self.first_node + self.nodes)

    def meets(self, other: "Place") -> bool:
        """Whether both are on some node."""
        return self.component == other.component and not {*self.node_range}.isdisjoint(
            other.node_range
        )


@dataclass(frozen=True)
class Component:
    """Nodes that are asked for together, with the same flags."""

    role: str
    """Whose flags they are; the trainer's where all roles are one component."""
    nodes: int
    ranks_per_node: int
    """Of all roles there, on the node that has most."""
    devices_per_node: int
    """As many as are asked for: 0 where no role needs one."""


@dataclass(frozen=True)
class Layout:
    """A job's components, the trainer's first, and where in them each role or server group is."""

    components: tuple[Component, ...]
    places: dict[str, Place]

    def is_shared(self, place: Place) -> bool:
        """Whether more than one role or server group has ranks on the nodes of a place."""
        return sum(place.meets(other) for other in self.places.values()) > 1


def slurm_role(config: Config, group: str) -> SlurmRoleConfig:
    """The settings of a group's role."""
    settings: SlurmRoleConfig = getattr(config.cluster.slurm.roles, role_of(group))
    return settings


def container_image(config: Config, group: str) -> str | None:
    """What a group's ranks run in; None: nothing but their node."""
    return slurm_role(config, group).image or config.cluster.slurm.image


def slurm_layout(config: Config) -> Layout:
    """Where every role runs. Raises ConfigError for what does not go on nodes so, naming its
    key."""
    groups = role_ranks(config)
    roles = list(dict.fromkeys(role_of(group) for group in ("trainer", *groups)))
    if problems := [*_role_problems(config, roles)]:
        raise ConfigError("\n".join(problems))
    hosts = [role for role in roles if slurm_role(config, role).shares_nodes_with is None]
    places: dict[str, Place] = {}
    for role in roles:
        host = slurm_role(config, role).shares_nodes_with or role
        places |= _role_places(config, role, hosts.index(host))
    components = []
    for index, host in enumerate(hosts):
        here = {group: place for group, place in places.items() if place.component == index}
        _check_shared(config, host, here)
        components.append(_component(config, host, here))
    layout = Layout(tuple(components), {group: places[group] for group in groups})
    return layout if config.cluster.slurm.heterogeneous else _as_one(layout)


def _role_problems(config: Config, roles: list[str]) -> Iterator[str]:
    """What is wrong with single roles' settings."""
    for role in roles:
        settings, key = slurm_role(config, role), f"cluster.slurm.roles.{role}"
        host = settings.shares_nodes_with
        if host is not None:
            given = f"{key}.shares_nodes_with={host}"
            if host not in roles:
                yield f"{given}: the run has no such role; must be one of {', '.join(roles)}"
            elif host == role or slurm_role(config, host).shares_nodes_with is not None:
                yield f"{given}: must be another role whose own `shares_nodes_with` is null"
            if settings.nodes is not None:
                yield (
                    f"{key}.nodes={settings.nodes}: is not supported with {given}, which places"
                    f" the role on the nodes of {host}; remove one of the two settings"
                )
        try:
            _chosen_devices(config, role)
        except ConfigError as error:
            yield str(error)


def _chosen_devices(config: Config, role: str) -> tuple[int, ...] | None:
    """The devices that a role names. Raises ConfigError for what is no list, and for those a node
    lacks."""
    text, most = slurm_role(config, role).devices, config.cluster.devices_per_node
    if text is None:
        return None
    return device_list(
        f"cluster.slurm.roles.{role}.devices", text, most, f"cluster.devices_per_node={most}"
    )


def _role_places(config: Config, role: str, component: int) -> dict[str, Place]:
    """Where the groups of a role are: one, or the replicas of the reward."""
    replicas = {
        group: ranks for group, ranks in role_ranks(config).items() if role_of(group) == role
    }
    ranks, nodes = next(iter(replicas.values())), slurm_role(config, role).nodes
    chosen = _chosen_devices(config, role)
    slots = tuple(range(config.cluster.devices_per_node)) if chosen is None else chosen
    packing = _packing(ranks, len(replicas), len(slots), nodes)
    if packing is None:
        what = (
            f"{len(replicas)} replicas of {ranks} ranks" if len(replicas) > 1 else f"{ranks} ranks"
        )
        limit = (
            "cluster.devices_per_node" if chosen is None else f"cluster.slurm.roles.{role}.devices"
        )
        raise ConfigError(
            f"cluster.slurm.roles.{role}.nodes={'null' if nodes is None else nodes}: {what}"
            f" cannot be distributed evenly over nodes with {len(slots)} devices ({limit}); change"
            " one of the two keys, or the layout"
        )
    nodes_each, together = packing
    per_node = ranks // nodes_each
    is_part = chosen is not None or together > 1
    places = {}
    for index, group in enumerate(replicas):
        first = index % together * per_node
        devices = slots[first : first + per_node] if is_part else None
        places[group] = Place(
            component, index // together * nodes_each, nodes_each, per_node, devices
        )
    return places


def _packing(ranks: int, replicas: int, slots: int, nodes: int | None) -> tuple[int, int] | None:
    """Nodes of each replica, and replicas that share a node; None where they do not go evenly on
    nodes with so many slots."""
    if nodes is None:
        each = -(-ranks // slots)
        together = 1 if each > 1 else min(replicas, slots // ranks)
    else:
        each = max(1, nodes // replicas)
        together = 1 if nodes >= replicas else -(-replicas // nodes)
    fits = (
        ranks % each == 0
        and ranks // each * together <= slots
        and (nodes is None or nodes < replicas or nodes % replicas == 0)
    )
    return (each, together) if fits else None


def _check_shared(config: Config, host: str, places: Mapping[str, Place]) -> None:
    """Raise ConfigError where roles on the same nodes have not said which devices are whose, or
    where one has no room."""
    if all(role_of(group) == host for group in places):
        return
    nodes = 1 + max(
        place.node_range[-1] for group, place in places.items() if role_of(group) == host
    )
    is_divided = len({role_of(group) for group in places if _needs_device(config, group)}) > 1
    owners: dict[int, str] = {}
    for group, place in places.items():
        role, key = role_of(group), f"cluster.slurm.roles.{role_of(group)}"
        if place.node_range[-1] >= nodes:
            raise ConfigError(
                f"{key}.shares_nodes_with={host}: requires {place.node_range[-1] + 1} nodes, but"
                f" {host} has {nodes}"
            )
        if not _needs_device(config, group) or not is_divided:
            continue
        if place.devices is None:
            raise ConfigError(
                f"{key}.devices=null: must list devices, such as 0-3, because several roles share"
                f" the nodes of {host}"
            )
        for device in place.devices:
            if owners.setdefault(device, role) != role:
                given = slurm_role(config, role).devices
                raise ConfigError(
                    f"{key}.devices={given}: device {device} already belongs to {owners[device]}"
                )


def _needs_device(config: Config, group: str) -> bool:
    return config.cluster.slurm.gpus != "none" and computes_on_devices(config, group)


def _component(config: Config, host: str, places: Mapping[str, Place]) -> Component:
    """What the places of a component's groups need together."""
    nodes = range(1 + max(place.node_range[-1] for place in places.values()))

    def busiest(groups: Iterable[str]) -> int:
        here = [places[group] for group in groups]
        return max(
            sum(place.ranks_per_node for place in here if node in place.node_range)
            for node in nodes
        )

    on_devices = [group for group in places if _needs_device(config, group)]
    # Devices are numbered over the whole node.
    is_numbered = any(slurm_role(config, group).devices is not None for group in on_devices)
    devices = config.cluster.devices_per_node if is_numbered else busiest(on_devices)
    return Component(host, len(nodes), busiest(places), devices)


def _as_one(layout: Layout) -> Layout:
    """The components' nodes one after another in a single one."""
    offsets = [
        sum(part.nodes for part in layout.components[:index])
        for index in range(len(layout.components))
    ]
    whole = Component(
        layout.components[0].role,
        sum(part.nodes for part in layout.components),
        max(part.ranks_per_node for part in layout.components),
        max(part.devices_per_node for part in layout.components),
    )
    places = {
        group: replace(place, component=0, first_node=place.first_node + offsets[place.component])
        for group, place in layout.places.items()
    }
    return Layout((whole,), places)
