"""`hermes-rl bench tools` on a real sandbox, in small."""

import json

import pytest

from environments.apps.cli.main import main


def test_the_bench_reports_every_figure_with_its_target(capsys):
    assert main(["bench", "tools", "--calls", "2", "--scripts", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    figures = report["figures"]
    assert report["settings"]["isolation"]
    assert {name: figure["target"] for name, figure in figures.items() if figure["target"] is not None} == {
        "read_file_over_exec": 1.5,
        "write_file_over_exec": 1.5,
        "patch_over_exec": 1.5,
        "nested_over_direct": 2.0,
        "script_with_50_calls_p50": 0.5,
        "verification_over_exec": 15.0,
    }
    assert all(figure["value"] > 0 for figure in figures.values())


@pytest.mark.parametrize("flags", [["--calls", "0"], ["--scripts", "0"]])
def test_an_empty_run_is_refused(flags, capsys):
    assert main(["bench", "tools", *flags]) == 2
    assert "at least 1" in capsys.readouterr().err
