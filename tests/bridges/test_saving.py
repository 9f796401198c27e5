"""Folders of config.json and safetensors: what is saved comes back equal, what was damaged says so."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from heedful import CorruptModel, Cosine, Gaussian, InvalidArgument, Kernel, Sigmoid, Softmax, Unsupported, _savable
from heedful._savable import digest
from heedful.nn import (
    Attention,
    Block,
    BochnerTime,
    ColumnAttention,
    DatapointAttention,
    DatapointBlock,
    Encoder,
    GramCoefficients,
    InvariantCoefficients,
    Knowledge,
    KnowledgeAttention,
    LinearTime,
    MercerTime,
    PairAttention,
    Pairs,
    Positions,
    PositionTime,
    Primal,
    TGATTime,
    Time2Vec,
    TimeAttention,
    Timed,
    TokenAttention,
)
from heedful.ranking import ListEncoder
from listed import KERNELS

MODULES = {
    "attention": lambda: Attention(12, 3, 0.1, kernel=Sigmoid(bias=-2.0), num_kv_heads=1, add_zero_attn=True),
    "attention-sizes": lambda: Attention(12, 3, kdim=5, vdim=7, bias=False, dtype=torch.float64),
    "attention-learned": lambda: Attention(12, 3, kernel=Gaussian(torch.nn.Parameter(torch.rand(3) + 1)) * Softmax()),
    "attention-buffer": lambda: Attention(12, 3, kernel=Gaussian(torch.rand(3) + 1), dtype=torch.bfloat16),
    "knowledge": lambda: KnowledgeAttention(12, 2, knowledge=3, readout="x|z", value="mlp", hidden=5),
    "knowledge-heads": lambda: KnowledgeAttention(
        12, 2, knowledge=3, own_knowledge=True, coordinates="knowledge", weight=True, readout="x|z", outputs=4, out_dim=5,
        kernel=[Softmax(torch.nn.Parameter(torch.ones(()))), Gaussian(2.0)], knowledge_kernel=Sigmoid(bias=-2.0), value_dim=7,
    ),
    "pair": lambda: PairAttention(12, 5, arity=3),
    "pair-heads": lambda: PairAttention(12, 5, 2, readout="x|z", value="mlp", out_dim=4, activation="tanh"),
    "invariant": lambda: InvariantCoefficients(units=3, depth=2, out_channels=2, out_scalars=1),
    "gram": lambda: GramCoefficients(5, outputs=2, use=("xx",), scale=0.5),
    "positions": lambda: Positions(12, "learned", max_len=9),
    "bochner": lambda: BochnerTime(6, "mixture", components=2, sampler="random", periods=["1d"], period_range=("1h", "28d")),
    "mercer": lambda: MercerTime([7.3, "7d"], 2, trainable=False),
    "mercer-projected": lambda: MercerTime(3, 2, output="projected", init="authors"),
    "time2vec": lambda: Time2Vec(5),
    "tgat": lambda: TGATTime(5, init="log", period_range=(1.0, 9.0)),
    "linear-time": lambda: LinearTime(5),
    "position-time": lambda: PositionTime(5, "learned", max_len=12),
    "encoder-knowledge": lambda: Encoder(
        12, 2, [Knowledge(knowledge=3, kernel=[Softmax(), Gaussian(torch.nn.Parameter(torch.ones(1)))]), Pairs(4)], hidden=0
    ),
    "time-attention": lambda: TimeAttention(12, 3, rotate_values=True, dropout=0.1, dtype=torch.bfloat16),
    "time-attention-encoding": lambda: TimeAttention(12, 3, "residual", encoding=BochnerTime(6, periods=[7.3]), depth=2),
    "time-attention-decay": lambda: TimeAttention(12, 3, "decay").calibrate(torch.arange(9)[None] / 7),
    "encoder-timed": lambda: Encoder(12, 3, [Timed("bias", BochnerTime(6, "mixture", components=2)), Timed("bucket", buckets=6)]),
    "list-encoder": lambda: ListEncoder(7, 12, 3, depth=1, kernel=Gaussian(2.0)),
    "datapoint-block": lambda: DatapointBlock(12, 3, 5, norm_kv=False, scale="width", residual="query", eps=1e-12),
    "datapoint-block-inducing": lambda: DatapointBlock(12, 3, inducing=2, residual="identity", kernel=Gaussian(torch.nn.Parameter(torch.ones(3)))),
    "datapoint-attention": lambda: DatapointAttention(3, 4, 2, dropout=0.3, inducing=2, dtype=torch.float64),
    "column-attention": lambda: ColumnAttention(4, 2, hidden=5, residual="identity"),
    "tokens": lambda: TokenAttention(7, 6, 5, 3, beta=0.7, exclude_self=False, reach=2, dtype=torch.float64),
    "pair-softmax": lambda: PairAttention(12, 5, form="softmax"),
    "block": lambda: Block(12, 3, 20, norm="rms", activation="silu", norm_first=False),
    "encoder": lambda: Encoder(12, 3, [Softmax(), Gaussian(torch.nn.Parameter(torch.ones(3)))], num_kv_heads=1),
}  # fmt: skip


def output(module, x):
    out = module(x.argmax(-1) % 7 if isinstance(module, TokenAttention) else x)
    return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", MODULES)
def test_a_module_comes_back_equal(name, tmp_path):
    module = MODULES[name]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.rand_like(parameter))
    module.save_pretrained(tmp_path / "saved")
    again = type(module).from_pretrained(tmp_path / "saved")
    state, wanted = again.state_dict(), module.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[key], wanted[key]) and state[key].dtype == wanted[key].dtype for key in wanted)
    assert again.arguments().keys() == module.arguments().keys()
    assert not again.training
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in module.parameters()]
    dtype = next(module.parameters()).dtype
    x = torch.randn(2, 5, 12, dtype=dtype)
    if isinstance(module, DatapointAttention | ColumnAttention):
        x = x.unflatten(-1, (3, 4))
    if any(isinstance(part, TimeAttention) for part in module.modules()):
        at = {"times": torch.rand(2, 5, dtype=torch.float64).cumsum(1)}
        assert torch.equal(again(x, **at), module(x, **at))
    elif name == "attention-sizes":
        entries = x, torch.randn(2, 4, 5, dtype=dtype), torch.randn(2, 4, 7, dtype=dtype)
        assert torch.equal(again(*entries)[0], module(*entries)[0])
    else:
        assert torch.equal(output(again, x), output(module, x))
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_comes_back_equal(name, tmp_path):
    kernel = KERNELS[name]()
    kernel.save_pretrained(tmp_path)
    assert Kernel.from_pretrained(tmp_path) == kernel


def test_a_base_class_loads_any_of_its_kind(tmp_path):
    from heedful.nn import Module

    Attention(12, 3).save_pretrained(tmp_path)
    assert isinstance(Module.from_pretrained(tmp_path), Attention)
    with pytest.raises(InvalidArgument, match=r"holds an Attention, not a Block; call Attention.from_pretrained"):
        Block.from_pretrained(tmp_path)


def test_saving_over_a_folder_replaces_it_whole(tmp_path):
    Attention(12, 3).save_pretrained(tmp_path)
    new = Attention(8, 2).eval()
    new.save_pretrained(tmp_path)
    x = torch.randn(1, 3, 8)
    assert torch.equal(Attention.from_pretrained(tmp_path)(x)[0], new(x)[0])
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="a file of that name is there"):
        new.save_pretrained(tmp_path / "file")


def truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-40])


def tamper(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))


def sign(folder, config):
    """Writes a config whose checksum fits: what is wrong must be found by what it says."""
    config["sha256"] = digest(config, (folder / "model.safetensors").read_bytes())
    (folder / "config.json").write_text(json.dumps(config))


def rewrite(**changes):
    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        for name, value in changes.items():
            if name in config["module"]:
                config["module"][name] = value
            else:
                config[name] = value
        sign(folder, config)

    return damage


def edit(folder):
    """Another kernel, still valid: only the checksum can tell."""
    file = folder / "config.json"
    file.write_text(file.read_text().replace("Softmax", "Relu"))


def swap(folder):
    """Weights of another layer, checksum and all."""
    Attention(8, 2).save_pretrained(folder / "other")
    (folder / "model.safetensors").write_bytes((folder / "other" / "model.safetensors").read_bytes())
    rewrite()(folder)


def replace_by_folder(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "was truncated or altered"),
        (tamper, "was truncated or altered"),
        (edit, "was truncated or altered"),
        (replace_by_folder, "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[" * 200000), "config.json is not valid JSON"),
        (rewrite(arguments=[1]), "no type and arguments"),
        (rewrite(type=["Attention"]), "no type and arguments"),
        (
            rewrite(arguments={"embed_dim": 12, "num_heads": 3, "dropout": "x"}),
            "dropout must be a number from 0 on, below 1",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text('{"module": '), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "does not describe a heedful module"),
        (rewrite(type="Nothing"), "unknown module 'Nothing' of .*; known: .*Attention"),
        (rewrite(arguments={"embed_dim": 12}), "cannot be made from what was saved"),
        (rewrite(arguments={"embed_dim": 12, "num_heads": 5}), "embed_dim must be a multiple"),
        (swap, "size mismatch"),
    ],
)
def test_damage_is_told(damage, told, tmp_path):
    Attention(12, 3).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(CorruptModel, match=told):
        Attention.from_pretrained(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CorruptModel, match="no saved folder at"):
        Attention.from_pretrained(tmp_path / "nowhere")
    Softmax().save_pretrained(tmp_path)
    with pytest.raises(CorruptModel, match="does not describe a heedful module"):
        Attention.from_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="name is empty"):
        Softmax().save_pretrained("")


def test_a_damaged_kernel_names_its_folder(tmp_path):
    Gaussian(torch.ones(3)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for bandwidth in (2.0, -1.0, {"tensor": [1.0, 1.0], "dtype": "float32"}, {"tensor": [1.0], "dtype": "zzz"}):
        config["kernel"]["bandwidth"] = bandwidth
        sign(tmp_path, config)
        with pytest.raises(CorruptModel, match=f"{tmp_path.name}: Gaussian cannot be made from what was saved"):
            Kernel.from_pretrained(tmp_path)


def test_a_layer_of_ones_own_keeps_its_arguments(tmp_path):
    class Narrow(Attention):
        def __init__(self, width, **more):
            super().__init__(width, 2)
            self.width = width

    with pytest.raises(InvalidArgument, match="keeps no attribute for its argument 'more'"):
        Narrow(8).save_pretrained(tmp_path)

    class Wide(Attention):
        def __init__(self, width):
            super().__init__(width, 2)
            self.width = width

    Wide(8).save_pretrained(tmp_path)
    assert isinstance(Wide.from_pretrained(tmp_path), Wide)
    with pytest.raises(InvalidArgument, match=r"a module Block exists in heedful.nn.block"):
        type("Block", (Attention,), {})


def test_a_frozen_parameter_stays_a_parameter(tmp_path):
    layer = Attention(8, 2, kernel=Gaussian(torch.nn.Parameter(torch.ones(2)))).requires_grad_(False)
    layer.save_pretrained(tmp_path)
    assert "kernel_parameters.bandwidth" in dict(Attention.from_pretrained(tmp_path).named_parameters())


def edited(folder, part, **changes):
    """Rewrites the entry of a class; None takes a name out."""
    config = json.loads((folder / "config.json").read_text())
    entry = config[part] | changes
    config[part] = {name: value for name, value in entry.items() if value is not None}
    sign(folder, config)


def test_a_fresh_process_finds_the_class_by_its_module(tmp_path):
    from heedful.series import SeriesNetwork

    SeriesNetwork(2, 3, 11, embed_dim=8, num_heads=2).save_pretrained(tmp_path / "network")
    # A folder of the first release names no module, and one whose class has moved names the wrong one.
    for at, module in enumerate(("heedful.nn.attention", None, "heedful.nn.elsewhere", "heedful.lens", 7)):
        Attention(12, 3).save_pretrained(tmp_path / f"layer{at}")
        edited(tmp_path / f"layer{at}", "module", module=module)
    code = """
