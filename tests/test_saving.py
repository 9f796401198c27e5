"""Folders of config.json and safetensors: what is saved comes back equal, what was damaged says so."""

import json
import subprocess
import sys

import pytest
import torch

import heedful
from contracts import KERNELS
from heedful import CorruptModel, Gaussian, InvalidArgument, Kernel, Sigmoid, Softmax, Unsupported
from heedful._pretrained import Register, digest
from heedful.nn import Attention, Block, Encoder, KnowledgeAttention, PairAttention

MODULES = {
    "attention": lambda: Attention(12, 3, 0.1, kernel=Sigmoid(bias=-2.0), num_kv_heads=1, add_zero_attn=True),
    "attention-sizes": lambda: Attention(12, 3, kdim=5, vdim=7, bias=False, dtype=torch.float64),
    "attention-learned": lambda: Attention(12, 3, kernel=Gaussian(torch.nn.Parameter(torch.rand(3) + 1)) * Softmax()),
    "attention-buffer": lambda: Attention(12, 3, kernel=Gaussian(torch.rand(3) + 1), dtype=torch.bfloat16),
    "knowledge": lambda: KnowledgeAttention(12, 2, knowledge=3, readout="x|z", value="mlp", hidden=5),
    "pair": lambda: PairAttention(12, 5, arity=3),
    "pair-softmax": lambda: PairAttention(12, 5, form="softmax"),
    "block": lambda: Block(12, 3, 20, norm="rms", activation="silu", norm_first=False),
    "encoder": lambda: Encoder(12, 3, [Softmax(), Gaussian(torch.nn.Parameter(torch.ones(3)))], num_kv_heads=1),
}


def output(module, x):
    out = module(x)
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
    if name == "attention-sizes":
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
    from heedful.nn._module import Module

    Attention(12, 3).save_pretrained(tmp_path)
    assert isinstance(Module.from_pretrained(tmp_path), Attention)
    with pytest.raises(InvalidArgument, match=r"holds a Attention, not a Block; call Attention.from_pretrained"):
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
        (rewrite(arguments={"embed_dim": 12, "num_heads": 3, "dropout": "x"}), "dropout must lie in"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text('{"module": '), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "does not describe a heedful module"),
        (rewrite(type="Nothing"), "unknown layer 'Nothing'; known: .*Attention"),
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
        with pytest.raises(CorruptModel, match=f"{tmp_path.name}: the kernel cannot be made"):
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
    with pytest.raises(InvalidArgument, match=r"a layer Block exists in heedful.nn.block"):
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
        with pytest.raises(CorruptModel, match="unknown layer 'Nothing'"):
            Attention.from_pretrained(tmp_path / "layer")
        assert "trap" not in sys.modules
        assert "heedful.__main__" not in sys.modules


def test_classes_of_one_name_are_told_apart():
    register = Register({"Old": "heedful.kernels"})
    here, there = (type("Same", (), {"__module__": module}) for module in ("mine.one", "mine.two"))
    for cls in (here, there, Softmax):
        register.add(cls)
    assert register.find({"type": "Same", "module": "mine.one"}, object) is here
    assert register.find({"type": "Same", "module": "mine.two"}, object) is there
    assert register.find({"type": "Same", "module": "mine.three"}, object) is None
    assert register.find({"type": "Same", "module": "mine.three"}, here) is here, "whoever names the class means it"
    assert register.find({"type": "Softmax", "module": "heedful.kernels"}, object) is Softmax
    assert register.find({"type": "InvalidArgument", "module": "heedful._errors"}, object) is None


@pytest.mark.parametrize("version", ["0.1.1", "0.2", "1.0.0rc1", "99999999999"])
def test_a_folder_of_a_later_release_is_refused_by_its_name(version, tmp_path, monkeypatch):
    monkeypatch.setattr("heedful._pretrained.__version__", "0.1.0")
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
    monkeypatch.setattr("heedful._pretrained.__version__", "0.1.0")
    Softmax().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sign(tmp_path, config | {"heedful": version})
    assert Kernel.from_pretrained(tmp_path) == Softmax()
    assert heedful.__version__ == config["heedful"]
