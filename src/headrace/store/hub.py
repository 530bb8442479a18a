"""Models of a Hugging Face hub: which files of a repository make a model, and where they lie in the cache.

Two addresses are used (hub documentation, "Hub API Endpoints"): ``/api/models/REPO/revision/REV?blobs=true`` lists
files with sizes and hashes, ``/REPO/resolve/COMMIT/FILE`` gives one, usually by a redirect to a file store.
"""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace import __version__
from headrace.config import Config
from headrace.errors import BadFile, BadRequest, Unavailable
from headrace.formats.folder import FILES, INDEX, OBJECTS
from headrace.formats.index import SPLIT
from headrace.store.cache import locked, require_room, writing
from headrace.store.transfer import NETWORK, Progress, Remote, fetch, matches, refused, request

MAX_LISTING = 64 << 20
FOLDER_FILES = {"config.json", INDEX, *FILES, *(f"{key}.json" for key in OBJECTS)}
"""Files at the top of a repository that, with safetensors, make a model folder; pickled weights are never wanted."""


@dataclass(frozen=True)
class Name:
    """``hf:ORG/REPO[@REVISION][:FILE]``. file: a file's name, or a part of it that only one model has (``Q4_K_M``)."""

    org: str
    repo: str
    revision: str
    file: str | None

    def __str__(self) -> str:
        return f"hf:{self.org}/{self.repo}"


def parse(text: str) -> Name:
    """BadRequest unless ``text`` is a hub model's name."""
    part = r"[A-Za-z0-9][A-Za-z0-9._-]*"
    found = re.fullmatch(rf"hf:({part})/({part})(?:@([A-Za-z0-9][\w./-]*))?(?::(.+))?", text)
    if found is None:
        raise BadRequest(f"{text!r} is no hub model; write hf:ORGANISATION/REPOSITORY, and :FILE for one of several.")
    return Name(found[1], found[2], found[3] or "main", found[4])


def folder(name: Name, config: Config) -> Path:
    return config.cache / "hub" / name.org / name.repo


def cached(name: Name, config: Config) -> Path | None:
    """What ``pull`` would give, from what is here; None when it isn't, or isn't complete."""
    here = folder(name, config)
    files = {str(p.relative_to(here)): p for p in here.rglob("*") if p.is_file()} if here.is_dir() else {}
    try:
        chosen = choose(name, {file: path.stat().st_size for file, path in files.items()})
    except BadRequest:
        return None
    whole = not any(f"{file}.part" in files for file in chosen)
    split = SPLIT.fullmatch(chosen[0])
    if split and len(chosen) != int(split[3]):
        whole = False
    index = files.get(INDEX)
    if chosen[0] == "config.json" and index is not None:
        whole = whole and all(file in files for file in set(json.loads(index.read_text())["weight_map"].values()))
    return _result(here, chosen) if whole else None


def pull(name: Name, config: Config, progress: Progress, note: Any = lambda line: None) -> Path:
    """Fetch a model (resuming what was begun) -> its .gguf file, or its folder. Checks sizes and hashes."""
    commit, remotes = listing(name, config)
    chosen = choose(name, {file: remote.nbytes for file, remote in remotes.items()})
    here = folder(name, config)
    with locked(here, note), writing(here):
        wanted = [remotes[f] for f in chosen if not ((here / f).is_file() and matches(remotes[f], here / f))]
        parts = [here / f"{remote.name}.part" for remote in wanted]
        begun = sum(part.stat().st_size for part in parts if part.exists())
        total = sum(remote.nbytes for remote in wanted)
        if wanted:
            require_room(here, total - begun)
            going_on = f", {begun / 1e6:,.0f} MB of them already here" if begun else ""
            note(f"fetching {len(wanted)} files, {total / 1e6:,.0f} MB{going_on}, of {name} ({commit[:8]}) into {here}")
        for remote in wanted:
            (here / remote.name).parent.mkdir(parents=True, exist_ok=True)
            fetch(remote, here / remote.name, _headers(config), progress)
    return _result(here, chosen)


