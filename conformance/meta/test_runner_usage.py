"""Wrong usage ends a command of runner.py with exit code 2 and one line that says what was wrong, before anything runs."""

import json
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

import runner
import shim
from conformance.meta.scratch import script

UNAVAILABLE = """
import shim

@shim.implementation("moe_sum", provider="elsewhere", available=lambda: "needs a device that is elsewhere")
def moe_sum(y, topk_ids=None):
    return y.sum(1)
"""
CONFIG = {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["full_attention"], "dtype": "float32"}


@pytest.fixture
def run(scratch):
    return lambda *arguments: CliRunner().invoke(runner.main, [str(argument) for argument in arguments])


@pytest.fixture
def model(tmp_path):
    """A folder that looks like a checkpoint."""
    folder = tmp_path / "looks-like-a-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")  # no tensors
    return folder


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def refused(result, *words):
    assert result.exit_code == 2, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr


def test_conform_takes_one_provider_and_drops_none(run):
    result = run("conform", "--op", "moe_sum", "--provider", "torch", "--provider", "vllm")
    assert result.exit_code == 2 and "one at a time, got torch and vllm" in result.stderr


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("command", sorted(runner.main.commands))
def test_every_command_has_help_with_an_example(run, command, option):
    result = run(command, option)
    assert result.exit_code == 0
    assert f"python runner.py {command}" in result.output


@pytest.mark.parametrize(
    "options", [["-dph"], ["-cc.cudagraph_mode=FULL"], ["-tp", "2"], ["-O3", "--port", "1", "-ac.backend", "X", "-ech"]]
)
def test_short_options_of_vllm_are_passed_on_as_they_are(run, monkeypatch, options):
    given = []
    monkeypatch.setattr("shim.vllm_plugin.serve.serve", lambda arguments, **_: given.extend(arguments) or 0)
    assert run("serve", "a-model", *options).exit_code == 0
    assert given == ["a-model", *(one for one in options if one not in ("--port", "1"))]


def test_the_list_of_commands_has_whole_sentences(run):
    assert "..." not in run("--help").output.partition("Commands:")[2]


@pytest.mark.parametrize("missing", ["click", "torch"])
def test_without_the_environment_a_command_says_where_it_is(missing):
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv[1:] = ['ops']; import runner; runner.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"opshim: no module {missing}: use .venv/bin/python, or make env\n")


def test_ctrl_c_ends_every_command_with_its_number(run, monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("shim.startup.chain_table", interrupted)
    result = run("ops")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "opshim: stopped by SIGINT\n")


def test_an_unknown_command_names_the_known_ones(run):
    result = run("confrom")
    assert result.exit_code == 2 and "No such command 'confrom'" in result.stderr and "bench, build, conform" in result.stderr


def test_a_variable_that_opshim_does_not_know_is_told_by_each_command(run, monkeypatch):
    monkeypatch.setenv("OPSHIM_POLCY", "auto")
    result = run("ops")
    assert (result.exit_code, result.stderr) == (0, "opshim: OPSHIM_POLCY is no variable of opshim, is OPSHIM_POLICY meant?\n")


@pytest.mark.parametrize("mode", ["stric", ""])
def test_an_unknown_policy_names_the_known_ones(run, mode):
    refused(run("ops", "--policy", mode or "none"), "unknown policy", "auto, reference, strict")


def test_serve_refuses_an_unknown_policy_before_it_says_anything(run, model, free_port):
    result = run("serve", model, "--port", free_port, "--policy", "bogus")
    refused(result, "unknown policy 'bogus'", "auto, reference, strict")
    assert not result.stdout


def test_an_unknown_op_names_the_known_ones(run):
    refused(run("ops", "--provider", "softmax=native"), "unknown op 'softmax'", "topk_softmax")
    refused(run("conform", "--op", "softmax"), "unknown op 'softmax'", "topk_softmax")
    refused(run("mutants", "--op", "softmax"), "unknown op 'softmax'", "topk_softmax")


def test_an_unknown_provider_names_the_known_ones(run):
    refused(run("ops", "--provider", "moe_sum=nobody"), "unknown provider of moe_sum 'nobody'", "native", "reference")
    refused(run("conform", "--provider", "nobody"), "unknown provider 'nobody'", "native")


def test_an_unknown_level_or_device_names_the_known_ones(run):
    refused(run("conform", "--level", "deep"), "unknown level 'deep'", "quick")
    refused(run("ops", "--device", "tpu"), "unknown device 'tpu'", "cpu")


@pytest.mark.parametrize("command", ["status", "conform-server"])
@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "http://127.0.0.1:80a", "ftp://127.0.0.1"])
def test_what_is_no_url_of_a_server_is_refused_in_the_same_words(run, command, url):
    refused(run(command, url), f"opshim: '{url}' is no URL of a server, such as http://127.0.0.1:8000")


