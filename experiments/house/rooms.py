# ruff: noqa
"""target file (below zpp_lab/) -> source files (below zpp_lab/), in order; first one's docstring unless DOC has one."""

T = {}


def t(target, *sources):
    T[target] = list(sources)


# loose
t("files.py", "files.py", "text.py", "paths.py", "folders.py", "locks.py", "hub.py")
t("api.py", "api.py")
t("__init__.py", "__init__.py")
# config
t("config/codec.py", "codec_config.py")
t("config/model.py", "lora_config.py", "model_config.py")
t("config/data.py", "data_config.py")
t("config/study.py", "study_config.py")
t("config/factors.py", "factors.py")
t("config/schema.py", "config.py")
t("config/load.py", "config_load.py", "hydra_words.py")
t("config/compose.py", "compose.py", "runconfig.py")
# data
t("data/__init__.py", "data/__init__.py")
t("data/corpus.py", "data/corpus.py")
t("data/records.py", "data/records.py", "data/token_files.py", "data/record_tokens.py")
t("data/packed.py", "data/fit.py", "data/packed.py")
t("data/tokenizer.py", "data/tokenizer.py", "data/outside_tokenizer.py")
t("data/prepare.py", "data/prepare.py")
t("data/tokens.py", "data/tokens.py")
# codecs
t("codecs/__init__.py", "codecs/__init__.py")
t("codecs/base.py", "codecs/base.py", "codecs/raw.py")
for n in "block packing hadamard registry contract errors".split():
    t(f"codecs/{n}.py", f"codecs/{n}.py")
t("codecs/noise.py", "philox.py", "codecs/noise.py")
t("codecs/layout.py", "layout.py")
t("codecs/numerics.py", "numerics.py")
for n in "__init__ backend build cuda reference squares table".split():
    t(f"codecs/kernels/{n}.py", f"ops/{n}.py")
# runs
t("runs/reader.py", "study/states.py", "study/runs.py")
t("runs/metrics.py", "tracking/jsonl.py")
t("runs/tracker.py", "tracking/tracker.py")
t("runs/console.py", "tracking/console.py")
t("runs/provenance.py", "commits.py", "machine.py")
t("runs/wandb/mode.py", "tracking/wandb_mode.py")
t("runs/wandb/run.py", "tracking/wandb_run.py")
t("runs/wandb/sink.py", "tracking/wandb_sink.py")
t("runs/wandb/process.py", "tracking/sink_process.py")
t("runs/wandb/folder.py", "tracking/folder.py")
t("runs/wandb/identity.py", "tracking/identity.py", "tracking/series.py")
t("runs/wandb/baseline.py", "tracking/baseline.py")
# models
t("models/__init__.py", "models/__init__.py")
t("models/build.py", "models/build.py")
t("models/hf.py", "models/hf_loss.py", "models/hf.py")
t("models/llama.py", "models/recompute.py", "models/llama.py")
for n in "hf_start hf_causal init llama_hf lora loss params".split():
    t(f"models/{n}.py", f"models/{n}.py")
t("models/start.py", "models/weight_files.py", "models/start.py", "models/run_start.py")
# collectives
t("collectives/__init__.py", "collectives/__init__.py")
t("collectives/recipe.py", "collectives/recipe.py")
t("collectives/plan.py", "collectives/plan.py")
t("collectives/context.py", "collectives/clock.py")
t("collectives/transport.py", "collectives/streams.py", "collectives/transport.py")
for n in "traffic ledger gather reduce choose watchdog".split():
    t(f"collectives/{n}.py", f"collectives/{n}.py")
t("collectives/peer/transport.py", "collectives/peer.py")
t("collectives/peer/slots.py", "collectives/express.py", "collectives/ring.py")
t("collectives/peer/symmetric.py", "collectives/symmetric.py")
# engines
for n in "__init__ base norm losses watch".split():
    t(f"engines/{n}.py", f"engines/{n}.py")
