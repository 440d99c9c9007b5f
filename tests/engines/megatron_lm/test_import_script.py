"""Scripts that run Megatron-LM become jobs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, strategies as st

from trainkit.base.errors import ConfigError
from trainkit.engines.megatron_lm.import_script import import_megatron
from trainkit.engines.options import load_table
from trainkit.engines.shell_words import find_command

# the form of the published scripts: arrays, defaults, arithmetic, comments, a pipe at the end
SCRIPT = """#!/bin/bash
set -euxo pipefail
GPUS_PER_NODE=8
NUM_LAYERS=${NUM_LAYERS:-96}   # overridden by the caller
WORLD_SIZE=$(($GPUS_PER_NODE*2))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 16 # two fields
)
GPT_MODEL_ARGS=(
    --num-layers ${NUM_LAYERS}
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
)
TRAINING="--micro-batch-size 1 --global-batch-size 512 --train-iters 1500 \\
  --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction .001 --fp16"
torchrun ${DISTRIBUTED_ARGS[@]} Megatron-LM/pretrain_gpt.py \\
    ${GPT_MODEL_ARGS[@]} $TRAINING \\
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 \\
    --sequence-parallel --use-distributed-optimizer \\
    --data-path 'data/a b_text_document' --split 949,50,1 \\
    --vocab-file vocab.json --merge-file "merges.txt" \\
    --save $CHECKPOINTS/x --load $CHECKPOINTS/x \\
    --ckpt-format torch_dist --overlap-grad-reduce --no-such-option 3 2>&1 | tee log.txt
"""


def imported(text: str, version: str = "core-0.12.0") -> tuple[dict[str, Any], tuple[str, ...]]:
    """(tables, what was not taken)."""
    job = import_megatron(text, "x", load_table("megatron-lm", version))
    return tomli.loads(job.to_toml()), job.not_taken


def test_a_script_becomes_a_job() -> None:
    tables, not_taken = imported(SCRIPT)
    job = tables["jobs"]["x"]
    assert tables["models"]["x"] == {
        "family": "gpt",
        "num_layers": 96,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "seq_length": 2048,
        "max_position_embeddings": 2048,
        "init_method_std": 0.02,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "untie_embeddings_and_output_weights": False,
        "gelu": "tanh",
    } | {key: tables["models"]["x"][key] for key in ("layernorm_epsilon",) if key in
         tables["models"]["x"]}  # fmt: skip
    assert job["nodes"] == 16
    assert job["parallelism"] == {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "sequence_parallel": True,
        "zero_stage": 1,
    }
    training = job["training"]
    assert (training["precision"], training["lr"], training["adam_beta2"]) == ("fp16", 6e-5, 0.999)
    assert training["recompute_granularity"] == "none"
    assert job["engine_args"] == {"ckpt-format": "torch_dist", "overlap-grad-reduce": True}
    assert job["args"] == ["--no-such-option", "3"]
    assert tables["datasets"]["x"]["prefixes"] == ["data/a b_text_document"]
    assert tables["tokenizers"]["x"]["merge_file"] == "merges.txt"
    assert any("$CHECKPOINTS" in each for each in not_taken)
    assert any("no-such-option" in each for each in not_taken)
    assert any("nproc_per_node" in each for each in not_taken)


COMMAND = "pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
EXPORTS = """
export CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_DEBUG="INFO"
export NCCL_IB_HCA=$HCAS,mlx5_4
LEVEL=2; NVTE_DEBUG=$((LEVEL*3)); export NVTE_DEBUG UNSET
export WANDB_API_KEY=0123456789abcdef
export MASTER_ADDR=node-1 LD_LIBRARY_PATH=/opt/lib
NOT_EXPORTED=1
OMP_NUM_THREADS=8 FLAGS='a b' torchrun {}
OTHER=1 echo done
"""


def test_exported_variables_become_env() -> None:
    tables, not_taken = imported(EXPORTS.replace("{}", COMMAND))
    assert tables["jobs"]["x"]["env"] == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_DEBUG": "INFO",
        "NVTE_DEBUG": "6",
        "OMP_NUM_THREADS": "8",
        "FLAGS": "a b",
    }
    said = "\n".join(not_taken)
    assert "export NCCL_IB_HCA: = $HCAS,mlx5_4: its value is not in the file" in said
    assert "export WANDB_API_KEY: looks like a secret" in said and "0123456789" not in said
    assert "export LD_LIBRARY_PATH: = /opt/lib: belongs to the machine" in said
    assert not any("MASTER_ADDR" in line for line in not_taken)


def test_exports_are_those_that_bash_passes(tmp_path: Path) -> None:
    """bash itself runs the script, with a program that writes down its environment."""
    program = tmp_path / "torchrun"
    program.write_text('#!/bin/bash\n/usr/bin/env -0 > "$OUT"\n')
    program.chmod(0o755)
    out = tmp_path / "environment"
    caller = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(out), "HCAS": "$HCAS"}
    text = EXPORTS.replace("{}", COMMAND)
    subprocess.run(["bash", "-c", text], env=caller, check=True, capture_output=True)
    pairs = [line.partition("=") for line in out.read_text().split("\0") if line]
    bash = {name: value for name, _, value in pairs if name not in (*caller, "_", "PWD", "SHLVL")}
    command = find_command(text, "pretrain_gpt.py")
    assert command is not None
    assert command.environment == bash


# what the script itself says of its conditions; nothing gives $GIVEN a value
DECIDED = r"""
SIZE=13b; NODES=2; EMPTY=
if [ $SIZE = 7b ]; then LAYERS=32
elif [[ "$SIZE" == 13b ]] && [ $NODES -gt 1 ]; then
    LAYERS=40; [ -z "$GIVEN" ] && HIDDEN=5120 || HIDDEN=1
