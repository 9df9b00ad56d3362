#!/bin/sh
# `netvm run` with programs of this machine, on kernels that copy pages (6.1: no moves, no tracking of writes) and that move them (6.12): results are
# those without it, also when a lender dies.
# kernels: 6.1 6.12
# modules: 9p 9pnet_virtio ext4 loop crc32c_generic?
# programs: mkfs.ext4
# host: read only
# memory: 1024
# limit: 300
. /test/functions
with_host_files netvm libnetvm_preload.so
ip link set lo up
mount -t tmpfs tmpfs /host/dev/shm
netvm() { on_host /tmp/netvm "$@"; }
job=/host/tmp/job
mkdir $job

echo "== what works here"
netvm doctor >doctor.log || true
grep -q 'netvm run and netvm lend work here' doctor.log
grep 'pages' doctor.log

echo "== sort"
on_host sh -c 'od -An -v -tx8 -w16 /dev/urandom | head -n 120000 >/tmp/job/lines; sort -S 64M /tmp/job/lines | sha256sum >/tmp/job/sum'
sum=$(cat $job/sum)
netvm run --local 4M --stats -- sort -S 64M /tmp/job/lines >$job/sorted 2>sort.log
equal "sorted lines" "$(sha256sum <$job/sorted)" "$sum"
cat sort.log
# Its memory was far: as much has left as it has little.
grep -Eq '[1-9][0-9]+ MiB out' sort.log

echo "== sort, one of two lenders is killed"
netvm secret new /tmp/key
for port in 7070 7071; do
    (exec chroot /host /tmp/netvm lend --size 128M --listen 127.0.0.1:$port --secret /tmp/key >lend$port.log 2>&1) &
    wait_until 30 grep -q lending lend$port.log
done
victim=$!
netvm run --local 4M --lender 127.0.0.1:7070 --lender 127.0.0.1:7071 --replicas 2 --secret /tmp/key --stats -- \
    sort -S 64M /tmp/job/lines >$job/sorted 2>sort.log &
run=$!
wait_until 30 sh -c 'chroot /host /tmp/netvm status 127.0.0.1:7071 --secret /tmp/key --json | grep -q "\"used_bytes\":[1-9][0-9]\{7\}"'
kill -9 $victim
wait $run
equal "sorted lines" "$(sha256sum <$job/sorted)" "$sum"
cat sort.log
grep -q 'lost 127.0.0.1:7071' sort.log

echo "== Python, and children of its forks"
if [ -x /host/usr/bin/python3 ]; then
    cat >$job/forks.py <<'P'
import hashlib, os, random
random.seed(7)
blocks = [bytearray(random.randbytes(1 << 20)) for _ in range(24)]
total = hashlib.sha256()
for child in range(3):
    reads, writes = os.pipe()
    if os.fork() == 0:
        for block in blocks[child::3]:
            block[:] = block[::-1]
        os.write(writes, hashlib.sha256(b"".join(blocks)).digest())
        os._exit(0)
    blocks[child][0:3] = b"own"
    total.update(os.read(reads, 32))
    os.wait()
for block in blocks:
    total.update(block)
print(total.hexdigest())
P
    netvm run --local 8M --stats -- python3 /tmp/job/forks.py >far 2>python.log
    equal "what Python found" "$(cat far)" "$(on_host python3 /tmp/job/forks.py)"
    cat python.log

    echo "== reads of a file by O_DIRECT, while another thread needs memory"
    # What a device writes into a page that is leaving must not be lost.
    truncate -s 64M disk
    mkfs.ext4 -q disk
    mkdir -p /host/tmp/direct
    mount -o loop disk /host/tmp/direct
    cat >$job/direct.py <<'P'
import hashlib, mmap, os, random, threading
random.seed(8)
size, path = 4 << 20, "/tmp/direct/file"
with open(path, "wb") as file:
    file.write(random.randbytes(size))
    os.fsync(file.fileno())
anonymous = lambda size: mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
into, other, over = anonymous(size), anonymous(16 << 20), threading.Event()
def press():
    while not over.is_set():
        for at in range(0, len(other), 1 << 20):
            other[at:at + (1 << 20)] = bytes(1 << 20)
presser = threading.Thread(target=press)
presser.start()
fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
found = set()
for _ in range(20):
    into[:] = bytes(size)
    assert os.preadv(fd, [into], 0) == size
    found.add(hashlib.sha256(into).hexdigest())
over.set()
presser.join()
print(sorted(found) == [hashlib.sha256(open(path, "rb").read()).hexdigest()])
P
    equal "what was read" "$(netvm run --local 8M -- python3 /tmp/job/direct.py)" "True"
    umount /host/tmp/direct
else
    echo "skipped (this machine has no Python)"
fi
echo "== done"
