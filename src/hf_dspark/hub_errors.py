"""What goes wrong between a user and the Hub, in one line with the fix; for loading and for pushing alike."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of the HTTP client that the installed huggingface_hub uses
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .errors import DSparkError

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
# ValueError: a repository id that cannot be one, and metadata that the Hub does not take.
HUB_FAILURES = (OSError, HTTPError, ValueError)


def explain(error: BaseException, name: str, revision: str | None = None, writing: bool = False) -> str | None:
    """One line with the fix, or `None` when `error` has nothing to do with the Hub.

    Args:
        error: what was caught; transformers wraps the Hub's own exceptions, so its causes are looked at too.
        name: the folder or Hub id that was asked for.
        revision: the branch, tag or commit that was asked for.
        writing: whether something was to be pushed.
    """
    link: BaseException | None = error
    while link is not None:
        sentence = _explain_one(link, name, revision, writing)
        if sentence is not None:
            return sentence
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return None


@contextlib.contextmanager
def explained(
    error_class: type[DSparkError], name: str | os.PathLike, revision: str | None = None, writing: bool = False
) -> Iterator[None]:
    """Turns failures of the Hub within the block into `error_class`; other exceptions pass through."""
    try:
        yield
    except DSparkError:
        raise
    except HUB_FAILURES as error:
        sentence = explain(error, os.fspath(name), revision, writing)
        if sentence is None:
            raise
        raise error_class(sentence) from error


def _explain_one(error: BaseException, name: str, revision: str | None, writing: bool) -> str | None:
    at = "" if revision is None else f" at revision {revision!r}"
    if isinstance(error, GatedRepoError):  # before RepositoryNotFoundError, which it derives from
        return (
            f"{name} is gated, and this account has no access to it. Ask for access at https://huggingface.co/{name}, "
            f"then {LOG_IN}."
        )
    if isinstance(error, RepositoryNotFoundError):
        if writing:
            return (
                f"The Hub knows no repository {name!r} that this token may write to. Check the name (OWNER/NAME), and "
                f"{LOG_IN} with a token that has write access."
            )
        return (
            f"{name!r} is no folder here, and on the Hub there is no such model, or it is private. Check the spelling; "
            f"for a private model, {LOG_IN}."
        )
    if isinstance(error, RevisionNotFoundError):
        return (
            f"{name} has no revision {revision!r}. Give a branch, a tag or a commit; "
            f"https://huggingface.co/{name}/tree/main lists them."
        )
    if isinstance(error, DisabledRepoError):
        return f"The Hub has disabled {name}; nothing of it can be read or written."
    if isinstance(error, LocalTokenNotFoundError):
        return f"There is no Hub token on this machine: {LOG_IN}."
    if isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError)):
        if writing:
            return f"Nothing can be pushed to {name} while HF_HUB_OFFLINE is set: unset it."
        if is_offline_mode():
            return (
                f"{name}{at} is not in the cache, or not all of it, and HF_HUB_OFFLINE is set. Unset it, or fetch the "
                f"model where there is a network (`hf download {name}`)."
            )
        return (
            f"{name}{at} is not in the cache, or not all of it, and the Hub was not reached (no network, or "
            f"local_files_only). Check the network and any proxy, or fetch the model first (`hf download {name}`)."
        )
    if isinstance(error, HFValidationError):
        if writing:
            return f"{name!r} is no Hub id. Give OWNER/NAME, of letters, digits, '-', '_' and '.'."
        return f"{name!r} is neither a folder here nor a Hub id. Give a folder that exists, or OWNER/NAME."
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, name, writing)
    if isinstance(error, HTTPError):  # none of the Hub's answers: the connection itself
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"The Hub cannot be reached for {name} ({reason}). Check the network and any proxy, then try again."
    return None


def _explain_status(error: HfHubHTTPError, name: str, writing: bool) -> str | None:
    status = error.response.status_code
    if status == 401:
        return f"The Hub does not accept this token, or there is none: {LOG_IN}."
    if status == 403 and writing:
        return (
            f"This token may not write to {name}. Make one with write access at https://huggingface.co/settings/tokens "
            f"and {LOG_IN} with it; or push to a namespace of your own."
        )
    if status == 403:
        return f"This token may not read {name}. Ask its owner for access, or {LOG_IN} with another token."
    if status == 404:
        return None  # one missing file of a repository that is there: the caller knows whether it matters
    said = error.server_message or f"status {status}"
    if status == 429:
        return f"The Hub asks for fewer requests ({said}). Wait a few minutes, and {LOG_IN} for a higher limit."
    if status >= 500:
        return f"The Hub is in trouble ({' '.join(said.split())}). Try again later."
    return f"The Hub refused the request for {name}: {' '.join(said.split())}."
