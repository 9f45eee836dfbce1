"""What status document and log tell of apps and requests: names, numbers and stages, never text or token ids."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from sparkd.ipc.messages import Failed, Finished, Json, Message
from sparkd.log import details
from sparkd.supervisor.requests import Client, Request, Stage, refused

#: Requests that are listed; the status document is bounded, the queue may be set to be longer.
MOST = 1000


def list_clients(clients: Iterable[Client], requests: Iterable[Request], now: float) -> list[Json]:
    """Each connection."""
    waiting: dict[bytes, int] = {}
    for request in requests:
        peer = request.client.peer
        waiting[peer] = waiting.get(peer, 0) + _waiting_bytes(request)
    return [
        {
            "name": client.name,
            "requests": len(client.requests),
            "waiting_bytes": waiting.get(client.peer, 0),
            "silent_s": now - client.seen,
        }
        for client in clients
    ]


def list_requests(requests: Iterable[Request], now: float) -> list[Json]:
    """Each open request, `MOST` at most, the oldest first."""
    return [
        {
            "request": request.number,
            "client": request.client.name,
            "stage": _stage(request),
            "position": request.position if request.stage is Stage.QUEUED else None,
            "prompt_tokens": request.entry.prompt_tokens,
            "output_tokens": len(request.entry.produced),
            "waiting_bytes": _waiting_bytes(request),
            "age_s": now - request.arrived,
            "resumed": request.resumed,
        }
        for request in islice(requests, MOST)
    ]


def line(request: Request, now: float) -> str:
    """The one line that is logged of a request when it has ended."""
    end = request.end
    timings = end.timings if isinstance(end, Finished) else request.timings(now)
    return details(
        request=request.number,
        client=request.client.name,
        reason=_reason(request),
        code=end.code if isinstance(end, Failed) else None,
        prompt_tokens=request.entry.prompt_tokens,
        output_tokens=len(request.entry.produced),
        queued_s=timings.queued_s,
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
        hit_rate=end.hit_rate if isinstance(end, Finished) else None,
        resumed=request.resumed or None,
    )


def outline(msg: Message) -> str:
    """What kind of message it is and what it is about, without its content."""
    return details(type=type(msg).__name__, tag=getattr(msg, "tag", None), request=getattr(msg, "request", None))


def _stage(request: Request) -> str:
    if request.stage is Stage.RUNNING:
        return "prefill" if request.first_token is None else "decode"
    return str(request.stage.value)


def _reason(request: Request) -> str:
    """How it ended; no words of a failure, which may quote what the app sent."""
    if isinstance(request.end, Finished):
        return str(request.end.reason)
    if refused(request.end):
        return "refused"
    return "failed" if isinstance(request.end, Failed) else "left"


def _waiting_bytes(request: Request) -> int:
    """Bytes of text that wait for the app's credit."""
    pieces = [*request.text, *(part.text for part in request.parts)]
    return sum(len(piece.encode(errors="surrogatepass")) for piece in pieces)
