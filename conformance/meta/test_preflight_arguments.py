"""The options and the tokenizer as vLLM takes them: files of --config, names that nobody knows, files that are broken."""

import json
import os

import pytest
from click.testing import CliRunner

import runner
from conformance.meta.looking import Imports, free, stops
from conformance.serving.engines import free_port
from shim.errors import OpshimError
from shim.vllm_plugin import arguments, model_class, preflight, preflight_model
from shim.vllm_plugin.serve import BUNDLED, USAGE, split


@pytest.fixture
def config(tmp_path):
    """config(text) -> a file of options."""

    def config(text):
        (tmp_path / "options.yaml").write_text(text)
        return str(tmp_path / "options.yaml")

    return config


# ---- --config --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_what_stands_in_the_file_comes_before_the_other_options(config, form):
    text = (
        "model: some/where\nmax-model-len: 64\nenforce-eager: true\nport: 8000\nspeculative-config: {method: ngram}\n"
    )
    given = [one.format(config(text)) for one in form]
    named, options = split(["--dtype", "half", *given, "--max-model-len", "32"], "127.0.0.1", 8000)
    assert named == "some/where"
    assert options.get("--max-model-len") == "32" and "--enforce-eager" in options and options.get("--dtype") == "half"
    assert options.get("--speculative-config") == '{"method": "ngram"}'
    assert not {"--config", "--model", "--port"} & set(options.given)


def test_a_file_that_names_another_is_refused(config):
    outer = config("config: inner.yaml\n")
    with pytest.raises(OpshimError, match=f"--config {outer}: it names another such file"):
        split(["mine", "--config", outer], "127.0.0.1", 8001)


def test_the_command_line_wins_over_the_model_and_the_port_of_the_file(config, capsys):
    named, options = split(["mine", "--config", config("model: some/where\nport: 9000\n")], "127.0.0.1", 8001)
    assert (named, options.given) == ("mine", [])
    told = capsys.readouterr().out
    assert told == "opshim: --port 9000 in --config's file is not taken: 8001 is the command line's\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "No such file"), ("", "a line 'option: value'"), ("- a", "a line 'o"), ("{", "ParserError")],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(config, tmp_path, text, words):
    file = str(tmp_path / "absent.yaml") if text is None else config(text)
    result = CliRunner().invoke(runner.main, ["serve", "--dry-run", "--config", file])
    assert result.exit_code == USAGE and len(result.output.splitlines()) == 1, result.output
    assert result.stderr.startswith(f"opshim: --config {file}: ") and words in result.stderr


@pytest.mark.parametrize(
    ("given", "words"), [(["--config"], "No config file"), (["--config", "a"] * 2, "More than one")]
)
def test_there_is_one_file(given, words):
    with pytest.raises(OpshimError, match=words):
        arguments.unfold(given)


def test_the_dry_run_looks_at_the_options_of_the_file(model, config, monkeypatch):
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    monkeypatch.setattr(arguments, "Verdict", lambda *of: None)
    file = config(f"model: {model}\nload-format: dummy\nmax-model-len: 5000\n")
    result = CliRunner().invoke(runner.main, ["serve", "--dry-run", "--port", str(free_port()), "--config", file])
    assert result.exit_code == USAGE and "--max-model-len 5000 is above the model's 2,048" in result.stderr


# ---- what vLLM says of options and tokenizer ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["extra"], "unrecognized arguments: extra"),
        (["--enforce-eager", "extra"], "unrecognized arguments: extra"),
        (["--polcy", "auto"], "unrecognized arguments: --polcy auto"),
        (["--max-model-l", "64"], "unrecognized arguments: --max-model-l 64"),
        (["--max-model-len", "many"], "--max-model-len: invalid"),
        (["--load-format"], "--load-format: expected one argument"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_an_argument_that_vllm_does_not_take_is_named(given, words):
    told = arguments.problem([str(BUNDLED), *given])
    assert told.startswith("options: ") and words in told and "\n" not in told


def test_arguments_that_vllm_takes_are_no_problem():
    assert arguments.problem([str(BUNDLED), "--max_model_len=1k", "-tp", "2", "-O3", "--tokenizer-mode", "HF"]) is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_of_the_tokenizer_is_named(model, name):
    (model / name).write_text('{"version": ')
    assert arguments.problem([str(model)]).startswith(f"tokenizer: {model / name}: JSONDecodeError")
    assert arguments.problem([str(model), "--skip-tokenizer-init"]) is None
    assert arguments.problem([str(model), "--tokenizer", str(BUNDLED)]) is None


@pytest.mark.parametrize("names", [["tokenizer.json"], ["tokenizer.json", "tokenizer_config.json"]])
def test_a_tokenizer_without_files_is_not_the_empty_one_of_transformers(model, names):
    for name in names:
        (model / name).unlink()
    told = arguments.problem([str(model)])
    assert told.startswith(f"tokenizer: {model}: ") and "\n" not in told


def test_another_tokenizer_than_the_models_is_named(tmp_path):
    told = arguments.problem([str(BUNDLED), "--tokenizer", str(tmp_path / "absent")])
    assert told.startswith(f"tokenizer: {tmp_path / 'absent'}: ")
    assert "tokenizer_mode='theirs'" in arguments.problem([str(BUNDLED), "--tokenizer-mode", "theirs"])


# ---- the finding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "plugins", "name", "code"),
    [
        (None, [], "tokenizer", 0),
        ("options: unrecognized arguments: --x", [], "options", USAGE),
        ("tokenizer: m: OSError: x", ["theirs"], "tokenizer", USAGE),
        ("tokenizer: m: ValueError: No tokenizer registered for 'x'", [], "tokenizer", USAGE),
        ("tokenizer: m: ValueError: No tokenizer registered for 'x'", ["theirs"], "tokenizer", 0),
        ("engine: x", [], "engine", USAGE),
        ("ImportError: no flux_capacitor", [], "tokenizer", 0),
    ],
)
def test_only_what_vllm_says_of_the_arguments_stops(look, monkeypatch, problem, plugins, name, code):
    class Said:
        def result(self):
            return problem

    monkeypatch.setattr(preflight_model, "other_plugins", lambda: plugins)
    found = {one.name: one for one in preflight_model.arguments(look()[0], Said())}
    assert list(found) == ["options", "tokenizer", "engine"], "a row each, whatever vLLM says"
    assert {one.name: one.code for one in found.values() if one.code} == ({name: code} if code else {})
    assert problem is None or problem.removeprefix(f"{name}: ") in found[name].text