else LAYERS=1; fi
if [ $NODES -eq 1 ] || [ -n "$EMPTY" ]; then HIDDEN=2; else HEADS=40; fi
[[ $NODES -lt 2 ]] && HEADS=3
false_one="a" && [ "$false_one" != a ] || LENGTH=2048
MORE="--seed `echo "7; 8" | head -c1` --lr $(echo "2") --clip-grad 1"
torchrun pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN \
    --num-attention-heads ${HEADS} --seq-length $LENGTH \
    --save \'a\ b\' --load "a \"b\"" --split '9\1'",1"
"""


# arrays that are declared, and that hold what the shell works out
ARRAYS = r"""
NODES=2
declare -a MODEL=(--num-layers 4 --hidden-size $(( 16 * 4 )))
readonly -a HEADS=(--num-attention-heads "$((2*NODES))" --save ${NAME:-(a)})
typeset RATE="--lr 1e-4"
TRAINING=(--micro-batch-size 1 --global-batch-size $((NODES * 4)) --train-iters 5)
TRAINING+=(--fp16 --eval-iters $((1 + 1)))
torchrun pretrain_gpt.py "${MODEL[@]}" "${HEADS[@]}" $RATE ${TRAINING[@]}
"""


# a known word of `case`, and groups behind && and ||
CASES = r"""
SIZE=7b; NODES=2; EMPTY=; NAME=gpt; NAME+=_$SIZE
case "$SIZE" in 7b) LAYERS=32;; *) LAYERS=12;; esac
case $SIZE$NODES in
    (7b1 | 13b?) HEADS=1 ;;   # neither
    "7b"[0-9])
        case $NAME in llama*) HEADS=2 ;; [!l]*_7b) HEADS=8 ;; esac ;;
    *) HEADS=3 ;;
esac
case '*' in \*) HIDDEN=64 ;; *) HIDDEN=1 ;; esac
if [ $NODES = 1 ]; then case $SIZE in 7b) HIDDEN=2;; esac; fi
[ -n "$EMPTY" ] && { LENGTH=1; ITERS=1; } || { LENGTH=2048; ITERS=5; }
[ $NODES = 1 ] &&
    ITERS=6
