"""The application: which path does what. `create_app` is all that a server or a test needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from bytefloor import __version__
from bytefloor.engine.sampling_params import SamplingParams
from bytefloor.server import bodies
from bytefloor.server.answers import Answer, Event, Told
from bytefloor.server.anthropic_answers import MessageAnswer
from bytefloor.server.anthropic_bodies import CountBody, MessagesBody
from bytefloor.server.anthropic_chat import ask_messages, count_tokens
from bytefloor.server.asked import Asked, ask_chat, ask_completion, chat_prompt
from bytefloor.server.embeddings import LABEL, Embedding, ask_embeddings, embeddings_answer, n_dimensions
from bytefloor.server.event_stream import EventStream, Write, event, events, unless_gone
from bytefloor.server.generation import Generation
from bytefloor.server.guard import LOG, Guard, error_body, failure, read_body, refused
from bytefloor.server.openapi import document
from bytefloor.server.page import page_routes
from bytefloor.server.progress import EVERY_S, Progress
from bytefloor.server.refusal import Refusal
from bytefloor.server.responses_answers import ResponseAnswer
from bytefloor.server.responses_bodies import ResponseBody
from bytefloor.server.responses_chat import ask_response
from bytefloor.server.sampling import SAMPLING_NAMES
from bytefloor.server.served import Served
from bytefloor.server.service import Service
from bytefloor.server.wire import to_json

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
LAST_WORDS_S = 1.0
"""Of a stream whose time is over, to say so; a client that does not read has no more."""
LITTLE = 4096
"""Bytes of a body."""
COSTLY = ("response_format", "grammar", "regex", "tools")
"""Fields that are compiled."""


def create_app(service: Service) -> Starlette:
    """The server as an ASGI application; its lifespan starts and stops the worker."""
    endpoints = Endpoints(service)
    routes = endpoints.routes()
    paths = frozenset(route.path for route in routes)
    middleware = [
        Middleware(
            CORSMiddleware,
            allow_origins=service.options.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id"],
        ),
        Middleware(
            Guard,
            service.metrics,
            service.options.api_key,
            lambda: service.closed,
            paths,
            service.worker.turn,
            service.begun,
        ),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.stop()

    # Not plain functions: those would go through a pool of threads each time.
    async def refuse_path(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        found = {404: "no such path here", 405: "the path does not know this method"}
        refusal = Refusal(error.status_code, found.get(error.status_code, error.detail))
        return refused(refusal, request.scope, error.headers)

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return refused(error, request.scope)

    return Starlette(
        routes=routes,
        middleware=middleware if service.options.cors else middleware[1:],
        exception_handlers={HTTPException: refuse_path, Refusal: refuse},
        lifespan=lifespan,
    )


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


def _failed(answer: Told, refusal: Refusal, request: Request) -> bytes:
    """What a stream ends with that cannot go on."""
    error = [error_body(refusal, request.scope)]
    return events(answer.failed(refusal) if isinstance(answer, ResponseAnswer) else error)


def _encoded(found: Event, answer: Told, progress: Progress | None) -> bytes:
    """An event as a stream tells it; nothing where there is nothing to see."""
    speed = {} if progress is None else progress.speed(found)
    if not speed:
        return answer.encoded(found)
    chunks = answer.chunks(found)
    return events([*chunks[:-1], {**(chunks[-1] if chunks else answer.beside({})), **speed}])


class Endpoints:
    """One method a path."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._served = service.served
        self._began = int(time.time())

    def routes(self) -> list[Route]:
        """Where everything is."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/messages", self.message, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_message_tokens, methods=["POST"]),
            Route("/v1/responses", self.respond, methods=["POST"]),
            Route("/v1/responses/{rest:path}", self.stored_response, methods=["GET", "POST", "DELETE"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/apply-template", self.apply_template, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/props", self.props, methods=["GET"]),
            *page_routes(),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

    # Text -------------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> ASGIApp:
        """Messages to a reply."""
        body = await self._body(request, bodies.ChatBody)
        asked = await self._ask(request, ask_chat, body)
        return await self._respond(request, asked, self._openai(asked))

    async def complete(self, request: Request) -> ASGIApp:
        """Texts or token ids to what follows them."""
        body = await self._body(request, bodies.CompletionBody)
        asked = await self._ask(request, ask_completion, body)
        return await self._respond(request, asked, self._openai(asked))

    async def message(self, request: Request) -> ASGIApp:
        """As `chat`, in Anthropic's words."""
        body = await self._body(request, MessagesBody)
        asked = await asyncio.to_thread(ask_messages, body, self._served)
        return await self._respond(request, asked, MessageAnswer(asked, self._served.name))

    async def _ask(self, request: Request, ask: Callable[[bodies.B, Served], Asked], body: bodies.B) -> Asked:
        """Templates, tokenizers and grammars take their time over much, which other clients' streams need not wait for;
        over little, less than handing it to a thread does."""
        is_little = request.state.n_bytes <= LITTLE and not any(getattr(body, name, None) for name in COSTLY)
        return ask(body, self._served) if is_little else await asyncio.to_thread(ask, body, self._served)

    async def count_message_tokens(self, request: Request) -> ASGIApp:
        """How many tokens the same messages would be."""
        body = await self._body(request, CountBody)
        return _json({"input_tokens": await asyncio.to_thread(count_tokens, body, self._served)})

    def _openai(self, asked: Asked) -> Answer:
        return Answer(asked, self._served.name, self._served.tokenizer, self._service.floor)

    async def respond(self, request: Request) -> ASGIApp:
        """As `chat`, in the words of OpenAI's newer interface."""
        body = await self._body(request, ResponseBody)
        asked, repeated = await asyncio.to_thread(ask_response, body, self._served)
        return await self._respond(request, asked, ResponseAnswer(asked, repeated, self._served.name))

    async def stored_response(self, _: Request) -> ASGIApp:
        """There is none, whatever its name."""
        raise Refusal(404, "responses are not stored: one is only in the reply to its request", code="not_stored")

    async def embed(self, request: Request) -> ASGIApp:
        """Texts or token ids to a vector each."""
        body = await self._body(request, bodies.EmbeddingBody)
        asked = await asyncio.to_thread(ask_embeddings, body, self._served)
        n_sequences = self._served.engine.executor.plan.n_sequences
        embedding = Embedding(self._service.worker, asked, n_sequences, self._service.options.timeout_s)
        self._check_room(embedding.n_ahead)
        try:
            vectors = await unless_gone(request.receive, embedding.vectors())
        finally:
            embedding.close()
            request.state.facts.update(embedding.facts)
        if vectors is None:
            return self._gone(request)
        # Millions of numbers take a while to write down.
        return await asyncio.to_thread(lambda: _json(embeddings_answer(asked, vectors, self._served.name)))

    async def _body(self, request: Request, kind: type[bodies.B]) -> bodies.B:
        try:
            data = await read_body(request, self._service.options.max_body_bytes)
        except ClientDisconnect:
            raise Refusal(499, "the body did not come to its end", code="client_disconnected") from None
        request.state.n_bytes = len(data)
        return bodies.decode(data, kind)

    async def _respond(self, request: Request, asked: Asked, answer: Told) -> ASGIApp:
        options, worker = self._service.options, self._service.worker
        self._check_room(len(asked.choices))
        generation = Generation(worker, asked.choices, options.timeout_s)
        try:
            await generation.start()
            if not asked.is_streamed:
                return await self._whole(request, generation, answer)
        except BaseException:
            generation.close()
            raise

        def is_late() -> None:
            self._service.metrics.failed(504)
            request.state.facts["error"] = f"the client has not read its stream to the end in {options.timeout_s:g} s"

        def tell(write: Write) -> Coroutine[Any, Any, bytes]:
            return self._stream(request, generation, answer, write)

        return EventStream(tell, generation.close, options.timeout_s + LAST_WORDS_S, is_late)

    def _check_room(self, n: int) -> None:
        n_open = self._service.worker.n_open
        if n_open + n > self._service.options.max_open:
            raise Refusal(429, f"{n_open} requests are open, the most there may be", code="too_many_requests")

    @staticmethod
    def _gone(request: Request) -> Response:
        request.state.facts["gone"] = True
        return refused(Refusal(499, "the client has gone", code="client_disconnected"), request.scope)

    async def _whole(self, request: Request, generation: Generation, answer: Told) -> ASGIApp:
        async def collect() -> bool:
            while not generation.is_over:
                for found in await generation.events(self._service.options.timeout_s):
                    answer.take(found)
            return True

        is_complete = await unless_gone(request.receive, collect())
        request.state.facts.update(answer.facts)
        generation.close()
        if not is_complete:
            return self._gone(request)
        return _json(answer.whole())

    async def _stream(self, request: Request, generation: Generation, answer: Told, write: Write) -> bytes:
        facts, progress = request.state.facts, Progress.of(answer.asked, self._service.floor)
        try:
            opening = answer.opening()
            if opening:
                await write(events(opening))
            if progress is not None:
                await write(event(answer.beside(progress.reading(generation))))
            keep_alive_s, sent_at = self._service.options.keep_alive_s, time.perf_counter()
            patience_s = keep_alive_s if progress is None else EVERY_S
            while not generation.is_over:
                found = await generation.events(patience_s)
                if found:
                    # Whatever has come goes out in one write.
                    told = b"".join([_encoded(each, answer, progress) for each in found])
                    if not told and time.perf_counter() - sent_at <= keep_alive_s:
                        continue
                else:
                    reading = {} if progress is None or progress.has_begun else progress.reading(generation)
                    told = event(answer.beside(reading)) if reading else b""
                await write(told or answer.quiet)  # what is held back is quiet too
                sent_at = time.perf_counter()
            return events(answer.closing()) + answer.end
        except Refusal as refusal:
            self._service.metrics.failed(refusal.status)
            facts["error"] = refusal.message
            return _failed(answer, refusal, request)
        except Exception as error:
            LOG.error("a stream failed", exc_info=error)
            self._service.metrics.failed(500)
            facts["error"] = f"{type(error).__name__}: {error}"
            return _failed(answer, failure(error), request)
        except asyncio.CancelledError:
            facts["gone"] = True
            raise
        finally:
            facts.update(answer.facts)

    # Around it --------------------------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> ASGIApp:
        """Text to ids; with_pieces: each with its text. add_special: what the model wants before a text."""
        body = await self._body(request, bodies.TokenizeBody)
        tokenizer = self._served.tokenizer
        wants_bos = None if body.add_special else False
        ids = await asyncio.to_thread(
            tokenizer.encode, body.content, parse_special=body.parse_special, add_bos=wants_bos
        )
        if body.with_pieces:
            return _json({"tokens": [{"id": id, "piece": tokenizer.token_text(id)} for id in ids]})
        return _json({"tokens": ids})

    async def detokenize(self, request: Request) -> ASGIApp:
        """Ids to text, control tokens as they are written."""
        body = await self._body(request, bodies.DetokenizeBody)
        self._served.check_ids(body.tokens, "tokens")
        return _json({"content": self._served.tokenizer.decode(body.tokens, keep_special=True)})

    async def apply_template(self, request: Request) -> ASGIApp:
        """Messages to the prompt as text. To read: encoding it again is not safe, /v1/chat/completions does not."""
        body = await self._body(request, bodies.TemplateBody)
        self._served.check_name(body.model)
        adds = body.add_generation_prompt is not False
        prompt = await asyncio.to_thread(chat_prompt, body, self._served, adds)
        return _json({"prompt": prompt.text, "n_tokens": len(prompt.ids)})

    async def models(self, _: Request) -> ASGIApp:
        """The one there is."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> ASGIApp:
        """The one there is, by name."""
        self._served.check_name(request.path_params["name"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        head = {"id": self._served.name, "object": "model", "created": self._began, "owned_by": "bytefloor"}
        return {**head, "context_length": self._served.facts["context"]}

    async def health(self, _: Request) -> ASGIApp:
        """200 while requests are taken."""
        reason = self._service.closed
        if reason is None:
            return _json({"status": "ok"})
        return _json({"status": "unavailable", **Refusal(503, reason, code="unavailable").body}, 503)

    async def metrics(self, _: Request) -> ASGIApp:
        """For Prometheus."""
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def props(self, _: Request) -> ASGIApp:
        """What is served and how."""
        defaults, load, options = SamplingParams(), self._service.worker.load, self._service.options
        return _json(
            {
                "model": self._served.name,
                **self._served.facts,
                "stream_gb_s": self._service.floor.gb_s if self._service.floor is not None else None,
                "version": __version__,
                "defaults": {name: getattr(defaults, name) for name in SAMPLING_NAMES},
                "embeddings": {"dimensions": n_dimensions(self._served), **LABEL},
                "timeout_s": options.timeout_s,
                "max_body_bytes": options.max_body_bytes,
                "load": {
                    "waiting": load.n_waiting,
                    "running": load.n_running,
                    "pages": {kind: {"used": use.n_used, "all": use.n_pages} for kind, use in load.pages.items()},
                },
            }
        )

    async def openapi(self, _: Request) -> ASGIApp:
        """What all paths take and give."""
        return _json(document(self._served.name, self._service.options.api_key is not None))
