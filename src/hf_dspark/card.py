"""The model card of a draft model: facts from its folder, the rendered text, and merging with a card that is there.

What is not known is left out. The template lies beside this module, so that it is inside every installation.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData, RepoCard
from safetensors import safe_open
from yaml import YAMLError

from .configuration_dspark import DSparkConfig
from .errors import DSparkHubError

TRAINING_FACTS = "training_facts.json"
TAGS = ("dspark", "speculative-decoding", "draft-model")
# Not "transformers": for that library, and where none is named, the Hub offers `AutoModel.from_pretrained(...)` as the
# way to use the model, which cannot work before this package is imported. A name that the Hub does not know gets no
# snippet, can be filtered by, and downloads are counted by config.json.
LIBRARY_NAME = "hf-dspark"

BEGIN = "<!-- hf-dspark: generated from here; `hf-dspark push` writes it anew. Text before and after it is kept. -->"
END = "<!-- hf-dspark: generated up to here -->"

_CURVE_POINTS = 10


@dataclass
class Weights:
    """What the safetensors files of a folder hold.

    Attributes:
        files: their names.
        shapes: of every tensor.
        parameters: the number of floating-point numbers.
        dtypes: of these, as safetensors names them ("BF16").
    """

    files: list[str]
    shapes: dict[str, list[int]] = field(default_factory=dict)
    parameters: int = 0
    dtypes: list[str] = field(default_factory=list)

    @property
    def whole_tables(self) -> list[str]:
        """Tables over the target's whole vocabulary; a reduced draft head is the draft's own."""
        found = {"embed_tokens.weight"} if "d2t" in self.shapes else {"embed_tokens.weight", "lm_head.weight"}
        return sorted(found & set(self.shapes))


def read_weights(folder: Path) -> Weights:
    """Reads the headers of model.safetensors, or of its shards.

    Raises:
        DSparkHubError: there is none.
    """
    names = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not names:
        raise DSparkHubError(
            f"{folder} has no model.safetensors: it is no finished draft model. Give the output_dir of a training run "
            "that has ended, one of its checkpoint folders, or a folder written by `save_pretrained`."
        )
    weights = Weights(names)
    for name in names:
        with safe_open(str(folder / name), framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  no dict: it has no other iterator
                part = tensors.get_slice(key)
                weights.shapes[key] = shape = list(part.get_shape())
                dtype = part.get_dtype()
                if dtype.startswith(("F", "BF")):
                    weights.parameters += torch.Size(shape).numel()
                    weights.dtypes = sorted({*weights.dtypes, dtype})
    return weights


# --------------------------------------------------------------------------------------------------------------------
# Results of `hf-dspark eval --json` and `hf-dspark calibrate --json`
# --------------------------------------------------------------------------------------------------------------------
def read_results(path: Path) -> dict[str, Any] | None:
    """Such a file's content; `None` when it is another kind of JSON file, or none at all."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("settings"), dict):
        return None
    is_evaluation = isinstance(values.get("sets"), list) and isinstance(values["settings"].get("drafts"), dict)
    return values if is_evaluation or isinstance(values.get("modes"), dict) else None


def own_results(values: dict[str, Any], folder: Path, weights: Weights) -> dict[str, Any] | None:
    """The part of a result that was measured with this folder's weights; `None` when there is no such part.

    Tensors are compared by the fingerprint that the measurement kept, in the file's dtype and in the measured one.
    """
    from .evaluation.partial import fingerprint_of

    settings = values["settings"]
    tensors: dict[str, torch.Tensor] = {}
    for name in weights.files:
        with safe_open(str(folder / name), framework="pt") as file:
            tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    ours = {fingerprint_of(tensors)}
    dtype = getattr(torch, str(settings.get("dtype")), None)
    if isinstance(dtype, torch.dtype):
        ours.add(fingerprint_of({k: t.to(dtype) if t.is_floating_point() else t for k, t in tensors.items()}))
    if "modes" in values:
        return values if settings.get("draft_fingerprint") in ours else None
    labels = [label for label, draft in settings["drafts"].items() if draft.get("fingerprint") in ours]
    return {**values, "sets": [row for row in values["sets"] if row["draft"] == labels[0]]} if labels else None


