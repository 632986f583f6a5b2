# Sourced by run.sh: the same as resume.sh on two machines, with the small twin's model, whose state
# can be carried. The first machine runs all STEPS steps and writes OUT/moved.tar.gz: the run's files
# and its checkpoint of half-way. With MOVED=FILE, that archive, another machine runs the second half
# again from it and says whether it is the same run. Both need the same Python packages, since the
# text is theirs. OVERRIDES: Hydra overrides for both.
source experiments/pretrain_13b/half.sh
twin=$(sized pretrain_13b_mini)
cuda=()
if nvidia-smi > /dev/null 2>&1; then cuda=(engine.device=cuda engine.compile=true); fi
nvidia-smi --query-gpu=uuid --format=csv,noheader > "$out/gpus.txt" 2> /dev/null
if [ -z "${MOVED:-}" ]; then
  begin_whole runs/moved
  mapfile -t whole < <(settings "$twin" mini runs/moved/whole "${cuda[@]}" ${OVERRIDES:-})
  launched "moved: the whole run" "${whole[@]}" train.checkpoint_every=$((STEPS / 2))
  begun_from runs/moved "$out/moved.log"
  hand_over runs/moved
  cp "$out/gpus.txt" runs/moved/first_gpus.txt
  tar czf "$out/moved.tar.gz" -C runs moved
  ls -l "$out/moved.tar.gz"
else
  [ -f "$MOVED" ] || { echo "MOVED=$MOVED: no such file; it is OUT/moved.tar.gz of the first machine" >&2; exit 2; }
  rm -rf runs/moved
  mkdir -p runs
  tar xzf "$MOVED" -C runs
  begun_from runs/moved "$out/moved.log"
  mapfile -t again < <(settings "$twin" mini runs/moved/again "${cuda[@]}" ${OVERRIDES:-})
  launched "moved: its second half again" "${again[@]}"
  if cmp -s "$out/gpus.txt" runs/moved/first_gpus.txt && [ -s "$out/gpus.txt" ]; then
    echo "these are the first machine's GPUs" | tee -a "$out/moved.log"
  fi
  compared runs/moved "$out/moved.log"
fi
