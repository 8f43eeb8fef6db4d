"""The shipped rules against what the programs print.

`data/logs` was printed by real runs: torchrun 2.13.0 (two ranks, gloo, a failing worker and a
restart), a transformers 5.23.0 Trainer and a Lightning 2.6.6 Trainer on a CPU (a new run each, and
one resumed), pip 23.2.1 and uv 0.13.9 installing two wheels and one source distribution. The other
programs need a GPU: their lines below follow the format strings of the sources that the rule files
name, and lines of public logs.
"""

from __future__ import annotations

import pytest

from bootseer.profiler.collect.log_rules import (
    engine as logengine,
)
from bootseer.profiler.collect.log_rules import (
    lines as loglines,
)
from bootseer.profiler.collect.log_rules import (
    rules as logrules,
)
from tests.support.paths import DATA

LOGS = DATA / "logs"


def found(rules: str, data: bytes, *, live: bool) -> list[logengine.PhaseEvent]:
    engine = logengine.Engine(logrules.load(rules), live=live, near_ns=1_795_288_000 * 10**9)
    splitter = loglines.LineSplitter()
    out = []
    for number, line in enumerate(splitter.feed(data) + splitter.flush()):
        at = (10**9 + number) * 10**9
        out += engine.match_line(line, at, at)
    return out + engine.close()


def brief(out: list[logengine.PhaseEvent]) -> list[str]:
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
    *kept, note = found("megatron", MEGATRON, live=False)
    assert "model.init" not in note.attributes["bootseer.reason"]
    assert "checkpoint: checkpoint.load (1)" in note.attributes["bootseer.reason"]
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


def test_megatron_whose_last_rank_prints_the_iterations() -> None:
    """As torchrun --tee has it: rank 0 says that training begins."""
    log = b"".join(
        (b"[default7]:" if b" iteration " in line else b"[default0]:") + line
        for line in MEGATRON.splitlines(keepends=True)
    )
    out = found("megatron", log, live=True)
    assert spans_ms(out)[-1] == ("first_step", 8250.0)
    first = [f for f in out if f.name == "first_step"]
    assert not any("bootseer.local_rank" in f.attributes for f in first)


def test_megatron_with_a_log_interval() -> None:
    log = MEGATRON_OLD.replace(b"   1/", b" 100/").replace(b"   2/", b" 200/")
    log = log.replace(b"255940.5", b"4000.0").replace(b"243438.3", b"2000.0")
    begin, end = found("megatron", log, live=False)
    assert end.time_unix_nano - begin.time_unix_nano == 202 * 10**9  # 100 x 4 s - 99 x 2 s
    assert end.attributes["log.step_estimated"] is True


def test_megatron_that_logs_the_first_iteration_besides() -> None:
    """Since core 0.16: a resumed run prints its first iteration, then each hundredth."""
    at = b"[2026-11-21 10:%02d:%02d.000000] iteration      %d/     900 | consumed samples: 1 |\n"
    steps = [at % line for line in ((0, 31, 501), (3, 49, 600), (7, 9, 700))]
    log = MEGATRON.partition(b" [2026-11-21 10:00:31")[0] + b" " + b" ".join(steps)
    out = found("megatron", log, live=False)
    assert spans_ms(out)[-1] == ("first_step", 7500.0)
    assert "log.step_estimated" not in out[-1].attributes


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


@pytest.mark.parametrize("rules", logrules.list_shipped())
def test_no_shipped_rule_fires_on_another_programs_text(rules: str) -> None:
    text = b"epoch 1 step 10 loss 0.5\nINFO loading config\nTraceback (most recent call last):\n"
    assert found(rules, text, live=True) == []


# The form of lines in public logs of torchtitan 0.2 (step 1 and each tenth are printed).
TORCHTITAN = b"""\
[rank0]:[titan] 2026-05-19 19:31:10,231 - root - INFO - torchtitan version: 0.2.2 (0.0.0 means).
[rank0]:[titan] 2026-05-19 19:31:11,436 - root - INFO - Building device mesh with parallelism: \
pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1
[rank0]:NCCL version 2.29.7+cuda13.1
[rank0]:[titan] 2026-05-19 19:31:14,624 - root - INFO - Preparing c4_test dataset from tests/c4
[rank0]:[titan] 2026-05-19 19:31:14,649 - root - INFO - Building qwen3 14B
[rank0]:[titan] 2026-05-19 19:31:15,533 - root - INFO - CUDA memory usage for model: 4.18GiB(2.35%)
[rank0]:[titan] 2026-05-19 19:31:15,551 - root - INFO - Trainer is initialized with local batch
[rank0]:[titan] 2026-05-19 19:31:16,000 - root - INFO - Loading the checkpoint from outputs/step-5.
[rank0]:[titan] 2026-05-19 19:31:18,101 - root - INFO - Finished loading the checkpoint in 2.10 \
seconds.
[rank0]:[titan] 2026-05-19 19:31:18,500 - root - INFO - Training starts at step 6
[rank0]:[titan] 2026-05-19 19:31:48,000 - root - INFO - step: 10  loss:  4.98934  grad_norm: 19.2500
[rank0]:[titan] 2026-05-19 19:32:08,000 - root - INFO - step: 20  loss:  4.38934  grad_norm: 17.2500
"""


