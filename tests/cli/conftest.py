import json

import pytest
from tiny_pair import save_pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Paths of a target and of a draft model whose config names it."""
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": [f"w{i} w{i + 1}", "ignored"]} for i in range(3, 6)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)
