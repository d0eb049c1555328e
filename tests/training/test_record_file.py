"""The file that written records go to: whole lines, one set of settings, every run on record."""

import json

import pytest
from writing import record_file

from hf_dspark.errors import DSparkDataError
from hf_dspark.training.record_file import RecordFile, read_meta


def test_other_settings_are_refused_and_named(tmp_path):
    path = tmp_path / "out.jsonl"
    settings = {"target": "a", "temperature": [0.0, 1.0], "seed": 1}
    record_file(path, settings).append([{"id": "x"}])
    assert record_file(path, {**settings, "temperature": (0.0, 1.0)}).ids == {"x"}
    with pytest.raises(DSparkDataError, match=r'target "a" there, "b" now; seed 1 there, 2 now; more null there'):
        record_file(path, {**settings, "target": "b", "seed": 2, "more": 3})
    assert json.loads(path.read_text()) == {"id": "x"} and read_meta(path)["settings"]["target"] == "a"


def test_a_file_that_is_not_ours_stays_as_it_is(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"prompt": "w1"}')  # without a line break at its end: not torn, but somebody's
    with pytest.raises(DSparkDataError, match=r"out\.jsonl\.meta\.json.*does not"):
        record_file(path)
    assert path.read_text() == '{"prompt": "w1"}'
    record_file(tmp_path / "own.jsonl").append([{"id": "a"}, {"id": "b"}])
    whole = (tmp_path / "own.jsonl").read_text()
    for damaged, words in ((whole.replace('{"id": "a"}', "{"), "line 1"), (whole + '{"id": "a"}\n', "'a' twice")):
        (tmp_path / "own.jsonl").write_text(damaged)
        with pytest.raises(DSparkDataError, match=words):
            record_file(tmp_path / "own.jsonl")
    (tmp_path / "own.jsonl.meta.json").write_text("{}")
    with pytest.raises(DSparkDataError, match="damaged"):
        record_file(tmp_path / "own.jsonl")


def test_a_run_that_was_killed_is_on_record_too(tmp_path):
    """Between two savings of the meta file."""
    path = tmp_path / "out.jsonl"
    RecordFile(path, {}, {}, {"machine": "first"}).append([{"id": "a"}, {"id": "b"}])
    RecordFile(path, {}, {}, {"machine": "second"})
    RecordFile(path, {}, {}, {"machine": "third"}).append([{"id": "c"}])
    RecordFile(path, {}, {}, {"machine": "fourth"})
    runs = [(run["machine"], run["records"]) for run in read_meta(path)["runs"]]
    assert runs == [("first", 2), ("third", 1), ("fourth", 0)]  # the last may still write


def test_the_meta_file_lists_the_runs_that_wrote(tmp_path):
    path = tmp_path / "sub" / "out.jsonl"
    file = record_file(path, chat_template="t")
    file.append([{"id": "a"}, {"id": "b"}])
    file.counts["x"] = 3
    file.save_meta()
    record_file(path).save_meta()  # writes nothing, so it is no run
    file = record_file(path)
    file.append([{"id": "c"}])
    file.save_meta()
    meta = read_meta(path)
    assert meta["counts"] == {"records": 3, "x": 3}
    assert [run["records"] for run in meta["runs"]] == [2, 1] and meta["runs"][0]["machine"] == "this one"
    assert not list(path.parent.glob("*.tmp"))