def spans_ms(out: list[logengine.PhaseEvent]) -> list[tuple[str, float]]:
    """Name and length of each span, in the order of their ends; points have none."""
    open_ns: dict[tuple[str, str], int] = {}
    spans = []
    for one in out:
        if one.kind == "begin":
            open_ns[one.key] = one.time_unix_nano
        elif one.kind == "end":
            spans.append((one.name, (one.time_unix_nano - open_ns.pop(one.key)) / 1e6))
    assert open_ns == {}
    return spans


def test_torchtitan_that_resumes_between_two_logged_steps() -> None:
    out = found("torchtitan", TORCHTITAN, live=False)
    assert spans_ms(out) == [
        ("setup", 1205.0),
        ("model.init", 884.0),
        ("checkpoint.load", 2101.0),
        ("first_step", 21_500.0),  # 10 steps take 20 s; 4 lie between step 6 and step 10
    ]
    assert out[-1].attributes["log.step_estimated"] is True
    assert out[-1].attributes["bootseer.rank"] == 0


def test_torchtitan_of_older_releases() -> None:
    log = TORCHTITAN.replace(b"[titan] ", b"")
    log = log.replace(b"Building qwen3 14B", b"Building llama3 8B with ModelArgs(dim=4096)")
    log = log.replace(b"Building device mesh with parallelism: ", b"Building 1-D device mesh with ")
    log = log.replace(b"torchtitan version: 0.2.2", b"Starting job: Llama 3 8B training")
    log = log.replace(b"starts at step 6", b"starts at step 1, with local batch size 1")
    log = log.replace(b"step: 10 ", b"step:  1 ")
    spans = dict(spans_ms(found("torchtitan", log, live=False)))
    assert spans["first_step"] == 29_500.0
    assert set(spans) == {"setup", "model.init", "checkpoint.load", "first_step"}


# The form of lines in public logs of vLLM 0.19 to 0.33, tensor parallel over two workers; a worker
# takes its place's name once the groups are there.
VLLM = b"""\
2026-08-29T04:15:30.1Z (APIServer pid=1) INFO 08-29 06:15:30 [model.py:680] Resolved architecture
2026-08-29T04:16:04.127689469Z (EngineCore pid=374) INFO 08-29 06:16:04 [core.py:121] Initializing \
a V1 LLM engine (v0.26.1) with config: model='/models/ds4'
2026-08-29T04:16:12.5Z (Worker pid=400) INFO 08-29 06:16:12 [parallel_state.py:1938] world_size=2 \
rank=0 local_rank=0 distributed_init_method=file:///tmp/vllm_dist_3a73 backend=nccl
2026-08-29T04:16:12.6Z (Worker pid=401) INFO 08-29 06:16:12 [parallel_state.py:1938] world_size=2 \
rank=1 local_rank=1 distributed_init_method=file:///tmp/vllm_dist_3a73 backend=nccl
2026-08-29T04:16:14.7Z (Worker_TP0 pid=400) INFO 08-29 06:16:14 [parallel_state.py:2385] rank 0 in \
world size 2 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 0, EP rank 0, EPLB rank N/A
2026-08-29T04:16:14.8Z (Worker_TP1 pid=401) INFO 08-29 06:16:14 [parallel_state.py:2385] rank 1 in \
world size 2 is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank 1, EP rank 0, EPLB rank N/A
Loading safetensors checkpoint shards:   9% Completed | 1/8 [00:01<00:10, 14.3it/s]
2026-08-29T04:16:25.978Z (Worker_TP0 pid=400) INFO 08-29 06:16:25 [default_loader.py:497] Loading \
weights took 10.39 seconds
2026-08-29T04:16:39.387Z (Worker_TP0 pid=400) INFO 08-29 06:16:39 [model_runner.py:513] Model \
loading took 80.99 GiB and 25.139530 seconds
2026-08-29T04:16:44.38Z (Worker_TP0 pid=400) INFO 08-29 06:16:44 [backends.py:1188] Dynamo \
bytecode transform time: 4.20 s
2026-08-29T04:16:51.9Z (Worker_TP0 pid=400) INFO 08-29 06:16:51 [backends.py:393] Compiling a \
graph for compile range (1, 4096) takes 8.53 s
2026-08-29T04:16:53.2Z (Worker_TP0 pid=400) INFO 08-29 06:16:53 [monitor.py:53] torch.compile took \
13.01 s in total
2026-08-29T04:19:58.1Z (Worker_TP1 pid=401) INFO 08-29 06:19:58 [model_runner.py:1371] Graph \
capturing finished in 18 secs, took 0.19 GiB
2026-08-29T04:20:12.1Z (EngineCore pid=374) INFO 08-29 06:20:12 [core.py:349] init engine \
(profile, create kv cache, warmup model) took 212.68 s (compilation: 13.01 s)
2026-08-29T04:20:13.8Z (APIServer pid=1) INFO 08-29 06:20:13 [api_server.py:689] Starting vLLM \
server on http://0.0.0.0:8000
2026-08-29T04:20:13.9Z (APIServer pid=1) INFO:     Started server process [1]
2026-08-29T04:20:14.338370303Z (APIServer pid=1) INFO:     Application startup complete.
"""
VLLM_SPANS = [
    ("rendezvous", 2200.0),
    ("checkpoint.load", 10_390.0),
    ("model.init", 25_139.53),
    ("compile.dynamo", 4200.0),
    ("compile.inductor", 8530.0),
    ("compile", 13_010.0),
    ("compile.graphs", 18_000.0),
    ("engine.init", 212_680.0),
]