torchrun pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --train-iters $ITERS \
    --num-attention-heads $HEADS --seq-length $LENGTH --save $NAME
"""


# whole numbers that are counted on
COUNTS = r"""
LAYERS=3; NODES=4; RANKS=-7
(( LAYERS++ )); let LAYERS*=2 LAYERS+=1; (( --LAYERS, HEADS = (NODES + 1) * 2 ))
((LAYERS -= 2)) && HIDDEN=$(( ((NODES + NODES)) * (HEADS - 2) ))
if (( NODES > 3 )); then RANKS=$((RANKS / 2)); fi; (( NODES == 3 )) && RANKS=0
NODES=$((NODES % 3)); MODEL=(--hidden-size $HIDDEN --save "a b")
torchrun pretrain_gpt.py --num-layers $LAYERS "${MODEL[@]}" --num-attention-heads $HEADS \
    --seq-length $NODES --seed $RANKS
"""


# functions, with the words of their calls
CALLS = r"""
LAYERS=1; SIZE=64
run() { torchrun pretrain_gpt.py "$@"; }
function sized
{
    local LAYERS=$1 NAME="${2:-x}"; shift
    shift 2
    if [ "$1" = --fp16 ]; then SIZE=$((SIZE + $3)); fi
    run --num-layers $LAYERS --save "$NAME" --hidden-size ${SIZE} "$@"
}
never() { SIZE=1; }
eval "SIZE=\$((SIZE * 2))"
[ $SIZE = 64 ] && never || sized 4 "a b" --fp16 --seq-length $((LAYERS + 1)) --lr 1
"""


# what is not the script's own: a text for another program, a variable that is gone or another's
OTHERS = r"""
LAYERS=4; export SIZE=64
cat > /dev/null <<-'EOF'
	It's a text; LAYERS=9
	EOF