# --------------------------------------------------------------------------------------------------------------------
# Rendering
# --------------------------------------------------------------------------------------------------------------------
def generated_card(
    *,
    repo_id: str,
    title: str,
    config: DSparkConfig,
    weights: Weights,
    base_model: str,
    wheel: str | None,
    revision: str | None,
    licence: dict[str, Any],
    runs: list[dict[str, Any]],
    results: list[dict[str, Any]],
    pictures: Iterable[str],
    tags: Iterable[str] = (),
    language: Any = None,
    datasets: Any = None,
) -> ModelCard:
    """The card, its text between the two markers.

    Args:
        repo_id: what the usage snippet loads.
        title: the heading.
        config, weights: the draft's.
        base_model: the target's Hub id.
        wheel: the requirement of the wheel whose weights it was trained for, where it was.
        revision: the target's commit, tag or branch, where it is known.
        licence: `license`, and `license_name` and `license_link` where the target's has them.
        runs: of `training_facts.json`.
        results: of `own_results`.
        pictures: paths of PNG files in the repository.
        tags, language, datasets: more metadata.
    """
    evaluations = [values for values in results if "sets" in values]
    modes: dict[str, Any] = dict(config.confidence_calibration or {})
    for values in results:
        modes.update(values.get("modes", {}))
    pictures = sorted(pictures)
    curve_picture = next((path for path in pictures if os.path.basename(path) == "learning_curve.png"), None)
    data = ModelCardData(
        base_model=base_model,
        **licence,
        library_name=LIBRARY_NAME,
        tags=[*TAGS, *(tag for tag in tags if tag not in TAGS)],
        language=language,
        datasets=datasets,
        model_name=title if evaluations else None,
        eval_results=_eval_results(evaluations) or None,
    )
    card = ModelCard.from_template(
        data,
        begin=BEGIN,
        end=END,
        template_str=resources.files(__package__).joinpath("card_template.md.jinja").read_text(encoding="utf-8"),
        repo_id=repo_id,
        title=title,
        wheel=wheel,
        revision=revision,
        revision_argument="" if revision is None else f', revision="{revision}"',
        draft_tokens=config.num_draft_tokens,
        model_rows=_model_rows(config, weights),
        training_heads=["", *(f"run {i}" if len(runs) > 1 else "" for i in range(1, len(runs) + 1))],
        training_rows=_training_rows(runs),
        learning_curve_picture=curve_picture,
        curve=_curve(runs[-1].get("curve", [])) if runs else [],
        measurements=[_measurement(values, config) for values in evaluations],
        calibrations=[_calibration(mode, modes[mode], config) for mode in ("greedy", "sample") if mode in modes],
        pictures=[
            {"name": Path(path).stem.replace("_", " "), "path": path} for path in pictures if path != curve_picture
        ],
    )
    card.text = re.sub(r"\n{3,}", "\n\n", card.text).strip() + "\n"  # absent parts leave gaps
    card.text = f"\n{card.text}"
    return card


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _model_rows(config: DSparkConfig, weights: Weights) -> list[tuple[str, str]]:
    layout = "the anchor's slot predicts too" if config.sample_from_anchor else "the anchor's slot predicts nothing"
    layers = "1 layer" if config.num_hidden_layers == 1 else f"{config.num_hidden_layers} layers"
    rows = [
        ("block size", f"{config.block_size} ({layout}): {config.num_draft_tokens} draft tokens a round"),
        ("tapped layers", f"{', '.join(map(str, config.target_layer_ids))} of {config.num_target_layers} (from 0)"),
        (
            "backbone",
            f"{layers} ({config.backbone}), hidden size {config.hidden_size}, "
            f"{config.num_attention_heads} heads, {config.num_draft_key_value_heads} key/value heads",
        ),
        (
            "sequential head",
            f"{config.markov_head_type}, rank {config.markov_rank}" if config.markov_rank else "none (DFlash)",
        ),
        ("confidence head", "yes" if config.enable_confidence_head else "no"),
    ]
    if config.draft_vocab_size < config.vocab_size:
        rows.append(("output vocabulary", f"{config.draft_vocab_size:,} of the target's {config.vocab_size:,} ids"))
    rows.append(("parameters", f"{weights.parameters:,} ({', '.join(weights.dtypes)}); both tables are the target's"))
    if weights.whole_tables or config.draft_vocab_size < config.vocab_size:
        rows[-1] = ("parameters", f"{weights.parameters:,} ({', '.join(weights.dtypes)})")
    if config.training_max_length is not None:
        rows.append(("longest training sequence", f"{config.training_max_length:,} tokens"))
    return rows


def _training_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    rows = [[label, *(_cell(value) for value in values)] for label, values in _training_values(runs)]
    return [row for row in rows if any(row[1:])]


