"""The application: routes, who may ask, what goes wrong.

A page of a stranger in a browser on this machine must not be able to ask: without keys the Host must be this machine
(no other name can be made to point here), bodies must be declared as JSON (which a browser sends to other origins only
after asking), and no origin is allowed unless one is named.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from spark_client import RequestFailed, SparkClientError
from spark_gateway import chat, completions, messages, responses
from spark_gateway.answer import new_id
from spark_gateway.body import Body, read
from spark_gateway.daemon import Daemon
from spark_gateway.errors import ApiError, of_client, refused
from spark_gateway.keys import Holder, Keys
from spark_gateway.log import details
from spark_gateway.metrics import CONTENT_TYPE, Metrics
from spark_gateway.openapi import document
from spark_gateway.overview import health_of, model_of, props_of
from spark_gateway.requests import Call, check_model
from spark_gateway.sse import data

PAGE = Path(__file__).parent / "page"
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """How the gateway serves. `local`: only this machine reaches it, and no key is asked for."""

    socket: Path
    keys: Keys = field(default_factory=Keys)
    aliases: frozenset[str] = frozenset()
    defaults: dict[str, float | int] = field(default_factory=dict)
    cors: tuple[str, ...] = ()
    local: bool = True


class TokenizeBody(Body):
    """A text, or a conversation, whose tokens are wanted."""

    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    special: bool = False


class DetokenizeBody(Body):
    """Token ids whose text is wanted."""

    tokens: list[int]


class Gateway:
    """Answers requests; everything it knows of a model it asks the daemon for."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._daemon = Daemon(config.socket)
        self._metrics = Metrics()

    def app(self) -> Starlette:
        """The ASGI application."""

        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            greeting = asyncio.ensure_future(self._daemon.greet())
            yield
            greeting.cancel()
            await self._daemon.close()

        middleware = []
        if self._config.cors:
            origins = list(self._config.cors)
            cors = Middleware(CORSMiddleware, origins, allow_methods=["GET", "POST"], allow_headers=["*"])
            middleware.append(cors)
        routes = [
            self._post("/v1/chat/completions", self._generation(chat, chat.ChatBody)),
            self._post("/v1/completions", self._generation(completions, completions.CompletionBody)),
            self._post("/v1/responses", self._generation(responses, responses.ResponsesBody)),
            self._post("/v1/messages", self._generation(messages, messages.MessagesBody), anthropic=True),
            self._post("/v1/messages/count_tokens", self._count_tokens, anthropic=True),
            self._post("/tokenize", self._tokenize),
            self._post("/detokenize", self._detokenize),
            self._get("/v1/models", self._models),
            self._get("/v1/models/{model:path}", self._model),
            self._get("/props", self._props),
            self._get("/status", self._status),
            self._get("/metrics", self._metrics_page),
            self._get("/openapi.json", self._openapi),
            self._get("/health", self._health, everybody=True),
            self._get("/", self._page, everybody=True),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error}
        return Starlette(routes=routes, middleware=middleware, lifespan=lifespan, exception_handlers=handlers)

    # ---- around every request ----

    def _post(self, path: str, handler: _Handler, *, anthropic: bool = False) -> Route:
        return Route(path, self._guarded(path, handler, anthropic, everybody=False), methods=["POST"])

    def _get(self, path: str, handler: _Handler, *, everybody: bool = False) -> Route:
        return Route(path, self._guarded(path, handler, False, everybody), methods=["GET"])

    def _guarded(
        self, path: str, handler: _Handler, anthropic: bool, everybody: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        """`handler` for those who may ask, with its failures as answers and lines of the log."""
        route = path.replace(":path}", "}")

        async def guarded(request: Request) -> Response:
            began, number, holder, failed = time.monotonic(), new_id("req_"), Holder(), None
            try:
                self._check_host(request)
                if not everybody:
                    holder = self._config.keys.holder(request.headers)
                response = await handler(request, holder)
            except ApiError as error:
                failed = error
            except (SparkClientError, TimeoutError) as error:
                failed = of_client(error)
            except Exception:
                _log.exception("%s %s failed by a fault of the gateway", request.method, path)
                failed = ApiError(500, "a fault of the gateway; its log says more")
            if failed is not None:
                response = _error(failed, anthropic, number)
                said = details(id=number, route=route, key=holder.name or None, status=failed.status, code=failed.code)
                _log.info("request refused: %s", said)
            response.headers["request-id" if anthropic else "x-request-id"] = number
            self._metrics.requests.labels(route, response.status_code).inc()
            self._metrics.first_byte.observe(time.monotonic() - began)
            return response

        return guarded

    def _check_host(self, request: Request) -> None:
        if not self._config.local or self._config.keys.needed:
            return
        host = request.headers.get("host", "localhost").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if request.scope.get("server", ("", 0))[1] is not None and name not in _LOCAL_HOSTS:
            raise ApiError(403, f"host {host[:100]!r} is not this machine; ask localhost, or give the gateway API keys")

    # ---- answers ----

    def _generation(self, dialect: ModuleType, model: type[Body]) -> _Handler:
        """The endpoint of a dialect: a module with `call_of`, `whole` and `stream`."""

        async def handler(request: Request, holder: Holder) -> Response:
            holder.check()
            self._daemon.check_queue(holder.name)
            body: Any = await read(request, model)
            call: Call = dialect.call_of(body, self._config.defaults)
            client = await self._daemon.client(holder.name)
            check_model(call.model, client.server.model, self._config.aliases)
            with ExitStack() as open_request, self._told_in(call.names, holder):
                open_request.enter_context(holder.request())
                open_request.enter_context(self._metrics.open.track_inprogress())
                answer = await _unless_gone(request, call.start(client))
                open_request.callback(answer.stream.close)
                if not body.stream:
                    return JSONResponse(await _unless_gone(request, dialect.whole(body, answer, self._daemon, client)))
                # The worker refuses what the supervisor cannot know of, and a status can be told only before the head.
                await _unless_gone(request, answer.begin())
                events = dialect.stream(body, answer, self._daemon, client)
                return _EventStream(_with_failure(events, dialect is messages), open_request.pop_all())

        return handler

    @contextmanager
    def _told_in(self, names: Mapping[str, str], holder: Holder) -> Iterator[None]:
        """What the daemon refuses, in the dialect's names; that its queue is full is remembered for a moment."""
        try:
            yield
        except RequestFailed as error:
            told = of_client(error, names)
            self._daemon.note_queue(holder.name, told)
            raise told from None

    async def _count_tokens(self, request: Request, holder: Holder) -> Response:
        call = messages.count_of(await read(request, messages.CountBody))
        client = await self._daemon.client(holder.name)
        check_model(call.model, client.server.model, self._config.aliases)
        with self._told_in(call.names, holder):
            tokens = await client.tokenize_chat(call.messages, tools=call.tools, options=call.options)
        return JSONResponse({"input_tokens": len(tokens)})

    async def _tokenize(self, request: Request, holder: Holder) -> Response:
        body = await read(request, TokenizeBody)
        client = await self._daemon.client(holder.name)
        if (body.content is None) == (body.messages is None):
            raise refused("content", "exactly one of content and messages is given", "invalid_value")
        with self._told_in({"options": "chat_template_kwargs"}, holder):
            if body.messages is None:
                tokens = await client.tokenize(body.content or "", special=body.special)
            else:
                options = body.chat_template_kwargs
                tokens = await client.tokenize_chat(body.messages, tools=body.tools, options=options)
        return JSONResponse({"tokens": tokens, "count": len(tokens)})

    async def _detokenize(self, request: Request, holder: Holder) -> Response:
        body = await read(request, DetokenizeBody)
        client = await self._daemon.client(holder.name)
        return JSONResponse({"content": await client.detokenize(body.tokens)})

    # ---- what there is ----

    async def _models(self, request: Request, holder: Holder) -> Response:
        status = await self._daemon.status()
        served = status["model"]["name"]
        names = [served, *sorted(self._config.aliases - {"*", served})]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": [model_of(status, name) for name in names], **ends})

    async def _model(self, request: Request, holder: Holder) -> Response:
        name = request.path_params["model"]
        if not name:
            return await self._models(request, holder)
        status = await self._daemon.status()
        check_model(name, status["model"]["name"], self._config.aliases)
        return JSONResponse(model_of(status, name))

    async def _props(self, request: Request, holder: Holder) -> Response:
        return JSONResponse(props_of(await self._daemon.status(), self._config.aliases, self._config.defaults))

    async def _status(self, request: Request, holder: Holder) -> Response:
        return JSONResponse(await self._daemon.status())

    async def _metrics_page(self, request: Request, holder: Holder) -> Response:
        try:
            status = await self._daemon.status()
        except (SparkClientError, TimeoutError):
            status = None
        return Response(self._metrics.page(status), media_type=CONTENT_TYPE)

    async def _health(self, request: Request, holder: Holder) -> Response:
        """Whether the gateway lives (it answers), whether requests are served, and why not."""
        try:
            status = await self._daemon.status()
        except (SparkClientError, TimeoutError) as error:
            return JSONResponse({"live": True, "ready": False, "state": "unreachable", "reason": str(error)}, 503)
        told = health_of(status)
        return JSONResponse(told, 200 if told["ready"] else 503)

    async def _openapi(self, request: Request, holder: Holder) -> Response:
        return JSONResponse(document())

    async def _page(self, request: Request, holder: Holder) -> Response:
        return FileResponse(PAGE / "index.html")


_Handler = Callable[[Request, Holder], Awaitable[Response]]


async def _unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The outcome of `work`, which is cancelled when the client leaves."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(400, "the client has left")
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.wait((task, watch))


class _EventStream(StreamingResponse):
    """Server-sent events; what is open for them is closed when they end, or the client leaves, however early."""

    def __init__(self, events: AsyncIterator[bytes], open_request: ExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._open_request = open_request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._open_request:
            await super().__call__(scope, receive, send)


async def _with_failure(events: AsyncIterator[bytes], anthropic: bool) -> AsyncIterator[bytes]:
    """The events, and the error that ended them."""
    try:
        async for event in events:
            yield event
    except (SparkClientError, TimeoutError) as error:
        what = of_client(error)
        yield data(what.anthropic(), "error") if anthropic else data(what.openai())


def _error(error: ApiError, anthropic: bool, number: str | None = None) -> Response:
    body = error.anthropic(number) if anthropic else error.openai()
    return JSONResponse(body, error.status, headers=error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """No such path, or another method."""
    allowed = sorted(error.headers["Allow"].split(", ")) if error.headers and "Allow" in error.headers else []
    path = request.url.path[:100]
    instead = f"; ask with {' or '.join(allowed)}" if allowed else ""
    what = f"{request.method[:20]} {path} is not served here{instead}"
    made = _error(ApiError(error.status_code, what), path.startswith("/v1/messages"))
    made.headers.update(error.headers or {})
    return made
