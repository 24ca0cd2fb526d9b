"""Checkpoints written on one number of ranks and read on another, bit for bit; and what a crash leaves."""

import pytest
import torch
from torch import nn

import tpcourse as tp

WORDS, DIM, HIDDEN, HEAD_DIM = 13, 5, 24, 3  # the vocabulary is uneven on 2, 3 and 4 ranks
IDS = torch.tensor([[1, 0, 10, 4], [7, 12, 2, 9]])
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
              "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})}


class Model(nn.Module):
    """An embedding tied to the head; between them a norm, fused blocks, a row layer, copies of KV heads."""

    def __init__(self, group, words=WORDS, tied=True):
        from tpcourse.layers import (ColumnParallelLinear, QKVParallelLinear, RowParallelLinear,
                                     VocabParallelEmbedding, VocabParallelHead)

        super().__init__()
        torch.manual_seed(3)
        self.embedding = VocabParallelEmbedding(words, DIM, group)
        self.norm = nn.LayerNorm(DIM)
        self.qkv = QKVParallelLinear(DIM, HEAD_DIM, 12, 1, group)
        self.up = ColumnParallelLinear(DIM, 2 * HIDDEN, group, stride=2)
        self.down = RowParallelLinear(HIDDEN, DIM, group)
        self.head = VocabParallelHead(DIM, words, group, weight=self.embedding.weight if tied else None)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        q, k, v = self.qkv(x).split([self.qkv.weight.size(0) - 2 * HEAD_DIM, HEAD_DIM, HEAD_DIM], -1)
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(gate.sigmoid() * up)
        self.seen += 1
        return self.head(x), (q.unflatten(-1, (-1, HEAD_DIM)) * (k + v).unsqueeze(-2)).square().sum()


def steps(model, optimizer, group, count):
    """Steps of training; the losses of the vocabulary, which all ranks see."""
    from tpcourse.comm import reduce_from_region
    from tpcourse.layers import vocab_parallel_cross_entropy

    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        logits, heads = model(IDS)
        loss = vocab_parallel_cross_entropy(logits, IDS, group, WORDS)
        loss = loss + 0.01 * reduce_from_region(heads, group)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def wholes(model, optimizer, group):
    """Parameters and moments, put together from all ranks by the layouts."""
    import torch.distributed as dist

    from tpcourse.comm import group_of, group_size
    from tpcourse.layers import model_layouts

    held = {}
    layouts = model_layouts(model, group)
    for name, parameter in model.named_parameters():
        held[name] = layouts[name], parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                held[f"{name} {key}"] = (layouts[name] if value.shape == parameter.shape else None), value
    ranks = [None] * group_size(group)
    dist.all_gather_object(ranks, held, group=group_of(group))
    out = {}
    for name, (layout, value) in held.items():
        out[name] = value if layout is None else torch.full(layout.shape, torch.nan)
        for rank in ranks:
            for piece in rank[name][0].pieces if layout is not None else ():
                out[name][piece.there] = rank[name][1][piece.here]
    return out


def write(mesh, path, kind, count=3):
    from tpcourse.layers import checkpoint

    model, (optimizer, options) = Model(mesh["tp"]), OPTIMIZERS[kind]
    optimizer = optimizer(model.parameters(), **options)
    losses = steps(model, optimizer, mesh["tp"], count)
    optimizer.param_groups[0]["lr"] *= 0.5
    checkpoint.save(path, model, optimizer, mesh["tp"], {"losses": losses, "rank": mesh.get_rank()})
    saved = wholes(model, optimizer, mesh["tp"])
    return saved, losses, steps(model, optimizer, mesh["tp"], 2)


def read(mesh, path, kind):
    from tpcourse.layers import checkpoint

    model, (optimizer, options) = Model(mesh["tp"]), OPTIMIZERS[kind]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    optimizer = optimizer(model.parameters(), **options)
    extra = checkpoint.load(path, model, optimizer, mesh["tp"])
    loaded = wholes(model, optimizer, mesh["tp"])
    state = model.seen.tolist(), optimizer.param_groups[0]["lr"], model.head.weight is model.embedding.weight
    return loaded, extra, state, steps(model, optimizer, mesh["tp"], 2)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before, after", [(2, 4), (4, 3), (4, 1), (2, 2)])
