#!/bin/bash
# The parts of AWS's network stack, a layer each: efa.sh base|installer|gdrcopy|nccl|plugin|tests.
# Versions and compilers' options come as variables from Dockerfile.efa. Sources lie in a folder of
# their own and are removed in the same layer.
set -euo pipefail

CUDA=/usr/local/cuda
EFA=/opt/amazon/efa
MPI=/opt/amazon/openmpi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

need() { # NAME: a build argument that the step cannot do without
    if [ -z "${!1-}" ]; then
        echo "efa.sh: --build-arg $1= has no value" >&2
        exit 3
    fi
}

get() { # URL FILE [SHA256]
    curl -fsSL --retry 3 -o "$2" "$1"
    if [ -n "${3-}" ] && ! echo "$3  $2" | sha256sum --check --quiet; then
        echo "efa.sh: $1 is not the file with SHA-256 $3" >&2
        exit 3
    fi
}

source_of() { # PROJECT TAG: its files at that tag, in ./source
    get "https://github.com/$1/archive/refs/tags/$2.tar.gz" source.tar.gz
    mkdir source
    tar -xzf source.tar.gz --strip-components 1 -C source
    cd source
}

loader() { # NAME FOLDER: where the dynamic loader looks too
    echo "$2" >"/etc/ld.so.conf.d/$1.conf"
    ldconfig
    rm -f /var/cache/ldconfig/aux-cache # has times of files in it
}

case ${1-} in
    base)
        # The base's MPI and verbs libraries would be found before EFA's. The rest of HPC-X stays:
        # torch of NVIDIA's images is linked to its UCX and UCC.
        present=()
        for package in ibverbs-utils libibverbs-dev libibverbs1 libmlx5-1; do
            if dpkg-query -W "$package" >/dev/null 2>&1; then
                present+=("$package")
            fi
        done
        if [ ${#present[@]} -gt 0 ]; then
            apt-get remove -q -y --allow-change-held-packages "${present[@]}"
            rm -rf /var/log/* /var/lib/dpkg/*-old
        fi
        rm -rf /opt/hpcx/ompi /opt/hpcx/nccl_rdma_sharp_plugin /usr/local/mpi
        ;;
    installer)
        # libfabric, Open MPI and rdma-core for EFA. In an image: no kernel module, no limits of the
        # host, no look for a device, which the building machine has not.
        need EFA_INSTALLER_VERSION
        get "https://efa-installer.amazonaws.com/aws-efa-installer-$EFA_INSTALLER_VERSION.tar.gz" \
            installer.tar.gz "${EFA_INSTALLER_SHA256-}"
        tar -xzf installer.tar.gz
        cd aws-efa-installer
        apt-get update -q
        ./efa_installer.sh -y -g -d --skip-kmod --skip-limit-conf --no-verify
        loader efa "$EFA/lib"
        apt-get clean
        rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/* /var/lib/dpkg/*-old
        "$EFA/bin/fi_info" --version
        ;;
    gdrcopy)
        need GDRCOPY_VERSION
        source_of NVIDIA/gdrcopy "v$GDRCOPY_VERSION"
        make -j "$(nproc)" prefix=/opt/gdrcopy CUDA="$CUDA" lib_install
        loader gdrcopy /opt/gdrcopy/lib
        ;;
    nccl)
        need NCCL_VERSION
        need NVCC_GENCODE
        if [ "$NCCL_VERSION" = base ]; then
            echo "efa.sh: the base image's NCCL stays"
            exit 0
        fi
        source_of NVIDIA/nccl "v$NCCL_VERSION"
        make -j "$(nproc)" src.build CUDA_HOME="$CUDA" NVCC_GENCODE="$NVCC_GENCODE"
        mkdir -p /opt/nccl
        cp -a build/lib build/include /opt/nccl/
        rm -f /opt/nccl/lib/*.a
        # torch's own build finds NCCL beside itself first: the loader takes this one before all
        echo /opt/nccl/lib/libnccl.so.2 >/etc/ld.so.preload
        loader nccl /opt/nccl/lib
        ;;
    plugin)
        need AWS_OFI_NCCL_VERSION
        source_of aws/aws-ofi-nccl "v$AWS_OFI_NCCL_VERSION"
        ./autogen.sh
        ./configure --prefix=/opt/aws-ofi-nccl --with-libfabric="$EFA" --with-cuda="$CUDA" \
            --with-mpi="$MPI" --enable-platform-aws
        make -j "$(nproc)"
        make install
        loader aws-ofi-nccl /opt/aws-ofi-nccl/lib
        ;;
    tests)
        need NCCL_TESTS_VERSION
        need NVCC_GENCODE
        if [ "$NCCL_TESTS_VERSION" = none ]; then
            exit 0
        fi
        source_of NVIDIA/nccl-tests "v$NCCL_TESTS_VERSION"
        nccl=()
        if [ -d /opt/nccl ]; then
            nccl=(NCCL_HOME=/opt/nccl)
        fi
        make -j "$(nproc)" MPI=1 MPI_HOME="$MPI" CUDA_HOME="$CUDA" "${nccl[@]}" \
            NVCC_GENCODE="$NVCC_GENCODE"
        mkdir -p /opt/nccl-tests
        cp -a build /opt/nccl-tests/
        ;;
    *)
        echo "efa.sh: no part '${1-}'; base, installer, gdrcopy, nccl, plugin or tests" >&2
        exit 3
        ;;
esac
