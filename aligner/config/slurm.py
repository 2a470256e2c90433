"""Which nodes and devices of a Slurm job each role has, and what of cluster.slurm cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from aligner.config.paths import cache_directory, run_paths
from aligner.config.placement import role_ranks
from aligner.config.reward_sources import has_reward_model
from aligner.config.schema import Config, SlurmRole
from aligner.errors import ConfigError

_TIME = r"\d+(:\d{1,2}(:\d{1,2})?)?|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE"
_REGISTRY_IMAGE = r"[\w.-]+(:\d+)?[#/]?[\w./@:-]*"


@dataclass(frozen=True)
class Place:
    """Where the ranks of a role or server group run: so many on each of some nodes of a component."""

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


def slurm_role(config: Config, role: str) -> SlurmRole:
    """A role's own settings, those of `reward` for its replicas too."""
    settings: SlurmRole = getattr(config.cluster.slurm.roles, role.partition(".")[0])
    return settings


def slurm_layout(config: Config) -> Layout:
    """Where every role runs. Raises ConfigError with a line for each thing that cannot be so."""
    roles = dict.fromkeys(group.partition(".")[0] for group in ["trainer", *role_ranks(config)])
    if problems := [*_role_problems(config, roles)]:
        raise ConfigError("\n".join(problems))
    own = [role for role in roles if slurm_role(config, role).beside is None]
    places: dict[str, Place] = {}
    for role in [*own, *(role for role in roles if role not in own)]:
        host = slurm_role(config, role).beside or role
        places |= _role_places(config, role, own.index(host))
    _check_shared(config, own, places)
    components = tuple(_component(config, index, role, places) for index, role in enumerate(own))
    layout = Layout(components, {group: places[group] for group in role_ranks(config)})
    return layout if config.cluster.slurm.heterogeneous else _as_one(layout)


def slurm_problems(config: Config) -> Iterator[str]:
    """One line for each thing about cluster.slurm that is wrong, as far as the machine that submits can tell."""
    slurm = config.cluster.slurm
    try:
        slurm_layout(config)
    except ConfigError as error:
        yield str(error)
    if slurm.time is not None and not re.fullmatch(_TIME, slurm.time):
        yield f"cluster.slurm.time={slurm.time}: allowed are minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM and D-HH:MM:SS"
    if config.server.tls.certificate is not None:
        yield (
            "server.tls.certificate: with TLS a server's health is asked for on its own machine alone, which the job's"
            " supervisor is not on; leave it out with cluster.kind=slurm"
        )
    images = {"cluster.slurm.image": slurm.image}
    images |= {f"cluster.slurm.roles.{role}.image": slurm_role(config, role).image for role in vars(slurm.roles)}
    for key, image in images.items():
        if image is not None:
            yield from _image_problems(key, image)
    if any(images.values()):
        yield from _mount_problems(config)


def container_mounts(config: Config) -> list[str]:
    """What a container sees: the run directory and the cache, at their own places, and what is configured."""
    always = [str(path) for path in (run_paths(config).root, cache_directory())]
    return [*(f"{path}:{path}" for path in always), *config.cluster.slurm.mounts]


def _role_problems(config: Config, roles: dict[str, None]) -> Iterator[str]:
    """What is wrong with single roles' settings."""
    for role in roles:
        settings, key = slurm_role(config, role), f"cluster.slurm.roles.{role}"
        if settings.beside is not None:
            if settings.beside not in roles:
                yield f"{key}.beside={settings.beside}: the run has no such role; it has {', '.join(roles)}"
            elif settings.beside == role or slurm_role(config, settings.beside).beside is not None:
                yield f"{key}.beside={settings.beside}: name a role with nodes of its own"
            if settings.nodes is not None:
                yield f"{key}.nodes={settings.nodes}: it runs on the nodes of {settings.beside}; leave one of both out"
        if settings.devices is not None:
            try:
                devices(f"{key}.devices", settings.devices, config.cluster.devices_per_node)
            except ConfigError as error:
                yield str(error)


def devices(key: str, text: str, most: int) -> tuple[int, ...]:
    """The devices that a list such as 0-3,6 names. Raises ConfigError for what is no list, and for those a node lacks."""
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", text):
        raise ConfigError(f"{key}={text}: allowed are numbers and ranges, such as 0-3 or 6,7")
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    if not found or max(found) >= most or len(set(found)) < len(found):
        raise ConfigError(f"{key}={text}: allowed are different ones from 0 to {most - 1} (cluster.devices_per_node={most})")
    return tuple(found)


