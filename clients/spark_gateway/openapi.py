"""What the gateway serves, as OpenAPI: made from the very models that check requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from spark_gateway import chat, completions, messages, responses


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    from spark_gateway.app import DetokenizeBody, TokenizeBody

    posts: list[tuple[str, type[BaseModel], str]] = [
        ("/v1/chat/completions", chat.ChatBody, "Answer a conversation (OpenAI)"),
        ("/v1/completions", completions.CompletionBody, "Continue a text (OpenAI)"),
        ("/v1/responses", responses.ResponsesBody, "Answer a conversation (OpenAI, responses)"),
        ("/v1/messages", messages.MessagesBody, "Answer a conversation (Anthropic)"),
        ("/v1/messages/count_tokens", messages.CountBody, "Count the tokens of a conversation (Anthropic)"),
        ("/tokenize", TokenizeBody, "Token ids of a text or a conversation"),
        ("/detokenize", DetokenizeBody, "Text of token ids"),
    ]
    gets = [
        ("/v1/models", "The model that is served, and its other names"),
        ("/props", "Model, limits, and defaults"),
        ("/status", "The daemon's status document"),
        ("/health", "Whether requests are served, and why not"),
    ]
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, model, summary in posts:
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        body = {"required": True, "content": content}
        codes = {"200": "The answer", **_ERRORS}
        answers = {code: _answer(text, path) for code, text in codes.items()}
        paths[path] = {"post": {"summary": summary, "requestBody": body, "responses": answers}}
    for path, summary in gets:
        codes = {"200": "The answer", "401": _ERRORS["401"], "503": _ERRORS["503"]}
        answers = {code: _answer(text, path) for code, text in codes.items()}
        paths[path] = {"get": {"summary": summary, "responses": answers}}
    metrics = {"200": {"description": "Prometheus text", "content": {"text/plain": {}}}}
    paths["/metrics"] = {"get": {"summary": "Figures for Prometheus", "responses": metrics}}
    info = {"title": "spark gateway", "version": "1", "description": "docs/clients.md says more"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


_ERRORS = {
    "400": "An option is wrong or not supported; the body names it",
    "401": "No API key, or an unknown one",
    "403": "Not from this machine",
    "404": "Another model",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "The body is not declared as JSON",
    "429": "Too much is open or waits; Retry-After says when to come again",
    "500": "The daemon cannot do it as it is set up",
    "503": "The daemon is not ready; the body says why",
    "504": "Not finished in time",
}


def _answer(text: str, path: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {}}
    if text == "The answer" and path.startswith("/v1/") and "count" not in path:
        content["text/event-stream"] = {}
    return {"description": text, "content": content}