def configuration(name: Name, config: Config, into: Path) -> Path:
    """A repository's config.json, in the folder ``into``, for a look before the weights are fetched.

    BadRequest when the model is a GGUF file, whose configuration comes with its weights.
    """
    _, remotes = listing(name, config)
    chosen = choose(name, {file: remote.nbytes for file, remote in remotes.items()})
    total = sum(remotes[file].nbytes for file in chosen)
    if chosen[0] != "config.json":
        raise BadRequest(f"{name} isn't here yet; `headrace pull` fetches it ({total / 1e6:,.0f} MB).")
    fetch(remotes["config.json"], into / "config.json", _headers(config), lambda *_: None)
    return into / "config.json"


def listing(name: Name, config: Config) -> tuple[str, dict[str, Remote]]:
    """(commit, file name -> file) of a repository at its revision."""
    repo = f"{name.org}/{name.repo}"
    url = f"{config.hub}/api/models/{repo}/revision/{quote(name.revision, safe='')}?blobs=true"
    try:
        with request(url, _headers(config)) as response:
            text = response.read(MAX_LISTING + 1)
    except urllib.error.HTTPError as error:
        raise refused(url, error) from None
    except NETWORK as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"{config.hub} can't be reached ({reason}); check the network, or HF_ENDPOINT.") from None
    try:
        data = json.loads(text)
        commit = str(data["sha"])
        remotes = [_remote(entry, f"{config.hub}/{repo}/resolve/{commit}") for entry in data["siblings"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadFile(f"{config.hub} gave a listing of {name} that can't be read; is it a Hugging Face hub?") from None
    return commit, {remote.name: remote for remote in remotes if remote is not None}


def _remote(entry: Mapping[str, Any], base: str) -> Remote | None:
    """None for a name that would leave the folder: a hub's answer is input like any other."""
    name, lfs = str(entry["rfilename"]), entry.get("lfs") or {}
    if not re.fullmatch(r"[^\\:\0]+", name) or any(part in ("", ".", "..") for part in name.split("/")):
        return None
    digest = ("sha256", lfs["sha256"]) if lfs else ("git", entry["blobId"]) if entry.get("blobId") else None
    return Remote(name, f"{base}/{quote(name)}", int(lfs.get("size", entry["size"])), digest)


def choose(name: Name, sizes: Mapping[str, int]) -> list[str]:
    """The files to fetch, the one that stands for the model first. BadRequest lists what there is to choose from."""
    ggufs = sorted(file for file in sizes if file.endswith(".gguf"))
    models = {(m[1] if (m := SPLIT.fullmatch(file)) else file): file for file in reversed(ggufs)}
    if name.file is not None:
        found = [name.file] if name.file in ggufs else []
        found = found or [first for stem, first in models.items() if name.file.lower() in stem.lower()]
        if len(found) != 1:
            what = "no GGUF file" if not found else "several GGUF files"
            raise BadRequest(f"{name} has {what} matching {name.file!r}; it has {_list(models, sizes)}.")
        return _parts(found[0], ggufs)
    top = sorted(f for f in sizes if f in FOLDER_FILES or ("/" not in f and f.endswith(".safetensors")))
    if "config.json" in top and any(file.endswith(".safetensors") for file in top):
        return ["config.json", *(file for file in top if file != "config.json")]
    if len(models) == 1:
        return _parts(next(iter(models.values())), ggufs)
    if models:
        raise BadRequest(f"{name} has several models; add one as `{name}:FILE`: {_list(models, sizes)}.")
    raise BadRequest(f"{name} has neither safetensors with a config.json nor GGUF files, so there is nothing to fetch.")


def _parts(first: str, ggufs: list[str]) -> list[str]:
    """All parts of a split model."""
    split = SPLIT.fullmatch(first)
    if split is None:
        return [first]
    return [file for file in ggufs if (m := SPLIT.fullmatch(file)) and m.group(1, 3) == split.group(1, 3)]


def _list(models: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{file} ({sizes[file] / 1e6:,.0f} MB)" for file in sorted(models.values())) or "none at all"


def _result(here: Path, chosen: list[str]) -> Path:
    return here if chosen[0] == "config.json" else here / chosen[0]


def _headers(config: Config) -> dict[str, str]:
    headers = {"User-Agent": f"headrace/{__version__}"}
    return {**headers, "Authorization": f"Bearer {config.token}"} if config.token else headers
