"""Publishing a draft model: which files, under which licence, with which card, and the push to the Hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    HfApi,
    get_token,
    hf_hub_download,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from .card import (
    TRAINING_FACTS,
    Weights,
    generated_card,
    is_hand_written,
    merge_card,
    own_results,
    parse_card,
    read_results,
    read_weights,
)
from .configuration_dspark import DSparkConfig
from .demo_weights import PYPI_PREFIX, WHEELS
from .errors import DSparkCheckpointError, DSparkHubError
from .hub_errors import HUB_FAILURES, LOG_IN, explained

CARD = "README.md"
# What others need to use and to judge the draft. Optimiser states, logs, data and tokenizers (the target's) stay here.
_PUBLISHED = (
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(TRAINING_FACTS, "*.png", "plots/*.png", "LICENSE*", "NOTICE*"),
)
# In the folder's place when the draft is saved anew: what tells of it.
_TELLING = (TRAINING_FACTS, "*.png", "plots/*.png", "LICENSE*", "NOTICE*")
_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})")
_LICENCE_KEYS = ("license", "license_name", "license_link")
PUSH_KEYWORDS = (
    *("repo_id", "commit_message", "commit_description", "private", "revision", "create_pr", "tags"),
    *("license", "base_model", "evaluations"),
)


@dataclass
class Publication:
    """What is pushed, and what there is to say about it.

    Attributes:
        files: by path in the repository: a file here, or the bytes themselves (the card, a changed config.json).
        left_out: files and folders (with a slash at the end) that are not pushed.
        card: the model card's whole text.
        notes: one sentence per decision that a user may want to know of.
    """

    files: dict[str, Path | bytes]
    left_out: list[str]
    card: str
    notes: list[str] = field(default_factory=list)


@dataclass
class _Origin:
    """Where a draft's target is to be had."""

    base_model: str
    wheel: str | None = None
    revision: str | None = None
    folder: Path | None = None


# --------------------------------------------------------------------------------------------------------------------
# What is pushed
# --------------------------------------------------------------------------------------------------------------------
def prepare(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    license: str | None = None,
    base_model: str | None = None,
    evaluations: Iterable[str | os.PathLike] | None = None,
    tags: Iterable[str] = (),
    language: Any = None,
    datasets: Any = None,
    title: str | None = None,
    facts_folder: str | os.PathLike | None = None,
    published_card: str | None = None,
    tables_are_own: bool = False,
    token: bool | str | None = None,
    offline: bool = False,
) -> Publication:
    """Everything of a push that needs no repository.

    Args:
        folder: a draft model, as `save_pretrained` and training leave it.
        repo_id: where it is to go.
        license, base_model, evaluations: as in [`DSparkDraftModel.push_to_hub`].
        tags, language, datasets: more metadata of the card.
        title: the card's heading; by default the repository's name.
        facts_folder: where training facts, results, pictures and a hand-written card lie; by default `folder`.
        published_card: the text of the card that the repository has.
        tables_are_own: whether vocabulary tables in `folder` are known to differ from the target's.
        token: for the target's card on the Hub.
        offline: look the target's card up in the cache alone.

    Raises:
        DSparkHubError: `folder` is no draft model of this package or holds tables of the target, a measurement is of
            another draft, a card cannot be merged, or no base model or licence is known; the message has the fix.
    """
    folder = Path(folder)
    facts_folder = folder if facts_folder is None else Path(facts_folder)
    raw, config = _read_config(folder)
    weights = read_weights(folder)
    if weights.whole_tables and not tables_are_own:
        raise DSparkHubError(
            f"{folder} holds {', '.join(weights.whole_tables)}, as large as the target's own and mostly the same. Load "
            "the draft with its target, which drops what is the target's, and push that: "
            "DSparkDraftModel.from_pretrained(folder, target=target).push_to_hub(...)."
        )
    existing, where = _existing_card(facts_folder, published_card, repo_id)
    metadata = parse_card(existing, where).data.to_dict() if existing is not None else {}
    origin = _origin(config, base_model, metadata, where, folder)
    licence = _licence(origin, license, metadata, where, token, offline)
    results, notes = _results(folder, facts_folder, weights, evaluations)

    files: dict[str, Path | bytes] = {}
    for place, patterns in ((facts_folder, _TELLING), (folder, _PUBLISHED)):
        for pattern in patterns:
            files |= {path.relative_to(place).as_posix(): path for path in place.glob(pattern) if path.is_file()}
    kept = {os.path.dirname(name) for name in files}
    left_out = sorted(
        path.name + ("/" if path.is_dir() else "")
        for path in folder.iterdir()
        if path.name not in {*files, CARD} and path.name not in kept
    )
    if _is_path(config.target_model_name_or_path):
        raw |= {"target_model_name_or_path": origin.base_model, "target_revision": origin.revision}
        files["config.json"] = (json.dumps(raw, indent=2) + "\n").encode()
        notes.append(f"config.json will name the target as {origin.base_model}, not as a folder of this machine.")

    generated = generated_card(
        repo_id=repo_id,
        title=title or repo_id.split("/")[-1],
        config=config,
        weights=weights,
        base_model=origin.base_model,
        wheel=origin.wheel,
        revision=origin.revision,
        licence=licence,
        runs=_runs(files.get(TRAINING_FACTS)),
        results=results,
        pictures=[name for name in files if name.endswith(".png")],
        tags=tags,
        language=language,
        datasets=datasets,
    )
    if existing is None:
        card = str(generated)
    else:
        card, changed = merge_card(existing, where, generated)
        with_facts = "its generated part is written anew" if generated.text.strip() in card else "its text is as it was"
        added = f"; metadata added: {', '.join(changed)}" if changed else "; metadata: nothing to add"
        notes.append(f"The card is {where}: {with_facts}{added}.")
    files[CARD] = card.encode()
    return Publication(files, left_out, card, notes)