def test_vllm_in_containers_of_another_zone() -> None:
    out = found("vllm", VLLM, live=False)
    assert spans_ms(out) == VLLM_SPANS
    assert brief(out)[-2:] == ["point server.start", "point first_step"]
    # the stamps are UTC, the program's own times two hours ahead
    assert out[-1].time_unix_nano == 1787977214_338370000  # 04:20:14 UTC
    assert 0 < out[-1].time_unix_nano - out[-2].time_unix_nano < 10**9
    lanes = {f.attributes["log.lane"] for f in out if f.name == "rendezvous"}
    assert lanes == {"Worker pid=400"}


def test_vllm_has_no_rendezvous_of_processes_that_never_say_its_end() -> None:
    line = b"(Worker pid=2) INFO 07-16 19:53:12 [parallel_state.py:1615] world_size=4 rank=%d "
    line += b"local_rank=%d distributed_init_method=tcp://127.0.0.1:40623 backend=nccl"
    assert brief(found("vllm", line % (1, 1), live=False)) == []
    assert brief(found("vllm", line % (4, 0), live=False)) == ["begin rendezvous"]


def test_vllm_without_stamps_does_not_know_when_it_answered() -> None:
    log = b"".join(line.partition(b"Z ")[2] for line in VLLM.splitlines(keepends=True))
    engine = logengine.Engine(logrules.load("vllm"), live=False, near_ns=1_787_977_300 * 10**9)
    out = [f for line in log.splitlines() for f in engine.match_line(line, 0, None)]
    assert [name for name, _ in spans_ms(out)] == [name for name, _ in VLLM_SPANS]
    assert "point first_step" not in brief(out)
    assert engine.undated == 1


def test_vllm_of_older_releases_without_lanes() -> None:
    log = b"""\
INFO 06-13 11:36:32 [default_loader.py:272] Loading weights took 5.52 seconds
INFO 06-13 11:36:32 [gpu_model_runner.py:1632] Model loading took 4.1801 GiB and 6.884285 seconds
INFO 06-13 11:36:38 [backends.py:472] Dynamo bytecode transform time: 5.86 s
INFO 06-13 11:37:03 [backends.py:173] Compiling a graph for general shape takes 24.53 s
INFO 06-13 11:37:04 [monitor.py:33] torch.compile takes 30.39 s in total
INFO 06-13 11:37:36 [gpu_model_runner.py:1933] Graph capturing finished in 31 secs, took 0.45 GiB
INFO 06-13 11:37:36 [core.py:167] init engine (profile, create kv cache, warmup model) took 64.0 \
seconds
"""
    assert spans_ms(found("vllm", log, live=False)) == [
        ("checkpoint.load", 5520.0),
        ("model.init", 6884.285),
        ("compile.dynamo", 5860.0),
        ("compile.inductor", 24_530.0),
        ("compile.graphs", 31_000.0),
        ("engine.init", 64_000.0),
    ]


