"""What the command lines of all builders share, and what their errors mean."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainkit.images.contract import Argv, BuildRecipe, FailureHint

CGROUPS = Path("/sys/fs/cgroup")
MARK_ARGUMENT = "TRAINKIT_BUILD"  # no Dockerfile reads it; leftovers.py does
EPOCH_ARGUMENT = "SOURCE_DATE_EPOCH"  # reproducible-builds.org/specs/source-date-epoch

# whatever the builder: the first that is found in its last lines counts
HINTS: tuple[FailureHint, ...] = (
    FailureHint(
        "no space left on device|disk quota exceeded",
        "the disk is full",
        "make room where the builder keeps its images; nothing half-made is used",
        of_steps=True,
    ),
    FailureHint(
        "cannot connect to the docker daemon|is the docker daemon running"
        "|failed to connect to the docker api|unable to connect to podman",
        "the builder's daemon does not answer",
        "start it (systemctl start docker), or take a builder without one: --builder buildah",
    ),
    FailureHint(
        "permission denied while trying to connect|dial unix .*permission denied",
        "you may not talk to the builder's daemon",
        "have somebody add you to its group (docker), or take a builder that needs no rights:"
        " --builder buildah",
    ),
    FailureHint(
        "newuidmap|newgidmap|cannot clone: |user namespaces are not enabled"
        "|no subuid ranges|insufficient uids or gids|potentially insufficient uids"
        "|error creating .*user namespace",
        "this user may not make user namespaces as the builder needs them",
        "have somebody add lines for you to /etc/subuid and /etc/subgid, or build as root",
    ),
    FailureHint(
        "unauthorized|pull access denied|authentication required|(?<!permission )denied: "
        "|forbidden|status(code)?: 403",
        "the registry wants to know who asks, or refuses",
        "log in with the builder's own command (docker login HOST, buildah login HOST), which"
        " keeps what you type in its own store",
    ),
    FailureHint(
        "manifest unknown|manifest .*not found|name unknown|repository .*not found"
        "|does not exist or no pull access|short-name .*did not resolve|image not known"
        "|no such image|not found: manifest|: not found$",
        "the registry has no such image",
        "look at the name and its tag",
    ),
    FailureHint(
        "no such host|temporary failure in name resolution|server misbehaving"
        "|connection refused|i/o timeout|network is unreachable|tls handshake"
        "|connection reset|x509: |request canceled|deadline exceeded",
        "the registry cannot be reached from here",
        "look at the name, or at the way to the network from this machine (https_proxy)",
    ),
    FailureHint(
        "cgroups in hybrid mode|cgroup.*(read-only|permission denied)|failed to create runc"
        "|crun: |runc: |oci runtime",
        "the builder's runtime cannot start a step on this kernel",
        "set BUILDAH_ISOLATION=chroot, which needs no runtime",
        of_steps=True,
    ),
    FailureHint(
        "unknown instruction|dockerfile parse error|unknown flag: (?!--)",
        "the Dockerfile has something that this builder does not know",
        "write it without heredocs, `# syntax=` and --mount, or take another builder",
    ),
    FailureHint(
        "buildx component is missing",
        "docker is set to use BuildKit and does not have it",
        "unset DOCKER_BUILDKIT, or install docker's buildx",
    ),
    FailureHint(
        "no items matching|copy failed|failed to compute cache key|copier: ",
        "COPY or ADD names something that is not in the context",
        "look at the path, and at .dockerignore",
    ),
    FailureHint(
        "permission denied|operation not permitted",
        "the builder lacks rights on this machine",
        "build as root, or take another builder",
    ),
)


def recipe_options(recipe: BuildRecipe) -> Argv:
    """Options that all builders have: docker-build(1), podman-build(1), buildah-build(1)."""
    words = ["-t", recipe.tag, "-f", str(recipe.dockerfile)]
    for name, value in recipe.build_args.items():
        words += ["--build-arg", f"{name}={value}"]
    if recipe.mark:
        words += ["--build-arg", f"{MARK_ARGUMENT}={recipe.mark}"]
    for name, value in recipe.labels.items():
        words += ["--label", f"{name}={value}"]
    return tuple(words)


def version_numbers(text: str) -> tuple[int, ...]:
    """The first version number in what a program says of itself; none: ()."""
    found = re.search(r"\d+(\.\d+)+", text)
    return () if found is None else tuple(map(int, found[0].split(".")))


def isolation_options() -> Argv:
    """How steps are isolated, for buildah and podman: ("--isolation", "chroot") where the kernel's
    control groups refuse an OCI runtime, nothing where the builder's own default works.

    That is so where version 2 is mounted beside version 1 ("hybrid": crun refuses it, its
    src/libcrun/cgroup-utils.c), and for root where they cannot be written to, as inside of most
    containers. BUILDAH_ISOLATION of the caller goes before.
    """
    if os.environ.get("BUILDAH_ISOLATION"):
        return ()
    hybrid = (CGROUPS / "unified").is_dir() and not (CGROUPS / "cgroup.controllers").exists()
    sealed = os.geteuid() == 0 and not os.access(CGROUPS, os.W_OK)
    return ("--isolation", "chroot") if hybrid or sealed else ()