def _read_config(folder: Path) -> tuple[dict[str, Any], DSparkConfig]:
    file = folder / "config.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DSparkHubError(
            f"{str(folder)!r} is no folder with a config.json. Give the folder of a draft model; what is on the Hub "
            "already needs no push."
        ) from error
    except ValueError as error:
        raise DSparkCheckpointError(f"{file} is not JSON: {error}.") from error
    if not isinstance(raw, dict) or raw.get("model_type") != DSparkConfig.model_type:
        raise DSparkHubError(
            f"{file} is not of this package's layout (model_type 'dspark'). Load the draft model and save it with "
            "`save_pretrained`, then push that folder."
        )
    return raw, DSparkConfig.from_dict(dict(raw))


def _runs(file: Path | bytes | None) -> list[dict[str, Any]]:
    """Of a `training_facts.json`."""
    return json.loads(file.read_text(encoding="utf-8"))["runs"] if isinstance(file, Path) else []


def _existing_card(folder: Path, published: str | None, repo_id: str) -> tuple[str | None, str]:
    """The card to go on from: one that somebody wrote in the folder, else the repository's, else the folder's.

    Raises:
        DSparkHubError: the folder's cannot be read.
    """
    file = folder / CARD
    local = None
    if file.is_file():
        local = file.read_bytes().decode("utf-8-sig")
        if published is None or is_hand_written(parse_card(local, str(file))):
            return local, str(file)
    return (local, str(file)) if published is None else (published, f"{CARD} of {repo_id} on the Hub")


def _is_path(name: str | None) -> bool:
    """Whether a target's name is a folder of some machine, and not a Hub id or a wheel."""
    if not name or name.startswith(PYPI_PREFIX):
        return False
    looks_like_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name
    return looks_like_path or os.path.isdir(name)


def _origin(
    config: DSparkConfig, base_model: str | None, metadata: dict[str, Any], where: str, folder: Path
) -> _Origin:
    name = config.target_model_name_or_path
    theirs: Any = metadata.get("base_model")
    theirs = theirs[0] if isinstance(theirs, list) and theirs else theirs
    if base_model is not None and theirs is not None and theirs != base_model:
        raise DSparkHubError(f"{where} has base_model {theirs!r}, but {base_model!r} was given. Change one of the two.")
    given: str | None = base_model or theirs
    if name and name.startswith(PYPI_PREFIX):
        wheel = name.removeprefix(PYPI_PREFIX)
        if wheel in WHEELS:
            return _Origin(given or WHEELS[wheel].base_model, wheel=wheel)
    elif name and _is_path(name):
        target_folder = Path(name) if os.path.isdir(name) else None
        snapshot = _SNAPSHOT.search(name)
        if snapshot is not None:
            found = snapshot[1].replace("--", "/")
            if given in (None, found):
                return _Origin(found, revision=snapshot[2], folder=target_folder)
        if given is not None:
            return _Origin(given, folder=target_folder)
    elif name:
        # The revision is of the model that the config names; a base model given in its place has others.
        return _Origin(given or name, revision=config.target_revision if given in (None, name) else None)
    elif given is not None:
        return _Origin(given)
    named = f"names its target as {name!r}, which others do not have" if name else "names no target"
    raise DSparkHubError(f"config.json of {folder} {named}. Give the target's Hub id: --base-model OWNER/NAME.")