def test_what_vllm_and_opshim_do_not_take_is_told_beside_each_other(look):
    class Said:
        def result(self):
            return "options: unrecognized arguments: --x"

    *options, tokenizer, _ = preflight_model.arguments(look("--uds", "x")[0], Said())
    assert [(one.name, one.code) for one in options] == [("options", USAGE)] * 2
    assert tokenizer.text == "not checked, as vLLM does not take the options"


def test_what_passed_is_asked_again_once_an_option_a_variable_or_a_file_is_another(model, monkeypatch):
    monkeypatch.setattr(model_class.subprocess, "Popen", lambda *of, **how: "asked")
    first = arguments.Verdict([str(model)], {})
    first._write_down()
    assert arguments.Verdict([str(model)], {"HOME": "/"}).child is None
    assert arguments.Verdict([str(model), "--enforce-eager"], {}).child == "asked"
    assert arguments.Verdict([str(model)], {"VLLM_USE_V1": "0"}).child == "asked"
    (model / "tokenizer.json").write_text(json.dumps({}))
    assert arguments.Verdict([str(model)], {}).child == "asked"


def test_the_dry_run_ends_with_one_line_of_what_vllm_does_not_take(scratch, monkeypatch):
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    command = ["serve", str(BUNDLED), "extra", "--dry-run", "--port", str(free_port()), "--load-format", "dummy"]
    result = CliRunner().invoke(runner.main, command)
    assert result.exit_code == USAGE
    assert result.stderr == "opshim: nothing is started: options: unrecognized arguments: extra\n"
    assert not (scratch / "cache" / "arguments").exists()


@pytest.mark.parametrize("name", ["--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs"])
def test_a_file_that_the_server_cannot_read_is_named(look, tmp_path, name):
    stops(look(name, str(tmp_path / "absent.pem"))[1], "options", f"{name} {tmp_path / 'absent.pem'}: there is no such")
    free(look(name, __file__)[1])


# ---- what vLLM configures its engine with ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--max-num-seqs", "4096", "--max-num-batched-tokens", "64"], "max_num_batched_tokens (64) must be greater"),
        (["--max-num-seqs", "0"], "max_num_seqs: Input should be greater than or equal to 1"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "nosuch"], "invalid tool call parser: nosuch"),
    ],
)
def test_what_only_vllms_own_configuration_refuses_is_told(scratch, given, words):
    told = arguments.Verdict([str(BUNDLED), *given], os.environ).result()
    assert told.startswith("engine: ") and words in told and "errors.pydantic.dev" not in told
    assert not (scratch / "cache" / "arguments").exists()


def test_what_another_version_of_vllm_has_elsewhere_refuses_nothing(scratch):
    script = scratch / "moved.py"
    script.write_text(
        "import runpy, sys\nfrom vllm.entrypoints.cli.serve import setup_server\n"
        "del sys.modules[setup_server.__module__].validate_api_server_args\n"
        "runpy.run_module('shim.vllm_plugin.arguments', run_name='__main__')"
    )
    asked = model_class.Check(scratch / "note", [str(script), str(BUNDLED)], os.environ)
    assert "has no attribute 'validate_api_server_args'" in asked.result()


def test_a_model_type_that_transformers_does_not_know_is_told(model, edit):
    edit(model_type="nobody")
    told = arguments.Verdict([str(model)], os.environ).result()
    assert told.startswith("engine: The checkpoint you are trying to load has model type `nobody`")


def test_vllm_is_asked_with_what_it_will_be_started_with(model, monkeypatch):
    asked = []
    monkeypatch.setattr(preflight, "ImportCheck", Imports)
    monkeypatch.setattr(arguments, "Verdict", lambda *of: asked.append(of))
    command = ["serve", str(model), "--dry-run", "--port", str(free_port()), "--policy", "auto", "--max-num-seqs", "4"]
    assert CliRunner().invoke(runner.main, command).exit_code == 0
    ((given, variables),) = asked
    assert given == [str(model), "--served-model-name", "model", "--enforce-eager", "--max-num-seqs", "4"]
    assert (variables["OPSHIM_POLICY"], variables["HF_HUB_OFFLINE"]) == ("auto", "1")


def test_what_vllm_says_of_another_length_than_is_served_does_not_stop(look):
    class Said:
        def result(self):
            return "engine: too long"

    plan = look()[0]
    assert [one.code for one in preflight_model.arguments(plan, Said())] == [0, 0, USAGE]
    plan.max_model_len = 64
    assert [one.code for one in preflight_model.arguments(plan, Said())] == [0, 0, 0]
