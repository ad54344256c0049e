"""The bench verb: purity of its output, errors, saving."""

from __future__ import annotations

import json

import pytest

from laneway.bench import BENCHES
from laneway.cli import main

FAST = ["--shape", "16x8", "--dtype", "fp32", "--threads", "1", "--no-compile", "--quick"]


def test_json_is_one_object_and_rows_are_saved(capfd, tmp_path):
    assert main(["bench", "layer", *FAST, "--json", "--save", str(tmp_path)]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert found["bench"] == "layer"
    assert any("60 s" in note for note in found["notes"])
    assert (tmp_path / "layer.csv").read_text().count("\n") >= 4
    assert (tmp_path / "layer_agreement.csv").is_file()
    assert "saved to" in err


@pytest.mark.slow
def test_tables_for_people(capfd):
    assert main(["bench", "layer", *FAST]) == 0
    out, _ = capfd.readouterr()
    for word in ("laneway", "plain_residual", "summary", "over_floor"):
        assert word in out
    assert not set("┃│━") & set(out), "lines are for terminals"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["layr"], "did you mean 'layer'?"),
        (["layer", "--shape", "2048"], "TOKENSxDIM"),
        (["layer", "--dtype", "fp64"], "fp32, bf16"),
        (["quality", "--variants", "residual,mch"], "did you mean 'mhc'?"),
        (["quality", "--seeds", "0"], "seeds: got 0"),
        (["hf", "--models", "deepseek_v3"], "did you mean 'deepseek_v4'?"),
        (["quality", "--nope", "1"], "--nope"),
        (["modalities", "--modalities", "vit,convnt"], "did you mean 'convnet'?"),
        (["modalities", "--variants", "mhc"], "a list with residual"),
        (["precision", "--variants", "mch"], "did you mean 'mhc'?"),
        (["precision", "--dim", "255"], "model.dim: got 255"),
        (["controls", "--controls", "curvatur"], "did you mean 'curvature'?"),
        (["controls", "--ranks", "1"], "ranks: got 1"),
        (["layer", "--save", "/dev/null/x"], "save: got"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capfd, words, part):
    assert main(["bench", *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert part in err


def test_help_names_every_bench(capfd):
    assert main(["bench", "--help"]) == 0
    out, _ = capfd.readouterr()
    for name in BENCHES:
        assert f"\n  {name} " in out
        with pytest.raises(SystemExit) as caught:
            main(["bench", name, "--help"])
        assert caught.value.code in (0, None)
        assert "--quick" in capfd.readouterr().out