t("engines/build.py", "engines/compiled.py", "engines/build.py")
t("engines/units.py", "engines/units.py", "engines/untouched.py")
t("engines/frozen.py", "frozen.py")
t("engines/virtual/engine.py", "engines/virtual.py")
t("engines/virtual/reduction.py", "engines/reduction.py")
t("engines/virtual/passes.py", "engines/passes.py")
t("engines/fsdp/engine.py", "engines/fsdp.py")
t("engines/fsdp/wrap.py", "engines/fsdp_wrap.py")
t("engines/fsdp/comm.py", "engines/fsdp_comm.py", "engines/fsdp_ledger.py")
t("engines/fsdp/packed.py", "engines/fsdp_packed.py")
t(
    "engines/fsdp/gradients.py",
    "engines/fsdp_present.py",
    "engines/fsdp_landing.py",
    "engines/fsdp_dtypes.py",
)
t("engines/fsdp/prefetch.py", "engines/laps.py", "engines/usage.py", "engines/prefetch.py")
t("engines/fsdp/watch.py", "engines/fsdp_watch.py")
t("engines/fsdp/base.py", "engines/fsdp_base.py")
t("engines/deepspeed/engine.py", "engines/deepspeed.py")
t("engines/deepspeed/settings.py", "engines/deepspeed_settings.py")
t("engines/deepspeed/state.py", "engines/deepspeed_state.py")
t("engines/optim/__init__.py", "optimizers/__init__.py")
t("engines/optim/build.py", "optim.py")
t("engines/optim/adamw.py", "optimizers/adamw.py")
t("engines/optim/update.py", "optimizers/host.py", "optimizers/kernel.py")
t("engines/optim/shards.py", "optimizers/sharded.py", "optimizers/shards.py")
t("engines/optim/states.py", "optimizers/states.py")
# train
t("train/trainer.py", "trainer.py")
t("train/resume.py", "rundata.py", "resume.py")
t("train/evaluation.py", "heldout.py", "divergence.py")
t("train/piece.py", "piece.py")
t("train/footprint.py", "garbage.py", "footprint.py")
t("train/inputs.py", "inputs.py", "preflight.py")
t("train/launch/cause.py", "cause.py")
t("train/launch/launcher.py", "launcher.py")
t("train/launch/place.py", "place.py")
t("train/launch/heartbeat.py", "pulse.py")
t("train/launch/gpus.py", "emulate/gpus.py")
t("train/launch/processes.py", "emulate/marks.py")
t("train/launch/mps.py", "emulate/mps.py", "emulate/mps_command.py")
t("train/launch/mps_keeper.py", "emulate/mps_keeper.py")
t("train/launch/ranks.py", "emulate/ranks.py")
t("tools/links/programs.py", "emulate/tools.py")
# study
t("study/__init__.py", "study/__init__.py")
t("study/run/plan.py", "study/settings.py", "study/selection.py", "study/plan.py")
t("study/run/queue.py", "study/queue.py")
t("study/run/attempts.py", "study/attempts.py", "study/outcome.py")
t("study/run/places.py", "study/memory.py", "study/slots.py")
t("study/run/pool.py", "study/pool.py")
t("study/run/launch.py", "study/sequential.py", "study/launch.py")
t("study/run/batch.py", "study/batch.py")
t("study/run/multirun.py", "multirun.py")
t("study/run/progress.py", "study/progress.py", "study/watch.py")
t("study/judge/arms.py", "study/arms.py")
t("study/judge/stats.py", "study/stats.py")
t("study/judge/families.py", "study/holm.py", "study/looks.py", "study/family.py")
t(
    "study/judge/verdict.py",
    "study/seed_notes.py",
    "study/controls.py",
    "study/verdict.py",
    "study/result.py",
)
t("study/judge/documents.py", "study/documents.py", "study/bootstrap.py")
t("study/judge/noise.py", "study/band.py", "study/noise.py")
t("study/judge/certainty.py", "study/certainty.py")
t("study/judge/effects.py", "study/levels.py", "study/effects.py")
t("study/judge/advice.py", "study/advice.py")
t("study/report/report.py", "study/report.py")
t("study/report/writeup.py", "study/latex.py", "study/writeup.py")
t("study/report/page.py", "study/page.py", "study/appendix.py")
t("study/report/table.py", "study/table.py")
t("study/report/html_table.py", "study/html_table.py")
t("study/report/curves.py", "study/curves.py")
t("study/report/style.py", "study/palette.py", "study/style.py")
t("study/report/export.py", "study/export.py")
t("study/report/figures/all.py", "study/captions.py", "study/figures.py", "study/pictures.py")
t("study/report/figures/gap.py", "study/pareto.py", "study/figure_rows.py", "study/gap_figures.py")
t("study/report/figures/cost.py", "study/cost_figures.py")
t("study/report/figures/training.py", "study/curve_figures.py")
t("study/report/figures/effects.py", "study/effect_figures.py")
t("study/report/speed/results.py", "study/speed_results.py")
t("study/report/speed/speeds.py", "study/speeds.py", "study/speedup.py")
t("study/report/speed/tables.py", "study/speed_rows.py", "study/speed_tables.py")
t("study/report/speed/figures.py", "study/speed_figures.py")
t("study/report/speed/report.py", "study/speed_report.py")
t("study/wandb_pages/__init__.py", "dashboard/__init__.py")
for n in "apply command publish spec".split():
    t(f"study/wandb_pages/{n}.py", f"dashboard/{n}.py")