def test_vllm_that_does_not_say_how_long_it_loaded() -> None:
    """Up to 0.7: the lines of one process in four, each a lane of its own."""
    other = b"\x1b[1;36m(VllmWorkerProcess pid=77)\x1b[0;0m "
    log = b"""\
INFO 03-04 10:20:00 model_runner.py:1056] Starting to load model /models/seven...
%bINFO 03-04 10:20:01 model_runner.py:1056] Starting to load model /models/seven...
Loading safetensors checkpoint shards:   9%% Completed | 1/8 [00:01<00:10, 14.3it/s]
INFO 03-04 10:28:05 model_runner.py:1067] Loading model weights took 15.3916 GB
%bINFO 03-04 10:28:06 model_runner.py:1067] Loading model weights took 15.3916 GB
INFO 03-04 10:28:47 model_runner.py:1523] Graph capturing finished in 27 secs.
""" % (other, other)
    assert spans_ms(found("vllm", log, live=False)) == [
        ("model.init", 485_000.0),
        ("model.init", 485_000.0),
        ("compile.graphs", 27_000.0),
    ]


# The form of lines in public logs of SGLang 0.5, four schedulers in one stream: one is ten minutes
# behind, and progress bars share its lines.
SGLANG = b"""\
[2026-02-26 05:19:50 TP0] Init torch distributed begin.
[2026-02-26 05:20:01 TP0] Init torch distributed ends. elapsed=11.20 s, mem usage=1.9 GB
[2026-02-26 05:20:20 TP7] Load weight begin. avail mem=283.62 GB
[2026-02-26 05:20:21 TP0] Load weight begin. avail mem=283.50 GB
[2026-02-26 05:20:21 TP4] Load weight begin. avail mem=283.62 GB

Loading safetensors checkpoint shards:   0% Completed | 0/142 [00:00<?, ?it/s]
[2026-02-26 05:24:09 TP4] Load weight end. elapsed=228.09 s, type=GlmMoeDsaForCausalLM, avail mem=1
[2026-02-26 05:33:19 TP0] Load weight end. elapsed=778.18 s, type=GlmMoeDsaForCausalLM, avail mem=1
[2026-02-26 05:35:08 TP7] Load weight end. elapsed=887.93 s, type=GlmMoeDsaForCausalLM, avail mem=1
[2026-02-26 05:35:08 TP7] Memory pool end. avail mem=4.02 GB
[2026-02-26 05:35:09 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=
Capturing batches (bs=1 avail_mem=11.18 GB): 100%|####| 36/36 [00:10<00:00,  3.37it/s][2026-02-26 \
05:35:40 TP0] Capture cuda graph end. Time elapsed: 31.35 s. mem usage=1.04 GB. avail mem=11.22 GB.
[2026-02-26 05:35:41 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens=4, bs=1
[2026-02-26 05:35:43 TP0] Capture target verify CUDA graph end. bs=[1, 2], elapsed=1.61 s, mem usage
[2026-02-26 05:35:50] INFO:     Application startup complete.
[2026-02-26 05:35:58] The server is fired up and ready to roll!
"""


def test_sglang_with_a_slow_scheduler_among_several() -> None:
    out = found("sglang", SGLANG, live=False)
    assert spans_ms(out) == [
        ("rendezvous", 11_000.0),
        ("checkpoint.load", 228_000.0),
        ("checkpoint.load", 778_000.0),
        ("checkpoint.load", 888_000.0),
        ("compile.graphs", 31_000.0),
        ("compile.graphs", 2000.0),
    ]
    assert brief(out)[-1] == "point first_step"
    slow = [f for f in out if f.attributes.get("log.lane") == "TP7"]
    assert [f.kind for f in slow] == ["begin", "end"]
    assert "bootseer.local_rank" not in slow[0].attributes


def test_sglang_that_answers_by_uvicorns_logger() -> None:
    """With several tokenizers the line has a level, and each of them writes it."""
    log = b"""\
[2026-03-04 10:19:19] INFO:     127.0.0.1:40998 - "POST /generate HTTP/1.1" 200 OK
[2026-03-04 10:19:20] INFO:     The server is fired up and ready to roll!
[2026-03-04 10:19:21] INFO:     The server is fired up and ready to roll!
"""
    assert brief(found("sglang", log, live=False)) == ["point first_step"]


