"""The notebook in `examples/` runs from top to bottom in a fresh kernel."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"
pytestmark = [pytest.mark.real, pytest.mark.slow]


def printed(cells) -> str:
    return "".join(
        out.get("text", "") for cell in cells for out in cell.get("outputs", ()) if out.get("name") == "stdout"
    )


def test_quickstart(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = printed(cells)
    assert "equal in fp32: True" in text and "drafts accepted" in text and "step 8: loss" in text
    pictures = [out for cell in cells for out in cell.outputs if "image/png" in out.get("data", {})]
    assert len(pictures) == 1
