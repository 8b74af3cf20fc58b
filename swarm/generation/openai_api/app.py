"""The routes: /health, /v1/models, /v1/completions, /v1/chat/completions and /v1/responses, of one model.

    request -> Gate -> Api: the prompts' tokens -> texts -> one answer, or a stream of events

The model's name is RUN or RUN@ROUND. Training goes on while the server runs. So a request may name any round since the
server began, but the present round answers it, and the answer names that round. Texts and names that users send are
neither logged nor kept.
"""

import asyncio
import dataclasses
import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swarm.generation.openai_api import requests
from swarm.generation.openai_api.answers import STILL_HERE, Answer, Refusal, Scored, Usage, event
from swarm.generation.openai_api.gate import HEALTH, refusal_of
from swarm.generation.openai_api.requests import ChatRequest, CompletionRequest, Request
from swarm.generation.openai_api.responses import ResponseAnswer, ResponseRequest
from swarm.generation.openai_api.texts import Piece, Pieces, Text, written
from swarm.generation.sampling import Scores, Scoring, require_few
from swarm.generation.text_model import TextModel
from swarm.machine.clock import Clock

STATUS_SECONDS = 1.0
"""How long a stream waits for its first piece, so that an error before it can be sent as an HTTP status."""
STILL_HERE_SECONDS = 5.0
"""Time between two signs of life in a stream to which nothing else is sent."""


_ROUTES = "/health, /v1/models, /v1/completions, /v1/chat/completions and /v1/responses"


