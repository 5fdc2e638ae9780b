"""Every name of torch and Triton that the package writes exists: what only a GPU runs is looked up here, too."""

import ast
import importlib
from pathlib import Path

import pytest
import torch

import sglang_dsa_plugin
from sglang_dsa_plugin.kernels.triton import index_scores

ROOT = Path(sglang_dsa_plugin.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
LIBRARIES = ("torch", "triton")


def imported(tree: ast.AST) -> dict[str, object]:
    """What the names stand for that a source brings in from LIBRARIES, wherever it does so."""
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.split(".")[0]
                if top in LIBRARIES:
                    module = importlib.import_module(name.name)
                    found[name.asname or top] = module if name.asname else importlib.import_module(top)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
                found[name.asname or name.name] = getattr(module, name.name)
    return found


def missing(source: str) -> list[str]:
    """Dotted names of `source` that LIBRARIES do not have, with their lines."""
    tree = ast.parse(source)
    known = imported(tree)
    # A name that is bound elsewhere in the source as well is not followed.
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    # `getattr(module, "new", None) or module.old`: the old one may lack.
    choices = [node for node in ast.walk(tree) if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)]
    choices = [node for node in choices if ast.unparse(node.values[0]).startswith("getattr(")]
    asked = {id(part) for choice in choices for part in ast.walk(choice)}
    lacking = []
    for node in ast.walk(tree):
        path, at = [], node
        while isinstance(at, ast.Attribute):
            path.insert(0, at.attr)
            at = at.value
        if id(node) in asked or not path or not isinstance(at, ast.Name) or at.id not in known or at.id in bound:
            continue
        value = known[at.id]
        for name in path:
            if not hasattr(value, name):
                lacking.append(f"line {node.lineno}: {at.id}.{'.'.join(path)}")
                break
            value = getattr(value, name)
            if not isinstance(value, type(torch)):  # what functions and instances have is theirs
                break
    return lacking


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_name_exists(source: Path):
    assert not missing(source.read_text())


def test_a_wrong_name_is_found():
    source = "import torch\nimport triton.language as tl\nx = torch.cuda.is_streaming()\ny = tl.lode, tl.load"
    assert sorted(missing(source)) == ["line 3: torch.cuda.is_streaming", "line 4: tl.lode"]


@pytest.mark.parametrize("recording", [True, False])
def test_a_recording_is_asked_for(monkeypatch: pytest.MonkeyPatch, recording: bool):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recording)
    assert index_scores.capturing(torch.device("cuda")) is recording
    assert not index_scores.capturing(torch.device("cpu"))
