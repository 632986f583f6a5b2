# Sourced by run.sh: one run of STEPS steps that saves a checkpoint half-way and goes on to its end,
# then new processes that start from that checkpoint and must repeat the second half to the bit. The
# checkpoint lies on this machine's disk: 12 bytes a parameter, with moments of 8 bits 6 (on two GPUs
# MODEL=13b: 78 GB; on four MODEL=6_7b: 81 GB, 13b: 156 GB). OVERRIDES: Hydra overrides for both.
source experiments/pretrain_13b/half.sh
case $STUDY:$GPUS in *_mini:*) MODEL=mini ;; *:2) MODEL="${MODEL:-13b}" ;; *) MODEL="${MODEL:-6_7b}" ;; esac
begin_whole runs/resume
mapfile -t whole < <(settings "$STUDY" "$MODEL" runs/resume/whole ${OVERRIDES:-})
mapfile -t again < <(settings "$STUDY" "$MODEL" runs/resume/again ${OVERRIDES:-})
launched "resume: the whole run" "${whole[@]}" train.checkpoint_every=$((STEPS / 2))
du -sh runs/resume/again/checkpoints/* | tail -n 1
hand_over runs/resume
begun_from runs/resume "$out/resume.log"
launched "resume: its second half again" "${again[@]}"
compared runs/resume "$out/resume.log"
pack resume