cat <<END > /dev/null
$(( LAYERS
END
SIZE=9 LAYERS=9 true; HEADS=1; unset HEADS
# the hosts are written by: cat <<EOF > hostfile
LENGTH=32
cat <<EOF > /dev/null && RATE=3
the host's
EOF
WAY+=:/opt SIZE=8 SIZE=9 true
run() { torchrun pretrain_gpt.py --save $1 "${@:2}" --num-attention-heads ${HEADS:-8}; }
also() { run ${@:2} --lr ${RATE:-1}; }
also x "a" --num-layers $LAYERS --hidden-size $SIZE --seq-length ${LENGTH:-16}
"""
# and where one feeds the command itself to a shell
FED = r"""
LENGTH=16
bash <<EOF
torchrun pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 8 \
    --seq-length $LENGTH
EOF
"""


@pytest.mark.parametrize("text", [SCRIPT, DECIDED, ARRAYS, CASES, COUNTS, CALLS, OTHERS, FED])
def test_words_are_those_that_bash_passes(tmp_path: Path, text: str) -> None:
    """bash itself runs the script, with programs that write down their arguments."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "torchrun"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$OUT"\n')
    program.chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(text)
    out = tmp_path / "words"
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "OUT": str(out),
        "CHECKPOINTS": "$CHECKPOINTS",
    }
    subprocess.run(["bash", str(script)], env=environment, cwd=tmp_path, check=True,
                   capture_output=True)  # fmt: skip
    words = out.read_text().split("\0")[:-1]
    command = find_command(text, "pretrain_gpt.py")
    assert command is not None
    at = len(command.before) - 1
    assert [*command.before[1:], words[at], *command.words] == words
    assert words[at].endswith("pretrain_gpt.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('if [ -n "$MULTI" ]; then LR=2; else LR=3; fi', "nothing in the file sets MULTI"),
        ("if ! grep -q x y; then LR=3; fi", "`! grep -q x y`: only running it tells"),
        ("case $1 in\n a) LR=2 ;;\n *) LR=3 ;;\nesac", "`case $1 in`: only running it tells"),
        ("for LR in 2 3; do\n export LR\ndone; LR=3", "`for LR in 2 3`: only running it tells"),
        ("LR=3; [[ -f config ]] && export LR=3", "`[[ -f config ]]`: only running it tells"),
        ("LR=3; source settings.sh", "source settings.sh: that file was not read"),
        ("LR=3; torchrun pretrain_gpt.py --lr 2", "2 commands run it; this is the last one"),
        ("S=b\ncase $S in a) LR=2 ;; *) LR=3 ;; esac", ""),
        ("S=a; case $S in @(b|c)) LR=2;; *) LR=3;; esac", "`case $S in`: only running it tells"),
        ("case ${S:-a} in b) LR=2;; a) LR=3;; esac", "'a' here, for nothing in the file sets S"),
        ("S=a; case $S in a) LR=3;& b) LR=2;; esac", "`case $S in`: ;&: the arms that it goes"),
        ("S=a; case $S in a) LR=3;;& *) LR=2;; esac", "`case $S in`: ;;&: the arms that it goes"),
        ("LR=3; ((N += M))", "`N += M`: N was not worked out"),
        ("LR=3; let A[0]=2", "`A[0]=2`: this arithmetic was not worked out"),
        (f"LR=3; (( N = {'+'.join('1' * 9999)} ))", "was not worked out"),
        ("declare -i N=1; LR=3", "declare -i N=1: read as text, not worked out"),
        ("f() {\n LR=2\n}\nLR=3; srun f", "function f: nothing calls it by its name"),
        ("f() {\n LR=2; ${X\n}\nLR=3", "function f: nothing calls it by its name"),
        ("LR=3; shift; X=${LR%0}; A=($@)", ""),
    ],
)
def test_what_a_script_leaves_open_is_said(text: str, said: str) -> None:
    tables, not_taken = imported(f"{text}\n{COMMAND} --lr $LR\n")
    assert tables["jobs"]["x"]["training"]["lr"] == 3.0
    assert [said in line for line in not_taken] == [True] * bool(said)


@pytest.mark.parametrize("word", ["${A%x}", "${B[0]}", "$(date)", "$((A*2))", "$@", '"${C[@]:1}"'])
def test_a_word_that_is_not_worked_out_is_said(word: str) -> None:
    _, not_taken = imported(f"{COMMAND} --timing-log-level {word}\n")
    assert f"{word.strip(chr(34))}: its value is not in the file" in not_taken


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_command_in_a_variable_is_found(quote: str) -> None:
    """bigscience's way: CMD is exported, and bash -c runs it on every node."""
    text = (
        'export LAUNCHER="python -u -m torch.distributed.launch --nnodes 16"\n'
        'export CMD=" \\\n  pretrain_gpt.py \\\n --num-layers 36 --hidden-size 4096 \\\n'
        " --num-attention-heads 32 --seq-length 512 --train-iters 1000 --lr 0.00015"
        ' --checkpoint-activations --fp16\n"\n'
        f"srun bash -c {quote}$PKILL; $LAUNCHER --node_rank \\$SLURM_PROCID $CMD{quote} | tee log\n"
    )
    tables, not_taken = imported(text, "2021")
    assert tables["jobs"]["x"]["nodes"] == 16
    assert not not_taken
    assert tables["models"]["x"]["num_layers"] == 36
    assert tables["jobs"]["x"]["training"]["recompute_granularity"] == "full"


def test_an_array_may_have_backslashes_at_its_ends_of_lines() -> None:
    # as in Megatron-LM's examples/mixtral/train_mixtral_8x7b_distributed.sh
    text = f"A=(\n --log-interval 3 \\\n --eval-iters 7 \\\n)\n{COMMAND} ${{A[@]}}\n"
    tables, not_taken = imported(text)
    training = tables["jobs"]["x"]["training"]
    assert (training["log_interval"], training["eval_iters"]) == (3, 7)
    assert not not_taken


