#!/bin/bash
# host.sh NAME: the "boot" of one host of the cluster, inside its new namespaces; started by cluster.sh alone. On a node this shell is pid 1.
set -euo pipefail
D=$TK_CLUSTER name=$1 h=$TK_CLUSTER/hosts/$1
# shellcheck source=tests/cluster/slurm.sh
. "$(dirname "$0")/slurm.sh"

read -r pid _ < /proc/self/stat                               # still the outer /proc, so this is the pid that outsiders see
readlink /proc/self/ns/{net,uts,mnt} > "$h/ns"                # how cluster.sh recognises what runs here
hostname "$name"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$h/etc,workdir=$h/.etcwork" /etc
mount -t tmpfs -o mode=755 tmpfs /run; mkdir -p /run/sshd /run/munge /run/lock
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount --bind "$h/srv" /srv
[ ! -d ~/.ssh ] || mount -t tmpfs -o mode=700 tmpfs ~/.ssh    # the person's own settings must not decide a test, nor a host that
: > /run/no-settings                                          # crashes leave locks that its shells' start-up takes (pyenv's)
for f in ~/.bashrc ~/.bash_profile ~/.bash_login ~/.profile; do [ ! -f "$f" ] || mount --bind /run/no-settings "$f"; done
if [ "$name" != head ]; then                                  # nodes have their own pids; the head shares the machine's (see `on`)
    mount -t proc proc /proc; mount -t sysfs sysfs /sys
    [ -z "$CG$CG2" ] || mount -t tmpfs -o mode=755 tmpfs /sys/fs/cgroup
    [ -z "$CG" ] || slurm_cgroup
    [ -z "$CG2" ] || { mkdir /sys/fs/cgroup/unified; mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified; }
fi
ip link set lo up
echo "$pid" > "$h/pid.new"; mv "$h/pid.new" "$h/pid"          # tells cluster.sh to plug in the network cable
for _ in $(seq 30000); do ip -4 addr show | grep -q 'inet 10\.77' && break; sleep 0.02; done
set +e                                                        # a daemon that fails says so in its log; the host stays up
/usr/sbin/sshd -E "$h/log/sshd.log"
((!TK_SLURM)) || slurm_host "$name"
while :; do sleep 86400 & wait $!; done                       # as pid 1 of a node, bash reaps its orphans
