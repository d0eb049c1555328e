import dataclasses

from hf_dspark.evaluation.harness import Evaluation, SetResult
from hf_dspark.evaluation.metrics import Summary
from hf_dspark.evaluation.plots import plot_learning_curve, write_plots


def test_three_pictures_per_temperature(tmp_path):
    empty = Summary(**{field.name: None for field in dataclasses.fields(Summary)})
    empty.acceptance_by_position = [None] * 3
    full = dataclasses.replace(empty, accepted_length=1.9, acceptance_by_position=[0.5, 0.3, None], decode_speedup=1.4)
    results = [
        SetResult(temperature, prompt_set, draft, summary, None, 0, 0)
        for temperature in (0.0, 1.0)
        for prompt_set in ("a", "b")
        for draft, summary in (("DSpark", full), ("nothing", empty))
    ]
    written = write_plots(Evaluation(["DSpark", "nothing"], [], results), tmp_path / "new" / "folder")
    assert sorted(path.name for path in written) == sorted(
        f"{name}_{t}.png" for t in (0, 1) for name in ("accepted_length", "acceptance_by_position", "speedup")
    )
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_learning_curve(tmp_path):
    history = [
        {"step": 1, "loss": 3.0},
        *({"step": n, "eval_accepted_length_greedy": 1.2, "eval_accepted_length_sample": 1.1} for n in (2, 4)),
    ]
    plot_learning_curve({"DSpark": history, "DFlash": history}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
