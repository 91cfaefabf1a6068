"""Prompts to send to a server or a model: short, medium and long ones that ship with the package, or a file's."""

from __future__ import annotations

import codecs
from importlib.resources import files
from pathlib import Path

import msgspec
from msgspec import Struct, field

from kvtransfer.completion import Prompt
from kvtransfer.kernels.errors import ConfigError

WORDS = {"short": 40, "medium": 300, "long": 1500}
"""Words of the prompts that ship; each class three times, from different places of the document."""
QUESTION = "\n\nIn one sentence, what does this text say?\nAnswer:"
_HUMAN = ("human", "user")


class NamedPrompt(Struct, frozen=True):
    """``name`` is unique in a list."""

    name: str
    prompt: Prompt


class _Turn(Struct, rename={"speaker": "from"}):
    value: str
    speaker: str


class _Conversation(Struct):
    conversations: list[_Turn] = field(default_factory=list)


class _Line(_Conversation):
    prompt: Prompt | None = None


def shipped_prompts() -> list[NamedPrompt]:
    """Nine texts, three of each length; no two begin alike, so that none is a prefix of another."""
    words = files("kvtransfer").joinpath("data/kv_cache.md").read_text(encoding="utf-8").split(" ")
    prompts = []
    for number, (kind, count) in enumerate(WORDS.items()):
        for part in range(3):
            start = (number * 3 + part) * 97
            name = f"{kind}-{part + 1}"
            prompts.append(NamedPrompt(name, f"Text {name}: " + " ".join(words[start : start + count]) + QUESTION))
    return prompts


def read_prompts(path: Path, most: int | None = None) -> list[NamedPrompt]:
    """Prompts of a file, at most ``most``.

    JSONL: an object a line with ``prompt``, a text or token ids, or with ``conversations`` as ShareGPT has. JSON:
    ShareGPT's list of objects with ``conversations``, turns with ``from`` and ``value``; what a person said becomes a
    prompt with all that was said before it, so that the prompts of a conversation grow from one another. Where a
    person said nothing there is no prompt. Raises ConfigError on anything else, or where there is none.
    """
    try:
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise ConfigError(f"prompts {path}: expected a readable file: {error}") from error
    found = _share_gpt(path, data) if data.lstrip()[:1] == b"[" else _lines(path, data)
    found = [prompt for prompt in found if prompt.prompt][:most]
    if not found:
        raise ConfigError(f"prompts {path}: expected at least one prompt that is not empty, got none")
    return found


def _lines(path: Path, data: bytes) -> list[NamedPrompt]:
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            name = f"line {number}"
            try:
                told = msgspec.json.decode(line, type=_Line)
                if told.prompt is None and not told.conversations:
                    raise msgspec.ValidationError("neither `prompt` nor `conversations` is there")
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise ConfigError(
                    f'prompts {path}, {name}: expected {{"prompt": text or ids}}, got {line[:60]!r}: {error}'
                ) from error
            found += _turns(name, told) if told.prompt is None else [NamedPrompt(name, told.prompt)]
    return found


def _share_gpt(path: Path, data: bytes) -> list[NamedPrompt]:
    try:
        conversations = msgspec.json.decode(data, type=list[_Conversation])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"prompts {path}: expected JSON lines, or ShareGPT's list of conversations: {error}"
        ) from error
    return [p for number, told in enumerate(conversations, 1) for p in _turns(f"conversation {number}", told)]


def _turns(name: str, conversation: _Conversation) -> list[NamedPrompt]:
    found, said = [], ""
    for turn, told in enumerate(conversation.conversations, 1):
        said += told.value
        if told.speaker in _HUMAN and told.value.strip():
            found.append(NamedPrompt(f"{name}, turn {turn}", said + "\n"))
        said += "\n"
    return found
