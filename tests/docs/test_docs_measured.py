"""Directives: the only way figures get into pages. Values, formats, the newest rows, and every way to be wrong."""

from __future__ import annotations

import re

import measured
import pytest
import readme
from measured import MeasuredError, render

LAYER = """date,variant,dtype,wall_ms,wall_ms_q1,laneway,cpu
2026-01-01,ours,fp32,40.0,39.5,0.1.0,X
2026-02-01,ours,fp32,31.25,30.0,0.1.0,X
2026-02-01,peer,fp32,80,79,0.1.0,X
2026-02-01,peer,bf16,,,0.1.0,X
"""


@pytest.fixture
def results(tmp_path):
    (tmp_path / "layer.csv").write_text(LAYER, "utf-8")
    return tmp_path


def show(text, results):
    return render(text, "page.md", results)


def test_a_figure_is_the_newest_row_that_fits(results):
    text = 'it takes {{ figure("layer", "wall_ms", "{:.1f} ms", variant="ours", dtype="fp32") }}.'
    assert show(text, results) == "it takes 31.2 ms."


def test_measuring_one_condition_again_leaves_the_others(tmp_path):
    (tmp_path / "layer.csv").write_text(
        "date,variant,dtype,wall_ms\n2026-01-01,ours,fp32,1\n2026-01-01,ours,bf16,2\n2026-02-01,ours,fp32,3\n", "utf-8"
    )
    lines = render('{{ table("layer", ["dtype", "wall_ms"]) }}', "page.md", tmp_path).splitlines()
    assert lines[2:] == ["| bf16 | 2 |", "| fp32 | 3 |"]


def test_a_format_sees_the_other_cells(results):
    text = '{{ figure("layer", "wall_ms", "{:.0f} from {wall_ms_q1:.0f}", variant="peer", dtype=["fp32", "fp16"]) }}'
    assert show(text, results) == "80 from 79"


def test_a_table_has_headings_alignment_and_dashes(results):
    text = '{{ table("layer", ["variant", "dtype", ("wall_ms", "median, ms", "{:.1f}")], variant="peer") }}'
    assert show(text, results).splitlines() == [
        "| variant | dtype | median, ms |",
        "| --- | --- | ---: |",
        "| peer | fp32 | 80.0 |",
        "| peer | bf16 | – |",
    ]


def test_a_table_without_columns_has_all_but_those_of_the_source(results):
    lines = show('{{ table("layer", dtype="fp32") }}', results).splitlines()
    assert lines[0] == "| variant | dtype | wall_ms | wall_ms_q1 |"
    assert lines[2:] == ["| ours | fp32 | 31.25 | 30 |", "| peer | fp32 | 80 | 79 |"]


def test_means_are_over_the_rows_of_each_group(results):
    (results / "quality.csv").write_text(
        "date,variant,seed,loss,peak\nd,a,0,1.0,1048576\nd,a,1,2.0,3145728\nd,b,0,5.0,0\nd,b,1,5.0,\n", "utf-8"
    )
    text = '{{ means("quality", "variant", [("loss", "loss (sd)", "{:.2f} ± {sd:.2f} of {count}, {min:.0f} to {max:.0f}")]) }}'
    assert show(text, results).splitlines() == [
        "| variant | loss (sd) |",
        "| --- | ---: |",
        "| a | 1.50 ± 0.71 of 2, 1 to 2 |",
        "| b | 5.00 ± 0.00 of 2, 5 to 5 |",
    ]
    assert "| a | 2.0 MiB |" in show('{{ means("quality", "variant", [("peak", "peak", "{:.1MiB}")], variant="a") }}', results)
    with pytest.raises(MeasuredError, match="without a number"):
        show('{{ means("quality", "variant", ["peak"]) }}', results)
    with pytest.raises(MeasuredError, match="no column 'group'"):
        show('{{ means("quality", "group", ["loss"]) }}', results)


def test_source_names_the_file_and_the_machine(results):
    assert show('{{ source("layer") }}', results) == "benchmarks/results/layer.csv: date 2026-02-01; laneway 0.1.0; cpu X"


def test_when_shows_one_part(results):
    text = '{{ when("NAME") }}yes {{ figure("layer", "laneway", variant="ours") }}{{ otherwise() }}no{{ end() }}!'
    assert show(text.replace("NAME", "layer"), results) == "yes 0.1.0!"
    assert show(text.replace("NAME", "absent"), results) == "no!"