def _role_places(config: Config, role: str, component: int) -> dict[str, Place]:
    """Where the groups of a role are: one, or several replicas of the reward, each on nodes of its own or beside others."""
    settings, per_node = slurm_role(config, role), config.cluster.devices_per_node
    key = f"cluster.slurm.roles.{role}"
    chosen = None if settings.devices is None else devices(f"{key}.devices", settings.devices, per_node)
    slots = per_node if chosen is None else len(chosen)
    sizes = {group: ranks for group, ranks in role_ranks(config).items() if group.partition(".")[0] == role}
    groups, ranks = list(sizes), next(iter(sizes.values()))
    nodes_each = -(-ranks // slots) if settings.nodes is None else max(1, settings.nodes // len(groups))
    together = 1 if nodes_each > 1 else slots // ranks
    if settings.nodes is not None and nodes_each == 1:
        together = -(-len(groups) // settings.nodes)
    if ranks % nodes_each or ranks // nodes_each * together > slots or not together:
        each = f"{len(groups)} replicas of {ranks} ranks" if len(groups) > 1 else f"{ranks} ranks"
        given = "null" if settings.nodes is None else settings.nodes
        which = "cluster.devices_per_node" if chosen is None else f"{key}.devices"
        raise ConfigError(
            f"{key}.nodes={given}: {each} do not go evenly on nodes of {slots} devices ({which}); change one, or the layout"
        )
    per_group = ranks // nodes_each
    needs = chosen if chosen is not None else tuple(range(slots))
    places = {}
    for index, group in enumerate(groups):
        beside = index % together
        part = needs[beside * per_group : (beside + 1) * per_group]
        is_shared = chosen is not None or (together > 1 and len(groups) > 1)
        places[group] = Place(
            component,
            index // together * nodes_each,
            nodes_each,
            per_group,
            part if is_shared and _uses_devices(config) else None,
        )
    return places


def _uses_devices(config: Config) -> bool:
    return config.cluster.slurm.gpus != "none"


def _needs_device(config: Config, group: str) -> bool:
    return _uses_devices(config) and (group.partition(".")[0] != "reward" or has_reward_model(config.reward))


def _check_shared(config: Config, own: list[str], places: dict[str, Place]) -> None:
    """Raise ConfigError where roles on the same nodes have not said which devices are whose, or where one has no room."""
    for index, host in enumerate(own):
        guests = {role for role in vars(config.cluster.slurm.roles) if slurm_role(config, role).beside == host}
        nodes = 1 + max(place.node_range[-1] for group, place in places.items() if group.partition(".")[0] == host)
        taken: dict[int, str] = {}
        for group, place in places.items():
            role = group.partition(".")[0]
            if place.component != index or (role != host and role not in guests):
                continue
            key = f"cluster.slurm.roles.{role}"
            if place.node_range[-1] >= nodes:
                raise ConfigError(f"{key}.beside={host}: it needs {place.node_range[-1] + 1} nodes, {host} has {nodes}")
            if not guests or not _needs_device(config, group):
                continue
            if place.devices is None:
                raise ConfigError(f"{key}.devices=null: {host} shares its nodes; say which devices are whose, such as 0-3")
            for device in place.devices:
                if taken.setdefault(device, role) != role:
                    raise ConfigError(
                        f"{key}.devices={slurm_role(config, role).devices}: device {device} is {taken[device]}'s"
                    )


def _component(config: Config, index: int, role: str, places: dict[str, Place]) -> Component:
    here = {group: place for group, place in places.items() if place.component == index}
    nodes = 1 + max(place.node_range[-1] for place in here.values())
    loads = [[group for group, place in here.items() if node in place.node_range] for node in range(nodes)]
    ranks = max(sum(here[group].ranks_per_node for group in load) for load in loads)
    wanted = [here[group] for group in here if _needs_device(config, group)]
    chosen = any(slurm_role(config, group).devices is not None for group in here)
    most = max(
        (sum(here[group].ranks_per_node for group in load if _needs_device(config, group)) for load in loads), default=0
    )
    asked = config.cluster.devices_per_node if chosen and wanted else most
    return Component(role, nodes, ranks, asked)


def _as_one(layout: Layout) -> Layout:
    """The components' nodes one after another in a single one."""
    offsets = [sum(part.nodes for part in layout.components[:index]) for index in range(len(layout.components))]
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


def _image_problems(key: str, image: str) -> Iterator[str]:
    is_file = image.startswith(("/", ".")) or image.endswith((".sqsh", ".squashfs"))
    if is_file and not Path(image).is_file():
        yield f"{key}={image}: no such file; make it with `enroot import`, or name an image of a registry"
    elif not is_file and not re.fullmatch(_REGISTRY_IMAGE, image.removeprefix("docker://")):
        yield f"{key}={image}: neither a file nor an image's name, such as REGISTRY#NAME:TAG"


def _mount_problems(config: Config) -> Iterator[str]:
    """Mounts that cannot be, and files that the configuration names but the container would not see."""
    seen = []
    for mount in container_mounts(config):
        source, _, target = mount.partition(":")
        target = target.partition(":")[0]
        if not target or not target.startswith("/"):
            yield f"cluster.slurm.mounts: {mount} is not SOURCE:TARGET[:FLAGS] with an absolute target"
        elif mount in config.cluster.slurm.mounts and not Path(source).exists():
            yield f"cluster.slurm.mounts: {mount}: {source} does not exist"
        seen.append(target)
    if config.cluster.slurm.mount_home:
        seen.append(str(Path.home()))
    named = {"model.path": config.model.path, "reward.path": config.reward.path, "data.path": config.data.path}
    for key, path in named.items():
        if path and Path(path).exists() and not any(Path(path).is_relative_to(target) for target in seen if target):
            yield f"{key}={path}: the container does not see it; give an absolute path that cluster.slurm.mounts has"
