"""Promise: each command prints what the library computes, in a form that people and programs can use."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import warnings

import pytest
import safetensors.torch

import minillm.analysis
from minillm import checkpoint, cli
from minillm.analysis import budget, model_config
from minillm.cli import common, demo, doctor
from minillm.cli.roof import DecodeBound, decode_bound, held_bytes
from minillm.generate import generate, generate_n
from minillm.kv_cache import ContiguousCache
from minillm.packing import Choice, PackedLinear, available
from minillm.sampling_params import SamplingParams
from tests import cli_models, tiny
from tests.cli_models import MACHINE


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with a tokenizer and a chat template."""
    return cli_models.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def loaded(folder):
    return checkpoint.load(folder, "float32")


@pytest.fixture
def options(folder):
    return ["--model", str(folder), "--dtype", "float32", "--device", "cpu"]


@pytest.fixture
def run(capsys):
    """Runs a command in this process; it must succeed, and stderr must be empty. Returns stdout."""

    def run(*arguments, code=0) -> str:
        capsys.readouterr()
        assert cli.main([str(a) for a in arguments]) == code
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return run


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Measuring the real one takes seconds."""
    (tmp_path / "ceilings-cpu.json").write_text("{}")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    monkeypatch.setattr(minillm.analysis, "this_machine", lambda device, refresh=False: MACHINE)
    monkeypatch.setattr(minillm.analysis, "measure", lambda device: MACHINE)


# --- help ---


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda c: c.__name__)
def test_help_has_examples_and_they_parse(run, command):
    name = command.__name__.rpartition(".")[2]
    shown = run(name, "--help")
    assert "examples:" in shown
    assert "--debug" in shown
    for line in command.EXAMPLES.strip().splitlines():
        words = shlex.split(line.rpartition(" | ")[2])
        assert words[:3] == ["python", "-m", "minillm"]
        args = cli._parser().parse_args(words[3:])
        assert args.run is command.run
        assert line in shown


def test_help_lists_every_command_and_nothing_prints_it_too(run):
    shown = run("--help")
    for command in ("demo", "chat", "generate", "tokenize", "bench", "size", "doctor"):
        assert f"\n    {command} " in shown
    assert run(code=2) == shown


def test_help_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from minillm.cli import main; main(['chat', '--help']); print({'torch', 'numpy'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("set()")


def test_version(run):
    assert run("--version") == f"minillm {minillm.__version__}\n"


# --- generate ---


def test_generate_json_is_what_the_library_generates(run, options, loaded):
    values = json.loads(run("generate", "the cat sat", "--max-tokens", 12, "--temperature", 0, "--json", *options))
    expected = generate(*loaded, "the cat sat", SamplingParams(temperature=0, max_tokens=12))
    assert values["text"] == expected.text
    assert values["token_ids"] == expected.token_ids
    assert values["prompt_token_ids"] == expected.prompt_token_ids
    assert values["prompt_tokens"] == len(expected.prompt_token_ids)
    assert values["output_tokens"] == len(expected.token_ids)
    assert (values["finish_reason"], values["layout"], values["device"]) == ("length", "float32", "cpu")
    assert 0 < values["ttft_s"] < 60
    assert 0 < values["tpot_s"] < 60


def test_generate_streams_the_same_text(run, options, loaded):
    expected = generate(*loaded, "the dog", SamplingParams(temperature=0, max_tokens=20))
    assert run("generate", "the dog", "--max-tokens", 20, *options) == expected.text + "\n"


def test_generate_streams_piece_by_piece(monkeypatch, options):
    """Something is written before the last token is drawn."""
    writes = []
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "flush", lambda: writes.append(sys.stdout.getvalue()), raising=False)
    assert cli.main(["generate", "the dog", "--max-tokens", "20", *options]) == 0
    assert len({len(text) for text in writes}) > 5


def test_generate_reads_stdin(monkeypatch, run, options):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the cät".encode())))
    from_stdin = json.loads(run("generate", "-", "--max-tokens", 4, "--json", *options))
    given = json.loads(run("generate", "the cät", "--max-tokens", 4, "--json", *options))
    assert from_stdin["token_ids"] == given["token_ids"]
    assert from_stdin["prompt_token_ids"] == given["prompt_token_ids"]


def test_generate_takes_ids(run, options, loaded):
    ids = loaded[1].encode("the cat")
    values = json.loads(run("generate", "--prompt-ids", ",".join(map(str, ids)), "--max-tokens", 4, "--json", *options))
    assert values["prompt_token_ids"] == ids
    assert values["token_ids"] == generate(*loaded, ids, SamplingParams(temperature=0, max_tokens=4)).token_ids


FLAGS = {
    "--max-tokens=7": {"max_tokens": 7},
    "--temperature=0.5": {"temperature": 0.5},
    "--top-k=3": {"top_k": 3},
    "--top-p=0.9": {"top_p": 0.9},
    "--min-p=0.1": {"min_p": 0.1},
    "--seed=-5": {"seed": -5},
    "--stop=a --stop=b": {"stop": ("a", "b")},
    "--stop-token-id=3 --stop-token-id=4": {"stop_token_ids": (3, 4)},
    "--ignore-eos": {"ignore_eos": True},
    "--min-tokens=2": {"min_tokens": 2},
    "--repetition-penalty=1.2": {"repetition_penalty": 1.2},
    "--presence-penalty=-0.5": {"presence_penalty": -0.5},
    "--frequency-penalty=0.25": {"frequency_penalty": 0.25},
    "--logit-bias=3=-1.5 --logit-bias=1=2": {"logit_bias": ((1, 2.0), (3, -1.5))},
    "--logprobs=2": {"logprobs": 2},
    "--n=3": {"n": 3},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_each_sampling_flag_reaches_its_parameter(flags):
    args = cli._parser().parse_args(["generate", "x", "--seed", "1", *flags.split()])
    base = SamplingParams(temperature=0, max_tokens=64, seed=1)
    expected = SamplingParams(**{**vars(base), **FLAGS[flags]})
    assert common.sampling_params(args) == expected
    assert expected != base


def test_a_seed_is_drawn_and_told_so_that_a_run_can_be_repeated(run, options):
    command = ("generate", "the", "--temperature", 1, "--max-tokens", 10, "--json", *options)
    first = json.loads(run(*command))
    again = json.loads(run(*command, "--seed", first["seed"]))
    assert again["token_ids"] == first["token_ids"]


def test_n_answers_and_log_probabilities(run, options, loaded):
    command = ["generate", "the", "--temperature", 1, "--max-tokens", 6, "--seed", 3, "--n", 3, "--logprobs", 2]
    values = json.loads(run(*command, "--json", *options))
    params = SamplingParams(temperature=1, max_tokens=6, seed=3, n=3, logprobs=2)
    expected = generate_n(*loaded, "the", params)
    assert [c["token_ids"] for c in values["completions"]] == [c.token_ids for c in expected]
    assert values["token_ids"] == expected[0].token_ids
    token = expected[1].tokens[0]
    assert values["completions"][1]["logprobs"][0] == {
        "token_id": token.id,
        "logprob": pytest.approx(token.logprob),
        "top": [[i, pytest.approx(p)] for i, p in token.top_logprobs],
    }


def test_n_answers_stream_one_after_another(run, options, loaded):
    shown = run("generate", "the", "--temperature", 1, "--max-tokens", 6, "--seed", 3, "--n", 2, *options)
    answers = generate_n(*loaded, "the", SamplingParams(temperature=1, max_tokens=6, seed=3, n=2))
    assert answers[0].text != answers[1].text
    assert shown == "".join(f"--- {i + 1} of 2\n{answer.text}\n" for i, answer in enumerate(answers))


def test_json_has_no_nan(run, capsys):
    """-inf, the log-probability of a masked token, has no word in JSON."""
    common.print_json({"a": float("-inf"), "b": [float("nan"), 1.5], "c": (1, None)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "c": [1, None]}


# --- tokenize ---


@pytest.mark.parametrize("text", ["the cat sat", "½ 你好 \n\t", "", "<end> is text"])
def test_tokenize_json(run, folder, loaded, text):
    values = json.loads(run("tokenize", text, "--json", "--model", folder))
    ids = loaded[1].encode(text)
    assert values == {"ids": ids, "pieces": loaded[1].pieces(ids)}


def test_tokenize_special_tokens_only_when_asked(run, folder):
    plain, special = (
        json.loads(run("tokenize", "the<end>", "--json", "--model", folder, *flag))["ids"]
        for flag in ((), ("--allow-special",))
    )
    assert 1 not in plain
    assert special[-1] == 1


def test_tokenize_table_shows_ids_and_pieces(run, folder, loaded):
    shown = run("tokenize", "the cat\x1b[2J", "--model", folder)
    assert "\x1b" not in shown
    assert "\\x1b" in shown
    for token in loaded[1].encode("the cat"):
        assert f"{token:>8}  " in shown
    assert "11 characters" in shown


def test_tokenize_colours_only_a_terminal(monkeypatch, run, folder):
    assert "\x1b[" not in run("tokenize", "the cat", "--model", folder)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\x1b[30;48;5;" in run("tokenize", "the cat", "--model", folder)


# --- demo ---


def test_demo_json_is_consistent(run, machine, options, loaded):
    v = json.loads(run("demo", "--question", "the cat?", "--max-tokens", 8, "--json", *options))
    model, tokenizer = loaded
    ids = tokenizer.encode_chat([{"role": "user", "content": "the cat?"}])
    expected = generate(model, tokenizer, ids, SamplingParams(temperature=0, max_tokens=8))
    assert v["token_ids"] == expected.token_ids
    assert v["weight_bytes_read_per_step"] == model.decode_bytes()
    per_token = 2 * 3 * 2 * 16 * 4  # keys and values, layers, kv heads, head_dim, bytes
    assert v["kv_bytes_held"] == (len(ids) + 8) * per_token
    assert v["kv_bytes_used"] == (len(ids) + 7) * per_token  # the last token was never fed
    mean = sum(len(ids) + i for i in range(1, 8)) / 7
    assert v["kv_bytes_read_per_step"] == pytest.approx(mean * per_token)
    assert v["predicted_tpot_s"] == (v["weight_bytes_read_per_step"] + v["kv_bytes_read_per_step"]) / 20e9
    assert v["decode_fraction_of_roofline"] == v["predicted_tpot_s"] / v["tpot_s"]
    assert v["read_bandwidth_gb_s"] == 20


def test_demo_streams_the_answer_and_reports(run, machine, options, loaded):
    shown = run("demo", "--question", "the cat?", "--max-tokens", 8, *options)
    ids = loaded[1].encode_chat([{"role": "user", "content": "the cat?"}])
    assert generate(*loaded, ids, SamplingParams(temperature=0, max_tokens=8)).text in shown
    for words in ("TTFT", "TPOT", "tokens/s", "weights", "KV cache", "read bandwidth, measured", "predicted TPOT",
                  "fraction of the roofline", "make lab", "minillm chat", "minillm bench", "minillm size"):  # fmt: skip
        assert words in shown


def test_demo_of_one_token_has_no_rate(run, machine, options):
    shown = run("demo", "--max-tokens", 1, *options)
    assert "fraction" not in shown
    assert json.loads(run("demo", "--max-tokens", 1, "--json", *options))["tpot_s"] is None


def test_the_explanation_names_the_limit():
    bound = DecodeBound(weight_bytes=10**8, kv_bytes=0, bandwidth=10**10, arithmetic_s=0.001)  # 10 ms to read
    assert "Memory bandwidth was the limit" in demo.explain(bound, 0.018)
    assert "The other 8 ms" in demo.explain(bound, 0.018)
    assert "sets the floor" in demo.explain(bound, 0.03)
    assert "cache" in demo.explain(bound, 0.005)
    slow = DecodeBound(weight_bytes=10**8, kv_bytes=0, bandwidth=10**10, arithmetic_s=0.015)
    assert "Arithmetic was the limit" in demo.explain(slow, 0.02)


def test_decode_bound_is_bytes_over_bandwidth(loaded):
    model = loaded[0]
    bound = decode_bound(model, 100, MACHINE)
    cache = ContiguousCache(model.config, 100)
    assert bound.kv_bytes == cache.allocated_bytes
    assert bound.seconds == (model.decode_bytes() + cache.allocated_bytes) / 20e9
    matrices = sum(layer.weight.numel() for layer in model.linears())
    assert 1 < bound.arithmetic_s / (2 * matrices / 1e11) < 2  # attention and norms come on top


@pytest.mark.parametrize("family", ["llama", "llama-mqa-tied", "llama-mha-bias"])
def test_held_bytes_are_those_of_the_files(tmp_path, family):
    """A tied head is in the file once and in memory once."""
    tiny.save(family, tmp_path)
    shards = [safetensors.torch.load_file(shard) for shard in tmp_path.glob("*.safetensors")]
    assert held_bytes(checkpoint.load_model(tmp_path)) == sum(t.nbytes for shard in shards for t in shard.values())


def test_held_bytes_counts_both_layouts_of_a_matrix(folder):
    model = checkpoint.load_model(folder)
    before, old = held_bytes(model), model.blocks[0].mlp.down_proj
    kinds = [name for name in available() if name != "int4"]
    new = PackedLinear(old.weight.data, None, Choice(kinds[0], kinds[-1], 1))
    model.blocks[0].mlp.down_proj = new
    layouts = {new.few, new.many}
    assert held_bytes(model) == before - old.weight.nbytes + sum(layout.weight_bytes for layout in layouts)


# --- size ---


def test_size_json_is_the_memory_budget(run):
    shown = run("size", "Llama-3-8B", "--tokens", 8192, "--sequences", 4, "--gpu", "a100-40", "--weights", "int8",
                "--kv", "fp8", "--tp", 2, "--json")  # fmt: skip
    expected = budget(model_config("Llama-3-8B"), 8192, 4, "A100-40", weight_dtype="int8", kv_dtype="fp8",
                      tensor_parallel=2)  # fmt: skip
    assert json.loads(shown) == {"model": "Llama-3-8B", **expected.to_dict()}


def test_size_takes_a_folder_a_config_a_hub_name_and_a_gguf_file(run, folder, smollm2_path):
    by_folder = json.loads(run("size", folder, "--json"))
    by_file = json.loads(run("size", folder / "config.json", "--json"))
    assert by_folder["bytes_per_gpu"] == by_file["bytes_per_gpu"]
    names = [json.loads(run("size", name, "--json")) for name in ("Qwen/Qwen3-8B", "qwen3-8b")]
    assert names[0] == names[1]
    gguf, table = (json.loads(run("size", name, "--json")) for name in (smollm2_path, "SmolLM2-135M"))
    assert gguf["bytes_per_gpu"] == table["bytes_per_gpu"]


def test_size_says_whether_it_fits_and_what_would(run):
    assert "Fits, at most" in run("size", "Llama-3-8B", "--gpu", "h100")
    assert "4 GPUs hold it: --tp 4" in run("size", "Llama-3-70B", "--gpu", "h100")
    assert "no number of these GPUs helps" in run("size", "Llama-3-70B", "--gpu", "t4", "--sequences", 10**6)


def test_size_lists_its_tables(run):
    tables = json.loads(run("size", "--list", "--json"))
    assert tables == {"models": list(minillm.analysis.MODELS), "gpus": list(minillm.analysis.HARDWARE)}
    shown = run("size", "--list")
    assert all(name in shown for name in tables["models"] + tables["gpus"])


# --- doctor ---


def findings(run, code=0):
    values = json.loads(run("doctor", "--json", code=code))
    assert values["healthy"] == (code == 0)
    return {finding["name"]: finding for finding in values["findings"]}


def test_doctor_of_this_machine(run, smollm2_path):
    found = findings(run)
    assert {"python", "torch", "cpu", "layouts", "gpu", "triton", "memory", "model", "cache"} <= set(found)
    assert found["model"]["status"] == "ok"
    assert str(smollm2_path) in found["model"]["detail"]
    assert all(f["remedy"] for f in found.values() if f["status"] == "missing")
    shown = run("doctor")
    assert all(f["name"] in shown and f["remedy"] in shown for f in found.values())


def test_doctor_fails_for_what_is_essential_alone(monkeypatch, run, tmp_path):
    monkeypatch.setattr(doctor, "REQUIRED", ("torch", "no_such_package"))
    found = findings(run, code=1)
    assert found["no_such_package"]["status"] == "missing"
    assert "pip install" in found["no_such_package"]["remedy"]
    assert "Something essential is missing" in run("doctor", code=1)
    monkeypatch.setattr(doctor, "REQUIRED", ("torch",))
    monkeypatch.setattr(doctor, "OPTIONAL", {"no_such_package": "nothing"})
    assert findings(run)["no_such_package"]["status"] == "missing"


def test_doctor_sees_a_missing_and_a_damaged_model(monkeypatch, run, tmp_path):
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    found = findings(run)
    assert "not there" in found["model"]["detail"]
    from minillm import fetch

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / fetch.FILE).write_bytes(b"GGUF")
    found = findings(run)
    assert "damaged" in found["model"]["detail"]
    assert found["model"]["remedy"]
    monkeypatch.setattr(doctor, "_ROOM", 1 << 62)  # no disk has as much
    assert findings(run, code=1)["cache"]["status"] == "missing"


# --- the frame ---


def test_ctrl_c_is_130(monkeypatch, capsys, options):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(common, "load", interrupt)
    assert cli.main(["generate", "x", *options]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "minillm", "size", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_fault_of_our_own_keeps_its_traceback(monkeypatch, options):
    def break_(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(common, "load", break_)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["generate", "x", *options])


def test_warnings_are_one_line(monkeypatch, capsys, options, loaded):
    def warn(args):
        warnings.warn("the disk is full", stacklevel=1)
        return loaded

    monkeypatch.setattr(common, "load", warn)
    assert cli.main(["generate", "the", "--max-tokens", "1", *options]) == 0
    assert capsys.readouterr().err == "minillm: warning: the disk is full\n"


def test_the_real_command_with_the_default_model(smollm2_path, smollm2):
    """What the README tells a newcomer to type."""
    command = [sys.executable, "-m", "minillm", "generate", "The capital of France is", "--max-tokens", "8"]
    done = subprocess.run(
        [*command, "--temperature", "0", "--dtype", "float32", "--json"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    expected = generate(*smollm2, "The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    assert values["token_ids"] == expected.token_ids
    assert "Paris" in values["text"]
