"""Softmax attention made primal: least squares against a direct solver, padding, structure, saving, honest reports."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from matplotlib import pyplot
from torch import nn

from heedful import CorruptModel, InvalidArgument, Unsupported, convert, lens
from heedful.bridges import swap
from heedful.convert import least_squares
from heedful.convert.distilling import Lesson, _loss, pool
from heedful.nn import Primal, PrimalAttention

transformers = pytest.importorskip("transformers", reason="runs where transformers is installed")

SMALL = {"hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 17}
D = torch.float64


def bert(**options):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=31, **(SMALL | {"initializer_range": 0.3} | options))
    return transformers.BertModel(config).eval()


def batch(size=5, length=11, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids, keep = torch.randint(1, 31, (size, length), generator=draw), torch.ones(size, length, dtype=torch.long)
    keep[1, 7:] = keep[3, 4:] = 0
    return {"input_ids": ids, "attention_mask": keep}


BATCHES = [batch(seed=seed) for seed in range(20)]


def layer_of(weights="data", rank=4, heads=3, max_len=5, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return PrimalAttention(
            12, heads, rank, max_len=max_len, weights=weights, track_loss=False, dtype=D, **options
        ).eval()


def data(count=6):
    torch.manual_seed(2)
    for _ in range(count):
        keep = torch.rand(3, 13) > 0.2
        keep[:, 0] = True
        yield torch.randn(3, 13, 12, dtype=D), keep


def test_features_are_what_the_weights_act_on():
    layer = layer_of(rank=3)
    x, keep = next(data())
    made = least_squares.features(layer, x, keep).unflatten(-1, (3, 2, 5))
    scores = layer.scores(x, ~keep)
    for side, (weight, expected) in enumerate(((layer.w_e, scores.e), (layer.w_r, scores.r))):
        got = torch.einsum("bnhm,hms->bhns", made[..., side, :], weight)
        torch.testing.assert_close(got, expected.masked_fill(~keep[:, None, :, None], 0.0))


def test_moments_are_those_of_the_tokens():
    parts = [(x, x @ torch.ones(12, 5, dtype=D), keep) for x, keep in data()]
    known = least_squares.moments(parts)
    z = torch.cat([x[keep] for x, _, keep in parts])
    d = torch.cat([y[keep] for _, y, keep in parts])
    torch.testing.assert_close(known.gram, (z - z.mean(0)).mT @ (z - z.mean(0)))
    torch.testing.assert_close(known.cross, (z - z.mean(0)).mT @ (d - d.mean(0)))
    torch.testing.assert_close(known.energy, (d - d.mean(0)).square().sum())
    torch.testing.assert_close(known.mean[12:], d.mean(0))
    halves = least_squares.moments(parts[:2]) + least_squares.moments(parts[2:])
    torch.testing.assert_close(halves.total, known.total)
    pooled = least_squares.moments(parts, pooled=2.0)
    rows = torch.cat(
        [
            *(x[keep] for x, _, keep in parts),
            *(x[b][keep[b]].mean(0, keepdim=True) for x, _, keep in parts for b in range(3)),
        ]
    )
    counts = torch.cat(
        [torch.ones(len(z), dtype=D), torch.tensor([2.0 * k.sum() for _, _, keep in parts for k in keep], dtype=D)]
    )
    mean = (rows * counts[:, None]).sum(0) / counts.sum()
    torch.testing.assert_close(pooled.gram, ((rows - mean) * counts[:, None]).mT @ (rows - mean))
    with pytest.raises(InvalidArgument, match="no tokens to fit to"):
        least_squares.moments([(x, x, torch.zeros_like(keep)) for x, keep in data(1)])


def test_the_control_is_a_ridge_regression():
    parts = [(x, x @ torch.randn(12, 5, dtype=D), keep) for x, keep in data()]
    known = least_squares.moments(parts)
    matrix, bias = least_squares.linear_map(known, 0.1)
    z, d = (torch.cat([part[at][part[2]] for part in parts]) for at in (0, 1))
    ridge = 0.1 * known.gram.diagonal().mean()
    stacked = torch.cat((z - z.mean(0), ridge.sqrt() * torch.eye(12, dtype=D)))
    expected = torch.linalg.lstsq(stacked, torch.cat((d - d.mean(0), torch.zeros(12, 5, dtype=D)))).solution
    torch.testing.assert_close(matrix, expected)
    torch.testing.assert_close(bias, d.mean(0) - z.mean(0) @ matrix)
    other = [(x, y + 1, keep) for x, y, keep in parts[:2]]
    far, wanted = (torch.cat([part[keep] for part, keep in side]) for side in (
        [(x @ matrix + bias - y, keep) for x, y, keep in other], [(y, keep) for _, y, keep in other]))  # fmt: skip
    expected = float(far.norm() / (wanted - wanted.mean(0)).norm())
    assert least_squares.moments(other).error(matrix, bias) == pytest.approx(expected)


def test_the_ridge_is_that_of_least_error():
    tried = []
    errors = dict(zip(least_squares.RIDGES, (1.0, 0.9, 0.7, 0.8, 0.1, 0.1, 0.1), strict=True))

    def solved(ridge):
        tried.append(ridge)
        return ridge

    assert least_squares.best(solved, errors.get, None) == 0.1
    assert tried == list(least_squares.RIDGES[:4])
    assert least_squares.best(solved, errors.get, 0.5) == 0.5


@pytest.mark.parametrize("weights", ["data", "static"])
@pytest.mark.parametrize("rank", [4, 7])
@pytest.mark.filterwarnings("ignore:PrimalAttention")
def test_a_layer_finds_another_one_of_its_kind(weights, rank):
    """Least squares recovers what a primal layer of the same queries and keys does."""
    teacher, student = layer_of(weights), layer_of(weights, rank)
    with torch.no_grad():
        for parameter in (teacher.w_e, teacher.w_r):
            parameter.mul_(3.0)
        teacher.head_proj.weight.copy_(torch.cat((torch.eye(4), torch.eye(4)), dim=-1))
        student.in_proj.load_state_dict(teacher.in_proj.state_dict())
    parts = [(x, teacher(x, ~keep).detach(), keep) for x, keep in data(12)]
    known = least_squares.moments((least_squares.features(student, x, keep), y, keep) for x, y, keep in parts)
    error = least_squares.fit_(student, known, teacher.out_proj.weight + 0.1 * torch.randn(12, 12, dtype=D), 1e-9)
    assert error < 0.02
    missed = torch.cat([(student(x, ~keep) - y)[keep] for x, y, keep in parts]).norm().detach()
    spread = torch.cat([y[keep] for _, y, keep in parts])
    assert float(missed / (spread - spread.mean(0)).norm()) == pytest.approx(error, abs=1e-4)
    assert bool((student.head_proj.weight.norm(dim=0) > 0).all())


def test_the_reported_error_is_the_layers_own_and_falls_with_the_rank():
    teacher = nn.MultiheadAttention(12, 3, batch_first=True, dtype=D)
    parts = []
    for x, keep in data(12):
        parts.append((3 * x, teacher(3 * x, 3 * x, 3 * x, ~keep)[0].detach(), keep))
    errors = {}
    for rank in (1, 2, 4):
        student = layer_of(rank=rank, max_len=3, rank_multi=4)
        known = least_squares.moments((least_squares.features(student, x, keep), y, keep) for x, y, keep in parts)
        errors[rank] = least_squares.fit_(student, known, teacher.out_proj.weight, 1e-6)
        made, wanted = (torch.cat([part[keep] for part, keep in side]) for side in (
            [(student(x, ~keep), keep) for x, _, keep in parts], [(y, keep) for _, y, keep in parts]))  # fmt: skip
        direct = float((made - wanted).detach().norm() / (wanted - wanted.mean(0)).norm())
        assert errors[rank] == pytest.approx(direct, abs=1e-6)
    assert errors[4] < errors[1] < 1
    assert errors[2] < errors[1]


def test_no_step_of_least_squares_can_be_bettered():
    """At the end each block is a solution of its own linear problem: no direction lowers the error to first order."""
    teacher = nn.MultiheadAttention(12, 3, batch_first=True, dtype=D)
    student = layer_of(rank=4, max_len=3)
    parts = [(x, teacher(x, x, x, ~keep)[0].detach(), keep) for x, keep in data(12)]
    known = least_squares.moments((least_squares.features(student, x, keep), y, keep) for x, y, keep in parts)
    least_squares.fit_(student, known, teacher.out_proj.weight, 1e-12)
    loss = sum((student(x, ~keep) - y)[keep].square().sum() for x, y, keep in parts) / known.energy
    slopes = torch.autograd.grad(loss, [student.out_proj.weight, student.out_proj.bias])
    assert max(float(slope.norm()) for slope in slopes) < 1e-6


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_embeddings_leave_out_padding(pooling):
    hidden = torch.randn(3, 5, 4)
    keep = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    got = pool(hidden, keep, pooling)
    expected = (
        [hidden[0].mean(0), hidden[1, 2:4].mean(0), hidden[2, 0]]
        if pooling == "mean"
        else [hidden[0, 0], hidden[1, 2], hidden[2, 0]]
    )
    torch.testing.assert_close(got, torch.stack(expected))
    torch.testing.assert_close(pool(hidden, None, pooling), hidden.mean(1) if pooling == "mean" else hidden[:, 0])
    assert pool(hidden[:, 0], keep, pooling) is not None


def models():
    tiny = {"vocab_size": 31, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 17}
    picture = SMALL | {"image_size": 8, "patch_size": 2}
    return {
        "bert": (lambda: bert(), ["encoder.layer.0.attention.self", False]),
        "roberta": (lambda: transformers.RobertaModel(transformers.RobertaConfig(vocab_size=31, **SMALL)), ["encoder.layer.0.attention.self", False]),
        "distilbert": (lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**tiny)), ["transformer.layer.0.attention", True]),
        "vit": (lambda: transformers.ViTModel(transformers.ViTConfig(**picture)), None),
        "deit": (lambda: transformers.DeiTModel(transformers.DeiTConfig(**picture)), None),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(models()))
def test_known_structures_are_found_converted_and_saved(name, tmp_path):
    torch.manual_seed(0)
    make, expected = models()[name]
    model = make().eval()
    sites = swap.find_sites(model)
    if expected is not None:
        assert [sites[0].name, sites[0].inside] == expected
    assert all((site.heads, site.width) == (3, 12) for site in sites)
    pictures = name in ("vit", "deit")
    batches = [{"pixel_values": torch.randn(2, 3, 8, 8)} for _ in range(10)] if pictures else BATCHES[:10]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    made = convert.primalize(model, batches, layers=[-1], rank=3, pooling="first")
    assert [fit.layer for fit in made.layers] == [len(sites) - 1]
    assert isinstance(made.model.get_submodule(sites[-1].name), swap.Slot)
    # The model that was given is as it was.
    assert swap.find_sites(model) == sites
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    convert.save(made, tmp_path)
    again = convert.load(tmp_path)
    for part in batches[:2]:
        assert torch.equal(swap.hidden(again(**part)), swap.hidden(made.model(**part)))
    assert not again.training


def test_the_slot_gives_the_fitted_layer_and_the_report_its_errors():
    model = bert()
    made = convert.primalize(model, BATCHES, layers=[1], rank=4, held_out=BATCHES[:3])
    site = swap.find_sites(model)[1]
    layer = made.model.get_submodule(site.name).primal
    torch.testing.assert_close(layer.in_proj.weight[:12], model.get_submodule(site.query).weight)
    torch.testing.assert_close(layer.in_proj.bias[12:], model.get_submodule(site.key).bias)
    far, wanted = [], []
    blocks = []
    for old, own in zip(
        swap.recorded(model, site, BATCHES[:3]), swap.recorded(made.model, site, BATCHES[:3]), strict=True
    ):
        keep = old.call.keep
        torch.testing.assert_close(layer(own.call.inputs, ~keep), own.output)
        far.append((own.output - old.output)[keep])
        wanted.append(old.output[keep])
        blocks.append((own.result - old.result)[keep])
    spread = torch.cat(wanted) - torch.cat(wanted).mean(0)
    assert made.layers[0].fitted == pytest.approx(float(torch.cat(far).norm() / spread.norm()), rel=1e-4)
    assert made.layers[0].rows == 4
    assert made.layers[0].block > 0
    assert len(made.cosines) == 15
    hidden = [m(**BATCHES[0]).last_hidden_state for m in (model, made.model)]
    keep = BATCHES[0]["attention_mask"].bool()
    both = [pool(part, keep, "mean") for part in hidden]
    torch.testing.assert_close(
        torch.tensor(made.cosines[:5]), torch.cosine_similarity(*both).detach(), atol=1e-5, rtol=0
    )


def test_padding_changes_nothing_in_a_converted_model():
    made = convert.primalize(bert(), BATCHES, layers=[0, 2], rank=4).model
    one = {name: value[1:2, :7] for name, value in BATCHES[0].items()}
    alone = made(**one).last_hidden_state
    padded = made(**BATCHES[0]).last_hidden_state[1:2, :7]
    torch.testing.assert_close(alone, padded, atol=1e-5, rtol=0)
    eager = made
    eager.set_attn_implementation("eager")
    torch.testing.assert_close(eager(**BATCHES[0]).last_hidden_state[1:2, :7], padded, atol=1e-5, rtol=0)


def test_later_layers_are_fitted_to_what_earlier_ones_left():
    """The second of two layers sees the converted model's activations, and aims at the original's."""
    model = bert()
    both = convert.primalize(model, BATCHES, layers=[0, 2], rank=4, held_out=BATCHES[:3])
    apart = convert.primalize(model, BATCHES, layers=[2], rank=4, held_out=BATCHES[:3])
    first, last = (made.model.get_submodule(swap.find_sites(model)[2].name).primal for made in (both, apart))
    assert not torch.equal(first.w_e, last.w_e)
    assert [fit.layer for fit in both.layers] == [0, 2]
    assert both.layers[1].block >= both.layers[0].block


@pytest.mark.parametrize("train", ["layer", "attention"])
def test_distillation_brings_the_layer_nearer(train):
    model = bert()
    fitted = convert.primalize(model, BATCHES, rank=4, held_out=BATCHES)
    how = convert.Distillation(30, 3e-3, train)
    taught = convert.primalize(model, BATCHES, rank=4, held_out=BATCHES, distill=how)
    # The last layer is taught by embeddings first of all, the others by their tokens.
    assert taught.agreement > fitted.agreement
    assert (fitted.distillation, taught.distillation) == (0, 30)
    network = "encoder.layer.2.intermediate.dense.weight"
    same = torch.equal(taught.model.state_dict()[network], model.state_dict()[network])
    assert same == (train == "attention")
    assert all(parameter.requires_grad and parameter.grad is None for parameter in taught.model.parameters())
    again = convert.primalize(model, BATCHES, rank=4, held_out=BATCHES, distill=how)
    assert again.cosines == taught.cosines
    before, after = (
        convert.primalize(model, BATCHES, layers=[0], rank=4, distill=steps).layers[0].block for steps in (0, how)
    )
    assert after < before


def test_forms_and_heads_may_be_chosen():
    made = convert.primalize(bert(), BATCHES, form=Primal(2, rank_multi=3, sampling="stride"), heads=6)
    layer = made.model.encoder.layer[2].attention.self.primal
    assert (layer.num_heads, layer.rank, layer.sampling, layer.w_e.shape) == (6, 2, "stride", (6, 6, 2))
    assert (made.layers[0].heads, made.layers[0].rows) == (6, 6)


def test_the_model_keeps_its_mode_and_random_numbers_their_course():
    model = bert().train()
    model.encoder.layer[0].eval()
    torch.manual_seed(5)
    convert.primalize(model, BATCHES[:8], rank=3, distill=2)
    drawn = torch.rand(1)
    assert model.training
    assert not model.encoder.layer[0].training
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


def test_lenses_see_a_converted_model():
    made = convert.primalize(bert(), BATCHES, rank=4).model
    found = lens.spectrum(made, BATCHES[0])
    assert found.select("softmax").layers == (0, 1)
    assert found.select("primal").layers == (2,)
    assert {one.rows for one in found} == {11, 7, 4}


def test_where_it_breaks():
    found = convert.breaking_point(bert(), BATCHES, threshold=1.0, rank=2)
    assert (found.layers, len(found.agreements)) == (0, 1)
    whole = convert.breaking_point(bert(), BATCHES, threshold=-1.0, rank=2)
    assert (whole.layers, len(whole.runs)) == (3, 3)
    assert [len(run.layers) for run in whole.runs] == [1, 2, 3]
    assert str(found).startswith("0 layers converted: embeddings stay at 1")
    json.dumps(whole.to_dict(), allow_nan=False)
    ax = whole.plot()
    assert list(ax.get_lines()[0].get_ydata()) == list(whole.agreements)
    pyplot.close("all")
    with pytest.raises(InvalidArgument, match="threshold must be a cosine"):
        convert.breaking_point(bert(), BATCHES, threshold=90)


def test_results_print_plot_and_go_to_json():
    made = convert.primalize(bert(), BATCHES, rank=3)
    assert repr(made) == f"Primalized(BertModel, layers 2, agreement {made.agreement:.4f})"
    told = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert told["agreement"] == pytest.approx(sum(made.cosines) / len(made.cosines))
    assert told["layers"][0]["name"] == "encoder.layer.2.attention.self"
    assert told["latency_before"] > 0 < told["latency_after"]
    assert told["batch"] == [5, 11]
    assert "no mixing" in str(made)
    assert max(map(len, str(made).splitlines())) <= 110
    ax = made.plot()
    assert sum(bar.get_height() for bar in ax.patches) == len(made.cosines)
    pyplot.close("all")


class Words:
    """A tokenizer of numbers."""

    def __call__(self, texts, **options):
        rows = [[int(word) for word in text.split()] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_texts_are_read_by_a_tokenizer():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 9, (40,), generator=draw).tolist()
    texts = [" ".join(str(int(x)) for x in torch.randint(1, 31, (n,), generator=draw)) for n in lengths]
    said = []
    made = convert.primalize(
        bert(),
        texts[:30],
        tokenizer=Words(),
        held_out=texts[30:],
        rank=3,
        batch_size=4,
        distill=2,
        progress=lambda *now: said.append(now),
    )
    assert len(made.cosines) == 10
    assert {what for _, _, what in said} == {"layer 2: least squares", "layer 2: distillation"}
    with pytest.raises(InvalidArgument, match="a text needs a tokenizer"):
        convert.primalize(bert(), texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [3]}, "layers must be places among 3 self-attentions"),
        ({"layers": []}, "layers must be places"),
        ({"layers": "last"}, "layers must be places"),
        ({"rank": 0}, "rank"),
        ({"ridge": 0}, "ridge must be a number above 0"),
        ({"pooling": "max"}, "pooling must be one of mean, first"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"distill": -1}, "steps must be a whole number"),
        ({"heads": 5}, "5"),
        ({"form": Primal(3, causal="prefix")}, "an encoder sees the whole sequence"),
        ({"calibration": []}, "calibration must be texts, or mappings"),
        ({"calibration": [torch.ones(2)]}, "calibration must be texts, or mappings"),
        ({"calibration": BATCHES[:1]}, "too few batches to hold some out"),
        ({"model": SimpleNamespace()}, "model must be an encoder of transformers; got SimpleNamespace"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(options, message):
    given = {"model": bert(), "calibration": BATCHES} | options
    with pytest.raises(InvalidArgument, match=message):
        convert.primalize(given.pop("model"), given.pop("calibration"), **given)


def test_models_that_cannot_be_converted_are_refused():
    with pytest.raises(Unsupported, match="is a decoder"):
        convert.primalize(bert(is_decoder=True), BATCHES)
    with pytest.raises(Unsupported, match="no self-attention of a known structure"):
        convert.primalize(nn.Linear(2, 2), BATCHES)
    gpt = transformers.GPT2Model(transformers.GPT2Config(vocab_size=31, n_embd=12, n_layer=1, n_head=3))
    with pytest.raises(Unsupported, match="no self-attention of a known structure"):
        convert.primalize(gpt, BATCHES)
    with pytest.raises(InvalidArgument, match="lr must be"):
        convert.Distillation(1, lr=0)
    with pytest.raises(InvalidArgument, match="train must be"):
        convert.Distillation(1, train="head")


def test_masks_that_hide_pairs_are_refused_not_ignored():
    made = convert.primalize(bert(), BATCHES, rank=3).model
    causal = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    slot = made.encoder.layer[2].attention.self
    x = torch.randn(1, 11, 12)
    with pytest.raises(Unsupported, match="differs between queries"):
        slot(x, attention_mask=causal)
    with pytest.raises(Unsupported, match="its own sequence alone"):
        slot(x, encoder_hidden_states=x)
    with pytest.raises(Unsupported, match="padding cannot be read"):
        slot(x, attention_mask=object())
    with pytest.raises(Unsupported, match="hidden states"):
        slot()
    hidden = torch.zeros(1, 1, 11, 11).masked_fill(torch.arange(11) > 6, torch.finfo(torch.float32).min)
    for mask in (hidden, hidden == 0, (hidden[:, 0, 0] == 0).long()):
        torch.testing.assert_close(slot(x, mask)[0][:, :7], slot(x[:, :7])[0])


def test_folders_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="has no primal layers"):
        convert.save(bert(), tmp_path)
    with pytest.raises(CorruptModel, match="no saved folder"):
        convert.load(tmp_path / "none")
    made = convert.primalize(bert(), BATCHES, rank=3)
    convert.save(made.model, tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(CorruptModel, match="truncated or altered"):
        convert.load(tmp_path)
    told = swap.described(made.model)
    for change, message in (
        ({"class": "os"}, "is no model of transformers"),
        ({"layers": {"x": {}}}, "has no self-attention 'x'"),
    ):
        with pytest.raises(CorruptModel, match=message):
            swap.rebuilt(told | change)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20])
def test_what_a_teacher_leaves_at_padding_is_not_learned(value):
    torch.manual_seed(0)
    block, x, wanted = nn.Linear(4, 4), torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    keep = torch.arange(5) < torch.tensor([[5], [3]])
    plain = ((block(x) - wanted)[keep].square().mean() / wanted[keep].square().mean()).detach()
    spoiled = wanted.masked_fill(~keep[..., None], value)
    for pooling in (None, "mean"):
        loss = _loss(block, Lesson((x,), {}, spoiled, keep), pooling)
        loss.backward()
        assert torch.equal(
            loss, _loss(block, Lesson((x,), {}, wanted.masked_fill(~keep[..., None], 0.0), keep), pooling)
        )
        assert loss >= plain * 0.999
    assert all(part.grad.isfinite().all() for part in block.parameters())
