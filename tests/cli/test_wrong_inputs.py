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
train train.steps=many => train.steps='many': use a whole number
train train.steps=-1 => train.steps=-1: use 1 or more
train train.steps=true => train.steps=true: use a number
train train.steps=[1,2] => train.steps=[1, 2]: use a whole number
train train.steps=1e30 => train.steps=1e+30: use a whole number
train train.lr=nan => train.lr=nan: use a finite number
train train.lr=-1 => train.lr=-1.0: use 0 or more
train train.param_dtype=fp8 => train.param_dtype='fp8': use 'fp32', 'bf16' or 'fp16'
train train.param_dtype=fp16 => train.param_dtype=fp16 and train. | engine=virtual has bf16 and fp32
train train.optimizer_place=host => train.optimizer_place=host nee | moments cross the host's bus tw
train seed=-1 => seed=-1: use a number from 0 to 2^63 - 1
train seed=99999999999999999999 => seed=99999999999999999999: use a number from 0 to 2^63 - 1
train seed => 'seed': write settings as name=value, such as train.steps=100
train cluster=9x9 => cluster=9x9 | cluster.nodes=3 cluster.gpus_per_node=4
train cluster.nodes=0 => cluster.nodes=0: use 1 or more
train engine=gpu => engine=gpu: no such engine. There are: deepspeed, fsdp, virtual
train engine.device=cuda => engine.device=cuda, but torch sees no GPU here: use engine.device=cpu
train engine.device=cuda:7 => engine.device=cuda, but torch sees no GPU here | use engine.device=cpu
train engine.threads=100000000000 => engine.threads=100000000000: use 0 (torch's choice) to 4096
train engine.prefetch=2 => engine.prefetch is a setting of engine=fsdp | leave it out
train engine=fsdp engine.prefetch=-1 => engine.prefetch=-1: use 0 (none) or more
train ops.backend=cuda => ops.backend=cuda: torch sees no CUDA GPU here; set ops.backend=auto
train recipe=zero4 => recipe=zero4 | amsp_node, base, broken, diff2_g82, g1_ef,
train recipe=mine/w5.yaml => recipe=mine/w5.yaml: give a name, no path | --config-dir DIR recipe=w5
train recipe.weights.bits=5 => recipe zero3, weights_forward | use one of (2, 3, 4, 6, 8), or null t
train recipe.weights.bits=4 recipe.weights.block_size=0 => recipe zero3, weigh | use a power of two,
train recipe.weights.bits=4 recipe.weights.hadamard=48 => recipe zero3, weigh | use 0 (off) or one o
train recipe.weights.random_signs=true recipe.weights.bits=4 => recipe zero3, we | set it to 16, 32,
train recipe.weights.codec=blok recipe.weights.bits=4 => recipe zero3, weigh | block, mask, none
train recipe.stage=2 recipe.secondary=true => recipe.secondary=true | stage=2 keeps the weights
train recipe.stage=2 recipe.sharding.weights=node => recipe.sharding.weights=node contradicts reci
train recipe.sharding.grads=node => is no point of the grid | weights=node, grads=node, optimizer=w
train recipe=tagc recipe.name=x recipe.shard=node cluster=2x2 => leave recipe.shard=node out
train recipe=tagc recipe.name=x recipe.hops=2 => set recipe.hops=1
train +wires.grads_intra.bits=4 => wires: no such setting. | at the top level
train recipe.weights_update.bits=4 => recipe.weights_update and | set recipe.sharding.weights=node
train recipe.stage=2 recipe.weights_update.bits=4 => or for whole weights recipe.sharding.update=d
train recipe=w4_diff cluster=1x2 => recipe w4_diff: on one node | would carry nothing; take a clust
train recipe=w4_diff cluster=2x1 => recipe w4_diff: with one GPU a node | set recipe.weights_update
train recipe=amsp_node recipe.sharding.update=differences => needs a codec | recipe.weights_update.
train recipe=amsp_node recipe.secondary=true => all weights are in the node anyway
train recipe.shard=node cluster=1x4 => recipe.shard=node needs several nodes | use recipe.shard=w
train recipe.name= run.dir=null => recipe.name='' | use letters, digits and _ . , + = -, no dot
train recipe.name=../up run.dir=null => recipe.name='../up' | use letters, digits and _ . , + = -, n
train recipe.rules=3 => recipe.rules=3: use a list, such as [a,b]
train 'recipe.rules=[{wires: [weights_update], set: {bits: 4}}]' => matches no parameter | its wires
train 'recipe.rules=[{nam: x}]' => recipe.rules.0.nam | exempt, max_numel, min_numel, name, ndim,
train 'recipe.rules=[{name: x, wires: [up]}]' => recipe.rules.0.wires.0=' | use 'weights_forward', '
train recipe.weights.codec=block => recipe zero3, weights_forward: codec=block needs bits: set 2, 3,
train recipe.weights=8 => recipe.weights=8 | recipe.weights.codec, recipe.weights.bits,
train recipe=w8,w4 => recipe=w8,w4: add -m to run each value, or write a list in brackets
train model=9b => model=9b | 10m, 125m, 13b, 1_3b, 1m, 30m, 32_5b, 350m, 3m, 6_7b,
train model.dim=15 => model.dim=15, model.heads=2: dim / heads must be an even number
train model.kv_heads=3 => model.kv_heads=3 must divide model.heads=2
train model.vocab_size=5 => model.vocab_size=5 is smaller than | raise it, set 0 to take the tokeniz
train model.units=layers => model.units is for model=hf
train model.weights=pretrained => model.weights=pretrained needs model.pat
train model.start=runs/good model.weights=pretrained model.path=models/llama => model.st | set one o
train model.lora.rank=4 => model.lora adapts a trained model | model.lora.rank=0 trains all paramete
train data.path=null => data.name=text needs data.path (a file, a folder or a dataset's name)
train data.seq_len=1 => data.seq_len=1: use 2 or more
train data.seq_len=99999999 => 29162 training tokens are too few | use more text (data.path, data.ma
train data.vocab_size=100000 data.tokenizer=bpe => data.vocab_size=100000 | use between 257 and that
train data.tokenizer=hf => data.tokenizer=hf and data.tokenizer_pat | set both or neither
train data.tokenizer=hf data.tokenizer_path=binary => binary is damaged (no | set data.tokenizer_pat
train data.tokenizer=hf data.tokenizer_path=tok => tok/tokenizer.json is d | set data.tokenizer_path
train data.suffixes=[py] => data.suffixes=['py']: name endings of files, such as [.py,.h]
train data.records.prompt= => data.records | prompt, completion and messages must be
train data.path=binary.txt => binary.txt holds zero bytes, so i | move it away, or convert it to UTF
train data.path=zero => place/zero: no text in there | name the folder that has some
train data.path=empty => place/empty: no text in there | name the folder that has some
train data.path=loop => data.path=loop | name the one with the text
train data.cache_dir=afile => place/afile: File exists | set data.cache_dir to another fold
train data.path=textz => data.path=textz | name the one with the text
train tracking.tags=a => tracking.tags='a': use a list, such as [a,b]
train run.piece_steps=-3 => run.piece_steps=-3: use 0 (all) or more
train run.until=-5 => run.until=-5.0: use a unix time
train run.dir=afile => file exists | name another one, or delete it
train run.dir= => run.dir='': name a folder, or null (runs/RECIPE/seedN)
train run.dir=3 => run.dir=3: use text, or null
train run.dir=runs/good => runs/good holds a run with other settings | Give another run.dir
train run.start_from=nope => run.start_from=nope | name one of a run's folder,
train run.start_from=cut/step-00000003 => run.start_from=cut/step-00 | name one of a run's folder
train +train.steps=3 => +train.steps: the setting is there already; leave out the +
train ~nothing => nothing: no such setting. | Valid names at the top level
train train.steps=1,2 => train.steps=1,2: add -m to run each value, or write a list in brackets
train train.steps=[1,2 => 'train.steps=[1,2' cannot be read | write name=value, and quote a value wi
train 'run.name="a' => 'run.name="a' cannot be read | write name=value, and quote a value with
train @file => '@file': write settings as name=value, such as train.steps=100
train --fro 3m => unknown option --fro; see zpp-lab train --help
train --for soon => --for soon: give a time above 0, such as 480, 480s, 8m or 1.5h
train --for nan => --for nan: give a time above 0, such as 480, 480s, 8m or 1.5h
train -m --cfg job => --cfg is for one run: leave out -m, or give -m --dry-run
train -m seed=1,x => seed='x': use a whole number
train --dry-run --dry-run=3 => --dry-run: ignored explicit argument '3'; see zpp-lab train --help
train hydra.run.dir=x => hydra.run.dir=x: settings of Hydra's own go with -m; leave it out
study => the following arguments are required: name; see zpp-lab study --help
study nothing => no study 'nothing' | bits, bits_13b, bits_full, block, deepspeed,
study world hardware=4gpus => hardware: zero3_2_global of study world sets cluster | leave
study nope.yaml => nope.yaml: no such file (did you mean s_role.yaml?); name a study's YAML file
study binary.yaml => binary.yaml is damaged (no text in UTF-8 | mend it, or name another file
study empty.yaml => empty.yaml: a study is a mapping with name, question, arms and seeds
study broken.yaml => broken.yaml is damaged (no YAML | mend it, or name another file
study s_key.yaml => s_key.yaml | arms, baseline, branch, composites, confidence, jobs, margin
study s_seeds_text.yaml => s_seeds_text.yaml: seeds='many': use a list, such as [a,b]
study s_seeds_neg.yaml => study mine, every arm: seed=-1: use a number from 0 to 2^63 - 1
study s_margin_neg.yaml => s_margin_neg.yaml: study mine: margin=-1.0: use more than 0
study s_arms_dict.yaml => s_arms_dict.yaml: arms={'zero3': 1}: use a list, such as [a,b]
study s_arm_noname.yaml => s_arm_noname.yaml | against, describe, factors, name, overrides,
study s_arm_twice.yaml => s_arm_twice.yaml: study mine: arm named twice: zero3
study s_arm_key.yaml => s_arm_key.yaml | against, describe, factors, name, overrides,
study s_arm_override.yaml => study mine, arm w4 | amsp_node, base, broken, diff2_g82, g1_ef,
study s_arm_override2.yaml => study mine, arm w4 | codec, hadamard, keep, memory,
study s_arm_override_dict.yaml => s_arm_override_dict.yaml | use a list, such as [a,b]
study s_baseline.yaml => s_baseline.yaml: study mine: baseline 'w5' is no arm; arms: zero3, w4
study s_without.yaml => s_without.yaml | zero3, zero3_reordered, zeropp, qsdp, w6,
study s_without_text.yaml => s_without_text.yaml: without='w4x': use a list, such as [a, b]
study s_against.yaml => s_against.yaml | zero3
study s_role.yaml => s_role.yaml | use 'baseline', 'baseline_repeat', 'arm' | 'sham_control'
study s_name_slash.yaml --dry-run => s_name_slash.yaml | use letters, digits and _ . , + = -, no dot
study s_dup.yaml --dry-run => s_dup.yaml is damaged (no YAML | mend it, or name another file
study s_prepare.yaml => s_prepare.yaml | name, overrides, seed
study s_self.yaml => s_self.yaml: extends itself, by way of s_self.yaml
study s_retries.yaml => s_retries.yaml: retries='two': use a whole number
study s_grid.yaml => s_grid.yaml | against, describe, factors, name, overrides,
study s_path.yaml => study mine, zero3, w4 | name the one with the text
study study.yaml seed=3 => study mine, every arm | use --seeds 1,2,3, or `seeds` of its file
study study.yaml recipe=w8 => recipe=w8 | mine), or train one run with zpp-lab train
study study.yaml run.dir=x => study mine, every arm | name the study's folder with --dir
study study.yaml train.stepz=3 => study mine, every arm | accumulate, batch_size, beta1, beta2,
study study.yaml --seeds one => --seeds 'one': give whole numbers, such as 1,2,3
study study.yaml --seeds '' => --seeds '': give whole numbers, such as 1,2,3
study study.yaml --arms w9 => --arms w9: no such arm; there are: zero3, w4
study study.yaml --arms '' => --arms : no such arm; there are: zero3, w4
study study.yaml --alone => --alone goes with --arms, such as --arms w8 --alone
study study.yaml --jobs two => --jobs: 'two': use a whole number; see zpp-lab study --help
study study.yaml --for soon => --for soon: give a time above 0, such as 480, 480s, 8m or 1.5h
study study.yaml --machine h200 => --machine goes with --dry-run
study study.yaml --dry-run --link-gbps 10 => --link-gbps goes with --machine
study study.yaml --dry-run --machine binary.json => binary.json is damaged | name another file, or l
study study.yaml --dry-run --machine h200 --link-gbps 10,20 => --link-gbps 10,20 | give one speed, o
study study.yaml --launcher nope => Hydra's launcher 'nope' cannot start | is its package installed
study study.yaml --launcher slurm --jobs 2 => --jobs is for runs on thi | leave it out, or --launche
study study.yaml --dir afile => afile is a file: give the study a folder with --dir
study study.yaml --dir runs/good => runs/good holds a single run | give the study a folder of its ow
study study.yaml --watch --dir runz => no study has been started her | start it without --watch, or
study study.yaml --watch --dir empty => no study has been started her | start it without --watch, or
study study.yaml --nope => unknown option --nope; see zpp-lab study --help
study ../x => no study '../x' | bits, bits_13b, bits_full, block, deepspeed,
prepare => the following arguments are required: name; see zpp-lab prepare --help
prepare binary.yaml => binary.yaml is damaged (no text in UTF-8 | mend it, or name another file
prepare study.yaml data.path=textz => place/textz: no such file | (did you mean | place/texts?)
prepare study.yaml x => 'x': write settings as name=value, such as train.steps=100
report => the following arguments are required: dir; see zpp-lab report --help
report runz => runz: no such folder (did you mean runs?); give the folder of a study or of runs
report afile => afile: a file, not a folder; give the folder of a study or of runs
report binary => binary: a file, not a folder; give the folder of a study or of runs
report runs --machine list.json => list.json | give one that `zpp-lab bench calibrate` wrote
report runs --speed nope.csv => nope.csv | `zpp-lab bench step --out FOLDER` makes one
report runs --speed afile => no column arm, nodes, gpus_per_node | a table of speeds has arm, nodes,
report speed => no runs in or below it (none has a confi | run something first, or name another fold
report binspeed => binspeed/results.csv is damaged (no tex | name a table of speeds, or measure agai
report runs extra => 'extra' is one word too many; see zpp-lab report --help
report bad/cfg_binary => bad/cfg_binary/zero3/seed1/config.ya | restore it from a copy, or move
report bad/cfg_empty => bad/cfg_empty/zero3/seed1/config.yaml | restore it from a copy, or move
report bad/sum_empty_object => bad/sum_empty_object/zero3/seed1/ | restore it from a copy, or delete
report bad/sum_binary => bad/sum_binary/zero3/seed1/summary.j | restore it from a copy, or delete it
report bad/sum_half => bad/sum_half/zero3/seed1/summary.json | restore it from a copy, or delete it
report bad/sum_types => bad/sum_types/zero3/seed1/summary.jso | restore it from a copy, or delete it
report bad/met_binary => bad/met_binary/zero3/seed1/metrics.j | restore it from a copy, or start the
report bad/met_broken => bad/met_broken/zero3/seed1/metrics.j | restore the file from a copy, or sta
report bad/met_empty => bad/met_empty/zero3/seed1/metrics.jso | restore it from a copy, or start the
report bad/met_list => bad/met_list/zero3/seed1/metrics.json | restore it from a copy, or start the
report bad/met_types => bad/met_types/zero3/seed1/metrics.jso | restore it from a copy, or start the
report bad/met_dir => bad/met_dir/zero3/seed1/metrics.jsonl | name a file
plan --gpu-gib nan => --gpu-gib/--memory-gib: 'nan': use a number; see zpp-lab plan --help
plan --link-gbps 10 => --link-gbps goes with --machine, whose figures predict times
plan --machine binary.json => binary.json is damaged (no text i | name another file, or let `zpp-lab
plan --machine h200 --link-gbps fast => --link-gbps fast: give Gbit/s or max, such as 12,25,max
plan --machine h200 --link-gbps , => --link-gbps ,: give Gbit/s or max, such as 12,25,max
plan --study runs => --study goes with --fastest
plan --fastest => --fastest needs --machine | a file that `zpp-lab bench calibrate` wrote,
plan --fastest --machine h200 --study runz => 2 nodes need --link-gbps, what each can
plan --fastest --machine h200 --max-gap -1 => --max-gap | see zpp-lab plan --help
plan --fastest --machine h200 --allow all => --allow | see zpp-lab plan --help
plan --fastest --machine h200 --link-gbps 10,20 => --link-gbps 10,20: a number above 0, or max
plan --jsn => unknown option --jsn; see zpp-lab plan --help
plan model=hf model.path=models/lama => model.path=models/lama | download the model first (hf downlo
plan model=hf => model=hf needs model.path (a folder with | ...}
plan recipe=zeropp cluster.nodes=1 cluster.gpus_per_node=1 => recipe zeropp | change the cluster or
bench => say what to measure | zpp-lab bench WHAT, of step, calibrate
bench everything => no bench 'everything' | step, calibrate
bench collectives => bench collectives was removed; use python experiments/collectives/bench.py
bench step --cpu --arm 'a recipe=w4' => arm 'a recipe=w4' has no colon: write NAME: SETTINGS
bench step --nodes 0 --cpu => --nodes: 0: use 1 or more; see zpp-lab bench step --help
bench step --arm 'x: train.stepz=3' --cpu => train.stepz | accumulate, batch_size, beta1, beta2,
bench step --steps 0 --cpu => --steps 0: use more than 0
bench step --link-gbps fast --cpu => --link-gbps fast: use numbers and max, such as 12,25,max
bench step --link-gbps -3 --cpu => a link of -3 Gb/s: use 0.001 to 1000, or max
bench step --share-gpus=maybe => --share-gpus | see zpp-lab bench step --help
bench step --recipes '' --cpu => bench step: name arms with --recipes or --arm
bench calibrate => the following arguments are required: --out; see zpp-lab bench calibrate --help
bench calibrate --out empty --cpu => empty is a folder | see zpp-lab bench calibrate --help
bench calibrate --out x.json --bits 5 --cpu => 5 | see zpp-lab bench calibrate --help
bench calibrate --out x.json --modes fast --cpu => --modes fast: use eager or eager,compiled
bench calibrate --out x.json --link-gbps -1 --cpu => --link-gbps | see zpp-lab bench calibrate --hel
export runs => the following arguments are required: --out; see zpp-lab export --help
export runz --out x.csv => no such folder (did you mean runs?) | give the folder of a study or of ru
export runs --out x.txt => x.txt: unknown format | .csv or .parquet
export runs --out afile/x.csv => file exists | name another one, or delete it
export runs --out x.csv --dtype bf16 => --dtype is for --to hf
export runs --out x.csv --codec bits=4 => --codec is for --to hf --quantized
export runs --to gguf --out o => invalid choice | see zpp-lab export --help
export runs --to hf --out o => runs is no run's folder | name one, such as RUNS/ARM/seed1
export runs/good --to hf --out afile/x => afile/.x.partial | name another one
export runs/good --to hf --out empty => empty is there already: name a new folder, or delete it
export runs/good --to hf --out o --dtype fp8 => --dtype | see zpp-lab export --help
export runs/good --to hf --out o --steps => --steps is for --to table
export runs/good --to hf --out o --codec bits=4 => --codec is for --quantized
export runs/good --to hf --out o --quantized --codec bits=5 => recipe --codec, w | use one of (2, 3,
export runs/good --to hf --out o --quantized --codec x => --codec x | write settings such as bits=4,
export runs/good --to hf --out o --quantized --requantize --dense => --dense | see zpp-lab export --
export runs/good --to hf --out o --quantized => recipe zero3 has no code | leave --quantized out, or
export runs/good --to peft --out o => runs/good has no adapters (model.lora.rank=0): use --to hf
export runs/good --to peft --out o --steps => --to peft takes no --steps and | adapters stay in fp32
export bad/ck_none/zero3/seed1 --to hf --out o => bad/ck_none/zero3/seed1 | let the run reach its fi
export bad/cfg_binary/zero3/seed1 --to hf --out o => bad/cfg_binary/zero3/s | restore it from a copy
export bad/cfg_key/zero3/seed1 --to hf --out o => bad/cfg_key/zero3/seed1 | let the version of zpp_l
export bad/met_broken --steps --out x.csv => bad/met_broken/zero3/seed1 | restore the file from a co
export bad/met_types --steps --out x.csv => bad/met_types/zero3/seed1/m | restore it from a copy, or
export bad/sum_empty_object --out x.csv => bad/sum_empty_object/zero3/ | restore it from a copy, or
export bad/sum_types --out x.csv => bad/sum_types/zero3/seed1/summ | restore it from a copy, or dele
evaluate => the following arguments are required: paths; see zpp-lab evaluate --help
evaluate runz => no such folder (did you mean runs?) | give a run's, or a model's for transformers
evaluate runs => runs is neither a run (config.yaml) nor | name one
evaluate afile => afile: a file, not a folder; give a run's, or a model's for transformers
evaluate empty => empty is neither a run (config.yaml) nor a model (config.json); name one
evaluate runs/good --tokens 0 => --tokens: 0: use 1 or more; see zpp-lab evaluate --help
evaluate runs/good --codec bits=5 => recipe --codec, weights_forwar | use one of (2, 3, 4, 6, 8), or
evaluate runs/good --dtype fp16 => --dtype | see zpp-lab evaluate --help
evaluate runs/good --device tpu => engine.device='tpu': use auto, cpu, cuda or cuda:N
evaluate runs/good --device cuda => engine.device=cuda, but torch sees no GP | use engine.device=cpu
evaluate runs/good --out x.txt => x.txt: give a file that ends with .csv or .json
evaluate runs/good --out afile/x.csv => afile is a file | see zpp-lab evaluate --help
evaluate runs/good --data nope => no such folder in  | give a run's, or a model's for transformers
evaluate models/llama => nothing here is a run: say with --data RUN whose held-out tokens to take
evaluate bad/ck_none/zero3/seed1 => bad/ck_none/zero3/seed1/checkp | let the run reach its first one
evaluate runs/good --codec bits=4,bits=2 => --codec bits=4,bits=2 | give --codec once for each
doctor now => 'now' is one word too many; see zpp-lab doctor --help
doctor --fast => unknown option --fast; see zpp-lab doctor --help
sync => the following arguments are required: dirs; see zpp-lab sync --help
sync runz => runz: no such folder (did you mean runs?); name a run's folder, or a study's
sync empty => no metrics.jsonl in or below empty: name a run's folder, or one above some
sync afile => afile: a file, not a folder; name a run's folder, or a study's
dashboard => name a study (its folder, name or YAML file), or --apply FILE
dashboard empty => empty: study.yaml not found | zpp-lab study
dashboard smoke --apply x => name a study (its folder, name or YAML file), or --apply FILE
dashboard --apply nope.json => nope.json | check the path, and that its folder can be
dashboard --apply binary.json => binary.json is damaged (no text in UTF-8 | zpp-lab dashboard
dashboard --apply half.json => half.json is damaged (no JSON | zpp-lab dashboard
dashboard --apply obj.json => obj.json: invalid | zpp-lab dashboard
dashboard --apply empty => empty: is a directory; this is a folder: name a file
dashboard smoke --out afile/x.json => cannot write afile/x.json | name another one
dashboard smoke --out empty => cannot write empty: Is a directory; this is a folder: name a file
dashboard smoke extra => 'extra' is one word too many; see zpp-lab dashboard --help
batch runs/good => the following arguments are required: steps; see zpp-lab batch --help
batch runz 3 => runz is no run's folder | name one, such as RUNS/ARM/seed1
batch empty 3 => empty is no run's folder: it has no config.yaml; name one, such as RUNS/ARM/seed1
batch runs/good x => 'x': give steps as 32 or 32,39-41
batch runs/good 99 => step 99: runs/good has steps 1 to 3
batch runs/good 1 --characters -1 => --characters: -1: use 0 or more; see zpp-lab batch --help
batch runs/good 1,,2 => '1,,2': give steps as 32 or 32,39-41
batch bad/cfg_binary/zero3/seed1 1 => bad/cfg_binary/zero3/seed1/co | restore it from a copy, or mo
batch bad/cfg_key/zero3/seed1 1 => bad/cfg_key/zero3/seed1/config. | let the version of zpp_lab that
emulate => name a command: zpp-lab emulate --nodes 2 -- COMMAND
emulate --nodes 0 -- true => --nodes: 0: use 1 or more; see zpp-lab emulate --help
emulate --per gpu -- true => invalid choice | see zpp-lab emulate --help
emulate --share-gpus=x -- true => --share-gpus | see zpp-lab emulate --help
emulate --nope -- true => unrecognized arguments: --nope; see zpp-lab emulate --help
emulate --iproute nope -- true => no such folder | install iproute2 (apt install iproute2), or
mps => name a command behind --: zpp-lab mps -- COMMAND
mps --nope => name a command behind --: zpp-lab mps -- COMMAND
build --arch 12 => --arch 12: use local, all, or names such as 80,90a,100
build --wheel binary.jsonl => --wheel binary.jsonl: is no folder
build --wheel nope --arch 12 => --arch 12: use local, all, or names such as 80,90a,100
build --nope => unrecognized arguments: --nope; see zpp-lab build --help
trian => no command 'trian' (did you mean train?) | train, study, from-deepspeed, prepare,
--nope => unknown option --nope; see zpp-lab --help
-x train => unknown option -x; see zpp-lab train --help
train data=jsonl data.path=binary.jsonl => binary.jsonl
train data=jsonl data.path=records/nojson.jsonl => nojson.jsonl | repair or remove the line
train data=jsonl data.path=records/nofields.jsonl => no field 'prompt' | data.records.prompt
train data=jsonl data.path=records/number.jsonl => number.jsonl | 'prompt'
train data=jsonl data.path=records/role.jsonl => no message of the role 'assistant'
train data=jsonl data.path=records/list.jsonl => list is no record; use {…}
train data=jsonl data.path=empty => no *.jsonl file in there
train data=stdlib => data.path=texts: data=stdlib does not read it; add data=text
train data=installation data.path=textz => no such folder (did you mean texts?)
train data=hf data.path=./textz => did you mean texts?
train data.tokenizer=hf data.tokenizer_path=textz => name a tokenizer.json or its folder
train data.tokenizer=hf data.tokenizer_path=empty => no tokenizer.json there
train model.path=models/llama model.weights=pretrained => no .safetensors file | fetch it whole
train model.start=runs/goood => did you mean runs/good?
train model.start=runs => did you mean runs/good?
train run.start_from=runs/good => did you mean runs/good/checkpoints/step-
train recipe=null => recipe=null: no such recipe | zero3
train -m recipe.weights.bits=5 seed=1,2 => bits=5: use one of
train -m recipe=zero4,w4 => recipe=zero4: no such recipe. Did you mean zero3?
study afile => afile: a study's file ends with .yaml | rename it
study s_extends.yaml => s_extends.yaml: extends: no study 'smokee' (did you mean smoke?)
report bad/met_cut => met_cut/zero3/seed1/metrics.jsonl | ends at step 1 of 3 | restore it
dashboard afile => afile: a study's file ends with .yaml | rename it
train model=6_7b model.dim=65536 model.layers=2 => the model, its gradients and | a smaller model
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
    "empty.yaml": "",
    "broken.yaml": "name: [1, 2\nseeds: }\n",
    "s_dup.yaml": "name: one\nname: two\n",
    "obj.json": "{}",
    "list.json": "[1, 2]",
    "half.json": '{"name": "x", "figures": [1,',
    "tok/tokenizer.json": "{",
    "models/llama/config.json": json.dumps({"model_type": "llama", "vocab_size": 256}),
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
    assert "summary.json of a run but no config.yaml" in said
    assert "give another run.dir" in said


@pytest.mark.parametrize("words", [["run.dir=runs/é"], ["recipe.name=ü", "run.dir=null"]])
def test_names_may_have_any_letters(
    words: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *HERE, "train.steps=1", "train.eval_tokens=16", *words]) == 0
    folder = Path("runs", words[0][-1])
    assert str(folder) in capsys.readouterr().out
    shutil.rmtree(folder)
