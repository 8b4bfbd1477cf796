"""Push: put a result's folder on the hub, private by default. A failed push costs no result."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.kind import class_name, find_used_class_in, head_note
from leansurgeon.checkpoints.publish import card
from leansurgeon.checkpoints.record import NAME
from leansurgeon.errors import LeanSurgeonError, NotPushed, UsageError
from leansurgeon.progress import Say, silent
from leansurgeon.reading import modelcard, names

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Weights at the top of a repository, which the new ones replace. All other files are left alone.
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
# What libraries read besides a model's weights: adapters, tokenizer, processor, settings, modules.
ADAPTER = "adapter_config.json"
READ = (ADAPTER, *names.TOKENIZER, *names.TEMPLATES, *names.PROCESSOR, names.GENERATION, *names.SENTENCES)
FOREIGN = "Push to another repository; or --force puts the result in their place."


def check(repo: str, say: Say, *, private: bool = True, force: bool = False, token: str | None = None) -> None:
    """Check before the work what would stop the push to `org/name` after it. If the hub cannot be reached, its part of
    the check is left for then. `private` applies if the repository is new, `force` replaces files of another model.

    Raises `UsageError` for an invalid name, without network or token, for a read-only token, and for a repository that
    is public where a private one is expected, or holds another model.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        raise UsageError(f"--push {repo}: this is not a valid name on the hub.", "Give ORG/NAME.") from None
    if repo.count("/") != 1:
        raise UsageError(f"--push {repo}: the name has no owner.", "Give ORG/NAME, or your own name before the slash.")
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push needs the hub, and HF_HUB_OFFLINE is set.", "Unset it, or push later.")
    if not (token or get_token()):
        raise UsageError("--push needs a token for the hub, and there is none.", "`hf auth login`, or set HF_TOKEN.")
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    api = client(token)
    try:
        who = api.whoami()
        rights = who.get("auth", {}).get("accessToken", {})
        if isinstance(rights, dict) and rights.get("role") == "read":
            raise UsageError("--push: the token may only read.", "Make one that may write, and `hf auth login` again.")
        if private:
            refuse_public(api, repo)
        refuse_foreign(repo, force, Content.of(api, repo))
    except RepositoryNotFoundError:
        return  # it will be created
    except LeanSurgeonError:
        raise
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise UsageError(
                "--push: the hub does not accept this token.", "`hf auth login`, or set HF_TOKEN."
            ) from None
        say(f"The hub cannot be asked about {repo} now ({status}); it is tried when the work is done.")
    except Exception as error:  # there is an exception class for each kind of network failure
        say(f"The hub cannot be asked about {repo} now ({type(error).__name__}); it is tried after the work.")


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = True,
    force: bool = False,
    token: str | None = None,
    say: Say = silent,
) -> str:
    """Push a result's folder to a repository, created if new; return its address.

    The card gets the repository's name and keeps what people wrote on an existing one. Of existing files, only weights
    that the new ones replace are deleted; with `force`, also files that would be read beside them. Raises `UsageError`
    as `check` does, and `NotPushed` with the command to retry: the folder stays as it is.
    """
    check(repo, say, private=private, force=force, token=token)
    # Loading by a class whose head is not in the files would give a random one. An embedder is loaded by its
    # modules.json instead.
    if (folder / "config.json").is_file() and not companions.is_embedder(folder):
        name, used = class_name(read_config(folder)), find_used_class_in(folder)
        if note := head_note(name, used, folder):
            raise NotPushed(
                f"{folder} is complete, but was not pushed: {note}. Whoever loads {name} would get a random head.",
                f'Name what it is, "architectures": ["{used}"] in its config.json, or train the head: leansurgeon '
                "retrain FOLDER --data DATA. Then push.",
            )
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api = client(token)
    say(f"Pushing {folder} to {repo} ...")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if private:
            refuse_public(api, repo)
        card.rename(folder, repo.split("/")[-1])
        theirs = Content.of(api, repo)
        files = {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if file.is_file()}
        hidden = {name for name in files if any(part.startswith(".") for part in name.parts)}
        ours = {name.as_posix(): file for name, file in files.items() if name not in hidden}
        others = refuse_foreign(repo, force, theirs, ours)
        given = dict(ours)
        if theirs.card and modelcard.CARD in ours:
            given[modelcard.CARD] = card.merge_cards(
                theirs.card, ours[modelcard.CARD].read_text(encoding="utf-8")
            ).encode()
        elif modelcard.CARD in theirs.files:
            say(f"{modelcard.CARD} of {repo} cannot be read, and stays as it is.")
            given.pop(modelcard.CARD, None)
        gone = [name for name in theirs.files if WEIGHTS.fullmatch(name) and name not in ours]
        operations = [CommitOperationAdd(name, source) for name, source in given.items()]
        operations += [CommitOperationDelete(name) for name in sorted({*gone, *others})]
        api.create_commit(repo, operations, commit_message="Made by leansurgeon", parent_commit=theirs.commit)
    except UsageError as error:
        raise NotPushed(f"{folder} is complete, but was not pushed: {error.message}", error.hint) from None
    except Exception as error:  # whatever the hub's client raises: report that the result is complete
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(
            "."
        )  # the first line of its message
        why = f"{status}: {why}" if status and str(status) not in why else why
        again = f"hf upload {shlex.quote(repo)} {shlex.quote(str(folder))}{' --private' if private else ''}"
        raise NotPushed(f"{folder} is complete, but was not pushed to {repo}: {why}.", f"Again: {again}") from error
    return f"{api.endpoint}/{repo}"


