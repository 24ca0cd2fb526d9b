"""The program: alike under both launchers, goes on where it was killed, on another number of ranks too."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.testing import assert_close

import tpcourse as tp
from tpcourse.train import Config, main, train

SMALL = ["--dim", "12", "--heads", "4", "--context", "8", "--batch", "3", "--layers", "1", "--sample", "4"]


def program(*options, launcher=("-m",), **kwargs):
    """What `python -m tpcourse.train` or torchrun printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *launcher, "tpcourse.train", *SMALL, *options], env=environment,
                          capture_output=True, text=True, timeout=100, **kwargs)


def losses(folder):
    return folder.joinpath("losses.txt").read_text()


def config(**options):
    return Config(dim=12, heads=4, context=8, batch=4, layers=1, sample=0, dropout=0.2, **options)


def test_python_and_torchrun_give_the_same_losses(tmp_path):
    """To the last bit; and both leave a plot, a sample and checkpoints behind."""
    options = ["--tp", "2", "--steps", "4", "--dropout", "0.1", "--save"]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    outs = [program(*options, str(tmp_path / "a")), program(*options, str(tmp_path / "b"), launcher=torchrun)]
    assert [out.returncode for out in outs] == [0, 0], [out.stderr for out in outs]
    assert len(losses(tmp_path / "a").split()) == 4
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for out, folder in zip(outs, "ab"):
        assert "step      4 of 4   loss" in out.stdout and "loss of the last step" in out.stdout
        assert {"losses.png", "step_00000004"} < set(os.listdir(tmp_path / folder))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["1D", "1D+SP"])
def test_goes_on_bit_for_bit(two, tmp_path, sequence_parallel):
    """With dropout, whose masks depend on where the streams stand. The folder keeps two checkpoints."""
    save = str(tmp_path / "run")
    options = dict(tp=2, sequence_parallel=sequence_parallel)
    whole = two.run(train, config(steps=6, **options))
    two.run(train, config(steps=2, save=save, every=1, **options))
    assert sorted(os.listdir(save)) == ["step_00000001", "step_00000002"]
    parts = two.run(train, config(steps=6, save=save, every=2, **options))
    assert parts == whole
    assert sorted(os.listdir(save)) == ["step_00000004", "step_00000006"]


def test_goes_on_on_another_number_of_ranks(two, tmp_path):
    """The same weights and optimizer: without dropout the losses differ by rounding only."""
    save = str(tmp_path / "run")
    first = dict(dim=12, heads=4, context=8, batch=4, layers=1, sample=0, save=save)
    two.run(train, Config(tp=2, steps=3, **first))
    (end, *_) = tp.spawn(train, Config(tp=4, steps=6, **first), ranks=4)
    (whole, *_) = two.run(train, Config(tp=2, steps=6, **{**first, "save": ""}))
    assert end.losses[:3] == whole.losses[:3]
    assert_close(end.losses, whole.losses, rtol=1e-5, atol=0)


def test_a_killed_run_loses_nothing_that_it_had_saved(tmp_path):
    """SIGKILL in the middle; the same command goes on, and ends with the losses of a run left alone."""
    options = ["--tp", "2", "--steps", "30", "--every", "3", "--save"]
    command = [sys.executable, "-m", "tpcourse.train", *SMALL, *options, str(tmp_path / "killed")]
    run = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("killed/step_*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert list(tmp_path.glob("killed/step_*")) and not (tmp_path / "killed/losses.txt").exists()
    again, whole = program(*options, str(tmp_path / "killed")), program(*options, str(tmp_path / "whole"))
    assert again.returncode == whole.returncode == 0, again.stderr
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_folder_of_another_run_is_refused(two, tmp_path):
    two.run(train, config(tp=2, steps=1, save=str(tmp_path)))
    with pytest.raises(tp.RankError, match="lr=0.003 there and 0.1 here"):
        two.run(train, config(tp=2, steps=2, lr=0.1, save=str(tmp_path)))


def test_other_text(two, tmp_path, monkeypatch):
    """A file of one's own; one that is not there, or too short, is refused before any rank starts."""
    mine = tmp_path / "mine.txt"
    mine.write_bytes(bytes(range(200)) * 20)
    (result, *_) = two.run(train, config(tp=2, steps=30, lr=0.03, text=str(mine)))
    assert result.losses[-1] < result.losses[0] - 0.4
    mine.write_text("short")
    for path, says in [(mine, "5 bytes do not fill a context of 8"), (tmp_path / "none", "no such file")]:
        monkeypatch.setattr(sys, "argv", ["train", "--text", str(path), "--context", "8"])
        with pytest.raises(SystemExit, match=says):
            main()


@pytest.mark.parametrize("wrong, says", [(["--tp", "0"], "tp=0 must be at least 1"),
                                         (["--steps", "-1"], "steps=-1 must not be negative"),
                                         (["--tp", "2", "--sequence-parallel", "--context", "5"], "it 6"),
                                         (["--save", __file__], "File exists"),
                                         (["--heads", "5", "--steps", "1"], "dim=64 is not divisible")])
def test_numbers_that_make_no_sense_are_refused(monkeypatch, wrong, says):
    monkeypatch.setattr(sys, "argv", ["train", *wrong])
    with pytest.raises(SystemExit, match=says):
        main()


def test_what_is_no_checkpoint_is_neither_read_nor_deleted(two, tmp_path):
    for name in ("step_00000009", "step_backup01"):
        tmp_path.joinpath(name).mkdir()
    two.run(train, config(tp=2, steps=3, save=str(tmp_path), every=1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000002", "step_00000003", "step_00000009",
                                                          "step_backup01"]


def test_it_learns():
    """Better than the frequencies of bytes alone, in a hundred steps."""
    from pydoc_data.topics import topics
    text = torch.tensor(list("\n\n".join(topics.values()).encode()))
    share = torch.bincount(text).double() / len(text)
    unigram = -(share[share > 0] * share[share > 0].log()).sum().item()
    (result, *_) = tp.spawn(train, Config(tp=2, steps=100, batch=8, sample=20), ranks=2)
    assert result.losses[0] > 5 and sum(result.losses[-10:]) / 10 < unigram - 0.2
    assert len(result.sample) > 10
