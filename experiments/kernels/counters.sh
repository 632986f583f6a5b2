# Nsight Compute's counters for the cases of counters.py, one line each.
source "$(dirname "$0")/env.sh"
stall=smsp__average_warps_issue_stalled
timeout "${LIMIT:-60}" ncu --clock-control none --profile-from-start off --csv --page raw --metrics \
smsp__thread_inst_executed.sum,smsp__inst_executed.sum,\
smsp__issue_active.avg.pct_of_peak_sustained_active,\
dram__throughput.avg.pct_of_peak_sustained_elapsed,gpu__time_duration.sum,\
${stall}_long_scoreboard_per_issue_active.ratio,${stall}_short_scoreboard_per_issue_active.ratio,\
${stall}_not_selected_per_issue_active.ratio,${stall}_wait_per_issue_active.ratio,\
${stall}_barrier_per_issue_active.ratio,${stall}_lg_throttle_per_issue_active.ratio,\
${stall}_math_pipe_throttle_per_issue_active.ratio,${stall}_mio_throttle_per_issue_active.ratio,\
${stall}_no_instruction_per_issue_active.ratio \
  python3 experiments/kernels/counters.py 2>&1 | grep '^"'