class Api:
    def __init__(self, model: TextModel, *, default_tokens: int, clock: Clock, numbers: random.Random) -> None:
        """`default_tokens` are the most tokens of an answer, unless the client gives a number. `numbers` gives random
        numbers, for ids of answers, and for seeds if clients give none."""
        self._model = model
        self._default_tokens = default_tokens
        self._clock = clock
        self._numbers = numbers
        self._first_round = self._newest_round = model.engine.round or 0
        self._began = int(clock.time())

    def app(self) -> Starlette:
        routes = [
            Route(HEALTH, _answering(self._health)),
            Route("/v1/models", _answering(self._models)),
            Route("/v1/models/{name:path}", _answering(self._one_model)),
            Route("/v1/completions", _answering(self._complete), methods=["POST"]),
        ]
        for path, kind in (("/v1/chat/completions", ChatRequest), ("/v1/responses", ResponseRequest)):
            routes.append(Route(path, _answering(functools.partial(self._converse, kind)), methods=["POST"]))
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_such_route})

    async def _health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _models(self, request: HttpRequest) -> Response:
        names = dict.fromkeys((self._model.name, self._model.run))
        return JSONResponse({"object": "list", "data": [self._described() | {"id": name} for name in names]})

    async def _one_model(self, request: HttpRequest) -> Response:
        self._require_model(request.path_params["name"])
        return JSONResponse(self._described())

    async def _complete(self, request: HttpRequest) -> Response:
        wanted = requests.parse(CompletionRequest, await request.body())
        self._require_model(wanted.model)
        return await self._written(wanted, [await self._prompt(prompt) for prompt in wanted.prompts])

    async def _converse(self, kind: type[ChatRequest | ResponseRequest], request: HttpRequest) -> Response:
        wanted = requests.parse(kind, await request.body())
        self._require_model(wanted.model)
        try:
            prompt = await self._model.conversation(wanted.conversation)
        except ValueError as error:
            raise Refusal(400, str(error), param=wanted.prompt_field) from None
        return await self._written(wanted, [prompt])

    async def _prompt(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            try:
                return await asyncio.to_thread(self._model.encode, prompt)
            except ValueError as error:
                raise Refusal(400, f"the prompt cannot be encoded: {error}", param="prompt") from None
        if not all(0 <= token < self._model.tokenizer.vocab_size for token in prompt):
            raise Refusal(400, f"tokens are from 0 to {self._model.tokenizer.vocab_size - 1}", param="prompt")
        return prompt

    async def _written(self, wanted: Request, prompts: list[list[int]]) -> Response:
        """Write the texts: `n` for each prompt."""
        texts = self._texts(wanted, prompts)
        num_prompt_tokens = sum(map(len, prompts))
        with_special = wanted.skip_special_tokens is False
        async with AsyncExitStack() as stack:
            pieces = await stack.enter_async_context(
                written(self._model, texts, stops=wanted.stops, with_special=with_special)
            )
            if wanted.stream:
                try:
                    async with asyncio.timeout(STATUS_SECONDS):
                        first = [await pieces.next()]
                except TimeoutError:
                    first = []
                events = self._events(self._answer(wanted), num_prompt_tokens, texts, first, pieces)
                return _Stream(events, stack.pop_all())
            while await pieces.next() is not None:
                pass
        answer = self._answer(wanted)
        choices = [
            answer.choice(text.index, "".join(text.said), text.finish_reason, await self._scored(text))
            for text in texts
        ]
        return JSONResponse(answer.whole(choices, _usage(num_prompt_tokens, texts)))

    def _texts(self, wanted: Request, prompts: list[list[int]]) -> list[Text]:
        sampling = wanted.sampling(seed=self._numbers.getrandbits(63))
        num_each, texts, num_scores = wanted.num_each, list[Text](), 0
        for index in range(len(prompts) * num_each):
            prompt = prompts[index // num_each]
            text = Text(
                index=index,
                prompt=prompt,
                # The first text of each prompt is that of a request for one.
                sampling=dataclasses.replace(sampling, seed=sampling.seed + index % num_each),
                max_tokens=self._num_tokens(wanted, prompt),
                echoes=wanted.echoes,
                scores=self._scores(wanted, prompt),
            )
            texts.append(text)
            if text.scores is not None:
                num_scores += text.scores.scoring.num_scores(len(prompt) + text.max_tokens + 1)
        require_few(num_scores)
        return texts

    def _scores(self, wanted: Request, prompt: list[int]) -> Scores | None:
        if wanted.num_top is None:
            return None
        first = 1 if wanted.echoes else len(prompt)
        return Scores(Scoring(first=first, num_top=min(wanted.num_top, self._model.tokenizer.vocab_size)))

    async def _scored(self, text: Text, first: int = 0, last: int | None = None) -> list[Scored]:
        if text.scores is None:
            return []
        return await asyncio.to_thread(text.scored, self._model.tokenizer, first, last)

    async def _events(
        self, answer: Answer | ResponseAnswer, num_prompt_tokens: int, texts: list[Text], first: list[Piece | None],
        pieces: Pieces,
    ) -> AsyncIterator[bytes]:  # fmt: skip
        for chunk in answer.opening(len(texts)):
            yield event(chunk)
        while True:
            try:
                async with asyncio.timeout(STILL_HERE_SECONDS):
                    arrived = first.pop() if first else await pieces.next()
            except TimeoutError:
                yield STILL_HERE
                continue
            except Exception as error:  # noqa: BLE001 - the status was sent already, so an event tells the client
                yield event(answer.failed(refusal_of(error)))
                return
            if arrived is None:
                break
            text, said, *numbers = arrived
            scored = await self._scored(text, *numbers)
            for chunk in (
                answer.ending(text.index, text.finish_reason, scored)
                if said is None
                else answer.piece(text.index, said, scored)
            ):
                yield event(chunk)
        for chunk in answer.closing(_usage(num_prompt_tokens, texts)):
            yield event(chunk)
        if answer.tail:
            yield answer.tail

    def _answer(self, wanted: Request) -> Answer | ResponseAnswer:
        digits = f"{self._numbers.getrandbits(96):024x}"
        created, model = int(self._clock.time()), self._model.name
        if isinstance(wanted, ResponseRequest):
            return ResponseAnswer(wanted, digits=digits, created=created, model=model)
        is_chat = isinstance(wanted, ChatRequest)
        return Answer(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{digits}",
            created=created,
            model=model,
            includes_usage=wanted.includes_usage,
        )

    def _num_tokens(self, wanted: Request, prompt: list[int]) -> int:
        """How many tokens the answer may have. Raises Refusal."""
        if not prompt:
            raise Refusal(400, "the prompt has no tokens", param=wanted.prompt_field)
        left = self._model.engine.longest - len(prompt)
        field, num_tokens = wanted.most_tokens
        # A prompt of the model's full length may still be scored.
        is_too_long = left < (0 if num_tokens == 0 or wanted.echoes else 1)
        if is_too_long:
            field = wanted.prompt_field
        elif num_tokens is None or num_tokens <= left:
            return min(self._default_tokens, left) if num_tokens is None else num_tokens
        has = f"the model takes {self._model.engine.longest} tokens with the answer, and the prompt has {len(prompt)}"
        fault = has if is_too_long else f"{field} is more than the {left} that are left: {has}"
        raise Refusal(400, fault, code="context_length_exceeded", param=field)

    def _require_model(self, name: str) -> None:
        # The engine's round can go back: of two texts under way, the one that began later may have older weights.
        self._newest_round = max(self._newest_round, self._model.engine.round or 0)
        run, _, number = name.rpartition("@")
        is_ours = name == self._model.run or (
            run == self._model.run
            and number.isdecimal()
            and len(number) < 16
            and self._first_round <= int(number) <= self._newest_round
        )
        if not is_ours:
            raise Refusal(
                404, f"there is no such model here: this is {self._model.name}", code="model_not_found", param="model"
            )

    def _described(self) -> dict[str, object]:
        longest = self._model.engine.longest
        described = {"id": self._model.name, "object": "model", "created": self._began, "owned_by": "swarm"}
        return described | {"max_model_len": longest}


class _Stream(StreamingResponse):
    """A stream of events. At its end, even an early one, it frees what the engine keeps for the text."""

    def __init__(self, events: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await super().__call__(scope, receive, send)


def _usage(num_prompt_tokens: int, texts: list[Text]) -> Usage:
    return Usage(prompt_tokens=num_prompt_tokens, completion_tokens=sum(text.num_tokens for text in texts))


def _answering(endpoint: Callable[[HttpRequest], Awaitable[Response]]) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def answer(request: HttpRequest) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:  # noqa: BLE001 - the client gets every error, and the server goes on
            return refusal_of(error).response()

    return answer


async def _no_such_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"there is nothing here: the routes are {_ROUTES}"
    return Refusal(error.status_code, where if error.status_code == 404 else error.detail).response()