def test_words_that_an_option_does_not_take_are_said() -> None:
    tables, not_taken = imported(f"{COMMAND} --log-interval 3 4 --bf16 yes --exit-interval 9")
    assert tables["jobs"]["x"]["training"]["log_interval"] == 3
    assert any(each.startswith("4: --log-interval") for each in not_taken)
    assert any(each.startswith("yes: --bf16") for each in not_taken)
    assert any(each.startswith("--exit-interval 9: ") for each in not_taken)


@pytest.mark.parametrize(
    "words",
    [
        "--model-parallel-size $TP",
        "--num-layers-per-virtual-pipeline-stage $V",
        "--num-layers-per-virtual-pipeline-stage 0",
        "--rampup-batch-size $A 1 2",
        "--norm-epsilon $E",
        "--rotary-base $B",
        "--fp16 --initial-loss-scale $S",
    ],
)
def test_a_number_that_the_script_leaves_to_its_caller_is_asked_for(words: str) -> None:
    with pytest.raises(ConfigError, match="a number is needed here"):
        imported(f"{COMMAND} {words}")


def test_what_is_counted_in_samples_is_counted_in_steps() -> None:
    tables, _ = imported(
        "python pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2"
        " --seq-length 8 --global-batch-size 4 --train-samples 40 --lr-warmup-samples 8 --lr 1"
    )
    training = tables["jobs"]["x"]["training"]
    assert (training["train_iters"], training["lr_warmup_iters"]) == (10, 2)


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        ("4 5 100", r"--rampup-batch-size \[4, 5, 100\]: 4 does not grow to global_batch_size 16"),
        ("20 4 100", "20 does not grow to global_batch_size 16 in steps of 4"),
        ("4 4", r"--rampup-batch-size \[4, 4\]: start, increment and samples are needed here"),
    ],
)
def test_a_batch_that_does_not_grow_to_the_global_one_is_refused(ramp: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        imported(f"{COMMAND} --global-batch-size 16 --train-samples 160 --rampup-batch-size {ramp}")


def test_samples_of_a_growing_batch_are_more_steps() -> None:
    """(2, 4, 8, 14 consumed while it grows, and 26 more by 6; megatron/training/training.py,
    update_train_iters.)"""
    words = "--global-batch-size 6 --rampup-batch-size 2 2 8 --lr-warmup-samples 1_0"
    tables, not_taken = imported(f"{COMMAND} --train-samples 4_0 {words}")
    training = tables["jobs"]["x"]["training"]
    assert (training["train_iters"], training["lr_warmup_iters"]) == (8, 4)
    assert training["rampup_batch_size"] == [2, 2, 8]
    assert any("learning rate follows the samples" in line for line in not_taken)
    assert "--lr-warmup-samples 1_0: whole iterations of 6 samples here" in not_taken


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--position-embedding-type alibi", "--position-embedding-type alibi: family 'gpt' has"),
        ("--position-embedding-type none", "--position-embedding-type none: family 'gpt' has"),
        ("--save /a --load /base", "--load /base: a start from these weights"),
        ("--data-path 0.5 /a 0.5 /b", "--data-path: weights 0.5 0.5: here prefixes count by"),
        ("--data-path /a --mock-data --vocab-file v", "--vocab-file v: tokenizers.X.vocab_file"),
        ("--rotary-base 500", "--rotary-base 500.0: family 'gpt' does not read it"),
        ("--num-query-groups 2", "--num-query-groups 2: Megatron-LM reads it with"),
    ],
)
def test_what_changes_the_training_is_said(words: str, said: str) -> None:
    for version in ("2021", "core-0.12.0"):
        _, not_taken = imported(f"{COMMAND} {words}", version)
        assert any(line.startswith(said) for line in not_taken), not_taken


