"""`aligner plan`: its options, and what they ask for."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from aligner.errors import ConfigError
from aligner.planner.phases import CRITIC, KINDS, Lengths, Phase, PipelineModel
from aligner.planner.plan import PlanRequest, make_plan, proportional_split

if TYPE_CHECKING:
    from aligner.planner.measured import Measured
    from aligner.planner.publish_cost import PublishCost

_STEPS = 100
# seconds, devices, tokens or steps beyond which nothing is meant; numbers overflow somewhere beyond
_MOST = 10**9
_MOST_STALENESS, _MOST_PARTS, _MOST_SAMPLES = 100, 1000, 100_000
"""What the prediction takes time and memory for, so that much more of it would go on for ever."""
_MOST_SEED = 10**18


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    add = command.add_argument
    add(
        "--measured",
        type=Path,
        metavar="RUN",
        help="directory of a run of an online algorithm: its phases",
    )
    add(
        "--phases",
        metavar="NAME[@ROLE]=SECONDS,…",
        help=(
            "seconds of each phase of a step, and who runs it where that is not its usual role;"
            " they replace measured ones: "
        )
        + "; ".join(
            f"{name} ({', '.join(kind.runs)}): {kind.meaning}" for name, kind in KINDS.items()
        ),
    )
    add(
        "--placement",
        metavar="ROLE=DEVICES,…",
        help="devices on which --phases take so long; a unit each if not given",
    )
    add(
        "--devices",
        metavar="N|ROLE=DEVICES,…",
        help=(
            "predict for N devices, split as they are now or, with --sweep, as is best; or for this"
            " split"
        ),
    )
    add("--sweep", action="store_true", help="find the split of --devices N with the fastest step")
    add(
        "--unit",
        metavar="ROLE=DEVICES,…",
        help="devices that come together only, such as TP x PP (1; the run's layouts)",
    )
    add(
        "--max-staleness",
        metavar="K",
        help="a batch trained at version v has no sample admitted below v-K; 0: synchronous (1)",
    )
    add(
        "--transfer",
        choices=("finish", "interrupt"),
        default="finish",
        help="new weights wait for what is under way (finish)",
    )
    add(
        "--micro-batches",
        metavar="N",
        help="parts of a batch, each scored and read as soon as it is there (1; the run's)",
    )
    add(
        "--lengths",
        metavar="mean=,…",
        help="response lengths: mean, deviation, longest (tokens), samples (a step), slots",
    )
    add(
        "--serial",
        metavar="NAME=SHARE,…",
        help="share of a phase's seconds that more devices do not shorten (0)",
    )
    add("--steps", metavar="N", help=f"steps of the whole run ({_STEPS}; the run's)")
    add("--seed", metavar="N", help="of the lengths that are drawn (1; the run's)")
    add(
        "--link",
        metavar="GB_PER_S",
        help="what a rank sends, and receives, a second while weights are published (the run's)",
    )
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=(
            "whose publish is told: experiment=NAME and further keys, as of launch; other values of"
            " the measured run's"
        ),
    )


def print_prediction(parsed: argparse.Namespace) -> None:
    """Predict what is asked for, and print it."""
    from aligner.planner.plan_view import as_json, print_plan

    plan = make_plan(_request(parsed))
    if parsed.json:
        print(json.dumps(as_json(plan)))
    else:
        print_plan(plan)


def _request(parsed: argparse.Namespace) -> PlanRequest:
    """Check the options. Raises ConfigError that names the option, its value and what is
    allowed."""
    measured = _measured(parsed)
    given = _phases(parsed.phases) if parsed.phases is not None else {}
    pipeline = _pipeline(parsed, given, measured)
    usual = dict.fromkeys(pipeline.roles, 1) | ({} if measured is None else measured.units)
    units = {role: usual[role] for role in pipeline.roles} | _by_role(
        "--unit", parsed.unit, pipeline
    )
    if measured is None:
        placement = _placement("--placement", parsed.placement, pipeline, units)
    else:
        known = units | {"generator": pipeline.generate.devices} | measured.placement
        placement = {role: known[role] for role in pipeline.roles}
    # The given phases take so long at this placement.
    placed = [
        replace(each, devices=placement.get(each.role, 1)) if each.name in given else each
        for each in pipeline.phases
    ]
    pipeline = replace(pipeline, phases=tuple(placed))
    devices = None
    if parsed.devices is not None and "=" in parsed.devices:
        placement = _placement("--devices", parsed.devices, pipeline, units)
    elif parsed.devices is not None:
        devices = _whole("--devices", parsed.devices, 1)
        placement = proportional_split(placement, units, devices)
    if parsed.sweep and devices is None:
        raise ConfigError(
            f"--sweep: it needs --devices N, the number to split; got {parsed.devices or 'none'}"
        )
    steps = _whole("--steps", parsed.steps, 1, usual=_STEPS if measured is None else measured.steps)
    return PlanRequest(
        pipeline,
        placement,
        units,
        steps,
        devices if parsed.sweep else None,
        measured,
        _publish(parsed, measured),
    )


def _measured(parsed: argparse.Namespace) -> Measured | None:
    if parsed.measured is None:
        if parsed.phases is None:
            raise ConfigError("give --measured RUN, or --phases generate=SECONDS,train=SECONDS,…")
        return None
    if parsed.placement is not None:
        raise ConfigError(
            f"--placement {parsed.placement}: it is the run's own with --measured; predict others"
            " with --devices"
        )
    from aligner.planner.measured import read_run

    return read_run(parsed.measured)


def _publish(parsed: argparse.Namespace, measured: Measured | None) -> PublishCost | None:
    """What a publish of the measured run, or of a configuration that is given, costs; None where
    there is neither."""
    rate = None if parsed.link is None else _number("--link", parsed.link) * 1e9
    if rate == 0:
        raise ConfigError(f"--link={parsed.link}: must be above 0")
    if measured is None and not parsed.overrides:
        if rate is not None:
            raise ConfigError(
                f"--link {parsed.link}: needs --measured RUN, or experiment=NAME: whose weights are"
                " published"
            )
        return None
    from aligner.config.compose import compose_config, load_config
    from aligner.paths import RunPaths
    from aligner.planner.publish_cost import cost_of  # imports torch

    if measured is None:
        cost = cost_of(compose_config(parsed.overrides))
    else:
        file = RunPaths(parsed.measured).config
        own, cost = cost_of(load_config(file)), cost_of(load_config(file, parsed.overrides))
        if rate is None and own.most and measured.publish_s:
            rate = own.most / measured.publish_s
    return cost if rate is None else cost.at(rate)


def _pipeline(
    parsed: argparse.Namespace, given: Mapping[str, Phase], measured: Measured | None
) -> PipelineModel:
    """The pipeline, its given phases not yet told on how many devices they were measured."""
    run = None if measured is None else measured.pipeline
    phases = {phase.name: phase for phase in run.phases} if run is not None else {}
    phases |= given
    for name in ("generate", "train"):
        if name not in phases or phases[name].seconds <= 0:
            raise ConfigError(
                f"--phases {parsed.phases}: {name} is missing, or takes no time; both generate and"
                " train are needed"
            )
    colocated = phases["generate"].role == "trainer"
    usual = int(not colocated) if run is None else max(1, run.max_staleness)
    bound = _whole("--max-staleness", parsed.max_staleness, 0, _MOST_STALENESS, usual=usual)
    if bound and run is not None and "generate" not in given:
        phases["generate"] = replace(phases["generate"], role="generator")
    elif bound and colocated:
        raise ConfigError(
            f"--max-staleness {bound}: with generate@trainer the engine cannot run ahead of"
            " training; allowed: 0, or generate@generator"
        )
    if "load" in phases:
        phases["load"] = replace(phases["load"], role=phases["generate"].role)
    for name, value in _pairs("--serial", parsed.serial).items():
        if name not in phases:
            raise ConfigError(
                f"--serial {name}={value}: no such phase here; allowed: {', '.join(phases)}"
            )
        if name == "generate" and parsed.lengths is not None:
            raise ConfigError(
                f"--serial {name}={value}: with --lengths the longest response bounds generation;"
                " leave it out"
            )
        phases[name] = replace(phases[name], serial=_number(f"--serial {name}", value, largest=1.0))
    seed = _whole(
        "--seed", parsed.seed, 0, _MOST_SEED, usual=1 if measured is None else measured.seed
    )
    parts = 1 if run is None else run.micro_batches
    return PipelineModel(
        phases=tuple(phases[name] for name in KINDS if name in phases),
        micro_batches=_whole("--micro-batches", parsed.micro_batches, 1, _MOST_PARTS, usual=parts),
        max_staleness=bound,
        interrupt=parsed.transfer == "interrupt",
        lengths=_lengths(parsed.lengths, seed) if parsed.lengths is not None else None,
        stepwise=run is not None,
    )


def _phases(text: str) -> dict[str, Phase]:
    phases = {}
    for key, value in _pairs("--phases", text).items():
        name, _, role = key.partition("@")
        if name not in KINDS:
            raise ConfigError(f"--phases {key}={value}: unknown phase; allowed: {', '.join(KINDS)}")
        allowed = KINDS[name].runs
        if role and role not in allowed:
            raise ConfigError(
                f"--phases {key}={value}: {role} does not run {name}; allowed: {', '.join(allowed)}"
            )
        if name in phases:
            raise ConfigError(f"--phases {text}: {name} is given twice")
        phases[name] = Phase(name, role or allowed[0], _number(f"--phases {key}", value))
    critics = sorted({phases[name].role for name in CRITIC if name in phases})
    if len(critics) > 1:
        raise ConfigError(
            f"--phases {text}: {' and '.join(CRITIC)} are of one critic, on one role; got"
            f" {' and '.join(critics)}"
        )
    return phases


def _lengths(text: str, seed: int) -> Lengths:
    values, names = _pairs("--lengths", text), ("mean", "deviation", "longest", "samples", "slots")
    if set(values) != set(names):
        raise ConfigError(f"--lengths {text}: needed are {', '.join(f'{name}=' for name in names)}")
    mean, deviation = (_number(f"--lengths {name}", values[name]) for name in ("mean", "deviation"))
    longest, slots = (_whole(f"--lengths {name}", values[name], 1) for name in ("longest", "slots"))
    samples = _whole("--lengths samples", values["samples"], 1, _MOST_SAMPLES)
    if not 1 <= mean <= longest:
        raise ConfigError(
            f"--lengths mean={values['mean']}: must be between 1 and longest={longest}"
        )
    return Lengths(mean, deviation, longest, samples, slots, seed)


def _placement(
    option: str, text: str | None, pipeline: PipelineModel, units: Mapping[str, int]
) -> dict[str, int]:
    """Devices by role, a unit where nothing is said."""
    placement = {**units, **_by_role(option, text, pipeline)}
    for role, devices in placement.items():
        if devices % units[role]:
            raise ConfigError(
                f"{option} {role}={devices}: its devices come in units of {units[role]}"
            )
    return placement


def _by_role(option: str, text: str | None, pipeline: PipelineModel) -> dict[str, int]:
    given = _pairs(option, text)
    for role, value in given.items():
        if role not in pipeline.roles:
            raise ConfigError(
                f"{option} {role}={value}: no role that runs a phase; allowed:"
                f" {', '.join(pipeline.roles)}"
            )
    return {role: _whole(f"{option} {role}", value, 1) for role, value in given.items()}


def _pairs(option: str, text: str | None) -> dict[str, str]:
    """The values by name; none where the option was not given."""
    pairs: dict[str, str] = {}
    for entry in text.split(",") if text is not None else ():
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key and equals and value):
            raise ConfigError(
                f"{option} {text}: {entry or 'nothing'} is not NAME=VALUE; separate several with"
                " commas"
            )
        if key in pairs:
            raise ConfigError(f"{option} {text}: {key} is given twice")
        pairs[key] = value
    return pairs


def _number(option: str, text: str, largest: float = _MOST) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= largest:
        raise ConfigError(f"{option}={text}: must be a number from 0 to {largest:.10g}")
    return number


def _whole(
    option: str, text: str | None, smallest: int, largest: int = _MOST, *, usual: int = 1
) -> int:
    """`usual` where the option was not given."""
    if text is None:
        return usual
    # Python reads no number of thousands of digits.
    if (
        not text.isdecimal()
        or len(text) > len(str(largest))
        or not smallest <= int(text) <= largest
    ):
        raise ConfigError(f"{option}={text}: must be a whole number from {smallest} to {largest}")
    return int(text)