# The form of lines in public logs of NeMo 2.0 to 2.4, as a container's log stamps them.
NEMO = b"""\
2024-11-14T19:42:14.1Z [default0]:[NeMo I 2024-11-14 19:42:14 base:44] Padded vocab_size: 128256, \
original vocab_size: 128256, dummy tokens: 0.
2024-11-14T19:42:15.5Z [default0]:Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2
2024-11-14T19:42:15.6Z [default1]:Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2
2024-11-14T19:42:15.7Z [default0]:distributed_backend=nccl
2024-11-14T19:42:15.8Z [default0]:All distributed processes registered. Starting with 2 processes
2024-11-14T19:42:16.5Z [default0]:[NeMo I 2024-11-14 19:42:16 megatron_parallel:550]  > number of \
parameters on (tensor, pipeline) model parallel rank (0, 0): 40950336
2024-11-14T19:42:46.0Z [default0]:[NeMo I 2024-11-14 19:42:46 pl:297] Global Checkpoint Load : \
Rank : 0 : Start time : 1731613336.000s : Time spent in load_checkpoint: 29.250s
"""
NEMO_STEPS = b"""\
2024-11-14T19:43:00Z [default0]:Training epoch 0, iteration 0/99 | lr: 0.0001 | global_step: 0 | \
reduced_train_loss: 0.5288 | train_step_timing in s: 4.022
2024-11-14T19:43:01Z [default0]:Training epoch 0, iteration 1/99 | lr: 0.0001 | global_step: 1 | \
reduced_train_loss: 0.6615 | train_step_timing in s: 0.4357 | consumed_samples: 16
"""


def test_nemo() -> None:
    out = found("nemo", NEMO + NEMO_STEPS, live=False)
    assert spans_ms(out) == [
        ("rendezvous", 300.0),
        ("model.init", 2400.0),
        ("checkpoint.load", 29_250.0),
    ]
    assert brief(out)[-1] == "point first_step"
    assert out[-1].time_unix_nano == 1731613380 * 10**9  # 19:43:00 UTC


def test_nemo_counts_from_nought_and_may_print_every_second_step() -> None:
    steps = NEMO_STEPS.replace(b"iteration 1/", b"iteration 3/")
    steps = steps.replace(b"iteration 0/", b"iteration 1/").replace(b"43:01Z", b"43:04Z")
    [step] = found("nemo", steps, live=False)
    assert step.time_unix_nano == 1731613378 * 10**9  # 2 s each: the first one ended at 19:42:58
    assert step.attributes["log.step_estimated"] is True


# The form of lines in public logs of Ray Train's second version: 2.48 to 2.60.
RAY = b"""\
(TrainController pid=33120) [State Transition] INITIALIZING -> SCHEDULING.
(TrainController pid=33120) Attempting to start training worker group of size 2 with the following \
resources: [{'GPU': 1}] * 2
(TrainController pid=33120) [State Transition] SCHEDULING -> RESCHEDULING.
(TrainController pid=33120) [State Transition] RESCHEDULING -> SCHEDULING.
(TrainController pid=33120) Attempting to start training worker group of size 2 with the following \
resources: [{'GPU': 1}] * 2
(RayTrainWorker pid=245, ip=10.0.24.158) Setting up process group for: env:// [rank=0, world_size=2]
(RayTrainWorker pid=245, ip=10.0.24.158) Rank 0: Launching training function.
(RayTrainWorker pid=245, ip=10.0.63.54) Rank 1: Launching training function.
(TrainController pid=33120) Started training worker group of size 2:
(TrainController pid=33120) - (ip=10.0.24.158, pid=245) world_rank=0, local_rank=0, node_rank=0
(TrainController pid=33120) [State Transition] SCHEDULING -> RUNNING.
(RayTrainWorker pid=245, ip=10.0.24.158) Initializing Vision Transformer model...
(TrainController pid=33120) [State Transition] RUNNING -> RESTARTING.
"""


def test_ray_train() -> None:
    out = found("ray", RAY, live=True)
    assert brief(out) == [
        "begin workers.start",
        "point workers.retry error",
        "point rendezvous.begin",
        "point rendezvous.end",
        "point rendezvous.end",
        "end workers.start",
        "point restart error",
    ]
    assert spans_ms(out) == [("workers.start", 8000.0)]
    lanes = [f.attributes["log.lane"] for f in out if f.name == "rendezvous.end"]
    assert lanes == [f"RayTrainWorker pid=245, ip=10.0.{n}" for n in ("24.158", "63.54")]


def test_ray_and_the_trainer_of_its_workers() -> None:
    """What workers print reads as without Ray, for the rules of what runs in them."""
    worker = b"(RayTrainWorker pid=245, ip=10.0.24.158) "
    lines = LIGHTNING.splitlines(keepends=True)
    out = found("lightning", b"".join(worker + line for line in lines), live=True)
    assert brief(out) == brief(found("lightning", LIGHTNING, live=True))