import sys; from heedful.nn import Module
for folder in sys.argv[1:]: print(type(Module.from_pretrained(folder)))
"""
    folders = [str(tmp_path / name) for name in ("network", *(f"layer{at}" for at in range(5)))]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=True)
    wanted = ["heedful.series.network.SeriesNetwork", *["heedful.nn.attention.Attention"] * 5]
    assert done.stdout.splitlines() == [f"<class '{name}'>" for name in wanted]


def test_a_folder_runs_no_module_but_heedfuls(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(tmp_path)
    Attention(12, 3).save_pretrained(tmp_path / "layer")
    for module in ("trap", "heedfully", "heedful.__main__", "heedful.nn.__main__", "heedful..trap", "heedful.", "os"):
        edited(tmp_path / "layer", "module", type="Nothing", module=module)
        with pytest.raises(CorruptModel, match="unknown module 'Nothing'"):
            Attention.from_pretrained(tmp_path / "layer")
        assert "trap" not in sys.modules
        assert "heedful.__main__" not in sys.modules


def test_classes_of_one_name_are_told_apart(monkeypatch):
    monkeypatch.setattr(_savable, "_CLASSES", dict(_savable._CLASSES))
    here, there = (type("Same", (Attention,), {"__module__": module}) for module in ("mine.one", "mine.two"))

    def find(name, module, caller=object):
        return _savable.find("module", {"type": name, "module": module}, caller)

    assert find("Same", "mine.one") is here
    assert find("Same", "mine.two") is there
    assert find("Same", "mine.three") is None
    assert find("Same", "mine.three", here) is here, "whoever names the class means it"
    assert find("Attention", "heedful.nn") is Attention
    assert find("Softmax", "heedful.kernels") is None, "a kernel is no module"
    assert find("InvalidArgument", "heedful._errors") is None


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 0.5, "word", [1, [2.0, "x"]], {"a": 1, 3: [None]}, np.array(["a", "bc"]), np.array([[1.5, 2.0]]),
        np.array(["a", "b"], dtype=object), torch.tensor([1.0, 2.0]), Gaussian(2.0) * Softmax(), Primal(3, feature_map=Cosine()),
        [Softmax(), "none", {"x": Primal(2)}],
    ],
    ids=str,
)  # fmt: skip
def test_values_go_through_json(value):
    again = _savable.decode(json.loads(json.dumps(_savable.encode(value))))
    assert type(again) is type(value)
    if isinstance(value, np.ndarray | torch.Tensor):
        assert again.dtype == value.dtype
        np.testing.assert_array_equal(again, value)
    else:
        assert again == value


def test_what_is_no_value_is_refused():
    for value in (lambda x: x, object(), np.array([1j]), [print]):
        with pytest.raises(InvalidArgument, match="cannot save"):
            _savable.encode(value)
    with pytest.raises(InvalidArgument, match="describes nothing that heedful knows"):
        _savable.decode({"pickle": "cos"})
    assert _savable.encode((np.int64(3), np.float32(0.5), np.bool_(True), Path("x"))) == [3, 0.5, True, "x"]


# As 0.1.0 wrote them, weights and checksum beside.
PRIMAL = {
    "rank": 2, "rank_multi": 10, "sampling": "segment_mean", "weights": "data", "causal": False, "feature_map": "cosine", "track_loss": True,
}  # fmt: skip
FIRST_MODULE = {
    "type": "Encoder", "module": "heedful.nn.encoder",
    "arguments": {
        "embed_dim": 4, "num_heads": 2,
        "kernels": [
            {"kernel": {"type": "Gaussian", "bandwidth": {"tensor": [1.0, 2.0], "dtype": "float32", "learned": True}, "normalize": True}},
            {"primal": PRIMAL},
            "none",
        ],
        "hidden": 16, "dropout": 0.0, "activation": "gelu", "norm": "layer", "norm_first": True, "bias": True, "num_kv_heads": 2,
        "impl": "auto", "max_len": 5,
    },
}  # fmt: skip
FIRST_ESTIMATOR = {
    "type": "SeriesClassifier", "module": "heedful.series.classifier",
    "params": {
        "attention": ["softmax", {"primal": PRIMAL}], "batch_size": "auto", "checkpoint_dir": None,
        "class_weight": {"mapping": [["a", 1.0], ["b", 2.0]]}, "device": "auto", "dropout": 0.1, "embed_dim": 4, "epochs": 2, "eta": 0.1,
        "head": "flatten", "hidden": None, "layers": None, "lr": 0.001, "max_len": None, "num_heads": 2, "patience": 20,
        "predict_dtype": "float32", "progress": False, "random_state": 3, "rank": 10, "validation_fraction": 0.2,
    },
    "fitted": {
        "classes_": {"array": ["a", "b"], "dtype": "<U1"}, "n_features_in_": 2, "channels_": 2, "is_table_": False, "max_len_": 5,
        "mean_": {"array": [0.1, 0.2], "dtype": "<f8"}, "scale_": {"array": [1.0, 2.0], "dtype": "<f8"}, "seed_": 3,
        "training_": {
            "training": {"epochs": [{"loss": 0.7, "held_out": {"loss": 0.6, "accuracy": 0.5}}], "best": 1, "resumed": 0}
        },
    },
}  # fmt: skip


def first_release(folder, kind, entry, weights):
    _savable.write_folder(folder, {kind: entry}, weights)
    config = json.loads((folder / "config.json").read_text())
    sign(folder, config | {"heedful": "0.1.0"})


def test_folders_of_the_first_release_load(tmp_path):
    encoder = Encoder(
        4, 2, [Gaussian(torch.nn.Parameter(torch.tensor([1.0, 2.0]))), Primal(2), "none"], max_len=5
    ).eval()
    first_release(tmp_path / "module", "module", FIRST_MODULE, encoder.state_dict())
    again, x = Encoder.from_pretrained(tmp_path / "module"), torch.randn(2, 5, 4)
    assert again.arguments() == encoder.arguments()
    assert torch.equal(again(x), encoder(x))
    kernel = {"type": "Product", "left": {"type": "Gaussian", "bandwidth": 2.0, "normalize": True}, "right": {"type": "Softmax", "scale": None}}  # fmt: skip
    first_release(tmp_path / "kernel", "kernel", kernel, {})
    assert Kernel.from_pretrained(tmp_path / "kernel") == Gaussian(2.0) * Softmax()
    pytest.importorskip("sklearn", reason="the extra 'tables' is not installed")
    from heedful.series import SeriesClassifier, SeriesNetwork

    network = SeriesNetwork(2, 2, 5, 4, 2, ["softmax", Primal(2)]).eval()
    first_release(tmp_path / "estimator", "estimator", FIRST_ESTIMATOR, network.state_dict())
    model = SeriesClassifier.from_pretrained(tmp_path / "estimator")
    assert (model.class_weight, model.attention[1], model.devices) == ({"a": 1.0, "b": 2.0}, Primal(2), 1)
    assert (model.training_.measured["accuracy"], model.scale_.tolist()) == (0.5, [1.0, 2.0])
    logits = network(torch.zeros(1, 5, 2), torch.zeros(1, 5, dtype=torch.bool))
    mean = np.broadcast_to(model.mean_[:, None], (1, 2, 5))
    np.testing.assert_allclose(model.predict_proba(mean), logits.softmax(1).detach(), atol=1e-6)


@pytest.mark.parametrize("version", ["0.1.1", "0.2", "1.0.0rc1", "99999999999"])
def test_a_folder_of_a_later_release_is_refused_by_its_name(version, tmp_path, monkeypatch):
    monkeypatch.setattr("heedful._savable.__version__", "0.1.0")
    for saved, load in ((Attention(12, 3), Attention.from_pretrained), (Softmax(), Kernel.from_pretrained)):
        saved.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        # Its checksum may be made in another way: what it is comes first.
        (tmp_path / "config.json").write_text(json.dumps({"heedful": version, "sha256": "?", "other": config}))
        with pytest.raises(
            Unsupported, match=rf"was written by heedful {version}, and this is 0.1.0; pip install 'heedful>="
        ):
            load(tmp_path)


@pytest.mark.parametrize("version", ["0.1.0", "0.1", "0.0.9", "0.1.0.dev3", "unknown", "", None])
def test_a_folder_of_this_or_an_earlier_release_loads(version, tmp_path, monkeypatch):
    monkeypatch.setattr("heedful._savable.__version__", "0.1.0")
    Softmax().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sign(tmp_path, config | {"heedful": version})
    assert Kernel.from_pretrained(tmp_path) == Softmax()
    assert config["heedful"] == "0.1.0"
