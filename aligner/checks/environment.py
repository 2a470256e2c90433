"""Episodes against the engine, and against what draws them."""

from collections.abc import Iterator

from aligner.models.model_source import ExpectedInputs
from aligner.models.shape import ModelShape
from aligner.schema import Config
from aligner.schema.options import callable_place


def problems(config: Config, model: ModelShape | None, expected: ExpectedInputs) -> Iterator[str]:
    """What no episodes can be drawn with."""
    settings, engine = config.environment, config.engine
    if settings.target is None:
        return
    key = f"environment.target={settings.target}"
    if callable_place(settings.target) is None:
        yield f"{key}: must be module:Class, or null"
    longest, patience = settings.deadline_s * settings.max_turns, config.cluster.collective_timeout_s
    if engine.parallel.ranks > 1 and longest > patience:
        yield (
            f"{key}: environment.deadline_s={settings.deadline_s:g} x environment.max_turns={settings.max_turns}: an episode"
            f" may wait {longest:g} s for its environment, and other ranks wait cluster.collective_timeout_s={patience:g} for"
            " it"
        )
    if engine.placement == "server" and longest >= config.server.request_timeout_s:
        yield (
            f"server.request_timeout_s={config.server.request_timeout_s:g}: the trainer waits so long for its samples, and an"
            f" episode may wait {longest:g} s for its environment (environment.deadline_s={settings.deadline_s:g} x"
            f" environment.max_turns={settings.max_turns}); give more"
        )
    if not config.rollout.stop_at_eos and settings.turn_end is None:
        yield f"{key}: a turn would have no end; give rollout.stop_at_eos=true or environment.turn_end"
    if config.rollout.truncate_token is not None:
        yield f"{key}: rollout.truncate_token={config.rollout.truncate_token!r} would cut episodes; give null"
