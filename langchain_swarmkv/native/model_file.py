"""What a GGUF file says of itself, read without llama.cpp: it ends the process over some values."""

from __future__ import annotations

import functools
import mmap
import struct
from pathlib import Path

from langchain_swarmkv.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError

__all__ = ["check_gguf", "check_model"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER_BYTES = 24  # magic, version u32, tensor count u64, key-value count u64

# enum gguf_type, gguf.h
_LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?"}
_LAYOUTS |= {10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_TOKENS = "tokenizer.ggml.tokens"

# Architectures of llama.cpp that only embed, whatever else their files say (src/llama-arch.cpp).
_EMBEDDING_ARCHITECTURES = frozenset(
    {
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
    }
)
_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # LLAMA_MAX_LAYERS, LLAMA_MAX_EXPERTS, llama-hparams.h
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_NO_POOLING = 0  # enum llama_pooling_type, llama.h
_RANKING = 4


def check_gguf(path: Path) -> None:
    """Refuse what is plainly no GGUF before native code sees it.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is no GGUF of a version that llama.cpp reads.
    """
    if not path.exists():
        raise ModelNotFoundError(f"There is no file {path}.", path=path)
    if not path.is_file():
        raise ModelFormatError(f"{path} is not a file.", path=path)
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError as error:
        raise ModelFormatError(f"{path} cannot be read: {error.strerror}.", path=path) from error
    if len(header) < _HEADER_BYTES or header[:4] != _MAGIC:
        raise ModelFormatError(
            f"{path} is not a GGUF file: it begins with {header[:4]!r}, not {_MAGIC!r}.", path=path
        )
    version = int.from_bytes(header[4:8], "little")
    if version not in _VERSIONS:
        raise ModelFormatError(
            f"{path} has GGUF version {version}; llama.cpp reads {_VERSIONS}.", path=path
        )


def check_model(path: Path) -> None:
    """Refuse, before native code sees it, what cannot write or would end the process.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFormatError: it is no GGUF, or has values over which llama.cpp ends the process.
        UnsupportedModelError: it is an embedding model.
    """
    check_gguf(path)
    found = path.stat()
    try:
        values, repeated = _read(path, found.st_size, found.st_mtime_ns, found.st_ino)
    except (struct.error, ValueError, OSError):
        return  # damaged, which llama.cpp says without harm
    architecture = values.get("general.architecture")
    _check_writes(path, architecture, values)
    if repeated is not None:
        raise ModelFormatError(
            f"{path} has the token {repeated!r} twice in its vocabulary, over which llama.cpp ends "
            "the process. Convert the model again.",
            path=path,
        )
    _check_numbers(path, architecture, values)
    for key, value in values.items():
        # NaN is not positive either.
        if key.endswith("_epsilon") and isinstance(value, float) and not 0 < value < float("inf"):
            raise _unfit(path, f"{key}={value:g}", "positive numbers")


def _check_numbers(path: Path, architecture: object, values: dict[str, object]) -> None:
    """What llama.cpp asserts while it loads (load_hparams, src/llama-model.cpp)."""

    def number(key: str) -> int | None:
        value = values.get(f"{architecture}.{key}")
        return value if isinstance(value, int) else None

    num_layers = number("block_count")
    if num_layers is not None and not 0 < num_layers <= _MAX_LAYERS:
        raise _unfit(path, f"{architecture}.block_count={num_layers}", f"1 to {_MAX_LAYERS}")
    num_experts, num_used = number("expert_count") or 0, number("expert_used_count")
    if num_experts > _MAX_EXPERTS:
        raise _unfit(path, f"{architecture}.expert_count={num_experts}", f"up to {_MAX_EXPERTS}")
    if num_used is not None and not min(num_experts, 1) <= num_used <= num_experts:
        raise _unfit(
            path,
            f"{architecture}.expert_used_count={num_used}",
            f"{min(num_experts, 1)} to {num_experts}, the number of experts",
        )
    scaling = values.get(f"{architecture}.rope.scaling.type", "linear")
    if scaling not in _ROPE_SCALINGS:
        raise _unfit(
            path, f"{architecture}.rope.scaling.type={scaling}", " or ".join(_ROPE_SCALINGS)
        )


def _unfit(path: Path, seen: str, wanted: str) -> ModelFormatError:
    return ModelFormatError(
        f"{path} says {seen}; llama.cpp takes {wanted} and would end the process. Convert the "
        "model again.",
        path=path,
    )


def _check_writes(path: Path, architecture: object, values: dict[str, object]) -> None:
    pooling = values.get(f"{architecture}.pooling_type", _NO_POOLING)
    if architecture not in _EMBEDDING_ARCHITECTURES and pooling in (_NO_POOLING, -1, 2**32 - 1):
        return
    kind = "a reranking model" if pooling == _RANKING else "an embedding model"
    raise UnsupportedModelError(
        f"{path} is {kind}, it cannot write. Its architecture is {architecture}; give a model that "
        "generates text.",
        path=path,
        architecture=architecture,
    )


@functools.lru_cache(maxsize=16)
def _read(path: Path, size: int, mtime_ns: int, inode: int) -> tuple[dict[str, object], str | None]:
    """Strings and numbers of the header, and a token that stands twice in the vocabulary.

    Raises:
        ValueError, struct.error: the header is cut off or damaged.
    """
    del mtime_ns, inode  # other bytes, another reading
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (num_values,) = struct.unpack_from("<Q", data, 16)
        values: dict[str, object] = {}
        repeated: str | None = None
        place = _HEADER_BYTES
        for _ in range(num_values):
            key, place = _text(data, place)
            (kind,) = struct.unpack_from("<I", data, place)
            place += 4
            if kind == _STRING:
                values[key.decode("utf-8", "replace")], place = _decoded(data, place)
            elif kind != _ARRAY:
                (values[key.decode("utf-8", "replace")],) = _number(data, place, kind)
                place += struct.calcsize(_layout(kind))
            else:
                kind, count = struct.unpack_from("<IQ", data, place)
                place += 12
                if kind != _STRING:
                    place += count * struct.calcsize(_layout(kind))
                elif key.decode("utf-8", "replace") == _TOKENS:
                    repeated, place = _repeated(data, place, count)
                else:
                    for _ in range(count):
                        place += 8 + struct.unpack_from("<Q", data, place)[0]
            if place > size:
                raise ValueError("the header is longer than the file")
    return values, repeated


def _layout(kind: int) -> str:
    if kind not in _LAYOUTS:
        raise ValueError(f"unknown type {kind}")
    return _LAYOUTS[kind]


def _number(data: mmap.mmap, place: int, kind: int) -> tuple[object, ...]:
    return struct.unpack_from(_layout(kind), data, place)


def _text(data: mmap.mmap, place: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, place)
    end = place + 8 + length
    if end > len(data):
        raise ValueError("a text is longer than the file")
    return data[place + 8 : end], end


def _decoded(data: mmap.mmap, place: int) -> tuple[str, int]:
    text, place = _text(data, place)
    return text.decode("utf-8", "replace"), place


def _repeated(data: mmap.mmap, place: int, count: int) -> tuple[str | None, int]:
    seen: set[bytes] = set()
    repeated: str | None = None
    for _ in range(count):
        text, place = _text(data, place)
        text = text.split(b"\0", 1)[0]  # as C reads it
        # NOTE: llama.cpp gives empty ones names of their own.
        if text and text in seen:
            repeated = text.decode("utf-8", "replace")
        seen.add(text)
    return repeated, place