# tools
t("tools/doctor.py", "doctor.py")
t("tools/evaluate.py", "evaluate.py")
t("tools/sequences.py", "sequences.py")
t("tools/plan/planner.py", "planner.py")
t("tools/plan/dry_run.py", "study/dry_run.py")
t("train/memory/forecast.py", "study/foreseen.py")
t("train/memory/estimate.py", "memory.py", "host_memory.py")
t("train/memory/buffers.py", "moments.py", "buffers.py")
t("train/memory/activations.py", "activations.py")
t("train/memory/compiled_block.py", "models/compiled_block.py")
t("train/memory/trace.py", "models/shape_run.py", "models/hf_memory.py")
t("tools/plan/cost/__init__.py", "cost/__init__.py")
t("tools/plan/cost/machine.py", "cost/machine.py")
t("tools/plan/cost/model.py", "cost/schedule.py", "cost/model.py")
t("tools/plan/cost/step.py", "cost/step.py")
t("tools/plan/cost/transfers.py", "cost/transfers.py")
t("tools/plan/cost/show.py", "cost/show.py", "predicted.py")
t("tools/plan/search/__init__.py", "search/__init__.py")
t("tools/plan/search/command.py", "search/command.py")
t("tools/plan/search/fastest.py", "search/fastest.py")
t("tools/plan/search/limits.py", "search/sameness.py", "search/limits.py")
t("tools/plan/search/space.py", "search/space.py")
t("tools/plan/search/parts.py", "search/parts.py")
t("tools/plan/search/shown.py", "search/overrides.py", "search/next_study.py", "search/shown.py")
t("tools/bench/__init__.py", "bench/__init__.py")
t("tools/bench/calibrate.py", "bench/calibrate_kept.py", "bench/calibrate.py")
t("tools/bench/calibrate_steps.py", "bench/calibrate_compute.py", "bench/calibrate_host.py")
t("tools/bench/calibrate_links.py", "bench/calibrate_links.py")
t("tools/bench/collectives.py", "bench/collectives.py")
t("tools/bench/kernels.py", "bench/figure.py", "bench/kernels.py")
t("tools/bench/measure.py", "bench/measure.py", "bench/work.py", "bench/peers.py")
t("tools/bench/ranks.py", "bench/ranks.py")
t("tools/bench/step/command.py", "bench/step.py")
t("tools/bench/step/arms.py", "bench/step_arms.py")
t("tools/bench/step/engines.py", "bench/step_engines.py")
t("tools/bench/step/rank.py", "bench/step_rank.py")
t("tools/bench/step/results.py", "bench/step_results.py")
t("tools/bench/step/run.py", "bench/step_run.py")
t("tools/bench/step/session.py", "bench/step_session.py")
t("tools/links/__init__.py", "emulate/__init__.py")
t("tools/links/command.py", "emulate/command.py")
t("tools/links/enter.py", "emulate/enter.py")
t("tools/links/holder.py", "emulate/holder.py")
t("tools/links/kernel.py", "emulate/kernel.py")
t("tools/links/network.py", "emulate/tcp.py", "emulate/network.py")
t("tools/links/nodes.py", "emulate/nodes.py")
t("tools/links/probe.py", "emulate/probe.py")
t("tools/export/__init__.py", "export/__init__.py")
t("tools/export/model.py", "export/merged.py", "export/model.py")
t("tools/export/adapters.py", "export/adapters.py")
t("tools/export/card.py", "export/instructions.py", "export/card.py")
t("tools/export/loaded.py", "export/comparable.py", "export/loaded.py")
for n in "packed quantized shards wire".split():
    t(f"tools/export/{n}.py", f"export/{n}.py")