def _licence(
    origin: _Origin,
    given: str | None,
    metadata: dict[str, Any],
    where: str,
    token: bool | str | None,
    offline: bool,
) -> dict[str, Any]:
    """Given, or the existing card's, or the target's."""
    theirs = metadata.get("license")
    if given is not None and theirs is not None and given != theirs:
        raise DSparkHubError(f"{where} has license {theirs!r}, but {given!r} was given. Change one of the two.")
    if given is not None or theirs is not None:
        return {"license": given or theirs}
    if origin.wheel is not None:
        return {"license": WHEELS[origin.wheel].license}
    target = _target_metadata(origin, token, offline)
    found = {key: target[key] for key in _LICENCE_KEYS if isinstance(target.get(key), str)}
    if "license" not in found:
        place = "in the cache " if offline else ""
        raise DSparkHubError(
            f"Under which licence? No card of the target {origin.base_model} {place}names one. Give it: --license "
            "apache-2.0, for instance (https://huggingface.co/docs/hub/repositories-licenses lists the names)."
        )
    link = found.get("license_link")
    if link is not None and "://" not in link:  # a file of the target's repository
        found["license_link"] = f"https://huggingface.co/{origin.base_model}/blob/main/{link}"
    return found


def _target_metadata(origin: _Origin, token: bool | str | None, offline: bool) -> dict[str, Any]:
    """Of the target's card, in its folder, in the cache or on the Hub; empty where there is none to be had."""
    file = origin.folder / CARD if origin.folder is not None else None
    if file is None or not file.is_file():
        file = None
        found: Any = None
        for revision in dict.fromkeys((origin.revision, None)):  # a snapshot without its card: any other will do
            if offline or is_offline_mode():
                # `local_files_only` would do, but for a request with which the client finds out about itself.
                found = try_to_load_from_cache(origin.base_model, CARD, revision=revision)
            else:
                with contextlib.suppress(*HUB_FAILURES):
                    found = hf_hub_download(origin.base_model, CARD, revision=revision, token=token)
            if isinstance(found, str):
                file = Path(found)
                break
    if file is None:
        return {}
    try:
        return parse_card(file.read_bytes().decode("utf-8-sig"), str(file)).data.to_dict()
    except (DSparkHubError, UnicodeDecodeError):  # somebody else's mistake
        return {}


