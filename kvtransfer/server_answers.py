"""What OpenAI-style and SGLang-style servers answer, whole or in pieces, and how pieces make one `Completion`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from msgspec import Struct, field

from kvtransfer.completion import Completion, KVDigests
from kvtransfer.kernels.errors import ServerError

_FAILED = ("abort", "error", "cancelled", "timeout")
"""Ends of an answer that is none; the last two are TensorRT-LLM's."""


class _End(Struct):
    type: str = ""
    message: str | None = None


_Ended = _End | str | None


class _Answer(Struct):
    """What both kinds have: servers tell of an error with status 200 too, in the middle of a stream above all."""

    error: Any = None
    object: Any = None
    message: Any = None

    @property
    def ended(self) -> bool:
        """Whether this is the last piece of an answer; some servers say "" in all that are not."""
        return bool(self._end)

    @property
    def _end(self) -> _Ended:
        raise NotImplementedError

    def require_well(self, path: str) -> None:
        """Raise ServerError if this tells of an error."""
        end = self._end
        kind, why = (end.type, end.message) if isinstance(end, _End) else (end, None)
        if self.error is not None or self.object == "error":
            why = self.message if self.error is None else self.error
        elif kind not in _FAILED:
            return
        raise ServerError(f"{path}: expected an answer, got {kind or 'an error'}: {str(why)[:500]}", 200)


class _CachedTokens(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Logprobs(Struct):
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    text: str = ""
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class OpenAIAnswer(_Answer):
    """One object of /v1/completions, whole or of a stream. ``kv_digests`` is ours."""

    choices: list[_Choice] = field(default_factory=list)
    usage: _Usage | None = None
    kv_digests: KVDigests | None = None

    @property
    def _end(self) -> _Ended:
        return next((choice.finish_reason for choice in self.choices), None)


class Flushed(Struct):
    """What vLLM answers to /reset_prefix_cache, with status 200 in any case."""

    success: bool = True


class _Model(Struct):
    id: str


class OpenAIModels(Struct):
    """/v1/models."""

    data: list[_Model] = field(default_factory=list)


_TopToken = tuple[float, int, str | None]
_Told = tuple[float | None, int, str | None]
_T = TypeVar("_T")


class _Meta(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _Ended = None
    output_token_logprobs: list[_Told] | None = None
    output_top_logprobs: list[list[_TopToken] | None] | None = None


class SGLangAnswer(_Answer):
    """One object of /generate; in a stream ``text`` holds everything so far, or with some settings only what is new.
    ``kv_digests`` is ours."""

    text: str | None = None
    output_ids: list[int] | None = None
    meta_info: _Meta = field(default_factory=_Meta)
    kv_digests: KVDigests | None = None

    @property
    def _end(self) -> _Ended:
        return self.meta_info.finish_reason


def join_openai(pieces: Iterable[tuple[float, OpenAIAnswer]]) -> Completion:
    """One completion of (seconds, piece). ServerError if nothing came, or an error."""
    text, first_s, last_s = "", None, None
    tokens: list[str] = []
    tops: list[list[tuple[str, float]]] = []
    usage, digests, texts = None, None, 0
    for at, piece in pieces:
        piece.require_well("/v1/completions")
        usage, digests = piece.usage or usage, piece.kv_digests or digests
        last_s = at if piece.choices else last_s
        for choice in piece.choices[:1]:
            if first_s is None and (choice.text or choice.logprobs is not None):
                first_s = at
            text += choice.text
            texts += bool(choice.text)
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens
                for top in choice.logprobs.top_logprobs or []:
                    ranked = sorted((top or {}).items(), key=lambda item: -item[1])
                    tops.append([(name.removeprefix("token_id:"), logprob) for name, logprob in ranked[:2]])
    if last_s is None:
        raise ServerError("/v1/completions: expected an answer, got an empty one", 200)
    details = usage.prompt_tokens_details if usage is not None else None
    return Completion(
        tokens=[token.removeprefix("token_id:") for token in tokens],
        text=text,
        prompt_tokens=usage.prompt_tokens if usage is not None else None,
        cached_tokens=details.cached_tokens if details is not None else None,
        output_tokens=(usage.completion_tokens if usage is not None else None) or len(tokens) or texts,
        tops=tops,
        first_token_s=last_s if first_s is None else first_s,
        total_s=last_s,
        digests=digests,
    )


def join_sglang(pieces: Iterable[tuple[float, SGLangAnswer]]) -> Completion:
    """One completion of (seconds, piece). ServerError if nothing came, or an error."""
    first_s: float | None = None
    last: tuple[float, SGLangAnswer] | None = None
    text = ""
    ids: list[int] = []
    told: list[_Told] = []
    ranked: list[list[_TopToken] | None] = []
    digests = None
    for at, piece in pieces:
        piece.require_well("/generate")
        meta, digests = piece.meta_info, piece.kv_digests or digests
        if piece.text is None and piece.output_ids is None:
            continue
        if first_s is None and (piece.text or piece.output_ids or meta.completion_tokens):
            first_s = at
        last = at, piece
        text = _text(text, piece, len(ids))
        ids = _grown(ids, piece.output_ids or [], meta.completion_tokens)
        told = _grown(told, meta.output_token_logprobs or [], meta.completion_tokens)
        ranked = _grown(ranked, meta.output_top_logprobs or [], meta.completion_tokens)
    if last is None:
        raise ServerError("/generate: expected an answer, got an empty one", 200)
    meta = last[1].meta_info
    return Completion(
        tokens=[str(token) for _, token, _ in told] or [str(token) for token in ids],
        text=text,
        prompt_tokens=meta.prompt_tokens,
        cached_tokens=meta.cached_tokens,
        output_tokens=meta.completion_tokens or len(ids),
        tops=[[(str(token), logprob) for logprob, token, _ in (top or [])[:2]] for top in ranked],
        first_token_s=last[0] if first_s is None else first_s,
        total_s=last[0],
        digests=digests,
    )


def _text(so_far: str, piece: SGLangAnswer, tokens: int) -> str:
    """The text so far with ``piece``, which holds everything so far or only what is new: the number of its ids says
    which. ``tokens``: how many there were before. Text alone may lead astray: it repeats itself, and its end may be
    taken back."""
    new, count = piece.text or "", piece.meta_info.completion_tokens
    more = None if piece.output_ids is None else len(piece.output_ids)
    if more is not None and count is not None and count in (more, tokens + more):
        return new if more == count else so_far + new
    return new if new.startswith(so_far) else so_far + new


def _grown(so_far: list[_T], piece: list[_T], count: int | None) -> list[_T]:
    """``piece`` where it holds everything so far, else both joined. ``count``: how many there are now, if it is told:
    a token that is repeated looks like everything so far."""
    if len(so_far) + len(piece) != count and piece[: len(so_far)] == so_far:
        return piece
    return so_far + piece
