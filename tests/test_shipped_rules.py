"""The shipped rules against what the programs print.

`data/logs` was printed by real runs: torchrun 2.13.0 (two ranks, gloo, a failing worker and a
restart), a transformers 5.23.0 Trainer on a CPU (a new run, and one resumed), pip 23.2.1 and uv
0.13.9 installing two wheels and one source distribution. Megatron-LM and DeepSpeed need a GPU:
their lines below follow the format strings of the sources that the rule files name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.profiler.collect import logengine, loglines, logrules

LOGS = Path(__file__).parent / "data" / "logs"


def found(rules: str, data: bytes, *, live: bool) -> list[logengine.Found]:
    engine = logengine.Engine(logrules.load(rules), live=live, near_ns=1_795_288_000 * 10**9)
    splitter = loglines.LineSplitter()
    out = []
    for number, line in enumerate(splitter.feed(data) + splitter.flush()):
        at = (10**9 + number) * 10**9
        out += engine.line(line, at, at)
    return out + engine.close()


def brief(out: list[logengine.Found]) -> list[str]:
    return [f"{f.kind} {f.name}{'' if f.status == 'ok' else ' ' + f.status}" for f in out]


def test_torchrun_with_a_restart() -> None:
    out = found("torchrun", (LOGS / "torchrun_restart.log").read_bytes(), live=False)
    assert brief(out) == [
        "begin rendezvous",
        "end rendezvous",
        "point worker.exit error",
        "point restart error",
        "begin rendezvous",
        "end rendezvous",
    ]
    # 18:58:57.242 to 18:58:57.451, and 18:59:01.186 to 18:59:01.415
    took = [(out[n + 1].time_unix_nano - out[n].time_unix_nano) / 1e6 for n in (0, 4)]
    assert took == [209.0, 229.0]
    assert out[0].attributes["bootseer.wait"] is True
    assert out[2].attributes["log.exit_code"] == "-6"
    assert out[2].attributes["bootseer.local_rank"] == 1


@pytest.mark.parametrize(
    ("name", "phases", "step"),
    [
        ("first", ["begin first_step", "end first_step"], "1"),
        (
            "resumed",
            [
                "begin checkpoint.load",
                "end checkpoint.load",
                "begin first_step",
                "end first_step",
            ],
            "13",
        ),
    ],
)
def test_hugging_face_trainer(name: str, phases: list[str], step: str) -> None:
    out = found("huggingface", (LOGS / f"huggingface_{name}.err").read_bytes(), live=True)
    assert brief(out) == phases
    assert out[-1].attributes["log.step"] == step


def test_pip_log_file() -> None:
    out = found("pip", (LOGS / "pip.log").read_bytes(), live=False)
    assert brief(out)[-4:] == [
        "begin deps.install.build",
        "end deps.install.build",
        "begin deps.install.install",
        "end deps.install.install",
    ]


def test_uv_states_its_durations() -> None:
    out = found("uv", (LOGS / "uv.err").read_bytes(), live=True)
    spans = [f for f in out if f.name != "deps.install.build"]
    took = {
        end.name: (end.time_unix_nano - begin.time_unix_nano) / 1e6
        for begin, end in zip(spans[::2], spans[1::2], strict=True)
    }
    assert took == {
        "deps.install.resolve": 1080.0,
        "deps.install.download": 927.0,
        "deps.install.install": 1.0,
    }
    assert "begin deps.install.build" in brief(out)


MEGATRON = b"""\
> initializing torch distributed ...
> compiling dataset index builder ...
>>> done with dataset index builder. Compilation time: 0.061 seconds
time to initialize megatron (seconds): 7.912
[after megatron is initialized] datetime: 2026-11-21 10:00:08.500000 
 loading distributed checkpoint from /ckpt at iteration 500
  successfully loaded checkpoint from /ckpt [ t 1/2, gtp_remat 1/1, p 1/1 ] at iteration 500
(min, max) time across ranks (ms):
    load-checkpoint ................................: (2010.11, 2033.40)
[after model, optimizer, and learning rate scheduler are built] datetime: \
2026-11-21 10:00:20.250000 
> building train, validation, and test datasets ...
[after dataloaders are built] datetime: 2026-11-21 10:00:23.000000 
done with setup ...
[before the start of training step] datetime: 2026-11-21 10:00:23.500000 
 [2026-11-21 10:00:31.750000] iteration      501/     600 | consumed samples:         4008 |
 [2026-11-21 10:00:32.750000] iteration      502/     600 | consumed samples:         4016 |