def test_from_one_number_of_ranks_to_another(tmp_path, kind, before, after):
    """Parameters, moments, counts and options come back bit for bit, and training goes on where it was."""
    saved, losses, next_losses = tp.spawn(write, tmp_path / "saved", kind, ranks=before)[0]
    keys = {"SGD": {"momentum_buffer"}, "AdamW": {"step", "exp_avg", "exp_avg_sq"}}[kind]
    assert {name.split(" ")[1] for name in saved if " " in name} == keys
    assert not any(value.isnan().any() for value in saved.values())
    for loaded, extra, state, own_losses in tp.spawn(read, tmp_path / "saved", kind, ranks=after):
        assert same(loaded, saved)
        assert extra == {"losses": losses, "rank": 0}
        assert state == ([3, 3], OPTIMIZERS[kind][1]["lr"] / 2, True)
        assert own_losses == pytest.approx(next_losses, rel=1e-4)
        assert before != after or own_losses == next_losses  # to the bit, where sums have the same order


def test_every_entry_is_written_once(tmp_path):
    """The chunks of each tensor in the folder cover it without overlap: copies are not written."""
    from torch.distributed.checkpoint import FileSystemReader

    tp.spawn(write, tmp_path / "saved", "SGD", ranks=4)
    stored = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    for name, tensor in stored.items():
        if name != "rest":
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel(), name
    assert {name.split(".", 1)[0] for name in stored} == {"model", "optimizer", "rest"}
    assert "model.head.weight" not in stored  # it is the embedding's


def crash(mesh, path, where):
    """Saves other numbers, and breaks down on rank 0 at that point."""
    from unittest import mock

    def stop(*args, **options):
        raise OSError("the disk is full")

    targets = {"writing": "torch.distributed.checkpoint.FileSystemWriter.write_data",
               "before renaming": "tpcourse.layers.checkpoint._replace"}
    with mock.patch(targets[where], stop) if mesh.get_rank() == 0 else mock.MagicMock():
        write(mesh, path, "SGD", count=1)


@pytest.mark.parametrize("where", ["writing", "before renaming"])
def test_a_crash_leaves_the_checkpoint_before(tmp_path, where):
    saved, *_ = tp.spawn(write, tmp_path / "saved", "SGD", ranks=2)[0]
    with pytest.raises(Exception, match="the disk is full"):
        tp.spawn(crash, tmp_path / "saved", where, ranks=2)
    assert all(same(loaded, saved) for loaded, *_ in tp.spawn(read, tmp_path / "saved", "SGD", ranks=2))
    again, *_ = tp.spawn(write, tmp_path / "saved", "SGD", 1, ranks=2)[0]  # and the next one takes its place
    assert all(same(loaded, again) for loaded, *_ in tp.spawn(read, tmp_path / "saved", "SGD", ranks=2))
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_a_crash_between_two_renamings_leaves_the_old_one(tmp_path):
    saved, *_ = tp.spawn(write, tmp_path / "saved", "SGD", ranks=2)[0]
    (tmp_path / "saved").rename(tmp_path / ".saved.old")
    assert all(same(loaded, saved) for loaded, *_ in tp.spawn(read, tmp_path / "saved", "SGD", ranks=2))


def refuse(mesh, path, words, tied, groups=1):
    from tpcourse.layers import checkpoint

    model = Model(mesh["tp"], words, tied)
    first = model.embedding.weight.detach().clone()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[i::groups]} for i in range(groups)], lr=0.1)
    try:
        checkpoint.load(path, model, optimizer, mesh["tp"])
    except (ValueError, FileNotFoundError) as error:
        return str(error).replace(str(path.parent), ""), torch.equal(first, model.embedding.weight)


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path):
    tp.spawn(write, tmp_path / "saved", "SGD", ranks=2)
    with tp.World(ranks=2) as world:
        def texts(*args):
            ((text, untouched), other) = world.run(refuse, *args)
            assert untouched and other == (text, untouched)
            return text

        path, build = tmp_path / "saved", "build the model that was saved"
        assert texts(path, 17, True) == (
            f"embedding.weight has shape (13, 5) in /saved and shape (17, 5) in the model; {build}")
        assert texts(path, WORDS, False) == (
            f"head.weight has no such parameter in /saved and shape (13, 5) in the model; {build}")
        assert texts(path, WORDS, True, 2) == (
            "the checkpoint has 1 groups of parameters and the optimizer 2; build it with as many")
        assert texts(tmp_path / "none", WORDS, True) == (
            " holds no checkpoint none; pass the path given to save")


def exported(mesh, path):
    from tpcourse.layers.checkpoint import export_safetensors

    model = Model(mesh["tp"])
    with torch.no_grad():
        model.down.bias[0], model.norm.weight[0] = -0.0, torch.nan
        model.qkv.weight[-1, 0] = -0.0  # a copy of the last value row on every rank
    export_safetensors(model, path, mesh["tp"])