t("tools/export/target.py", "export/tokenizer.py", "export/target.py")
# cli
t("cli/main.py", "cli.py")
t("config/parser.py", "parser.py")
for n in "adding machine results training weights".split():
    t(f"cli/{n}.py", f"commands/{n}.py")
for n in "__init__ index read tensor_file write".split():
    t(f"runs/checkpoint/{n}.py", f"checkpoint/{n}.py")
GONE = {"tracking/__init__.py", "commands/__init__.py"}
RENAME = {
    "bench.calibrate_compute": {"REPEATS": "COMPUTE_REPEATS"},
    "bench.calibrate_host": {"REPEATS": "HOST_REPEATS"},
    "host_memory": {"FP32": "_FP32"},
}

INIT = {
    "cli": "The command line: words to calls, errors to exit codes.\n\n`main.py` parses and answers mistakes; the other files hold a kind of command each.\nOnly this room imports `tools`.\n",
    "config": "Every setting as a frozen dataclass, validated when it is built. No torch.\n\n`schema.py` has `Config` and its parts; `compose.py` makes one from conf/*.yaml and overrides.\n",
    "runs": "A run's folder: written while it trains, read by everyone else.\n\n`metrics.jsonl` is the truth about a run, `summary.json` is written last, and console and wandb\nare views of both.\n",
    "runs/wandb": "A run's folder as a wandb run, sent by a process of its own.",
    "collectives/peer": "Transport between ranks of one host that read each other's memory.",
    "engines/virtual": "All ranks of a cluster in one process, with the same numerics.",
    "engines/fsdp": "One process a rank: FSDP2 with the recipe's collectives.",
    "engines/deepspeed": "The peer: DeepSpeed's ZeRO-3 and ZeRO++ behind the same interface.",
    "train": "One run, from its start to its summary: inputs, resume, steps, evaluation, end.\n\n`trainer.py` is the step loop; `launch/` starts its ranks and sees that none outlives the run.\n",
    "train/memory": "What each rank of a run will hold, in bytes, before anything is allocated.",
    "train/launch": "The processes of a run: where each sits, how they start, who fell silent, how they end.",
    "study/run": "The runs of a study: planned, queued, placed, started and shown.",
    "study/judge": "From finished runs to verdicts: statistics of paired seeds, families of tests, effects.",
    "study/report": "A study's report: tables, figures and words, each from the judged study.",
    "study/report/figures": "A report's figures: rows of data and Vega-Lite charts of them.",
    "study/report/speed": "Measured speed: tables, figures and the page of a bench.",
    "tools": "What stands beside training: plan it, measure it, export its weights. The command line alone\nimports this room.",
    "tools/plan": "What a run will send, hold and take, before it starts.",
    "tools/bench/step": "`zpp-lab bench step`: training steps of several recipes over links of several speeds.",
}
MOVED = [
    ("study/foreseen.py", ["predicted_seconds"], "study/dry_run.py"),
    ("emulate/tools.py", ["EmulationError"], "emulate/marks.py"),
    ("emulate/tools.py", ["network_environment"], "emulate/ranks.py"),
    ("emulate/nodes.py", ["Hosts"], "emulate/ranks.py"),
    ("models/loss.py", ["IGNORED"], "data/packed.py"),
    ("inputs.py", ["check_model_path", "DOWNLOAD"], "model_config.py"),
    ("cost/model.py", ["vocabulary", "plan_of", "_plan", "_units"], "engines/build.py"),
]