@pytest.mark.parametrize("rules", ["huggingface", "lightning"])
def test_bars_that_ray_relays_without_its_prefix(rules: str) -> None:
    """Its prefix comes before a line's first drawing, and the others follow carriage returns."""
    worker = "(RayTrainWorker pid=245, ip=10.0.24.158) "
    draw = [bar(done, 12, "Epoch 0: " if rules == "lightning" else "") for done in (0, 1, 2)]
    log = f"{worker}***** Running training *****\n{worker}\r{draw[0]}\r{draw[1]}\r{draw[2]}\n"
    assert brief(found(rules, log.encode(), live=True)) == ["begin first_step", "end first_step"]


def test_the_trainers_log_confirms_a_bar_across_lanes() -> None:
    worker = "(RayTrainWorker pid=245, ip=10.0.24.158) "
    log = f"{worker}\r{bar(0, 12)}\r{bar(1, 12)}\n{worker}{LOSS}\n{worker}\r{bar(1, 12)}\n"
    out = found("huggingface", log.encode(), live=True)
    assert brief(out) == ["begin first_step", "end first_step"]


REGISTERED = b"""Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2
All distributed processes registered. Starting with 2 processes
"""
# As Lightning 2.6.6 prints it on a CPU (`data/logs/lightning_*.log` have its bars as they are).
LIGHTNING = b"""\
Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/2
Initializing distributed: GLOBAL_RANK: 1, MEMBER: 2/2
distributed_backend=nccl
All distributed processes registered. Starting with 2 processes
Restoring states from the checkpoint path at x.ckpt
Restored all states from the checkpoint at x.ckpt
Sanity Checking: |          | 0/? [00:00<?, ?it/s]
Sanity Checking DataLoader 0:   0%|          | 0/2 [00:00<?, ?it/s]
Sanity Checking DataLoader 0: 100%|##########| 2/2 [00:00<00:00,  2.76it/s]
Training: |          | 0/? [00:00<?, ?it/s]
Epoch 1:   0%|          | 0/62733 [00:00<?, ?it/s]
Epoch 1:   0%|          | 1/62733 [00:00<2:37:08,  6.65it/s]
Epoch 1:   0%|          | 1/62733 [00:00<2:37:40,  6.63it/s, v_num=31]
Epoch 1:   0%|          | 2/62733 [00:00<1:27:16, 11.98it/s, v_num=31]
Epoch 2:   0%|          | 0/62733 [00:00<?, ?it/s]
"""


@pytest.mark.parametrize("total", [b"/62733 ", b"/? "])
def test_lightning(total: bytes) -> None:
    out = found("lightning", LIGHTNING.replace(b"/62733 ", total), live=True)
    assert spans_ms(out) == [
        ("rendezvous", 3000.0),
        ("checkpoint.load", 1000.0),
        ("sanity_check", 1000.0),
        ("first_step", 1000.0),
    ]


def test_lightning_as_it_runs() -> None:
    first = found("lightning", (LOGS / "lightning_first.log").read_bytes(), live=True)
    assert [name for name, _ in spans_ms(first)] == ["rendezvous", "sanity_check", "first_step"]
    resumed = found("lightning", (LOGS / "lightning_resumed.log").read_bytes(), live=True)
    names = [name for name, _ in spans_ms(resumed)]
    assert names == ["checkpoint.load", "sanity_check", "first_step"]
    assert [first[-1].attributes["log.step"], resumed[-1].attributes["log.step"]] == ["1", "1"]


def test_lightning_whose_bar_has_no_total() -> None:
    bars = b"Epoch 0: : 0it [00:00, ?it/s]\nEpoch 0: : 1it [00:26, 26.64s/it, v_num=0]\n"
    assert spans_ms(found("lightning", bars, live=True)) == [("first_step", 1000.0)]


@pytest.mark.parametrize("rules", ["lightning", "nemo"])
def test_waiting_for_all_to_register_is_no_work_of_the_rank_that_waits(rules: str) -> None:
    begin, end = (f for f in found(rules, REGISTERED, live=True) if f.name == "rendezvous")
    assert begin.attributes["bootseer.wait"] is True
    assert end.kind == "end"


def test_lightning_on_another_node_than_the_first_says_nothing_of_the_rendezvous() -> None:
    other = b"Initializing distributed: GLOBAL_RANK: 8, MEMBER: 9/16\nLOCAL_RANK: 0 - CUDA\n"
    assert found("lightning", other, live=True) == []


def bar(done: int, total: int, label: str = "") -> str:
    """One drawing of tqdm's; the first one knows no speed."""
    share = 100 * done // total
    rest = "00:01<00:09, 1.00it/s" if done else "00:00<?, ?it/s"
    return f"{label}{share:3d}%|{'#' * (share // 10):10}| {done}/{total} [{rest}]"


