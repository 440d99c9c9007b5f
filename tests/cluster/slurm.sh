# shellcheck shell=bash disable=SC2034
# slurm.sh: the Slurm half of the cluster, sourced by cluster.sh and host.sh; nothing of it runs unless TK_SLURM=1.
# TK_GPUS=4 TK_CPUS=8: what a node pretends to have. TK_SACCT=1: mariadb and slurmdbd too, so that `sacct` works, and a slurmctld that forgets after
# seconds. TK_CGROUP=0: proctrack/linuxproc.
GPUS=${TK_GPUS:-4}

slurm_needs() {
    echo slurmctld:slurmctld slurmd:slurmd srun:slurm-client munged:munge
    [ "${TK_SACCT:-0}" != 1 ] || echo slurmdbd:slurmdbd mariadbd:mariadb-server-core
}

slurm_configure() { # on the machine, once: keys, pretend devices, slurm.conf
    mkdir -p "$D"/{slurm/state,dev}
    # cgroup v1 freezer, if the machine has one: with it Slurm kills all of a step's processes, as real clusters do; without,
    # proctrack/linuxproc loses those that daemonize (they stay, and srun waits for them)
    [ "${TK_CGROUP:-1}" = 0 ] || [ ! -w /sys/fs/cgroup/freezer/cgroup.procs ] || CG=/sys/fs/cgroup/freezer/tk${D//\//-}
    (umask 077; head -c 128 /dev/urandom > "$D/slurm/munge.key")
    local g; for g in $(seq 0 $((GPUS - 1))); do mknod "$D/dev/nvidia$g" c 1 3; done   # File= must name a device
    cat > "$D/slurm/slurm.conf" <<CONF
ClusterName=tk
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=$D/slurm/state
SlurmctldPidFile=$D/slurm/slurmctld.pid
SlurmctldLogFile=$D/slurm/slurmctld.log
SlurmdSpoolDir=$D/hosts/%n/spool
SlurmdPidFile=/run/slurmd.pid
SlurmdLogFile=$D/hosts/%n/log/slurmd.log
ProctrackType=proctrack/$([ -n "$CG" ] && echo cgroup || echo linuxproc)
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/$([ "${TK_SACCT:-0}" = 1 ] && echo linux || echo none)
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SchedulerParameters=bf_interval=2,sched_interval=2
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc=$D/slurm/jobcomp.txt
$([ "${TK_SACCT:-0}" != 1 ] || printf '%s\n' AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=head AccountingStorageTRES=gres/gpu \
    AccountingStorageEnforce=associations MinJobAge=2)
NodeName=node[1-$N] CPUs=${TK_CPUS:-8} RealMemory=4000 Gres=gpu:$GPUS State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=5
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
    echo "CgroupPlugin=cgroup/v1" > "$D/slurm/cgroup.conf"    # said even if unused: autodetection fails without cgroups
    echo "Name=gpu Flags=nvidia_gpu_env File=$D/dev/nvidia[0-$((GPUS - 1))]" > "$D/slurm/gres.conf"
}

slurm_knows() { # HOST: whether the controller has it as a node that takes work
    [ "$1" = head ] || "$D/on" head sinfo -h -N -n "$1" -o %t 2> /dev/null | grep -qE '^(idle|mix|alloc)$'
}

slurm_cgroup() { # on a node: a freezer hierarchy of its own, for proctrack/cgroup
    mkdir /sys/fs/cgroup/freezer
    mount -t cgroup -o freezer cgroup /sys/fs/cgroup/freezer
}

slurm_accounting() { # on the head: a database of its own and slurmdbd, so that the real sacct works
    local db=$D/slurm/db said=$D/slurm/mariadb.log sql
    local -a maria=(mariadbd --no-defaults --user=root "--datadir=$db" --innodb-log-file-size=4M --innodb-buffer-pool-size=16M
        --innodb-flush-log-at-trx-commit=0 --innodb-lock-wait-timeout=900)
    mkdir -p /run/mysqld "$db"
    for sql in /usr/share/{mysql,mariadb}/{mysql,mariadb}_system_tables.sql; do [ ! -e "$sql" ] || break; done
    printf '%s\n' 'create database mysql;' 'use mysql;' | cat - "$sql" | "${maria[@]}" --bootstrap >> "$said" 2>&1
    # nobody but slurmdbd reaches its socket, in this host's own /run, where libmariadb looks by itself
    setsid "${maria[@]}" --skip-networking --skip-grant-tables --socket=/run/mysqld/mysqld.sock --pid-file=/run/mysqld/mysqld.pid \
        >> "$said" 2>&1 < /dev/null &
    for _ in $(seq 30000); do [ ! -S /run/mysqld/mysqld.sock ] || break; sleep 0.02; done
    (umask 077; printf '%s\n' AuthType=auth/munge DbdHost=head SlurmUser=root StorageType=accounting_storage/mysql \
        StorageHost=localhost StorageUser=root StorageLoc=slurm_acct LogFile="$D/slurm/slurmdbd.log" \
        PidFile=/run/slurmdbd.pid > /etc/slurm/slurmdbd.conf)
    slurmdbd
    for _ in $(seq 30000); do (: < /dev/tcp/head/6819) 2> /dev/null && break; sleep 0.02; done
    # all of it must be there before slurmctld starts
    sacctmgr -i add cluster tk > /dev/null; sacctmgr -i add account physics > /dev/null; sacctmgr -i add user root account=physics > /dev/null
}

slurm_host() { # NAME: its daemons
    local f; for f in slurm.conf gres.conf cgroup.conf; do ln -sf "$D/slurm/$f" "/etc/slurm/$f"; done
    munged --key-file="$D/slurm/munge.key" --log-file="$h/log/munged.log" --seed-file="$h/munge.seed" \
           --socket=/run/munge/munge.socket.2 --pid-file=/run/munge/munged.pid
    [ "$1${TK_SACCT:-0}" != head1 ] || slurm_accounting
    if [ "$1" = head ]; then slurmctld
    else until timeout 20 bash -c ': < /dev/tcp/head/6817' 2> /dev/null; do sleep 0.1; done; slurmd -N "$1"; fi
}
