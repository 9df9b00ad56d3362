#!/bin/sh
# `netvm run` on arm64, with programs that check every byte. By hand, as it takes a Rust for arm64 (rustup target add aarch64-unknown-linux-gnu), gcc-aarch64-linux-gnu
# and five minutes:
#
#     target=target/aarch64-unknown-linux-gnu
#     export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
#     cargo build --profile tested --target aarch64-unknown-linux-gnu -p netvm-cli -p netvm-preload
#     for name in alloc maps forks threads handle last packed_lives spawn stacks tls tiles orphan; do
#         aarch64-linux-gnu-gcc -O1 -fno-builtin-malloc -pthread -o $target/tested/$name crates/netvm-preload/tests/c/$name.c
#     done
#     cargo xtask guest guest/benches/arm64.sh
#
# kernels: 6.12-arm64
# modules: 9p 9pnet_virtio
# host: read only
# memory: 2048
# checks: none
# limit: 900
. /test/functions
mkdir -p /host /lib
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /host
for library in ld-linux-aarch64.so.1 libc.so.6 libm.so.6 libgcc_s.so.1; do
    cp -L /host/usr/aarch64-linux-gnu/lib/$library /lib/
done
built=/host${BUILT%/*}/aarch64-unknown-linux-gnu/tested
cp "$built/netvm" "$built/libnetvm_preload.so" .

echo "== what works here"
./netvm doctor | tee doctor.log || true
grep -q 'netvm run and netvm lend work here' doctor.log

echo "== demo"
./netvm demo --local 8M --data 24M | tee demo.log
grep -q 'Results are equal' demo.log

for name in alloc maps forks threads handle last packed_lives spawn stacks tls tiles orphan; do
    echo "== $name"
    cp "$built/$name" .
    ./netvm run --local 8M --threshold 128K --small-local 0 --stats -- ./$name | tee $name.log
    grep -q 'ok$' $name.log
done
echo "== done"
