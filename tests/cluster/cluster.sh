#!/bin/bash
# cluster.sh FOLDER [N]: a private cluster on this one machine: a "head" and node1..nodeN (default 3, at most 9). It lives as long as this
# script runs: the script answers commands read from stdin with one line each, and takes everything down when stdin ends.
#
#   boot HOST | crash HOST        crash: SIGKILL to everything on it; then it can be booted again
#   cut HOST | heal HOST          a node's network cable
#   FOLDER/on HOST CMD...         (from another shell) runs CMD on HOST; on the head it is a plain exec: same pid, signals arrive
#
# Each host is a set of namespaces (net, uts, mount, ipc; nodes also pid) with its own name, address (10.77.0.10 = head, 10.77.0.1i = node i),
# /etc (overlay), /run, /dev/shm and /srv (a node's own disk), and an sshd with a key of its own. Everything else is shared, like a cluster with
# one NFS; FOLDER/small is a shared file system of 48 MB that can be filled up. The bridge lives in the head's network namespace: the machine's
# own network, /etc and ~/.ssh see nothing of it, and several clusters can run side by side, one folder each.
# Two ordinary people, ann and ben, are known on all hosts: homes in FOLDER/home, which all share, with a key that lets them in everywhere. Folders
# in TK_OPEN that only root may pass (a /root with the interpreter in it) let them pass in here: an overlay has the wider permissions, the disk does not.
# With TK_SLURM=1 also munge, slurmctld and slurmd with 4 pretend GPUs a node (slurm.sh). Needs root; see need() for the packages.
set -euo pipefail
export PATH=/usr/sbin:/sbin:$PATH
HERE=$(dirname "$(realpath "$0")")
D=$(realpath -m "${1:?usage: cluster.sh FOLDER [N]}") N=${2:-3}
die() { echo "cluster: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die "namespaces of its own need root"
# a mount namespace of the cluster's own, from which the hosts' are copied; exec keeps the pid
[ "${TK_INSIDE:-}" = "$D" ] || TK_INSIDE=$D exec unshare --mount --propagation private bash "$0" "$@"
export TK_CLUSTER=$D TK_SLURM=${TK_SLURM:-0} CG= CG2=
# shellcheck source=tests/cluster/slurm.sh
. "$HERE/slurm.sh"

need() { # commands that must be there, each with its Debian package
    local pair missing=
    for pair in sshd:openssh-server ssh:openssh-client pdsh:pdsh ip:iproute2 unshare:util-linux nsenter:util-linux $( ((TK_SLURM)) && slurm_needs); do
        command -v "${pair%%:*}" > /dev/null || missing+=" ${pair##*:}"
    done
    [ -z "$missing" ] || die "these packages are missing:$missing"
}
address() { awk -v h="$1" '$2==h{print $1}' "$D/hosts.txt"; }
of_head() { nsenter -t "$(< "$D/hosts/head/pid")" -n "$@"; }

configure() {
    local h f
    mkdir -p "$D"/{hosts,ssh,small}; chmod 755 "$D"
    mount -t tmpfs -o mode=1777,size=48m tmpfs "$D/small"
    { echo "127.0.0.1 localhost"; echo "10.77.0.10 head"; for i in $(seq 9); do echo "10.77.0.1$i node$i"; done; } > "$D/hosts.txt"
    ssh-keygen -q -t ed25519 -N '' -C cluster -f "$D/ssh/id_ed25519"
    for h in "${hosts[@]}"; do
        ssh-keygen -q -t ed25519 -N '' -C "$h" -f "$D/ssh/host_$h"
        echo "$h,$(address "$h") $(cut -d' ' -f1,2 "$D/ssh/host_$h.pub")"
    done > "$D/ssh/known_hosts"
    ((!TK_SLURM)) || slurm_configure
    people
    cat > "$D/on" <<'ON'
#!/bin/bash
D=$(dirname "$(realpath "$0")"); h=$1; shift
pid=$(cat "$D/hosts/$h/pid") || exit 255
# head: no pid namespace, so nsenter execs in place. nodes: nsenter forks and waits.
[ "$h" = head ] || set -- -p -- "$@"
exec nsenter -t "$pid" -n -u -m -i --wd="$PWD" "$@"
ON
    chmod +x "$D/on"
}

people() { # homes, and what /etc/passwd has of them
    local name uid=60101
    cp /etc/passwd "$D/passwd"; cp /etc/group "$D/group"
    for name in ann ben; do
        echo "$name:x:$uid:$uid::$D/home/$name:/bin/bash" >> "$D/passwd"; echo "$name:x:$uid:" >> "$D/group"
        install -d "$D/home"; install -d -m 700 "$D/home/$name" "$D/home/$name/.ssh"
        ssh-keygen -q -t ed25519 -N '' -C "$name" -f "$D/home/$name/.ssh/id_ed25519"
        cp "$D/home/$name/.ssh/id_ed25519.pub" "$D/home/$name/.ssh/authorized_keys"
        chown -R "$uid:$uid" "$D/home/$name"; uid=$((uid + 1))
    done
}

open_folders() { # those of TK_OPEN that others may not pass, and that the cluster's own files are not below
    local path i=0
    for path in ${TK_OPEN:-}; do
        [ $(($(stat -c %a "$path") % 2)) = 0 ] && [ "${D#"$path"/}" = "$D" ] || continue
        i=$((i + 1)); mkdir -p "$D/open/$i/up" "$D/open/$i/work"
        mount -t overlay overlay -o "lowerdir=$path,upperdir=$D/open/$i/up,workdir=$D/open/$i/work" "$path" && chmod o+x "$path"
    done
}

boot() { # HOST: create its namespaces, plug it into the bridge
    local name=$1 h=$D/hosts/$1 pid f flags="--net --uts --mount --ipc --propagation private"
    [ ! -e "$h/pid" ] || die "$name is up"
    rm -rf "$h/etc" "$h/.etcwork" "$h/spool"
    mkdir -p "$h"/{etc/ssh/ssh_config.d,etc/slurm,.etcwork,log,spool,srv}
    cp "$D/passwd" "$D/group" "$h/etc/"; cp "$D/hosts.txt" "$h/etc/hosts"; echo "$name" > "$h/etc/hostname"; : > "$h/etc/resolv.conf"
    cp "$D/ssh/known_hosts" "$h/etc/ssh/ssh_known_hosts"
    cp "$D/ssh/id_ed25519.pub" "$h/etc/ssh/authorized_keys"
    printf 'Match localuser root\n    IdentityFile %s\n' "$D/ssh/id_ed25519" > "$h/etc/ssh/ssh_config.d/00-cluster.conf"
    printf '%s\n' "HostKey $D/ssh/host_$name" "AuthorizedKeysFile /etc/ssh/authorized_keys .ssh/authorized_keys" "StrictModes no" "UsePAM no" \
        "PermitRootLogin prohibit-password" "PasswordAuthentication no" "PidFile /run/sshd.pid" "UseDNS no" \
        "MaxStartups 200" "Subsystem sftp internal-sftp" > "$h/etc/ssh/sshd_config"
    [ "$name" = head ] || flags+=" --pid --fork --kill-child"
    (   if [ -n "$CG" ] && [ "$name" != head ]; then   # enter the cgroup first: it becomes the root of the new cgroup namespace
            mkdir -p "$CG/$name"; echo "$BASHPID" > "$CG/$name/cgroup.procs"; flags+=" --cgroup"
        fi
        if [ -n "$CG2" ] && [ "$name" != head ]; then
            mkdir -p "$CG2/$name"; echo "$BASHPID" > "$CG2/$name/cgroup.procs"; flags="${flags/ --cgroup/} --cgroup"
        fi
        # shellcheck disable=SC2086
        exec setsid unshare $flags bash "$HERE/host.sh" "$name" ) < /dev/null > "$h/log/host.log" 2>&1 &
    disown                                                   # that it is killed is nothing new
    for _ in $(seq 30000); do [ ! -s "$h/pid" ] || break; sleep 0.02; done
    pid=$(cat "$h/pid") || die "$name did not start: $(cat "$h/log/host.log")"
    if [ "$name" = head ]; then
        of_head sh -c "ip link add br0 type bridge && ip link set br0 up && ip addr add $(address head)/24 dev br0"
    else
        # the same hardware address after each boot, as real ones have: the others' ARP entries stay right
        of_head sh -c "ip link del $name 2>/dev/null; ip link add $name type veth peer name eth0 address 02:77:00:00:00:0${name#node} netns $pid &&
            ip link set $name master br0 up"
        nsenter -t "$pid" -n sh -c "ip link set eth0 up && ip addr add $(address "$name")/24 dev eth0"
    fi
}

answers() { # HOST: wait until its sshd does, and Slurm knows it
    local end=$((SECONDS + 600)) # slow machines are slow: only what hangs takes so long
    until of_head -m timeout 20 bash -c ": < /dev/tcp/$1/22" 2> /dev/null && { ((!TK_SLURM)) || slurm_knows "$1"; }; do
        ((SECONDS < end)) || die "$1 is not up after 600 s: $(tail -n 5 "$D/hosts/$1/log/"*.log)"
        sleep 0.05
    done
}

pids_of() { # HOST: processes whose net, uts and mount namespaces are those recorded at its boot
    find /proc -maxdepth 3 \( -path '/proc/[0-9]*/ns/net' -o -path '/proc/[0-9]*/ns/uts' -o -path '/proc/[0-9]*/ns/mnt' \) -printf '%h %l\n' 2> /dev/null |
        awk 'NR==FNR{want[$1]; next} $2 in want && ++n[$1]==3 {split($1,a,"/"); print a[3]}' "$D/hosts/$1/ns" -
}

crash() { # HOST: its processes are killed by pid; its mounts and interfaces vanish with the last of them
    local try p
    [ -s "$D/hosts/$1/ns" ] || return 0
    for try in $(seq 100); do
        mapfile -t p < <(pids_of "$1"); [ "${#p[@]}" -gt 0 ] || break
        kill -KILL "${p[@]}" 2> /dev/null || :
        [ "$try" -lt 100 ] || die "$1 still has processes: ${p[*]}"
        sleep 0.03
    done
    rm -f "$D/hosts/$1"/{pid,ns}
    local g
    for g in $CG $CG2; do
        for _ in $(seq 40); do [ -d "$g/$1" ] || break; find "$g/$1" -depth -type d -exec rmdir {} + 2> /dev/null || sleep 0.05; done
    done
}

down() {
    local h
    trap - EXIT
    for h in "$D"/hosts/*/; do crash "$(basename "$h")"; done
    for h in $CG $CG2; do [ ! -d "$h" ] || rmdir "$h"; done
    umount "$D/small" 2> /dev/null || :
    rm -rf "$D"
}

[[ $N =~ ^[1-9]$ ]] || die "N is 1 to 9, not $N"
need
[ ! -e "$D" ] || [ -z "$(ls -A "$D")" ] || die "$D is there and not empty"
hosts=(head); for i in $(seq "$N"); do hosts+=("node$i"); done
trap down EXIT
trap exit INT TERM HUP
configure
open_folders
[ "${TK_CGROUP2:-1}" = 0 ] || for m in /sys/fs/cgroup /sys/fs/cgroup/unified; do   # TK_CGROUP2=0: hosts without cgroup v2
    [ "$(stat -fc %T "$m" 2> /dev/null)" != cgroup2fs ] || [ ! -w "$m/cgroup.procs" ] || CG2=$m/tk${D//\//-}
done
for h in "${hosts[@]}"; do boot "$h"; done
for h in "${hosts[@]}"; do answers "$h"; done
echo "up: ${hosts[*]} ($D/on head bash)"
obey() { # VERB HOST
    [ -d "$D/hosts/$2" ] || die "no host $2"
    case $1 in
        boot) boot "$2"; answers "$2" ;;
        crash) crash "$2" ;;
        cut) of_head ip link set "$2" down ;;
        heal) of_head ip link set "$2" up ;;
        *) die "no command $1" ;;
    esac
}
while read -r verb host; do
    set +e; said=$(set -e; obey "$verb" "$host" 2>&1); code=$?; set -e
    [ "$code" = 0 ] && echo ok || echo "failed: ${said//$'\n'/; }"
done
