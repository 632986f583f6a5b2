"""Inputs that are wrong, command by command: exit code 2, one line that names the wrong thing and
the fix, and nothing written.

A row: the command line => what the line on stderr has, parts set off by |. `train` gets the
settings of HERE as well. All rows share one place, since none may change it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest

from tests.small_runs import small, tear
from zpp_lab.cli.main import main
from zpp_lab.train.trainer import run

ROWS = r"""
train train.stpes=3 => train.stpes | accumulate, batch_size, beta1, beta2,
train train.steps=many => train.steps='many'
train train.steps=-1 => train.steps=-1
train train.steps=true => train.steps=true
train train.steps=[1,2] => train.steps=[1
train train.steps=1e30 => train.steps=1e+30
train train.lr=nan => train.lr=nan
train train.lr=-1 => train.lr=-1
train train.param_dtype=fp8 => train.param_dtype='fp8' | 'fp32' | 'bf16' | 'fp16'
train train.param_dtype=fp16 => train.param_dtype=fp16 | engine=virtual | bf16 | fp32
train train.optimizer_place=host => train.optimizer_place=host
train train.masters=split => train.masters=split | train.param_dtype=bf16
train engine=fsdp train.param_dtype=bf16 train.masters=split cluster.tp=2 => cluster.tp=2
train engine=deepspeed train.param_dtype=bf16 train.masters=split => train.masters=split
train seed=-1 => seed=-1 | 2^63
train seed=99999999999999999999 => seed=99999999999999999999 | 2^63
train seed => name=value | train.steps=100
train cluster=9x9 => cluster=9x9 | cluster.nodes=3 | cluster.gpus_per_node=4
train cluster.nodes=0 => cluster.nodes=0
train cluster=1x2 cluster.tp=2 data.seq_len=33 => cluster.tp=2 | data.seq_len=33
train engine=fsdp cluster=1x2 cluster.tp=2 model.ffn=65 => cluster.tp=2 | model.ffn=65
train cluster=1x2 cluster.tp=2 train.optimizer_state=8bit => cluster.tp=2 | train.optimizer_state
train cluster=2x1 cluster.pp=2 => cluster.pp=2
train engine=gpu => engine=gpu
train engine.device=cuda => engine.device=cuda | engine.device=cpu
train engine.device=cuda:7 => engine.device=cuda | engine.device=cpu
train engine.threads=100000000000 => engine.threads=100000000000 | 4096
train engine.prefetch=2 => engine.prefetch | engine=fsdp
train engine=fsdp engine.prefetch=-1 => engine.prefetch=-1
train ops.backend=cuda => ops.backend=cuda | ops.backend=auto
train recipe=zero4 => recipe=zero4 | amsp_node, base, broken, diff2_g82, diff_g84h,
train recipe=mine/w5.yaml => recipe=mine/w5.yaml | --config-dir | recipe=w5
train recipe.weights.bits=5 => weights_forward: bits=5 | (2, 3, 4, 6, 8)
train recipe.weights.bits=4 recipe.weights.block_size=0 => block_size=0
train recipe.weights.bits=4 recipe.weights.hadamard=48 => hadamard=48
train recipe.weights.random_signs=true recipe.weights.bits=4 => random_signs=true | hadamard
train recipe.weights.codec=blok recipe.weights.bits=4 => blok | none, normal, sham
train recipe.stage=2 recipe.secondary=true => recipe.secondary=true | stage=2
train recipe.stage=2 recipe.sharding.weights=node => recipe.sharding.weights=node
train recipe.sharding.grads=node => weights=node | grads=node | optimizer=w
train recipe=tagc => recipe=tagc | pip install ./examples/tagc | --config-dir examples/tagc
train recipe.grads.codec=sketch => sketch | pip install ./examples/tagc
train recipe.grads.codec=mask => mask | codec=topk
train +wires.grads_intra.bits=4 => wires: 
train recipe.weights_update.bits=4 => recipe.weights_update | recipe.sharding.weights=node
train recipe.stage=2 recipe.weights_update.bits=4 => recipe.sharding.update=d
train recipe=w4_diff cluster=1x2 => w4_diff
train recipe=w4_diff cluster=2x1 => w4_diff | recipe.weights_update
train recipe=amsp_node recipe.sharding.update=differences => recipe.weights_update
train recipe=amsp_node recipe.secondary=true => recipe.secondary
train recipe.shard=node cluster=1x4 => recipe.shard=node | recipe.shard=w
train recipe.name= run.dir=null => recipe.name=''
train recipe.name=../up run.dir=null => recipe.name='../up'
train recipe.rules=3 => recipe.rules=3
train 'recipe.rules=[{wires: [weights_update], set: {bits: 4}}]' => matches no parameter | its wires
train 'recipe.rules=[{nam: x}]' => recipe.rules.0.nam | exempt, max_numel, min_numel, name, ndim,
train 'recipe.rules=[{name: x, wires: [up]}]' => recipe.rules.0.wires.0=' | 'weights_forward'
train recipe.phases={after:2} => recipe.phases={ | [{after: | a list
train recipe.phases.0.after=2 => recipe.phases.0.after | recipe.phases=[
train recipe.rules={name:x} => recipe.rules={ | [{name: | a list
train tracking.tags={a:1} => tracking.tags={ | a list
train recipe.weights=[8] => recipe.weights=[8] | recipe.weights.bits
train cluster=2 => cluster=2: | 1x2, 1x4,
train recipe.weights.codec=block => zero3 | weights_forward | codec=block
train recipe.weights=8 => recipe.weights=8 | recipe.weights.codec | recipe.weights.bits
train recipe=w8,w4 => recipe=w8,w4
train model=9b => model=9b | 10m, 125m, 13b, 1_3b, 1m, 30m, 32_5b, 350m, 3m, 6_7b,
train model.dim=15 => model.dim=15 | model.heads=2
train model.kv_heads=3 => model.kv_heads=3 | model.heads=2
train model.vocab_size=5 => model.vocab_size=5
train model.units=layers => model.units | model=hf
train model.weights=pretrained => model.weights=pretrained | model.pat
train model.start=runs/good model.weights=pretrained model.path=models/llama => model.st
train model.lora.rank=4 => model.lora.rank=0
train data.path=null => data.name=text | data.path
train data.seq_len=1 => data.seq_len=1
train data.seq_len=99999999 => 29162 | data.path | data.ma
train data.vocab_size=100000 data.tokenizer=bpe => data.vocab_size=100000 | 257
train data.tokenizer=hf => data.tokenizer=hf | data.tokenizer_pat
train data.tokenizer=hf data.tokenizer_path=binary => data.tokenizer_pat
train data.tokenizer=hf data.tokenizer_path=tok => tok/tokenizer.json | data.tokenizer_path
train data.suffixes=[py] => data.suffixes=['py']
train data.records.prompt= => data.records
train data.path=binary.txt => binary.txt
train data.path=zero => place/zero
train data.path=empty => place/empty
train data.path=loop => data.path=loop
train data.cache_dir=afile => place/afile | data.cache_dir
train data.path=textz => data.path=textz
train tracking.tags=a => tracking.tags='a'
train run.piece_steps=-3 => run.piece_steps=-3
train run.until=-5 => run.until=-5.0
train run.dir=afile => afile
train run.dir=bad/ck_file/zero3/seed1 => run.dir=bad/ck_file/zero3/seed1 | checkpoints
train run.dir=bad/met_folder/zero3/seed1 => run.dir=bad/met_folder/zero3/seed1 | metrics.jsonl
train run.dir= => run.dir='' | runs/RECIPE/seedN
train run.dir=3 => run.dir=3
train run.dir=runs/good => runs/good | run.dir
train run.start_from=nope => run.start_from=nope
train run.start_from=cut/step-00000003 => run.start_from=cut/step-00
train +train.steps=3 => +train.steps
train ~nothing => nothing: 
train train.steps=1,2 => train.steps=1,2
train train.steps=[1,2 => 'train.steps=[1,2' | name=value
train 'run.name="a' => 'run.name="a' | name=value
train @file => name=value | train.steps=100
train --fro 3m => --fro | --help
train --for soon => --for | 480s | 1.5h
train --for -5m => --for -5m | 480s | 1.5h
train --for nan => --for | 480s | 1.5h
train -m --cfg job => --cfg | --dry-run
train -m seed=1,x => seed='x'
train --dry-run --dry-run=3 => --dry-run | '3' | --help
train hydra.run.dir=x => hydra.run.dir=x
study => the following arguments are required: name; see zpp-lab study --help
study nothing => bits, bits_13b, deepspeed,
study world hardware=4gpus => zero3_2_global
study nope.yaml => nope.yaml | s_role.yaml
study binary.yaml => binary.yaml | UTF-8
study empty.yaml => empty.yaml
study broken.yaml => broken.yaml
study s_key.yaml => s_key.yaml | arms, baseline, branch, composites, confidence, jobs, margin
study s_seeds_text.yaml => s_seeds_text.yaml | seeds='many'
study s_seeds_neg.yaml => seed=-1 | 2^63
study s_margin_neg.yaml => s_margin_neg.yaml | margin=-1
study s_arms_dict.yaml => s_arms_dict.yaml | arms={'zero3'
study s_arm_noname.yaml => s_arm_noname.yaml | against, describe, factors, name, overrides,
study s_arm_twice.yaml => s_arm_twice.yaml | zero3
study s_arm_key.yaml => s_arm_key.yaml | against, describe, factors, name, overrides,
study s_arm_override.yaml => amsp_node, base, broken, diff2_g82, diff_g84h,
study s_arm_override2.yaml => codec, hadamard, keep, memory,
study s_arm_override_dict.yaml => s_arm_override_dict.yaml
study s_baseline.yaml => s_baseline.yaml | 'w5' | zero3
study s_without.yaml => s_without.yaml | zero3, zero3_reordered, zeropp, qsdp, w6,
study s_without_text.yaml => s_without_text.yaml | without='w4x'
study s_against.yaml => s_against.yaml | zero3
study s_role.yaml => s_role.yaml | 'baseline_repeat' | 'sham_control'
study s_name_slash.yaml --dry-run => s_name_slash.yaml
study s_dup.yaml --dry-run => s_dup.yaml
study s_prepare.yaml => s_prepare.yaml | name, overrides, seed
study s_self.yaml => s_self.yaml
study s_retries.yaml => s_retries.yaml | retries='two'
study s_grid.yaml => s_grid.yaml | against, describe, factors, name, overrides,
study s_path.yaml => zero3
study study.yaml seed=3 => --seeds | 1,2,3
study study.yaml recipe=w8 => recipe=w8
study study.yaml run.dir=x => --dir
study study.yaml train.stepz=3 => accumulate, batch_size, beta1, beta2,
study study.yaml --seeds one => --seeds | 1,2,3
study study.yaml --seeds '' => --seeds | 1,2,3
study study.yaml --arms w9 => --arms | zero3
study study.yaml --arms '' => --arms | zero3
study study.yaml --alone => --alone | --arms
study study.yaml --jobs two => --jobs | --help
study study.yaml --for soon => --for | 480s | 1.5h
study study.yaml --machine h200 => --machine | --dry-run
study study.yaml --dry-run --link-gbps 10 => --link-gbps | --machine
study study.yaml --dry-run --machine binary.json => binary.json
study study.yaml --dry-run --machine h200 --link-gbps 10,20 => --link-gbps | 10,20
study study.yaml --launcher nope => 'nope'
study study.yaml --launcher slurm --jobs 2 => --jobs | --launche
study study.yaml --dir afile => --dir
study study.yaml --dir runs/good => runs/good
study study.yaml --watch --dir runz => --watch
study study.yaml --watch --dir empty => --watch
study study.yaml --nope => --nope | --help
study ../x => '../x' | bits, bits_13b, deepspeed,
prepare => the following arguments are required: name; see zpp-lab prepare --help
prepare binary.yaml => binary.yaml | UTF-8
prepare study.yaml data.path=textz => place/textz | place/texts
prepare study.yaml x => name=value | train.steps=100
report => the following arguments are required: dir; see zpp-lab report --help
report runz => runz | runs?
report afile => afile: 
report binary => binary: 
report runs --machine list.json => list.json
report runs --speed nope.csv => nope.csv | --out
report runs --speed afile => gpus_per_node
report speed => no runs in or below it (none has a confi | run something first, or name another fold
report binspeed => binspeed/results.csv
report runs extra => --help
report bad/cfg_binary => bad/cfg_binary/zero3/seed1/config.ya
report bad/cfg_empty => bad/cfg_empty/zero3/seed1/config.yaml
report bad/sum_empty_object => bad/sum_empty_object/zero3/seed1/
report bad/sum_binary => bad/sum_binary/zero3/seed1/summary.j
report bad/sum_half => bad/sum_half/zero3/seed1/summary.json
report bad/sum_types => bad/sum_types/zero3/seed1/summary.jso
report bad/met_binary => bad/met_binary/zero3/seed1/metrics.j
report bad/met_broken => bad/met_broken/zero3/seed1/metrics.j
report bad/met_empty => bad/met_empty/zero3/seed1/metrics.jso
report bad/met_list => bad/met_list/zero3/seed1/metrics.json
report bad/met_types => bad/met_types/zero3/seed1/metrics.jso
report bad/met_order => bad/met_order/zero3/seed1/metrics.jsonl | line 2
report bad/met_dir => bad/met_dir/zero3/seed1/metrics.jsonl
plan --gpu-gib nan => --gpu-gib/--memory-gib | --help
plan --link-gbps 10 => --link-gbps | --machine
plan --machine binary.json => binary.json
plan --machine h200 --link-gbps fast => --link-gbps | Gbit/s | 12,25,max
plan --machine h200 --link-gbps -5,max => --link-gbps -5,max | more than 0
plan --machine h200 --link-gbps , => --link-gbps | Gbit/s | 12,25,max
plan --study runs => --study | --fastest
plan --fastest => --fastest | --machine
plan --fastest --machine h200 --study runz => --link-gbps
plan --fastest --machine h200 --max-gap -1 => --max-gap | --help
plan --fastest --machine h200 --allow all => --allow | --help
plan --fastest --machine h200 --link-gbps 10,20 => --link-gbps | 10,20
plan --jsn => --jsn | --help
plan model=hf model.path=models/lama => model.path=models/lama
plan model=hf => model=hf | model.path
plan recipe=zeropp cluster.nodes=1 cluster.gpus_per_node=1 => recipe zeropp | change the cluster or
bench => zpp-lab bench WHAT | step, calibrate
bench everything => step, calibrate
bench step --cpu --arm 'a recipe=w4' => 'a recipe=w4'
bench step --nodes 0 --cpu => --nodes | --help
bench step --arm 'x: train.stepz=3' --cpu => train.stepz | accumulate, batch_size, beta1, beta2,
bench step --steps 0 --cpu => --steps
bench step --link-gbps fast --cpu => --link-gbps | 12,25,max
bench step --link-gbps -3 --cpu => --link-gbps | more than 0
bench step --share-gpus=maybe => --share-gpus | --help
bench step --recipes '' --cpu => --recipes | --arm
bench calibrate => the following arguments are required: --out; see zpp-lab bench calibrate --help
bench calibrate --out empty --cpu => --help
bench calibrate --out obj.json --cpu --tiny => --out | obj.json
bench calibrate --out x.json --bits 5 --cpu => --help
bench calibrate --out x.json --modes fast --cpu => --modes
bench calibrate --out x.json --link-gbps -1 --cpu => --link-gbps | --hel
export runs => the following arguments are required: --out; see zpp-lab export --help
export runz --out x.csv => runz | runs?
export runs --out other.csv => --out | other.csv
export bad/met_order --steps --out x.csv => bad/met_order/zero3/seed1/metrics.jsonl
export runs --out x.txt => x.txt | .csv or .parquet
export runs --out afile/x.csv => afile
export runs --out x.csv --dtype bf16 => --dtype | --to
export runs --out x.csv --codec bits=4 => --codec | --to | --quantized
export runs --to gguf --out o => invalid choice | see zpp-lab export --help
export runs --to hf --out o => RUNS/ARM/seed1
export runs/good --to hf --out afile/x => afile/.x.partial
export runs/good --to hf --out empty => empty
export runs/good --to hf --out o --dtype fp8 => --dtype | --help
export runs/good --to hf --out o --steps => --steps | --to
export runs/good --to hf --out o --codec bits=4 => --codec | --quantized
export runs/good --to hf --out o --quantized --codec bits=5 => --codec
export runs/good --to hf --out o --quantized --codec x => --codec | bits=4
export runs/good --to hf --out o --quantized --requantize --dense => --dense
export runs/good --to hf --out o --quantized => zero3 | --quantized
export runs/good --to peft --out o => runs/good | model.lora.rank=0 | --to
export runs/good --to peft --out o --steps => --to | --steps | fp32
export bad/ck_none/zero3/seed1 --to hf --out o => bad/ck_none/zero3/seed1
export bad/cfg_binary/zero3/seed1 --to hf --out o => bad/cfg_binary/zero3/s
export bad/cfg_key/zero3/seed1 --to hf --out o => bad/cfg_key/zero3/seed1 | zpp_l
export bad/met_broken --steps --out x.csv => bad/met_broken/zero3/seed1
export bad/met_types --steps --out x.csv => bad/met_types/zero3/seed1/m
export bad/sum_empty_object --out x.csv => bad/sum_empty_object/zero3/
export bad/sum_types --out x.csv => bad/sum_types/zero3/seed1/summ
evaluate => the following arguments are required: paths; see zpp-lab evaluate --help
evaluate runz => runz | runs?
evaluate runs => config.yaml
evaluate afile => afile
evaluate empty => config.yaml | config.json
evaluate runs/good --tokens 0 => --tokens | --help
evaluate runs/good --codec bits=5 => --codec | weights_forwar
evaluate runs/good --dtype fp16 => --dtype | --help
evaluate runs/good --device tpu => engine.device='tpu'
evaluate runs/good --device cuda => engine.device=cuda | engine.device=cpu
evaluate runs/good --out x.txt => x.txt
evaluate runs/good --out afile/x.csv => --help
evaluate runs/good --data nope => nope
evaluate models/llama => --data
evaluate bad/ck_file/zero3/seed1 => bad/ck_file/zero3/seed1/checkpoints
evaluate runs/good --out other.csv => --out | other.csv
evaluate runs/good --out obj.json => --out | obj.json
evaluate runs/good --data bad/data_empty/zero3/seed1 => bad/data_empty/zero3/seed1/data.json
evaluate bad/data_types/zero3/seed1 => bad/data_types/zero3/seed1/data.json
evaluate bad/ck_none/zero3/seed1 => bad/ck_none/zero3/seed1/checkp
evaluate runs/good --codec bits=4,bits=2 => --codec | bits=4,bits=2
doctor now => --help
doctor --fast => --fast | --help
sync => the following arguments are required: dirs; see zpp-lab sync --help
sync runz => runz | runs?
sync empty => metrics.jsonl
sync afile => afile: 
dashboard => --apply
dashboard empty => empty | zpp-lab study
dashboard smoke --apply x => --apply
dashboard --apply nope.json => nope.json
dashboard --apply binary.json => binary.json | UTF-8
dashboard --apply half.json => half.json
dashboard --apply obj.json => obj.json | zpp-lab dashboard
dashboard --apply empty => empty
dashboard smoke --out afile/x.json => afile/x.json
dashboard smoke --out obj.json => --out | obj.json
dashboard smoke --out empty => empty
dashboard smoke extra => --help
batch runs/good => the following arguments are required: steps; see zpp-lab batch --help
batch runz 3 => RUNS/ARM/seed1
batch empty 3 => config.yaml | RUNS/ARM/seed1
batch runs/good x => 32,39-41
batch runs/good 99 => runs/good
batch runs/good 1 --characters -1 => --characters | --help
batch runs/good 1,,2 => '1,,2' | 32,39-41
batch bad/cfg_binary/zero3/seed1 1 => bad/cfg_binary/zero3/seed1/co
batch bad/cfg_key/zero3/seed1 1 => bad/cfg_key/zero3/seed1/config | zpp_lab
emulate => --nodes
emulate --nodes 0 -- true => --nodes | --help
emulate --per gpu -- true => invalid choice | see zpp-lab emulate --help
emulate --share-gpus=x -- true => --share-gpus | --help
emulate --nope -- true => --nope | --help
emulate --iproute nope -- true => iproute2
mps => zpp-lab mps -- COMMAND
mps --nope => zpp-lab mps -- COMMAND
build --arch 12 => --arch | 80,90a,100
build --wheel binary.jsonl => --wheel | binary.jsonl
build --wheel nope --arch 12 => --arch | 80,90a,100
build --nope => --nope | --help
trian => train, study, from-deepspeed, prepare,
--nope => --nope | --help
-x train => --help
train data=jsonl data.path=binary.jsonl => binary.jsonl
train data=jsonl data.path=records/nojson.jsonl => nojson.jsonl
train data=jsonl data.path=records/nofields.jsonl => data.records.prompt
train data=jsonl data.path=records/number.jsonl => number.jsonl
train data=jsonl data.path=records/role.jsonl => no message of the role 'assistant'
train data=jsonl data.path=records/list.jsonl => list.jsonl, line 1
train data=jsonl data.path=empty => *.jsonl
train data=stdlib => data.path=texts | data=stdlib | data=text
train data=installation data.path=textz => textz | texts?
train data=hf data.path=./textz => did you mean texts?
train data.tokenizer=hf data.tokenizer_path=textz => tokenizer.json
train data.tokenizer=hf data.tokenizer_path=empty => tokenizer.json
train model.path=models/llama model.weights=pretrained => .safetensors
train model=13b model.path=models/llama model.weights=pretrained --dry-run => model.vocab_size
plan model=13b model.path=models/llama model.weights=pretrained => model.vocab_size | model=hf
plan --gpus 8 model=13b model.path=models/llama model.weights=pretrained => model.vocab_size
train model.start=runs/goood => runs/good
train model.start=runs => runs/good
train model.start=bad/data_empty/zero3/seed1 => bad/data_empty/zero3/seed1/data.json
train run.start_from=runs/good => runs/good/checkpoints/step-
train recipe=null => recipe=null | zero3
train -m recipe.weights.bits=5 seed=1,2 => bits=5
train -m recipe=zero4,w4 => recipe=zero4 | zero3
study afile => afile: a study's file ends with .yaml | rename it
study s_extends.yaml => s_extends.yaml
report bad/met_cut => met_cut/zero3/seed1/metrics.jsonl
dashboard afile => afile: a study's file ends with .yaml | rename it
train model=6_7b model.dim=65536 model.layers=2 => model, gradients and optimizer | a smaller model
"""

HERE = shlex.split(
    "engine.device=cpu tracking.wandb=off data=text data.path=texts data.cache_dir=../cache "
    "data.seq_len=16 data.heldout_every=2 model.dim=16 model.layers=1 model.heads=2 "
    "model.kv_heads=2 model.ffn=24 train.batch_size=2 train.warmup_steps=1 run.dir=runs/new"
)
BINARY = bytes(range(128, 256)) * 8 + b"\x00\xff\xfe\n" * 50
STUDY = {
    "name": "mine",
    "question": "Does it?",
    "seeds": [1, 2],
    "overrides": ["data=text", "data.path=texts", "engine.device=cpu", "train.steps=2"],
    "arms": [
        {"name": "zero3", "overrides": ["recipe=zero3"]},
        {"name": "w4", "overrides": ["recipe=w4"]},
    ],
}
STUDIES = {  # what is wrong with each, in JSON, which is YAML too
    "study": {},
    "s_key": {"margim": 0.1},
    "s_seeds_text": {"seeds": "many"},
    "s_seeds_neg": {"seeds": [-1]},
    "s_margin_neg": {"margin": -1},
    "s_arms_dict": {"arms": {"zero3": 1}},
    "s_arm_noname": {"arms": [STUDY["arms"][0], {"nam": "w4"}]},
    "s_arm_twice": {"arms": [STUDY["arms"][0]] * 2},
    "s_arm_key": {"arms": [STUDY["arms"][0], {"name": "w4", "overides": []}]},
    "s_arm_override": {"arms": [STUDY["arms"][0], {"name": "w4", "overrides": ["recipe=w5"]}]},
    "s_arm_override2": {
        "arms": [STUDY["arms"][0], {"name": "w4", "overrides": ["recipe.weights.bitz=4"]}]
    },
    "s_arm_override_dict": {
        "arms": [STUDY["arms"][0], {"name": "w4", "overrides": {"recipe": "w4"}}]
    },
    "s_baseline": {"baseline": "w5"},
    "s_extends": {"extends": "smokee"},
    "s_without": {"extends": "smoke", "without": ["nope"]},
    "s_without_text": {"extends": "smoke", "without": "w4x"},
    "s_against": {"arms": [STUDY["arms"][0], {"name": "w4", "against": "w8"}]},
    "s_role": {"arms": [STUDY["arms"][0], {"name": "w4", "role": "control"}]},
    "s_name_slash": {"name": "../mine"},
    "s_prepare": {"prepare": [{"nam": "x"}]},
    "s_self": {"extends": "s_self.yaml"},
    "s_retries": {"retries": "two"},
    "s_grid": {"arms": [STUDY["arms"][0], {"name": "w4", "grid": 3}]},
    "s_path": {"overrides": ["data=text", "data.path=textz", "engine.device=cpu"]},
}
FILES: dict[str, str | bytes] = {
    "afile": "hello\n",
    "zero": "",
    **dict.fromkeys(("binary", "binary.txt", "binary.json", "binary.yaml"), BINARY),
    **dict.fromkeys(("binspeed/results.csv", "binary.jsonl"), BINARY),
    "speed/results.csv": "a,b\n1,2\n",
    "other.csv": "a,b\n1,2\n",
    "empty.yaml": "",
    "broken.yaml": "name: [1, 2\nseeds: }\n",
    "s_dup.yaml": "name: one\nname: two\n",
    "obj.json": "{}",
    "list.json": "[1, 2]",
    "half.json": '{"name": "x", "figures": [1,',
    "tok/tokenizer.json": "{",
    "models/llama/config.json": json.dumps(
        {"model_type": "llama", "vocab_size": 256, "rms_norm_eps": 1e-5}
    ),
    "records/nojson.jsonl": "hello\n",
    "records/nofields.jsonl": '{"a": "b"}\n',
    "records/number.jsonl": '{"prompt": 3, "completion": 4}\n',
    "records/role.jsonl": '{"messages": [{"rol": "user", "content": "x"}]}\n',
    "records/list.jsonl": "[1]\n",
}
DAMAGED: dict[str, tuple[str, str | bytes]] = {  # of a finished run: which file, and what it holds
    "cfg_binary": ("config.yaml", BINARY),
    "cfg_empty": ("config.yaml", ""),
    "cfg_key": ("config.yaml", "nokey: 3\n"),
    "sum_empty_object": ("summary.json", "{}"),
    "sum_binary": ("summary.json", BINARY),
    "sum_half": ("summary.json", '{"heldout_loss": 3.'),
    "sum_types": ("summary.json", '{"heldout_loss": "low", "steps": 3, "bytes": {}}'),
    "met_binary": ("metrics.jsonl", BINARY),
    "met_broken": ("metrics.jsonl", '{"step": 1, "loss": 5.0}\n{"step": 2, "lo\n{"step": 3}\n'),
    "met_empty": ("metrics.jsonl", ""),
    "met_cut": ("metrics.jsonl", '{"step": 1, "loss": 5.0}\n'),
    "met_order": (
        "metrics.jsonl",
        "".join(f'{{"step": {step}, "loss": 5.0}}\n' for step in (1, 1, 3)),
    ),
    "data_empty": ("data.json", "{}"),
    "data_types": ("data.json", '{"hash": 3, "tokenizer": "x", "vocab_size": 256}'),
    "met_list": ("metrics.jsonl", "[1]\n[2]\n[3]\n"),
    "met_types": ("metrics.jsonl", '{"step": 1, "loss": "x"}\n' * 3),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, a finished run and damaged copies of it, studies, and files of every wrong kind."""
    place = tmp_path_factory.mktemp("wrong") / "place"
    place.mkdir()
    good = place / "runs" / "good"
    run(small(place, f"run.dir={good}", f"data.cache_dir={place.parent}", "train.steps=3"))
    for name, held in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(held.encode() if isinstance(held, str) else held)
    for name, wrong in STUDIES.items():
        (place / f"{name}.yaml").write_text(json.dumps({**STUDY, **wrong}))
    for name, (file, held) in DAMAGED.items():
        copy = place / "bad" / name / "zero3" / "seed1"
        shutil.copytree(good, copy)
        (copy / file).write_bytes(held.encode() if isinstance(held, str) else held)
    shutil.copytree(good, place / "bad/ck_none/zero3/seed1", ignore=lambda *_: ["checkpoints"])
    shutil.copytree(good, place / "bad/met_dir/zero3/seed1", ignore=lambda *_: ["metrics.jsonl"])
    (place / "bad/met_dir/zero3/seed1/metrics.jsonl").mkdir()
    (place / "bad/met_folder/zero3/seed1/metrics.jsonl").mkdir(parents=True)
    shutil.copytree(good, place / "bad/ck_file/zero3/seed1", ignore=lambda *_: ["checkpoints"])
    (place / "bad/ck_file/zero3/seed1/checkpoints").write_text("x")
    (place / "bad/ck_file/zero3/seed1/summary.json").unlink()
    cut = shutil.copytree(good / "checkpoints/step-00000003", place / "cut/step-00000003")
    tear(Path(cut))
    (place / "empty").mkdir()
    (place / "loop").symlink_to("loop")
    return place


@pytest.fixture(autouse=True)
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("ZPP_LAB_IPROUTE", "nowhere")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("zpp_lab.files.reachable", lambda: pytest.fail("the Hub was asked"))


def tree(place: Path) -> dict[str, tuple[int, ...]]:
    """Every path below; of a file what no writing leaves as it was."""
    found: dict[str, tuple[int, ...]] = {}
    for folder, _, files in os.walk(place):
        found[folder] = ()
        for path in (os.path.join(folder, name) for name in files):
            now = os.lstat(path)
            found[path] = (now.st_size, now.st_mtime_ns, now.st_ino)
    return found


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_one_line_names_it_and_the_fix(
    row: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words = shlex.split(row.partition(" => ")[0])
    before = tree(place)
    assert main([command, *(HERE if command == "train" else []), *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    absent = [part for part in row.partition(" => ")[2].split(" | ") if part not in said]
    assert not absent, said
    assert tree(place) == before


def test_what_is_left_of_a_run_without_its_settings_is_no_other_run_s(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / "left"
    left.mkdir()
    shutil.copy(place / "runs" / "good" / "summary.json", left)
    assert main(["train", *HERE, f"run.dir={left}"]) == 2
    said = capsys.readouterr().err
    assert "summary.json" in said
    assert "run.dir" in said


@pytest.mark.parametrize("words", [["run.dir=runs/é"], ["recipe.name=ü", "run.dir=null"]])
def test_names_may_have_any_letters(
    words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *HERE, "train.steps=1", "train.eval_tokens=16", *words]) == 0
    folder = Path("runs", words[0][-1])
    assert str(folder) in capsys.readouterr().out
    shutil.rmtree(folder)