def test_code_is_left_alone(results):
    text = 'use `{{ figure("layer") }}`\n```\n{{ nonsense }}\n```\n'
    assert show(text, results) == text


@pytest.mark.parametrize(
    ("directive", "why"),
    [
        ('figure("layer", "wall_ms", variant="nobody")', "no row fits"),
        ('figure("layer", "wall_ms", dtype="fp32")', "2 rows fit"),
        ('figure("layer", "wall_ms", variant="peer", dtype="bf16")', "has no wall_ms"),
        ('figure("layer", "wal_ms", variant="ours")', "no column 'wal_ms'; there are date, variant"),
        ('figure("layer", "wall_ms", flavour="ours")', "no column 'flavour'"),
        ('figure("absent", "wall_ms")', "there is no benchmarks/results/absent.csv"),
        ('table("layer", ["nothing"])', "no column 'nothing'"),
        ('figure("layer", "variant", "{:.1f}", variant="ours")', "format"),
        ("figure(open)", "malformed"),
        ("__import__('os')", "accepted: a call of figure"),
        ("figure(", "not a directive"),
        ('rules("nobody")', "accepted: run, machine"),
        ('settings("nobody")', "accepted: memory"),
        ("end()", "without a when"),
    ],
)
def test_what_cannot_be_resolved_says_where_and_why(results, directive, why):
    with pytest.raises(MeasuredError, match=r"page\.md: ") as caught:
        show("{{ " + directive + " }}", results)
    assert directive in str(caught.value)
    assert why in str(caught.value)


def test_settings_come_from_their_source(results):
    from dataclasses import fields

    from laneway.memory.config import VARIABLES, MemoryConfig

    lines = show('{{ settings("memory") }}', results).splitlines()
    assert len(lines) == 2 + len(fields(MemoryConfig))
    for field, line in zip(fields(MemoryConfig), lines[2:], strict=True):
        name, variable, default, meaning = re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |"))
        assert (name, variable) == (f"`{field.name}`", f"`{VARIABLES[field.name]}`")
        assert default == (f"`{field.default}`" if field.default != "" else "empty")
        assert len(meaning) > 15
    assert "cost_aware \\| lru \\| fifo" in "\n".join(lines)


def test_a_missing_row_inside_a_shown_part_fails_too(results):
    with pytest.raises(MeasuredError, match="no row fits"):
        show('{{ when("layer") }}{{ figure("layer", "wall_ms", variant="nobody") }}{{ end() }}', results)


def test_an_open_when_fails(results):
    with pytest.raises(MeasuredError, match="without its end"):
        show('{{ when("layer") }}x', results)


def test_the_hook_turns_it_into_a_failed_build():
    import figures
    from mkdocs.exceptions import PluginError

    class Page:
        class file:  # noqa: N801
            src_uri = "some.md"

    with pytest.raises(PluginError, match=r"some\.md: .*absent\.csv"):
        figures.on_page_markdown('{{ source("absent") }}', page=Page)


def test_readme_is_up_to_date(capsys):
    assert readme.main(["--check"]) == 0, "run `make figures`"


def test_readmes_block_is_replaced_and_nothing_else(results):
    text = "a\n<!-- figures -->\nold 5 ms\n<!-- end of figures -->\nb\n"
    new = readme.updated(text, 'now {{ figure("layer", "wall_ms", variant="ours") }}', results)
    assert new == "a\n<!-- figures -->\nnow 31.25\n<!-- end of figures -->\nb\n"
    assert readme.updated(new, 'now {{ figure("layer", "wall_ms", variant="ours") }}', results) == new
    with pytest.raises(MeasuredError, match="found 0"):
        readme.updated("no markers", "x", results)


def test_check_notices_an_old_readme(tmp_path, monkeypatch, capsys):
    old = tmp_path / "README.md"
    old.write_text("<!-- figures -->\nold\n<!-- end of figures -->\n", "utf-8")
    monkeypatch.setattr(readme, "README", old)
    assert readme.main(["--check"]) == 1
    assert "make figures" in capsys.readouterr().err
    assert "old" in old.read_text("utf-8")
    assert readme.main([]) == 0
    assert readme.main(["--check"]) == 0


def test_every_directive_in_the_pages_resolves():
    for page in (measured.ROOT / "docs").rglob("*.md"):
        render(page.read_text("utf-8"), page.name)