BEFORE_TRAINING = [
    bar(0, 5, "Downloading shards: "),
    bar(5, 5, "Downloading shards: "),
    bar(0, 4, "Loading checkpoint shards: "),
    bar(4, 4, "Loading checkpoint shards: "),
    bar(0, 900, "Map (num_proc=4): "),
    bar(900, 900, "Map (num_proc=4): "),
    bar(0, 900, "Tokenizing: "),
    bar(0, 100),  # tqdm(range(100)) in the user's own script
    bar(1, 100),
    bar(100, 100),
]
LOSS = "{'loss': '0.6931', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.5'}"


def hugging_face(lines: list[str]) -> list[tuple[str, int]]:
    out = found("huggingface", "\n".join(lines).encode() + b"\n", live=True)
    return [(f.kind, f.time_unix_nano // 10**9 - 10**9) for f in out if f.name == "first_step"]


@pytest.mark.parametrize("info", [[], ["[transformers] ***** Running training *****"]])
def test_bars_before_training_are_no_steps_of_hugging_faces_trainer(info: list[str]) -> None:
    lines = [*BEFORE_TRAINING, *info, bar(0, 12), bar(1, 12), bar(2, 12), LOSS, bar(2, 12)]
    at = len(BEFORE_TRAINING)
    assert hugging_face(lines) == [("begin", at), ("end", at + 1 + len(info))]


def test_hugging_face_as_it_runs_without_its_info_lines() -> None:
    """A loop of the user's own with a bar of 50, then 16 steps with evaluations of 2."""
    out = found("huggingface", (LOGS / "huggingface_plain.log").read_bytes(), live=True)
    assert brief(out) == ["begin first_step", "end first_step"]
    assert (out[1].attributes["log.step"], out[1].attributes["log.total"]) == ("1", "16")


def test_the_bar_of_an_evaluation_is_not_the_trainers() -> None:
    scores = "{'eval_loss': '0.7', 'eval_runtime': '1.1', 'epoch': '1'}"
    evaluation = [bar(0, 3), bar(1, 3), bar(3, 3), scores, bar(6, 12), bar(3, 3)]
    lines = [bar(0, 12), bar(1, 12), bar(6, 12), *evaluation, bar(11, 12), LOSS, bar(12, 12)]
    assert hugging_face(lines) == [("begin", 0), ("end", 1)]


def test_an_evaluation_before_the_first_step_is_none() -> None:
    """`eval_on_start`: the trainer's bar of 1,560 waits at 0 while another counts to 12."""
    begin = [
        "[INFO|trainer.py:2519] 2026-11-21 19:00:00,100 >> ***** Running training *****",
        "[INFO|trainer.py:2525] 2026-11-21 19:00:00,101 >>   Total optimization steps = 1,560",
    ]
    evaluation = [bar(0, 12), bar(2, 12), bar(12, 12), "{'eval_loss': '2.1', 'epoch': '0'}"]
    lines = [*begin, bar(0, 1560), *evaluation, bar(0, 1560), bar(1, 1560), bar(2, 1560), LOSS]
    assert hugging_face(lines) == [("begin", 0), ("end", 8)]
    assert hugging_face([begin[0], *lines[2:3], bar(1, 1560)]) == [("begin", 0), ("end", 2)]


def test_a_training_that_begins_again_has_another_total() -> None:
    """`auto_find_batch_size`: the batch did not fit, and half of it takes twice the steps."""
    begin = "[INFO|trainer.py:2519] 2026-11-21 19:00:0{},100 >> ***** Running training *****"
    total = "[INFO|trainer.py:2525] 2026-11-21 19:00:0{},101 >>   Total optimization steps = {}"
    first = [begin.format(0), total.format(0, "1,560"), bar(0, 1560)]
    again = [begin.format(5), total.format(5, "3,120"), bar(0, 3120), bar(1, 3120), bar(2, 3120)]
    assert hugging_face([*first, *again]) == [("begin", 0), ("end", 6)]


def test_without_a_line_of_the_trainer_a_bar_says_nothing() -> None:
    assert hugging_face([*BEFORE_TRAINING, bar(0, 12), bar(1, 12), bar(12, 12)]) == []


def test_a_later_bar_is_no_end_of_the_first_step() -> None:
    """A container's stamp is before a line alone, not before each drawing that it holds."""
    log = b"""\
2026-03-04T10:20:00Z ***** Running training *****
2026-03-04T10:20:00Z   Total optimization steps = 72
2026-03-04T10:43:00Z \r  0%|    | 0/72 [00:00<?, ?it/s]\r  1%|    | 1/72 [00:27<32:54, 27.82s/it]
2026-03-04T10:43:23Z  69%|##  | 50/72 [23:15<09:35, 26.18s/it]
"""
    out = found("huggingface", log, live=False)
    assert brief(out) == ["begin first_step", "point log_rules fallback"]
    assert "first_step (2)" in out[1].attributes["bootseer.reason"]


def test_a_trainer_without_bars_has_its_first_logged_step_alone() -> None:
    info = "***** Running training *****"
    out = found("huggingface", f"{info}\n{LOSS}\n{LOSS}\n".encode(), live=True)
    assert brief(out) == ["begin first_step", "end first_step fallback"]
    assert "first logged step" in out[1].attributes["bootseer.reason"]


def test_deepspeeds_engine_may_set_up_the_process_group_itself() -> None:
    """As public logs of 0.15 have it; drawn bars may share a line with what DeepSpeed says."""
    log = b"""\
[2024-09-15 00:13:15,786] [INFO] [logging.py:96:log_dist] [Rank -1] DeepSpeed info: version=0.15.1,\
 git-hash=unknown, git-branch=unknown
[2024-09-15 00:13:15,786] [INFO] [comm.py:683:init_distributed] Initializing TorchBackend in \
DeepSpeed with backend nccl
[2024-09-15 00:13:15,931] [INFO] [config.py:733:__init__] Config mesh_device None world_size = 4
[2024-09-15 00:13:18,786] [INFO] [logging.py:96:log_dist] [Rank 0] DeepSpeed Flops Profiler Enabled
[2024-09-15 00:13:25,786] [INFO] [config.py:1001:print] DeepSpeedEngine configuration:
  8%|####  | 10/24128 [1:52:09<20:27:23,  3.33s/it][2024-09-15 00:13:55,786] [INFO] \
[logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[0.0]
  8%|####  | 20/24128 [1:52:09<20:27:23,  3.33s/it][2024-09-15 00:14:05,786] [INFO] \
[logging.py:96:log_dist] [Rank 0] step=20, skipped=0, lr=[0.001], mom=[0.0]
"""
    out = found("deepspeed", log, live=False)
    assert spans_ms(out) == [("setup", 3000.0), ("model.init", 10_000.0)]
    assert out[-1].time_unix_nano - out[0].time_unix_nano == 31 * 10**9


def test_deepspeed_by_default_says_nothing_of_a_step() -> None:
    """Its logger's level is WARNING: what is at INFO does not come, and is not made up."""
    log = b"".join(
        line
        for line in DEEPSPEED.replace(b"[INFO] [launch", b"[WARNING] [launch").splitlines(True)
        if b"[INFO]" not in line
    )
    log += b"[2026-11-21 10:00:05,000] [WARNING] [stage3.py:2120:step] 1 pytorch allocator cache\n"
    assert found("deepspeed", log, live=False) == []


def test_the_step_that_deepspeeds_engine_prints_when_it_is_made_is_none() -> None:
    log = b"""\
[2026-03-04 10:19:20,749] [INFO] [logging.py:96:log_dist] [Rank -1] DeepSpeed info: version=0.19.8,\
 git-hash=unknown, git-branch=unknown
[2026-03-04 10:19:23,352] [INFO] [logging.py:96:log_dist] [Rank 0] step=0, skipped=0, lr=[0.0], \
mom=[(0.9, 0.95)]
[2026-03-04 10:19:23,749] [INFO] [config.py:996:print] DeepSpeedEngine configuration:
"""
    assert spans_ms(found("deepspeed", log, live=False)) == [("model.init", 3000.0)]
    for second, step in ((33, 10), (43, 20)):
        log += (
            f"[2026-03-04 10:21:{second},000] [INFO] [logging.py:96:log_dist] [Rank 0] step={step},"
            " skipped=0, lr=[0.1], mom=[(0.9, 0.95)]\n"
        ).encode()
    begun, *_, first = found("deepspeed", log, live=False)
    assert (first.name, first.attributes["log.step_estimated"]) == ("first_step", True)
    # nine steps of a second before the tenth, at 10:21:24
    assert first.time_unix_nano - begun.time_unix_nano == 123_251 * 10**6


def test_deepspeeds_setup_is_no_rendezvous() -> None:
    """Between its first line and the engine's the user's own code runs, so nobody is blamed."""
    out = found("deepspeed", DEEPSPEED, live=False)
    assert "rendezvous" not in {f.name for f in out}
    assert not any("bootseer.wait" in f.attributes for f in out)