def test_build_refuses_archs_that_the_kernels_or_nvcc_do_not_have(run, scratch, monkeypatch):
    nvcc = script(scratch / "nvcc", f'test "$1" = --list-gpu-code && echo sm_75 sm_80 sm_90 || touch {scratch / "compiled"}')
    monkeypatch.setenv("NVCC", str(nvcc))
    for arch in ("75", "33", "80,75", "", "80,"):
        wrong = arch.split(",")[-1]
        words = f"unknown GPU arch '{wrong}'; known: 80, 90, 90a; opshim's kernels need sm_80 or later"
        refused(run("build", "--arch", arch, "--folder", scratch / "lib"), words)
    assert not (scratch / "compiled").exists() and not (scratch / "lib").exists()


def test_a_choice_without_a_provider_says_how_to_write_it(run):
    refused(run("ops", "--provider", "moe_sum"), "op=provider", "'moe_sum'")


def test_a_provider_file_that_does_not_import_is_named_with_its_line(run, tmp_path, model, free_port):
    file = tmp_path / "broken.py"
    file.write_text("import shim\n\nimport not_there_at_all\n")
    refused(run("ops", "--provider-file", file), "not_there_at_all", f"{file}:3")
    result = run("serve", model, "--port", free_port, "--provider-file", file)
    refused(result, "not_there_at_all", f"{file}:3")


def test_a_provider_file_that_is_no_python_or_registers_nothing_is_named(run, tmp_path):
    for content, words in ((b"\x7fELF\0", "does not import"), (b"import shim\n", "registered nothing")):
        file = tmp_path / f"{len(content)}.txt"
        file.write_bytes(content)
        refused(run("conform", "--provider-file", file, "--provider", "mylib"), str(file), words)


def test_serve_refuses_a_provider_file_that_it_could_not_name_to_vllm(run, tmp_path, model, free_port):
    (file := tmp_path / "a:b.py").write_text(UNAVAILABLE)
    assert run("ops", "--provider-file", file).exit_code == 0
    result = run("serve", model, "--port", free_port, "--provider-file", file)
    refused(result, f"provider file {file}", "no ':' may be in its path")
    assert not result.stdout


def test_a_provider_file_with_a_wrong_signature_is_named_with_its_line(run, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(UNAVAILABLE.replace("topk_ids=None", "ids=None"))
    refused(run("ops", "--provider-file", file), "moe_sum", "(y, ids=None)", "(y, topk_ids=None)", f"{file}:")


def test_the_chain_table_is_json_on_request(run):
    result = run("ops", "--policy", "reference", "--json")
    assert result.exit_code == 0
    table = json.loads(result.stdout)
    assert {one["op"] for one in table["ops"]} == set(shim.names())
    assert {one["selected"] for one in table["ops"]} == {"reference"}


@pytest.mark.parametrize("port", ["0", "65536", "-1"])
def test_serve_refuses_a_port_that_cannot_be(run, model, port):
    refused(run("serve", model, "--port", port), f"port {port}", "65535")


def test_serve_refuses_an_unknown_rule_of_the_request_policy(run, model, free_port):
    result = run("serve", model, "--port", free_port, "--request-policy", "clamp_max_tokens,be_nice")
    refused(result, "'be_nice'", "clamp_max_tokens, no_thinking_when_short, refuse_large_n")


def test_serve_refuses_a_port_in_use(run, model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        refused(result := run("serve", model, "--port", port), f"127.0.0.1 port {port}", "in use")
        assert not result.stdout


def test_serve_refuses_a_host_that_is_no_name(run, model, free_port):
    refused(run("serve", model, "--port", free_port, "--host", "a..b"), f"cannot listen on a..b port {free_port}")


def test_serve_refuses_a_folder_that_is_not_there(run, free_port):
    refused(run("serve", "/not/there", "--port", free_port), "/not/there does not exist")
    refused(run("serve", "README.md", "--port", free_port), "README.md is a file")


def test_serve_refuses_a_folder_without_config(run, model, free_port):
    (model / "config.json").unlink()
    refused(run("serve", model, "--port", free_port), str(model), "no config.json")


def test_serve_refuses_a_folder_without_weights(run, model, free_port):
    (model / "model.safetensors").unlink()
    refused(run("serve", model, "--port", free_port), str(model), "no weights")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '"words"'])
def test_serve_refuses_a_config_that_is_none(run, model, free_port, text):
    (model / "config.json").write_text(text)
    refused(run("serve", model, "--port", free_port), "config.json", "architecture" if text != "{" else "not JSON")


def test_serve_refuses_a_model_that_uses_no_op(run, model, free_port):
    (model / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    refused(run("serve", model, "--port", free_port), "no op of BertModel")


def test_serve_refuses_the_model_as_an_option(run, model, free_port):
    refused(run("serve", "--port", free_port, "--model", model), "right after serve")


def test_strict_starts_nothing_while_an_op_is_unserved(run, tmp_path, model, free_port):
    file = tmp_path / "elsewhere.py"
    file.write_text(UNAVAILABLE)
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_experts": 4}))
    choices = [f"--provider={op}=reference" for op in shim.names() if op != "moe_sum"] + [
        "--provider=moe_sum=elsewhere"
    ]
    result = run("serve", model, "--port", free_port, "--provider-file", file, *choices)
    assert result.exit_code == 3, result.output
    assert "needs a device that is elsewhere" in result.output
    why = "policy strict leaves moe_sum without an implementation: needs a device that is elsewhere"
    assert result.stderr.splitlines()[-1] == f"opshim: nothing is started: {why}"
