"""A replica's ranks that are led: what is asked of their engine follows from what the first of them
alone knows, and when."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from torch.distributed import ProcessGroup

from aligner.data.collectives import broadcast_json, broadcast_samples
from aligner.data.types import Prompt, Sample, create_empty_samples
from aligner.engines.engine_protocol import (
    BeginsGenerations,
    BeginsTurns,
    Generation,
    GenerationEngine,
    GenerationRequest,
    SamplingOptions,
    TurnGeneration,
)
from aligner.errors import AlignerError

_OWN = {each.name for each in fields(GenerationRequest)} - {"prompt", "sample_index", "begun"}
"""What a request has beside the sample that it asks for: JSON."""


@dataclass(frozen=True)
class LedEngine:
    """What draws on every rank of a replica as its first rank does: all are asked the same, and
    give the same samples.

    Every call to the first rank's engine is told to the others before it is made, and they make it
    too.
    """

    engine: GenerationEngine
    """This rank's part of it."""
    group: ProcessGroup
    """The replica's ranks, in order."""
    leads: Callable[[BeginsTurns], BeginsGenerations] | None
    """The first rank's: what draws there, of the engine that it is to use. None on the others."""

    def start(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Generation:
        """As `GenerationEngine.start`; the first rank's requests count. Raises on every rank what
        is raised there."""
        if self.leads is None:
            return _Following(self.engine, self.group)
        return _Leading(self._drawing, self.group, requests, options)

    @cached_property
    def _drawing(self) -> BeginsGenerations:
        """What draws on the first rank."""
        assert self.leads is not None
        return self.leads(_ToldEngine(self.engine, self.group))


@dataclass(frozen=True)
class _ToldEngine:
    """The first rank's engine."""

    engine: GenerationEngine
    group: ProcessGroup

    @property
    def version(self) -> int | None:
        return self.engine.version

    def start(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> TurnGeneration:
        _tell(self.group, {"do": "start", "options": asdict(options)}, requests)
        return _Told(self.engine.start(requests, options), self.group)


@dataclass(frozen=True)
class _Told:
    """The first rank's part of a generation of the engine's."""

    generation: TurnGeneration
    group: ProcessGroup

    @property
    def done(self) -> bool:
        return self.generation.done

    def step(self) -> list[tuple[int, Sample]]:
        _tell(self.group, {"do": "step"})
        return self.generation.step()

    def go_on(self, place: int, tokens: Sequence[int]) -> None:
        _tell(self.group, {"do": "go_on", "with": [place, [*tokens]]})
        self.generation.go_on(place, tokens)

    def add(self, request: GenerationRequest) -> int:
        _tell(self.group, {"do": "add"}, [request])
        return self.generation.add(request)

    def leave(self, place: int) -> None:
        _tell(self.group, {"do": "leave", "with": [place]})
        self.generation.leave(place)

    def unfinished(self) -> list[tuple[int, Sample]]:
        return self.generation.unfinished()

    def cancel(self) -> None:
        _tell(self.group, {"do": "cancel"})
        self.generation.cancel()


class _Leading:
    """The first rank's `Generation`, whose results the others are told."""

    def __init__(
        self,
        means: BeginsGenerations,
        group: ProcessGroup,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
    ) -> None:
        self._group = group
        self._generation: Generation | None = None

        def begin() -> list[tuple[int, Sample]]:
            self._generation = means.start(requests, options)
            return []

        self._tell_outcome(begin)

    @property
    def done(self) -> bool:
        return self._generation is None or self._generation.done

    def step(self) -> list[tuple[int, Sample]]:
        return self._tell_outcome(self._begun.step)

    def unfinished(self) -> list[tuple[int, Sample]]:
        return self._tell_outcome(self._begun.unfinished)

    def cancel(self) -> None:
        def cancel() -> list[tuple[int, Sample]]:
            self._begun.cancel()
            return []

        self._tell_outcome(cancel)

    @property
    def _begun(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def _tell_outcome(
        self, act: Callable[[], list[tuple[int, Sample]]]
    ) -> list[tuple[int, Sample]]:
        try:
            samples = act()
        except AlignerError as error:
            _tell(self._group, {"do": "end", "error": str(error), "done": self.done, "places": []})
            raise
        _tell(
            self._group,
            {
                "do": "end",
                "error": None,
                "done": self.done,
                "places": [place for place, _ in samples],
            },
        )
        if samples:
            broadcast_samples([sample for _, sample in samples], self._group)
        return samples


class _Following:
    """Another rank's `Generation`: it does as it is told, and has what the first rank has."""

    def __init__(self, engine: GenerationEngine, group: ProcessGroup) -> None:
        self._engine, self._group = engine, group
        self._generation: TurnGeneration | None = None
        self._is_done = False
        self._follow()

    @property
    def done(self) -> bool:
        return self._is_done

    def step(self) -> list[tuple[int, Sample]]:
        return self._follow()

    def unfinished(self) -> list[tuple[int, Sample]]:
        return self._follow()

    def cancel(self) -> None:
        self._follow()

    def _follow(self) -> list[tuple[int, Sample]]:
        """Do what the first rank does, up to the end of its call; what that gives. Raises what it
        raises there, or here."""
        failed: AlignerError | None = None
        while (told := broadcast_json(None, group=self._group))["do"] != "end":
            try:
                self._do(told)
            # the first rank has had it too, and says what comes of it
            except AlignerError as error:
                failed = failed if told["do"] in ("go_on", "add") else error
        self._is_done = told["done"]
        if told["error"] is not None:
            raise AlignerError(told["error"])
        if failed is not None:
            raise failed
        return (
            [*zip(told["places"], broadcast_samples(None, self._group), strict=True)]
            if told["places"]
            else []
        )

    def _do(self, told: Mapping[str, Any]) -> None:
        if told["do"] == "start":
            options = {
                **told["options"],
                "stop_token_ids": tuple(told["options"]["stop_token_ids"]),
            }
            self._generation = self._engine.start(
                _told_requests(told, self._group), SamplingOptions(**options)
            )
            return
        getattr(self._generation, told["do"])(
            *_told_requests(told, self._group), *told.get("with", ())
        )


def _tell(
    group: ProcessGroup, what: Mapping[str, Any], requests: Sequence[GenerationRequest] = ()
) -> None:
    """Have the other ranks hear what the first one is about to do, with these requests."""
    own = [{name: getattr(each, name) for name in _OWN} for each in requests]
    broadcast_json({**what, "requests": own}, group=group)
    if requests:
        broadcast_samples([_as_sample(request) for request in requests], group)


def _told_requests(told: Mapping[str, Any], group: ProcessGroup) -> list[GenerationRequest]:
    """The requests that `_tell` was given."""
    samples = broadcast_samples(None, group) if told["requests"] else []
    return [
        GenerationRequest(
            Prompt(sample.prompt_id, "", sample.tokens[: sample.prompt_length]),
            sample.sample_index,
            begun=sample if len(sample.response) else None,
            **own,
        )
        for sample, own in zip(samples, told["requests"], strict=True)
    ]


def _as_sample(request: GenerationRequest) -> Sample:
    """What it goes on from, a sample without a token where that is nothing."""
    return request.begun or replace(
        create_empty_samples([request.prompt], 1)[0], sample_index=request.sample_index
    )