@dataclass(frozen=True)
class Content:
    """The content of a repository: size and digest of its files by name, the text of its card (empty if unreadable),
    and its commit.
    """

    files: Mapping[str, tuple[int, str]]
    card: str = ""
    commit: str | None = None
    is_ours: bool = False  # pushed by leansurgeon, or without files of a model

    @classmethod
    def of(cls, api: HfApi, repo: str) -> Content:
        """Read the content of a repository. Raises what the hub's client raises."""
        from huggingface_hub.hf_api import RepoFile

        tree = [entry for entry in api.list_repo_tree(repo, recursive=True) if isinstance(entry, RepoFile)]
        files = {entry.path: (entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id) for entry in tree}
        text, tags = "", []
        # if the client raises, the card stays as it is
        with tempfile.TemporaryDirectory() as place, suppress(Exception):
            if modelcard.CARD in files:
                read = Path(api.hf_hub_download(repo, modelcard.CARD, local_dir=place)).read_text(encoding="utf-8")
                text, tags = read, card.tags_of(modelcard.parts(read, repo)[0])
        ours = NAME in files or card.TAG in tags or not any(map(is_of_a_model, files))
        return cls(files, text, api.repo_info(repo).sha, ours)


def is_of_a_model(name: str) -> bool:
    """Return whether a file belongs to the model in the repository's top folder."""
    return bool(WEIGHTS.fullmatch(name)) or name == "config.json" or any(fnmatch(name, one) for one in READ)


def refuse_foreign(repo: str, force: bool, theirs: Content, ours: Mapping[str, Path] | None = None) -> list[str]:
    """Return the files of a repository that would be read beside the pushed ones, which `force` deletes. `ours` are
    known once the work is done.

    Raises `UsageError` for files of another model without `force`.
    """
    read = [name for name in theirs.files if any(fnmatch(name, one) for one in READ)]
    beside = [name for name in read if name not in ours] if ours is not None else [n for n in read if n == ADAPTER]
    others = list(beside)
    if ours is not None:
        own = [n for n in read if n in ours and n in companions.READING]
        others += [n for n in own if not same(ours[n], *theirs.files[n])]
    if not theirs.is_ours:
        others += [name for name in theirs.files if is_of_a_model(name)]
    if others and not force:
        first = list(dict.fromkeys(others))
        more = f" and {len(first) - 4} more" if len(first) > 4 else ""
        raise UsageError(f"{repo} holds files of another model: {', '.join(first[:4])}{more}.", FOREIGN)
    return beside


def same(file: Path, size: int, digest: str) -> bool:
    """Return whether a file has this size and digest: SHA-256 for LFS files, else git's."""
    if file.stat().st_size != size:
        return False
    content = file.read_bytes()
    return digest in (hashlib.sha256(content).hexdigest(), hashlib.sha1(b"blob %d\0" % size + content).hexdigest())


def client(token: str | None) -> HfApi:
    """Return the hub's client, for the endpoint in the environment."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="leansurgeon")


def refuse_public(api: HfApi, repo: str) -> None:
    """Raise `UsageError` if a private push would be publicly visible."""
    if api.repo_info(repo).private is False:
        raise UsageError(
            f"{repo} is there already and is public.", "Add --public if it may be, or name another repository."
        )