"""  # noqa: W291 - the prints end in a space


def test_megatron() -> None:
    live = brief(found("megatron", MEGATRON, live=True))
    assert live == [
        "begin rendezvous",
        "begin compile",
        "end compile",
        "end rendezvous",
        "begin model.init",
        "begin checkpoint.load",
        "end checkpoint.load",
        "end model.init",
        "begin data.init",
        "end data.init",
        "begin first_step",
        "end first_step",
    ]
    kept = found("megatron", MEGATRON, live=False)
    times = {f"{f.kind} {f.name}": f.time_unix_nano for f in kept}
    assert times["end model.init"] - times["begin model.init"] == 11_750_000_000
    assert times["end first_step"] - times["begin first_step"] == 8_250_000_000
    assert kept[-1].attributes["log.iteration"] == "501"


# As older releases print it: lines of a public log of a GPT run, whose iterations have no stamp.
MEGATRON_OLD = b"""\
[after dataloaders are built] datetime: 2024-07-16 22:14:01
[before the start of training step] datetime: 2024-07-16 22:14:07
 iteration        1/  508626 | consumed samples:          288 | elapsed time per iteration (ms): \
255940.5 | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 4294967296.0 |
 iteration        2/  508626 | consumed samples:          576 | elapsed time per iteration (ms): \
243438.3 | learning rate: 0.000E+00 | global batch size:   288 | loss scale: 2147483648.0 |
"""


@pytest.mark.parametrize("prefix", [b"", b"[default7]:", b" 7: "])
def test_megatron_without_stamps_takes_the_time_that_it_prints(prefix: bytes) -> None:
    log = b"".join(prefix + line for line in MEGATRON_OLD.splitlines(keepends=True))
    begin, end = found("megatron", log, live=False)
    assert (begin.name, end.name, end.kind) == ("first_step", "first_step", "end")
    assert end.time_unix_nano - begin.time_unix_nano == 255_940_500_000


def test_megatron_with_a_log_interval() -> None:
    log = MEGATRON_OLD.replace(b"   1/", b" 100/").replace(b"   2/", b" 200/")
    log = log.replace(b"255940.5", b"4000.0").replace(b"243438.3", b"2000.0")
    begin, end = found("megatron", log, live=False)
    assert end.time_unix_nano - begin.time_unix_nano == 202 * 10**9  # 100 x 4 s - 99 x 2 s
    assert end.attributes["log.step_estimated"] is True


DEEPSPEED = b"""\
[2026-11-21 10:00:00,100] [INFO] [launch.py:180:main] dist_world_size=8
[2026-11-21 10:00:05,000] [INFO] [comm.py:856:init_distributed] Initializing TorchBackend in \
DeepSpeed with backend nccl
[2026-11-21 10:00:09,250] [INFO] [logging.py:123:log_dist] [Rank 0] DeepSpeed info: \
version=0.19.8, git-hash=unknown, git-branch=unknown
[2026-11-21 10:00:15,000] [INFO] [config.py:1000:print] DeepSpeedEngine configuration:
[2026-11-21 10:00:16,000] [INFO] [logging.py:123:log_dist] [Rank 0] [Torch] Begin Load checkpoint \
from /ckpt/a.pt...
[2026-11-21 10:00:19,500] [INFO] [logging.py:123:log_dist] [Rank 0] [Torch] End Load checkpoint \
from /ckpt/a.pt...
[2026-11-21 10:00:25,000] [INFO] [logging.py:123:log_dist] [Rank 0] step=10, skipped=0, lr=[0.1], \
mom=[0.9]
[2026-11-21 10:00:35,000] [INFO] [logging.py:123:log_dist] [Rank 0] step=20, skipped=0, lr=[0.1], \
mom=[0.9]
"""


def test_deepspeed() -> None:
    out = found("deepspeed", DEEPSPEED, live=False)
    assert brief(out) == [
        "point launch",
        "begin setup",
        "end setup",
        "begin model.init",
        "end model.init",
        "begin checkpoint.load",
        "end checkpoint.load",
        "point first_step",
    ]
    took = [(out[n + 1].time_unix_nano - out[n].time_unix_nano) / 1e6 for n in (1, 3, 5)]
    assert took == [4250.0, 5750.0, 3500.0]
    assert out[-1].attributes["log.step"] == "10"
    assert out[-1].attributes["log.step_estimated"] is True
    # 10 steps of 1 s before 10:00:25, but not before the checkpoint was there
    assert out[-1].time_unix_nano == out[-2].time_unix_nano


@pytest.mark.parametrize("rules", logrules.shipped())
def test_no_shipped_rule_fires_on_another_programs_text(rules: str) -> None:
    text = b"epoch 1 step 10 loss 0.5\nINFO loading config\nTraceback (most recent call last):\n"
    assert found(rules, text, live=True) == []
