#!/bin/bash
# A simulation on two machines of a Slurm cluster: sbatch slurm.sh
#
# silograph with its extras fast and ray must be on PATH of all machines (module, venv or image),
# and the folder in which sbatch is called must be shared by them.
#SBATCH --job-name=silograph
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
set -euo pipefail

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a machine
cores=$SLURM_CPUS_PER_TASK
export RAY_USAGE_STATS_ENABLED=0
export RAY_AUTH_MODE=token # in ~/.ray, which machines of a cluster share
ray get-auth-token --generate > /dev/null

srun --nodes=1 --ntasks=1 --nodelist="$head" \
  ray start --head --port "$port" --num-cpus "$cores" --include-dashboard=false --block &
sleep 20

for host in "${hosts[@]:1}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$host" \
    ray start --address "$head:$port" --num-cpus "$cores" --block &
done
sleep 20

# The batch script runs on the first machine.
silograph run pubmed --clients 1000 --engine ray --address "$head:$port" --out "runs/$SLURM_JOB_ID"
mapfile -t started < <(jobs -p)
kill "${started[@]}" # the batch job would wait for Ray otherwise