def imported(mesh, path):
    from tpcourse.layers.checkpoint import import_safetensors

    model = Model(mesh["tp"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    import_safetensors(model, path, mesh["tp"])
    return wholes(model, torch.optim.SGD(model.parameters()), mesh["tp"])


@pytest.mark.parametrize("before, after", [(2, 4), (4, 3), (3, 1)])
def test_safetensors(tmp_path, before, after):
    """One file of whole tensors, which a dense model loads too: equal to the bit, negative zeros included."""
    from safetensors.torch import load_file

    tp.spawn(exported, tmp_path / "model.safetensors", ranks=before)
    file = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(3)
    table = nn.Embedding(WORDS, DIM).weight
    assert torch.equal(file["embedding.weight"], table) and "head.weight" not in file
    assert file["seen"].dtype == torch.int64 and file["norm.weight"][0].isnan()
    assert file["down.bias"][0].signbit() and file["qkv.weight"][-1, 0].signbit()
    dense = nn.Linear(DIM, 14 * HEAD_DIM)
    dense.load_state_dict({name: file[f"qkv.{name}"] for name in ("weight", "bias")})
    for loaded in tp.spawn(imported, tmp_path / "model.safetensors", ranks=after):
        assert all(value.numpy().tobytes() == file[name].numpy().tobytes() for name, value in loaded.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_file_of_another_model_is_refused(tmp_path, two):
    from safetensors.torch import load_file, save_file

    def on_rank(mesh, path):
        from tpcourse.layers.checkpoint import import_safetensors

        try:
            import_safetensors(Model(mesh["tp"]), path, mesh["tp"])
        except ValueError as error:
            return str(error).replace(str(path.parent), "")

    path = tmp_path / "model.safetensors"
    two.run(exported, path)
    file = load_file(path)
    save_file(file | {"up.weight": torch.zeros(47, DIM)}, path)
    end = "in the model; build the model that was saved"
    assert set(two.run(on_rank, path)) == {
        f"up.weight has shape (47, 5) in /model.safetensors and shape (48, 5) {end}"}
    save_file(file | {"more": torch.zeros(1)}, path)
    text = f"more has shape (1,) in /model.safetensors and no such parameter {end}"
    assert set(two.run(on_rank, path)) == {text}


def test_replaces_nothing_but_a_checkpoint(two, tmp_path):
    """A folder or file of somebody's own stays as it is, and every rank raises."""
    tmp_path.joinpath("mine").mkdir()
    tmp_path.joinpath("mine", "thesis.txt").write_text("important")

    def on_rank(mesh, path):
        from tpcourse.layers import ColumnParallelLinear, checkpoint

        layer = ColumnParallelLinear(6, 8, mesh["tp"])
        with pytest.raises(ValueError, match="is no checkpoint"):
            checkpoint.save(path, layer, torch.optim.SGD(layer.parameters(), lr=0.1), mesh["tp"], None)

    for path in (tmp_path / "mine", tmp_path / "mine" / "thesis.txt"):
        two.run(on_rank, path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    assert tmp_path.joinpath("mine", "thesis.txt").read_text() == "important"


def test_an_optimizer_that_keeps_rows_and_columns_is_refused(two, tmp_path):
    def on_rank(mesh, path):
        from tpcourse.layers import ColumnParallelLinear, checkpoint

        layer = ColumnParallelLinear(6, 8, mesh["tp"])
        optimizer = torch.optim.Adafactor(layer.parameters(), lr=0.1)
        layer(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        with pytest.raises(ValueError, match="row_var of weight has shape"):
            checkpoint.save(path, layer, optimizer, mesh["tp"], None)

    two.run(on_rank, tmp_path / "saved")
    assert not tmp_path.joinpath("saved").exists()


def test_an_optimizer_of_fewer_parameters_takes_theirs(two, tmp_path):
    """Fine-tuning: what is frozen now had moments once."""
    def on_rank(mesh, path):
        from tpcourse.layers import ColumnParallelLinear, checkpoint

        layer = ColumnParallelLinear(6, 8, mesh["tp"])
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        layer(torch.randn(3, 6)).sum().backward()
        optimizer.step()
        checkpoint.save(path, layer, optimizer, mesh["tp"], None)
        fewer = torch.optim.AdamW([layer.weight], lr=0.1)
        checkpoint.load(path, layer, fewer, mesh["tp"])
        return torch.equal(fewer.state[layer.weight]["exp_avg"], optimizer.state[layer.weight]["exp_avg"])

    assert all(two.run(on_rank, tmp_path / "saved"))
