"""The endpoint of agents: OpenAI's API over HTTP, an address and a key for each episode, in a
thread of a rank's."""

import hmac
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from aligner.environments.agent_session import AgentSession
from aligner.environments.openai_protocol import (
    MODEL,
    ChatBody,
    CompletionBody,
    Refused,
    RewardBody,
    TextBody,
    parsed,
)
from aligner.environments.openai_server import OpenAIServer, models_response
from aligner.values import is_finite_number

_Handler = Callable[[AgentSession, Request], Awaitable[Response]]


class AgentServer(OpenAIServer):
    """Serves sessions that are open, under `/episodes/NAME/v1`; what has no key of its own gets
    401."""

    def __init__(self, host: str, most_characters: int) -> None:
        """`host` is this machine's name or address, as agents reach it; bodies of more than
        `most_characters` are refused."""
        self._sessions: dict[str, AgentSession] = {}
        super().__init__(host, 0, most_characters, "environment.endpoint_host")

    def url(self, session: AgentSession) -> str:
        """Where a session is served; its agent's `base_url` is this and `/v1`."""
        return f"{self.address}/episodes/{session.name}"

    def open(self, session: AgentSession) -> None:
        """Serve a session."""
        self.on_loop(self._opened(session))

    def close_session(self, session: AgentSession) -> None:
        """Serve it no more; when this returns it has all the turns that it will have. May be
        repeated."""
        self.on_loop(self._closed(session))

    async def _opened(self, session: AgentSession) -> None:
        self._sessions[session.name] = session

    async def _closed(self, session: AgentSession) -> None:
        self._sessions.pop(session.name, None)
        session.close()

    def routes(self) -> list[Route]:
        """As `OpenAIServer`."""
        root = "/episodes/{episode}"
        routes = {
            "attempts": ("POST", self._begun),
            "v1/reward": ("POST", self._rewarded),
            "v1/models": ("GET", self._models),
            "v1/chat/completions": ("POST", self._completed),
            "v1/completions": ("POST", self._completed),
        }
        return [
            Route(f"{root}/{path}", self._served(each), methods=[method])
            for path, (method, each) in routes.items()
        ]

    def _served(self, handler: _Handler) -> Callable[[Request], Awaitable[Response]]:
        """A handler for requests with the session's key."""

        async def serve(request: Request) -> Response:
            session = self._sessions.get(request.path_params["episode"])
            key = request.headers.get("authorization", "").removeprefix("Bearer ")
            expected = None
            if session is not None:
                expected = session.key if handler == self._begun else session.agent_key
            if (
                session is None
                or expected is None
                or not hmac.compare_digest(key.encode(), expected.encode())
            ):
                raise Refused(
                    401, "no episode in flight has this URL and API key", "invalid_api_key"
                )
            return await handler(session, request)

        return serve

    async def _begun(self, session: AgentSession, request: Request) -> Response:
        return JSONResponse({"api_key": session.begin()})

    async def _models(self, session: AgentSession, request: Request) -> Response:
        return models_response(MODEL)

    async def _rewarded(self, session: AgentSession, request: Request) -> Response:
        body = parsed(RewardBody, await self.read(request))
        if not is_finite_number(body.reward):
            raise Refused(400, f"reward: must be a finite number, got {body.reward}")
        session.reward += body.reward
        return JSONResponse({"reward": session.reward})

    async def _completed(self, session: AgentSession, request: Request) -> Response:
        kind: type[CompletionBody] = (
            ChatBody if request.url.path.endswith("/chat/completions") else TextBody
        )
        body = parsed(kind, await self.read(request))
        return await self.answer(request, body, session.answer(body), session.name)