def test_one_query_group_is_what_megatron_takes_by_itself() -> None:
    tables, _ = imported(f"{COMMAND} --group-query-attention")
    assert tables["models"]["x"]["num_query_groups"] == 1
    tables, not_taken = imported(f"torchrun --nnodes=4 --nproc-per-node=2 {COMMAND}")
    assert tables["jobs"]["x"]["nodes"] == 4 and "--nproc-per-node 2: hosts" in not_taken[0]
    asked = "#SBATCH -N 6\n#SBATCH --nodes=8\n#SBATCH --ntasks-per-node 8\n"
    tables, not_taken = imported(f"{asked}srun torchrun --nnodes $SLURM_NNODES {COMMAND}")
    assert tables["jobs"]["x"]["nodes"] == 8
    tables, not_taken = imported(f"deepspeed --num_nodes 3 -H hosts --num_gpus=8 {COMMAND}")
    assert tables["jobs"]["x"]["nodes"] == 3
    assert [line.partition(":")[0] for line in not_taken[:2]] == ["-H hosts", "--num_gpus 8"]


def test_a_llama_is_one_and_what_differs_is_said() -> None:
    text = (
        "python pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2"
        " --seq-length 8 --train-iters 1 --lr 1 --swiglu --disable-bias-linear"
        " --position-embedding-type rope --rotary-base 500000"
    )
    tables, not_taken = imported(text)
    assert tables["models"]["x"]["family"] == "llama"
    assert tables["models"]["x"]["rotary_base"] == 500000.0
    assert [each for each in not_taken if "RMSNorm" in each]
    tables, not_taken = imported(text + " --normalization RMSNorm")
    assert not not_taken


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello\n", "nothing in it runs pretrain_gpt.py"),
        ("python pretrain_gpt.py --lr 1\n", "no --num-layers"),
        ('python pretrain_gpt.py "$@"', r"no --num-layers\s.*\$@: its value is not in the file"),
        (
            "python pretrain_gpt.py $(cat a.txt)",
            r"no --num-layers\s.*\$\(cat a.txt\): its value is not",
        ),
        ('f() { pretrain_gpt.py "$@"; }\nif f 1; then true; fi', r"\$@: its value is not"),
        ('f() { shift $N; pretrain_gpt.py "$@"; }\nf 1 2', r"\$@: its value is not"),
        ("pretrain_gpt.py $((((((1 + 1))))))", r"no --num-layers\s.*\$: its value is not"),
        ('eval "$(cat a.txt)"', r"what \$\(...\) prints .* not read"),
        ("python pretrain_gpt.py 'open\n", "has no end"),
        ("", "nothing in it runs"),
    ],
)
def test_what_is_no_such_script_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        imported(text)


@given(st.sampled_from(["ab", "a", "b-", "[a]", "^b", "*"]), st.text("ab*?[]!^-", min_size=1))
def test_patterns_are_those_of_bash(text: str, pattern: str) -> None:
    script = f"case '{text}' in {pattern}) L=1;; *) L=0;; esac\n"
    bash = subprocess.run(
        ["bash"], check=True, input=f"{script}echo $L", text=True, capture_output=True
    )
    command = find_command(f"{script}pretrain_gpt.py $L", "pretrain_gpt.py")
    assert command is not None
    assert command.words == [bash.stdout.strip()]


@given(st.text(max_size=200))
def test_no_text_is_run_or_crashes(text: str) -> None:
    with_command = f"{text}\npython pretrain_gpt.py --num-layers 1\n"
    try:
        find_command(with_command, "pretrain_gpt.py")
    except ValueError as error:
        assert "has no end" in str(error)


def test_a_variable_that_holds_itself_ends() -> None:
    text = 'A="$A --x $B"\nB="$A"\nA="$B $A"\npython pretrain_gpt.py $A $B\n'
    assert find_command(text, "pretrain_gpt.py") is not None