def _training_values(runs: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    def amount(part: dict[str, int] | None) -> str:
        if part is None:
            return ""
        return f"{part['samples']:,} samples, {part['tokens']:,} tokens, {part['supervised_tokens']:,} supervised"

    def optimiser(run: dict[str, Any]) -> str:
        text = f"AdamW, peak rate {run['learning_rate']:g} ({run['lr_scheduler_type']})"
        return text if run["muon_learning_rate"] is None else f"Muon, {run['muon_learning_rate']:g}, and {text}"

    def metric(run: dict[str, Any], name: str) -> str:
        return _number(run["metrics"].get(f"eval_accepted_length_{name}"))

    return [
        ("started from", [run["started_from"] or "" for run in runs]),
        ("data", [", ".join(run["data"]["names"]) for run in runs]),
        ("trained on", [amount(run["data"]["train"]) for run in runs]),
        ("held out", [amount(run["data"]["held_out"]) for run in runs]),
        ("steps", [f"{run['steps']:,} ({run['epochs']:.2f} epochs)" for run in runs]),
        ("sequences per step", [run["sequences_per_step"] for run in runs]),
        ("anchors per sequence, at most", [run["num_anchors"] for run in runs]),
        ("supervised slots", [f"{run['slots']:,}" for run in runs]),
        ("optimiser", [optimiser(run) for run in runs]),
        ("precision", [run["precision"] for run in runs]),
        ("time", [_duration(run["seconds"]) for run in runs]),
        ("hardware", [run["hardware"] for run in runs]),
        ("versions", [", ".join(f"{name} {v}" for name, v in run["versions"].items()) for run in runs]),
        ("held-out expected accepted length, greedy", [metric(run, "greedy") for run in runs]),
        ("held-out expected accepted length, sampling", [metric(run, "sample") for run in runs]),
    ]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _curve(points: list[dict[str, float]]) -> list[dict[str, str]]:
    """At most `_CURVE_POINTS` of the points, the last one among them."""
    if len(points) < 2:
        return []
    step = -(-len(points) // _CURVE_POINTS)
    kept = points[::-1][::step][::-1]
    return [{"step": f"{p['step']:,}", "greedy": _number(p["greedy"]), "sample": _number(p["sample"])} for p in kept]


def _measurement(values: dict[str, Any], config: DSparkConfig) -> dict[str, Any]:
    settings = values["settings"]
    parts = [f"{settings['dtype']} on {settings['device']} ({settings['machine']})"]
    if settings["device"] == "cpu":
        parts.append(f"{settings['threads']} thread{'s' if settings['threads'] > 1 else ''}")
    parts.append(f"at most {settings['max_new_tokens']} new tokens")
    parts.append(
        "every block verified in full" if settings["full_blocks"] else "block lengths scheduled, as by default"
    )
    parts += [f"{name} {version}" for name, version in settings["versions"].items() if name != "python"]
    text = (
        f"With {', '.join(parts)}; each prompt generated plain and with the draft in turn. Speeds are relative to "
        "plain `generate` in the same run; decode speed leaves the first token out."
    )
    if settings["target"] != config.target_model_name_or_path:
        text += f" The target's weights were those of `{os.path.basename(settings['target'].rstrip('/'))}`."
    tables = []
    for temperature in dict.fromkeys(row["temperature"] for row in values["sets"]):
        rows = [row for row in values["sets"] if row["temperature"] == temperature]
        tables.append({"title": _mode(temperature, settings), "rows": [_set_row(row) for row in rows]})
        if temperature == 0:
            count = sum(row["summary"]["prompts"] for row in rows)
            same, ties, other = (sum(row[key] for row in rows) for key in ("identical", "ties", "different"))
            tables[-1]["texts"] = f"Of {count} greedy texts, {same} are the plain ones token for token" + (
                f", {ties} part from them where two logits are as good as equal" if ties else ""
            ) + (f", {other} differ otherwise" if other else "") + "."  # fmt: skip
    return {"conditions": text, "tables": tables}


def _mode(temperature: float, settings: dict[str, Any]) -> str:
    if temperature == 0:
        return "greedy"
    limits = [f"top-k {settings['top_k']}"] if settings["top_k"] else []
    limits += [f"top-p {settings['top_p']:g}"] if settings["top_p"] < 1 else []
    return ", ".join([f"temperature {temperature:g}", *limits])


def _set_row(row: dict[str, Any]) -> list[str]:
    summary = row["summary"]
    times = [summary["decode_speedup"], summary["end_to_end_speedup"]]
    return [
        _cell(row["prompt_set"]),
        str(summary["prompts"]),
        _number(summary["accepted_length"]),
        *("" if value is None else f"{value:.2f} ×" for value in times),
        " / ".join(_number(share) or "–" for share in summary["acceptance_by_position"]),
    ]


def _eval_results(evaluations: list[dict[str, Any]]) -> list[EvalResult]:
    """Accepted length and decode speed per prompt set and mode, for the card's metadata."""
    found = []
    for values in evaluations:
        settings = values["settings"]
        conditions = {name: settings[name] for name in ("dtype", "device", "threads", "max_new_tokens", "full_blocks")}
        for row in values["sets"]:
            mode = _mode(row["temperature"], settings)
            for metric, name in (("accepted_length", "Accepted length"), ("decode_speedup", "Decode speed-up")):
                if row["summary"][metric] is not None:
                    found.append(
                        EvalResult(
                            task_type="text-generation",
                            dataset_type="unknown",  # a prompt file; the Hub wants the id of a data set here
                            dataset_name=row["prompt_set"],
                            metric_type=metric,
                            metric_name=f"{name} ({mode})",
                            metric_value=round(row["summary"][metric], 3),
                            metric_args={"temperature": row["temperature"], **conditions},
                        )
                    )
    return found


def _calibration(mode: str, record: dict[str, Any], config: DSparkConfig) -> dict[str, Any]:
    kept = (config.confidence_temperatures or {}).get(mode)
    temperatures = kept or record.get("temperatures") or [None] * len(record["ece_before"])
    what = "Greedy decoding" if mode == "greedy" else f"Sampling at temperature {record['temperature']:g}"
    text = (
        f"{what}: fitted on {record['blocks']:,} full blocks of {record['prompts']} prompts, measured on "
        f"{record['held_out_blocks']:,} of {record['held_out_prompts']} others ({record['dtype']}, at most "
        f"{record['max_new_tokens']} new tokens, {record['date']}). Expected calibration error of the survival a_k:"
    )
    if kept is None:
        text = text.replace("Expected calibration", "These temperatures are not in the config. Expected calibration")
    rows = zip(temperatures, record["ece_before"], record["ece_after"])
    return {
        "text": text,
        "rows": [
            [str(k), _number(t, 3), f"{100 * before:.1f} %", f"{100 * after:.1f} %"]
            for k, (t, before, after) in enumerate(rows, start=1)
        ],
    }


# --------------------------------------------------------------------------------------------------------------------
# Merging with a card that is there
# --------------------------------------------------------------------------------------------------------------------
def parse_card(text: str, where: str) -> RepoCard:
    """A card with its metadata.

    Raises:
        DSparkHubError: its metadata cannot be read, or it has one marker of the generated part without the other.
    """
    try:
        card = RepoCard(text)
    except (ValueError, YAMLError) as error:
        raise DSparkHubError(
            f"The metadata of {where} cannot be read ({' '.join(str(error).split())}). Mend the block between its two "
            "lines of ---."
        ) from error
    if (card.text.count(BEGIN), card.text.count(END)) not in ((0, 0), (1, 1)) or (
        card.text.find(END) < card.text.find(BEGIN)
    ):
        raise DSparkHubError(
            f"{where} must have the two comments that enclose the generated part once each and in order. Restore them, "
            "or remove both to keep the whole text as it is."
        )
    return card


def is_hand_written(card: RepoCard) -> bool:
    """Whether it has text that was not generated."""
    if BEGIN not in card.text:
        return bool(card.text.strip())
    before, rest = card.text.split(BEGIN)
    return bool((before + rest.split(END)[1]).strip())


def merge_card(existing: str, where: str, generated: ModelCard) -> tuple[str, list[str]]:
    """An existing card with what it lacks.

    Its metadata win where it has a key; `tags` are joined. Only `model-index`, what was measured, is written anew, and
    only where the card has a generated part. The text between the markers is written anew; all other text stays. A card
    to which nothing is added comes out as it is, byte for byte.

    Args:
        existing: its text.
        where: whose it is, for messages.
        generated: of `generated_card`.

    Returns:
        The text, and the metadata keys that were added or changed.

    Raises:
        DSparkHubError: as `parse_card`.
    """
    card = parse_card(existing, where)
    theirs, old_text = card.data.to_dict(), card.text
    has_markers = BEGIN in old_text
    changed = {}
    for key, value in generated.data.to_dict().items():
        if key == "tags":
            tags = theirs.get("tags") or []
            tags = [tags] if isinstance(tags, str) else tags
            missing = [tag for tag in value if tag not in tags]
            if missing:
                changed[key] = [*tags, *missing]
        elif key not in theirs or (key == "model-index" and has_markers and theirs[key] != value):
            changed[key] = value
    if has_markers:
        before, rest = old_text.split(BEGIN)
        new = generated.text[generated.text.index(BEGIN) : generated.text.index(END)]
        card.text = before + new + END + rest.split(END)[1]
    elif not old_text.strip():
        card.text = generated.text
    if not changed and card.text == old_text:
        return existing, []
    for key, value in changed.items():
        card.data[key] = value
    return str(card), list(changed)