def _results(
    folder: Path, facts_folder: Path, weights: Weights, given: Iterable[str | os.PathLike] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The measurements of this very draft, and what is to be said about others."""
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    if given is not None:
        for path in map(Path, given):
            if not path.is_file():
                raise DSparkHubError(f"There is no file {str(path)!r}. Write it with hf-dspark eval --json {path}.")
            values = read_results(path)
            if values is None:
                raise DSparkHubError(
                    f"{path} is no result of hf-dspark eval --json or hf-dspark calibrate --json (without --sweep)."
                )
            own = own_results(values, folder, weights)
            if own is None:
                raise DSparkHubError(
                    f"{path} was measured with other weights than those in {folder}. Measure these: "
                    f"hf-dspark eval --draft {folder} --json {path}."
                )
            found.append(own)
        return found, notes
    for path in sorted(facts_folder.glob("*.json")):
        values = read_results(path)
        if values is not None:
            own = own_results(values, folder, weights)
            notes.append(f"{path.name}: {'in the card' if own else 'of other weights, so not in the card'}.")
            found += [own] if own else []
    return found, notes


# --------------------------------------------------------------------------------------------------------------------
# The push
# --------------------------------------------------------------------------------------------------------------------
def check_publishable(config: DSparkConfig, license: str | None, base_model: str | None, folder: Path) -> None:
    """Refuses, before a training run, what its pushes would refuse.

    Raises:
        DSparkHubError: no base model or licence will be known.
    """
    existing, where = _existing_card(folder, None, "")
    metadata = parse_card(existing, where).data.to_dict() if existing is not None else {}
    _licence(_origin(config, base_model, metadata, where, folder), license, metadata, where, None, False)


def published_card(repo_id: str, revision: str | None = None, token: bool | str | None = None) -> str | None:
    """The text of the card that a repository has; `None` where there is none. A new branch begins with main's."""
    for wanted in dict.fromkeys((revision, None)):
        try:
            file = hf_hub_download(repo_id, CARD, revision=wanted, token=token)
            return Path(file).read_bytes().decode("utf-8-sig")
        except RevisionNotFoundError:
            continue
        except (RepositoryNotFoundError, EntryNotFoundError):
            return None
    return None


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    **options: Any,
) -> tuple[Publication, CommitInfo]:
    """Pushes a draft model's folder, in one commit; the repository is made where there is none.

    Args:
        folder, repo_id: see [`prepare`]; `repo_id` without an owner is the token's own.
        commit_message, commit_description, private, token, revision, create_pr: as in `PreTrainedModel.push_to_hub`.
        options: those of [`prepare`].

    Returns:
        What was pushed, and the Hub's answer.

    Raises:
        DSparkHubError: as [`prepare`], or the Hub refuses.
    """
    from . import __version__

    _read_config(Path(folder))  # a mistyped folder is told before anything is asked of the Hub
    api = HfApi(library_name="hf-dspark", library_version=__version__)
    with explained(DSparkHubError, repo_id, revision, writing=True):
        validate_repo_id(repo_id)
        if is_offline_mode():
            raise DSparkHubError(f"Nothing can be pushed to {repo_id} while HF_HUB_OFFLINE is set: unset it.")
        if not isinstance(token, str) and get_token() is None:
            raise DSparkHubError(f"Pushing to {repo_id} needs a Hub token, and there is none: {LOG_IN}.")
        if "/" not in repo_id:
            repo_id = f"{api.whoami(token=token)['name']}/{repo_id}"
        card = published_card(repo_id, revision, token)
    publication = prepare(folder, repo_id, published_card=card, token=token, **options)
    with explained(DSparkHubError, repo_id, revision, writing=True):
        api.create_repo(repo_id, private=private, token=token, exist_ok=True)
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        info = api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=what) for name, what in publication.files.items()],
            commit_message=commit_message or "Upload draft model",
            commit_description=commit_description,
            token=token,
            revision=revision,
            create_pr=create_pr,
        )
    return publication, info


class HubMixin:
    """`push_to_hub` of [`DSparkDraftModel`], in place of transformers' own."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: list[str] | None = None,
        license: str | None = None,
        base_model: str | None = None,
        evaluations: Sequence[str | os.PathLike] | None = None,
    ) -> CommitInfo:
        """Uploads config.json, generation_config.json, the draft's own tensors and a model card; never a table of the
        target's.

        The card is made from facts: those of the config, and of the folder that the draft was loaded from, where it has
        them (training, results of `hf-dspark eval`, pictures). A card that somebody wrote, in that folder or in the
        repository, is kept and added to.

        Args:
            repo_id, commit_message, commit_description, private, token, revision, create_pr, max_shard_size, tags: as
                in `PreTrainedModel.push_to_hub`.
            license: the draft's, such as `"apache-2.0"`; by default that of the target's card.
            base_model: the target's Hub id; by default the one that the config names.
            evaluations: JSON files of `hf-dspark eval` and `hf-dspark calibrate`; by default those in the folder that
                the draft was loaded from.

        Raises:
            DSparkHubError: no licence or no base model is known, a measurement is of another draft, or the Hub refuses;
                the message has the fix.
        """
        draft: Any = self
        source = draft.config.name_or_path
        with tempfile.TemporaryDirectory() as temporary:
            draft.save_pretrained(temporary, max_shard_size=max_shard_size)
            _, info = push_folder(
                temporary,
                repo_id,
                commit_message=commit_message,
                commit_description=commit_description,
                private=private,
                token=token,
                revision=revision,
                create_pr=create_pr,
                license=license,
                base_model=base_model,
                evaluations=evaluations,
                tags=[*(draft.model_tags or ()), *(tags or ())],
                facts_folder=source if os.path.isdir(source) else None,
                tables_are_own=draft.was_bound,
            )
        return info
