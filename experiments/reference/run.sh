# Fills what a call of a GPU machine leaves with runs of the reference study:
#     CALL=590 bash experiments/reference/run.sh OUT [OVERRIDES...]
# One GPU or several, as found. .queue lies beside the project (carry.sh makes it): texts, kernels,
# wheels. Runs that experiments/reference/NAME.tar.xz has are not trained again, and keep.py puts
# those of OUT/NAME.tar.gz, which is renewed each minute, into it.
# STUDY: reference, all of them whose text .queue has; one of them; or reference_10m_mini, a rehearsal without a GPU.
# PER_GPU: runs that share a GPU at most. RUNS: a folder with archives of runs that are there.
# GOES_ON: any word where another call follows on this machine; runs go on in it (fill.py).
# BESIDE: a command that takes little of a GPU, such as a check of kernels, to share them with the runs.
set -u
out="${1:?name a folder for the results}"
shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
exec > >(tee -a "$out/log.txt") 2>&1
here=experiments/reference queue=.queue study="${STUDY:-reference}"
kept="${RUNS:-$here}"
say() { echo "[$(date +%H:%M:%S)] $* ($SECONDS s)"; }
die() { say "STOPPED: $*"; exit 1; }
export CALL="${CALL:-590}"
source experiments/kernels/env.sh
zpp="python3 -m zpp_lab.cli"
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
settings=("$@")
case $study in *_mini)  # other text, which needs no file
  settings=(data=stdlib data.path=null data.tokenizer=bytes data.tokenizer_path=null data.end_token=null "$@") ;;
esac
if [ "$gpus" -gt 0 ]; then settings+=(ops.backend=cuda); fi
case $gpus:$study in 0:*_mini | [1-9]*) ;; *) die "no GPU: only STUDY=reference_10m_mini runs here" ;; esac
python3 -c 'import hydra, pydantic, torch, tokenizers, zpp_lab.config.compose' || die "a package is missing"
say "$gpus GPUs, commit ${ZPP_COMMIT:-$(git rev-parse --short HEAD 2> /dev/null || echo unknown)}"

tokens() {  # of the text that the study reads; of all studies, of those texts that .queue has
  local text texts=python name
  case $study in
    *_mini) $zpp prepare "$study" "${settings[@]}"; return ;;
    *_prose) texts=prose ;;
    reference)
      texts=$(cd "$queue" && ls corpus.tar.xz corpus_prose.tar.xz 2> /dev/null |
        sed 's/corpus.tar.xz/python/; s/corpus_\(.*\).tar.xz/\1/')
      [ -n "$texts" ] || { echo "$queue has no corpus"; return 1; } ;;
  esac
  for text in $texts; do
    python3 $here/corpus.py unpack "$text" "$queue" || return 1
    say "corpus is there: $text"
    name=reference_10m
    [ "$text" = python ] || name+=_$text
    $zpp prepare "$name" "${settings[@]}" || return 1
    [ "$text" != python ] || $zpp prepare reference_10m_reread "${settings[@]}" || return 1
  done
}
fill() {  # plans while kernels and tokens are made, and begins when they are there
  local fill=(python3 $here/fill.py "$study" runs "$out" "${settings[@]}")
  export READY="$out/ready" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  if [ "$gpus" -gt 0 ] && $zpp mps -- true; then
    exec $zpp mps -- "${fill[@]}"
  elif [ "$gpus" -gt 0 ]; then
    say "no MPS: runs take turns, fewer side by side"
    export PER_GPU=3
  fi
  exec "${fill[@]}"
}
rm -f "$out/ready"
mkdir -p data_cache runs
for archive in "$kept"/*.tar.xz; do
  [ ! -f "$archive" ] || tar xJf "$archive" -C runs || die "$archive is no whole archive"
done
if [ "$gpus" -gt 0 ]; then kernels "$out"; fi > "$out/kernels.log" 2>&1 &
building=$!
tokens > "$out/tokens.log" 2>&1 &
preparing=$!
fill &
filling=$!
failed() { kill $filling; cat "$1"; die "$2"; }
wait $preparing || failed "$out/tokens.log" "no tokens"
tail -n 4 "$out/tokens.log"
wait $building || failed "$out/kernels.log" "no kernels"
tail -n 1 "$out/kernels.log"
say "ready"
touch "$out/ready"
wait $filling
code=$?
for log in runs/reference_*/*/seed*/failure.json; do
  if [ -f "$log" ] && ! grep -qE 'diverged|interrupted' "$log"; then tail -n 30 "$log"; break; fi
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null
say "done, code $code"
exit $code
