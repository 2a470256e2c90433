"""Pipelines to try the planner on."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from aligner.planner.phases import CRITIC, HOST, KINDS, Lengths, Phase, PipelineModel


def pipeline(
    max_staleness: int = 1, micro_batches: int = 1, lengths: Lengths | None = None, **phases: float
) -> PipelineModel:
    """Phases by name, `score_at_trainer=…` for one that a role runs which does not usually."""
    made = []
    for key, seconds in phases.items():
        name, _, role = key.partition("_at_")
        made.append(Phase(name, role or KINDS[name].runs[0], seconds))
    return PipelineModel(
        tuple(made), micro_batches=micro_batches, max_staleness=max_staleness, lengths=lengths
    )


def each_one(pipeline: PipelineModel) -> dict[str, int]:
    """One device a role."""
    return dict.fromkeys(pipeline.roles, 1)


@st.composite
def pipelines(
    draw: st.DrawFn, even: bool | None = None, lengths: bool | None = None
) -> tuple[PipelineModel, dict[str, int]]:
    """Any pipeline and a placement of it; `even`: all batches take equally long."""
    even = draw(st.booleans()) if even is None else even
    seconds = st.floats(0.01, 50)
    phases = []
    for name, kind in KINDS.items():
        given = seconds if name in ("generate", "train") else st.one_of(st.just(0.0), seconds)
        runs = (
            ("generator",)
            if name in ("load", "generate")
            else tuple(role for role in kind.runs if role != HOST)
        )
        phases.append(
            Phase(
                name,
                draw(st.sampled_from(runs)),
                draw(given),
                draw(st.integers(1, 3)),
                draw(st.sampled_from((0, 0.3))),
            )
        )
    critic = next(phase.role for phase in phases if phase.name == CRITIC[0])
    phases = [replace(phase, role=critic) if phase.name in CRITIC else phase for phase in phases]
    drawn = None
    if lengths or (not even and draw(st.booleans())):
        mean, longest = draw(st.integers(4, 30)), draw(st.integers(30, 60))
        drawn = Lengths(
            mean,
            draw(st.sampled_from((0.0, 10.0, 40.0))),
            longest,
            draw(st.integers(4, 12)),
            draw(st.integers(1, 8)),
            draw(st.integers(0, 9)),
        )
    made = PipelineModel(
        tuple(phases),
        micro_batches=draw(st.integers(1, 3)),
        max_staleness=draw(st.integers(0, 4)),
        interrupt=draw(st.booleans()),
        lengths=drawn,
    )
    return made, {role: draw(st.integers(1, 6)) for role in made.roles}
