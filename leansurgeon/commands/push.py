"""Push: a result's folder to the hub, private unless told otherwise. A push that fails costs no result."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.errors import LeanSurgeonError, NotPushed, UsageError
from leansurgeon.progress import Say, silent

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# What another model may have left in the repository, and would be loaded beside or instead of what is pushed.
OF_BEFORE = ["*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json"]


@dataclass(frozen=True)
class Target:
    """A repository `org/name` of the hub; `private` is how it is made where it is new."""

    repo: str
    private: bool = True

    def again(self, folder: Path) -> str:
        """The line that pushes a folder there."""
        return f"hf upload {shlex.quote(self.repo)} {shlex.quote(str(folder))}{' --private' if self.private else ''}"


def target(repo: str | None, *, public: bool, dry_run: bool = False) -> Target | None:
    """What `--push` and `--public` ask for. Raises `UsageError` for what excludes each other."""
    if repo is None:
        if public:
            raise UsageError("--public is for a push.", "Add --push ORG/NAME.")
        return None
    if dry_run:
        raise UsageError("--push and --dry-run exclude each other: a dry run writes nothing.", "Leave one of them out.")
    return Target(repo, not public)


def check(where: Target, say: Say, token: str | None = None) -> None:
    """Say before the work what would stop the push after it. What only the hub knows, and it cannot be asked, is left
    for then.

    Raises `UsageError` for a name that is none, without network or token, for a token that may only read, and for a
    repository that is public where a private one is meant.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(where.repo)
    except HFValidationError:
        raise UsageError(f"--push {where.repo}: the hub knows no such name.", "Give ORG/NAME.") from None
    if where.repo.count("/") != 1:
        raise UsageError(f"--push {where.repo}: whose is it?", "Give ORG/NAME, or your own name before the slash.")
    if constants.HF_HUB_OFFLINE:
        raise UsageError("--push needs the hub, and HF_HUB_OFFLINE is set.", "Unset it, or push later.")
    if not (token or get_token()):
        raise UsageError("--push needs a token of the hub, and there is none.", "`hf auth login`, or set HF_TOKEN.")
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    api = client(token)
    try:
        who = api.whoami()
        if role(who) == "read":
            raise UsageError("--push: the token may only read.", "Make one that may write, and `hf auth login` again.")
        refuse_public(api, where)
    except RepositoryNotFoundError:
        return  # it is made
    except LeanSurgeonError:
        raise
    except HfHubHTTPError as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401:
            raise UsageError("--push: the hub does not take this token.", "`hf auth login`, or set HF_TOKEN.") from None
        say(f"The hub cannot be asked about {where.repo} now ({status}); it is tried when the work is done.")
    except Exception as error:  # a class of its own for every way in which a network fails
        say(f"The hub cannot be asked about {where.repo} now ({type(error).__name__}); it is tried after the work.")


def push(folder: Path, repo: str, *, private: bool = True, token: str | None = None, say: Say = silent) -> str:
    """Put a result's folder into a repository, made where it is new; its card is named after it. Returns its address.

    Raises `UsageError` as `check` does, and `NotPushed` with the line that tries again: the folder stays as it is.
    """
    where = Target(repo, private)
    check(where, say, token)
    from leansurgeon.checkpoints.publish.card import rename

    api = client(token)
    say(f"Pushing {folder} to {repo} ...")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        refuse_public(api, where)
        rename(folder, repo.split("/")[-1])
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message="Made by leansurgeon",
            ignore_patterns=[".*", "**/.*"],
            delete_patterns=OF_BEFORE,
        )
    except UsageError as error:
        raise NotPushed(f"{folder} is whole, and was not pushed: {error.message}", error.hint) from None
    except Exception as error:  # whatever the hub's client raises: the result is whole, and that is said
        raise NotPushed(
            f"{folder} is whole, and was not pushed to {repo}: {reason(error)}.", f"Again: {where.again(folder)}"
        ) from error
    return f"{api.endpoint}/{repo}"


def client(token: str | None) -> HfApi:
    """The hub's client, for the endpoint that the environment names now."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token, library_name="leansurgeon")


def refuse_public(api: HfApi, where: Target) -> None:
    """Raises `UsageError` where a private push would be seen by everybody."""
    if where.private and api.repo_info(where.repo).private is False:
        raise UsageError(
            f"{where.repo} is there already and is public.", "Add --public if it may be, or name another repository."
        )


def role(who: dict) -> str:
    """What the token may do: read, write, or another word of the hub's."""
    token = who.get("auth", {}).get("accessToken", {})
    return str(token.get("role", "")) if isinstance(token, dict) else ""


def reason(error: Exception) -> str:
    """The first line of what the hub's client said."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return f"{status}: {first}" if status and str(status) not in first else first
