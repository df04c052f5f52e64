"""The next token is the same with no cache, with a live one and after a resume; and the chart shows the figures."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.errors import PathError, SettingsError
from kvstore.tools.bench import decode
from kvstore.tools.chart import chart, refuse_other_kinds, write_chart
from kvstore.tools.cli import app

SVG = "{http://www.w3.org/2000/svg}"


def run(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["bench", "decode", *map(str, words)])
    assert done.exit_code == code, done.output
    return done.stdout


def test_every_way_gives_the_same_token_and_is_drawn(tiny_model: Path, tmp_path: Path) -> None:
    work, plot = tmp_path / "work", tmp_path / "next.svg"
    work.mkdir()
    words = ("--model", tiny_model, "--tokens", "300", "--threads", "1", "--path", work)
    found = json.loads(run(*words, "--plot", plot, "--json"))
    assert [point["tokens"] for point in found["points"]] == [128, 256, 300]
    assert all(point["identical"] for point in found["points"])
    assert found["kv_bytes_a_token"] == found["kv_bytes_a_token_stored"] == 2 * 2 * 2 * 16 * 4
    for point in found["points"]:
        assert point["no_cache_over_live"] == pytest.approx(point["no_cache_s"] / point["live_s"])
    lines = xml.fromstring(plot.read_text()).findall(f"{SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3, 3, 3]
    assert list(work.iterdir()) == []
    assert "by the configuration" in run(*words, "--repeats", "1")


def test_what_cannot_be_measured_is_told_before_anything_runs(tiny_model: Path, tmp_path: Path) -> None:
    run("--model", tiny_model, "--tokens", "2000", "--path", tmp_path, code=2)
    run("--model", tiny_model, "--plot", tmp_path / "next.png", code=2)
    run("--model", tiny_model, "--plot", tmp_path / "absent" / "next.svg", code=3)
    assert decode.__doc__ is not None


def test_larger_numbers_lie_higher_and_names_are_escaped() -> None:
    drawn = xml.fromstring(chart("<a> & b", "x", "y", {"<one>": [(128, 0.01), (256, 0.1), (512, 1.0)]}))
    places = [tuple(map(float, place.split(","))) for place in drawn.find(f"{SVG}polyline").attrib["points"].split()]  # type: ignore[union-attr]
    assert places == sorted(places)
    assert [place[1] for place in places] == sorted((place[1] for place in places), reverse=True)
    steps = [second[1] - first[1] for first, second in itertools.pairwise(places)]
    assert steps[0] == pytest.approx(steps[1], abs=0.2), "a decade is as high as any other"
    assert "<one>" in [text.text for text in drawn.iter(f"{SVG}text")]


def test_what_has_no_logarithm_is_refused(tmp_path: Path) -> None:
    for lines in ({}, {"x": [(1.0, 0.0)]}, {"x": [(-1.0, 1.0)]}):
        with pytest.raises(SettingsError):
            chart("", "", "", lines)
    with pytest.raises(PathError):
        write_chart(tmp_path, "", "", "", {"x": [(1.0, 1.0)]})
    with pytest.raises(SettingsError):
        refuse_other_kinds(Path("chart"))


def test_one_point_is_drawn_inside() -> None:
    made: Any = xml.fromstring(chart("", "", "", {"x": [(128, 1.0)]}))
    (circle,) = made.findall(f"{SVG}circle")
    assert 0 < float(circle.attrib["cx"]) < 720
    assert 0 < float(circle.attrib["cy"]) < 440
